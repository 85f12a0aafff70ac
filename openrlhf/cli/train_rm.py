"""`openrlhf rm`: pairwise reward model."""

from openrlhf.cli.runner import supervised
from openrlhf.config.supervised import RMConfig

main = supervised("openrlhf rm", RMConfig, "openrlhf.trainer.rm_trainer:RMTrainer")

if __name__ == "__main__":
    main()
