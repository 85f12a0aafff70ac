"""`openrlhf kd`: knowledge distillation."""

from openrlhf.cli.runner import Command, supervised
from openrlhf.config.supervised import KDConfig

main = Command("openrlhf kd", KDConfig, supervised("openrlhf.trainer.kd_trainer:KDTrainer"))

if __name__ == "__main__":
    main()
