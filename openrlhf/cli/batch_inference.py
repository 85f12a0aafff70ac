"""`openrlhf infer`: answer prompts or score answers in bulk."""

from openrlhf.cli.runner import Command, Work, imported
from openrlhf.config.serving import BatchInferenceConfig
from openrlhf.trainer.rank_gpus import see_own_gpus


def load(config: BatchInferenceConfig) -> Work:
    """Choose the GPUs of this rank before torch looks, then import the command."""
    see_own_gpus(config)
    return imported("openrlhf.serving.batch_inference:run_batch_inference")(config)


main = Command("openrlhf infer", BatchInferenceConfig, load)

if __name__ == "__main__":
    main()
