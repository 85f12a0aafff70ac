"""`openrlhf kto`: preference optimisation on single good and bad responses."""

from openrlhf.cli.runner import supervised
from openrlhf.config.supervised import KTOConfig

main = supervised("openrlhf kto", KTOConfig, "openrlhf.trainer.kto_trainer:KTOTrainer")

if __name__ == "__main__":
    main()
