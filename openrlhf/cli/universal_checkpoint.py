"""Convert the latest checkpoint of a run, so that another number of ranks or another ZeRO stage
goes on from it without waiting: `python -m openrlhf.cli.universal_checkpoint --ckpt_path ...`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> None:
    """Convert what every model of the checkpoint keeps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ckpt_path", type=Path, default=Path("./ckpt/checkpoints"))
    parser.add_argument("--num_workers", type=int, default=4, help="processes that convert")
    args = parser.parse_args(argv)
    from openrlhf.distributed import engine_state  # noqa: PLC0415 - --help must not import torch
    from openrlhf.distributed.checkpoints import CheckpointStore  # noqa: PLC0415 - as above

    saved = CheckpointStore(args.ckpt_path).latest()
    if saved is None:
        parser.error(f"there is no checkpoint in {args.ckpt_path}. Type the --ckpt_path of a run.")
    for facts in sorted(saved.path.glob(f"*/{engine_state.ENGINE}")):
        engine_state.convert(facts.parent, num_workers=args.num_workers)
        print(f"{facts.parent} can be taken up by any number of ranks")


if __name__ == "__main__":
    main()
