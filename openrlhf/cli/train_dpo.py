"""`openrlhf dpo`: preference optimisation on pairs, DPO and its relatives."""

from openrlhf.cli.runner import supervised
from openrlhf.config.supervised import DPOConfig

main = supervised("openrlhf dpo", DPOConfig, "openrlhf.trainer.dpo_trainer:DPOTrainer")

if __name__ == "__main__":
    main()
