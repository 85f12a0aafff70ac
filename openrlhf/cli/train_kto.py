"""`openrlhf kto`: preference optimisation on single good and bad answers."""

from openrlhf.cli.runner import Command, supervised
from openrlhf.config.supervised import KTOConfig

main = Command("openrlhf kto", KTOConfig, supervised("openrlhf.trainer.kto_trainer:KTOTrainer"))

if __name__ == "__main__":
    main()
