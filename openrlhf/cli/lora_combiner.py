"""`openrlhf merge-lora`: merge an adapter into its base model."""

from openrlhf.cli.runner import Command, imported
from openrlhf.config.serving import LoraCombinerConfig

main = Command(
    "openrlhf merge-lora",
    LoraCombinerConfig,
    imported("openrlhf.commands.merge_lora:run_lora_combiner"),
)

if __name__ == "__main__":
    main()
