"""`openrlhf sft`: supervised fine-tuning and continued pre-training."""

from openrlhf.cli.runner import supervised
from openrlhf.config.supervised import SFTConfig

main = supervised("openrlhf sft", SFTConfig, "openrlhf.trainer.sft_trainer:SFTTrainer")

if __name__ == "__main__":
    main()
