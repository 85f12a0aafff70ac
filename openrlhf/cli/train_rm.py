"""`openrlhf rm`: pairwise reward model."""

from openrlhf.cli.runner import Command, supervised
from openrlhf.config.supervised import RMConfig

main = Command("openrlhf rm", RMConfig, supervised("openrlhf.trainer.rm_trainer:RMTrainer"))

if __name__ == "__main__":
    main()
