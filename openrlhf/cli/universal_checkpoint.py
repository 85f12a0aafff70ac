"""Check that the latest checkpoint of a run is whole, so that another number of ranks or another
ZeRO stage can go on from it: `python -m openrlhf.cli.universal_checkpoint --ckpt_path ...`.

Checkpoints need no conversion; scripts that convert one first keep working.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from openrlhf.cli.runner import show


def main(argv: Sequence[str] | None = None) -> None:
    """Verify the latest checkpoint and print how to go on from it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ckpt_path", type=Path, default=Path("./ckpt/checkpoints"))
    parser.add_argument("--num_workers", type=int, default=4, help="has no effect")
    args = parser.parse_args(argv)
    from openrlhf.distributed.checkpoints import CheckpointStore  # noqa: PLC0415 - imports torch

    saved = CheckpointStore(args.ckpt_path).latest()
    if saved is None:
        parser.error(f"there is no checkpoint in {args.ckpt_path}. Type the --ckpt_path of a run.")
    show(f"{saved.path}: --load_checkpoint --use_ds_universal_ckpt goes on from it")


if __name__ == "__main__":
    main()
