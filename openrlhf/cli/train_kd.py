"""`openrlhf kd`: knowledge distillation."""

from openrlhf.cli.runner import supervised
from openrlhf.config.supervised import KDConfig

main = supervised("openrlhf kd", KDConfig, "openrlhf.trainer.kd_trainer:KDTrainer")

if __name__ == "__main__":
    main()
