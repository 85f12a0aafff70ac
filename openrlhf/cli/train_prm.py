"""`openrlhf prm`: process reward model."""

from openrlhf.cli.runner import supervised
from openrlhf.config.supervised import PRMConfig

main = supervised("openrlhf prm", PRMConfig, "openrlhf.trainer.prm_trainer:PRMTrainer")

if __name__ == "__main__":
    main()
