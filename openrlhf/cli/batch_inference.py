"""`openrlhf infer`: answer prompts or score answers in bulk."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.runner import Command, Work
from openrlhf.config.serving import BatchInferenceConfig
from openrlhf.trainer.rank_gpus import see_own_gpus


def load(config: BatchInferenceConfig) -> Work:
    """Import what the command needs, and return what it does."""
    see_own_gpus(config)  # before torch looks
    from openrlhf.serving.batch_inference import run_batch_inference  # noqa: PLC0415 - --help must not import torch

    return partial(run_batch_inference, config)


main = Command("openrlhf infer", BatchInferenceConfig, load)

if __name__ == "__main__":
    main()
