"""`openrlhf infer`: answer prompts or score answers in bulk."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.runner import Command, loading_libraries, print_notices, run_command
from openrlhf.config.cli import Parsed
from openrlhf.config.serving import BatchInferenceConfig
from openrlhf.trainer.rank_gpus import see_own_gpus


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and do the task."""
    run_command(Command("openrlhf infer", BatchInferenceConfig, _run), argv)


def _run(parsed: Parsed[BatchInferenceConfig]) -> None:
    see_own_gpus(parsed.config)
    with loading_libraries():
        from openrlhf.serving.batch_inference import run_batch_inference  # noqa: PLC0415 - --help must not import torch

    print_notices(parsed.notices)
    run_batch_inference(parsed.config)


if __name__ == "__main__":
    main()
