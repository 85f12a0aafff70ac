"""`openrlhf prm`: process reward model."""

from openrlhf.cli.runner import Command, supervised
from openrlhf.config.supervised import PRMConfig

main = Command("openrlhf prm", PRMConfig, supervised("openrlhf.trainer.prm_trainer:PRMTrainer"))

if __name__ == "__main__":
    main()
