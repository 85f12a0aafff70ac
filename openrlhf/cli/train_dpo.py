"""`openrlhf dpo`: preference optimisation on pairs, DPO and its relatives."""

from openrlhf.cli.runner import Command, supervised
from openrlhf.config.supervised import DPOConfig

main = Command("openrlhf dpo", DPOConfig, supervised("openrlhf.trainer.dpo_trainer:DPOTrainer"))

if __name__ == "__main__":
    main()
