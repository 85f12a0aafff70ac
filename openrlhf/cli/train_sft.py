"""`openrlhf sft`: supervised fine-tuning and continued pre-training."""

from openrlhf.cli.runner import Command, supervised
from openrlhf.config.supervised import SFTConfig

main = Command("openrlhf sft", SFTConfig, supervised("openrlhf.trainer.sft_trainer:SFTTrainer"))

if __name__ == "__main__":
    main()
