"""A rank of 8, 64 and 512: what it sends in a step, holds and writes, without the other ranks."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

pytestmark = pytest.mark.slow
WORLDS = (8, 64, 512)


def walked(model: Path, stage: int, world: int, rank: int) -> dict[str, Any]:
    words = [str(model), str(stage), "bf16", str(world), str(rank)]
    command = [sys.executable, "-m", "tests.distributed.many_ranks", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_a_step_takes_as_many_collectives_on_512_ranks_as_on_8(tiny_model_dir: Path) -> None:
    for stage in (1, 2, 3):
        steps = [walked(tiny_model_dir, stage, world, 0) for world in WORLDS]
        assert steps[0]["step"] == steps[1]["step"] == steps[2]["step"]
        assert steps[0]["save"] == steps[2]["save"] == {"allgather": 2}
        assert steps[0]["step"]["allreduce"] >= 1


def test_a_rank_holds_its_part_of_the_optimizer_and_writes_it_under_its_number(
    tiny_model_dir: Path,
) -> None:
    for world in WORLDS:
        first, other = (walked(tiny_model_dir, 2, world, rank) for rank in (0, world // 2))
        share = math.ceil(first["whole"] / world)
        assert share <= first["states"] <= share + 2  # padded to an even number
        assert 0 < other["states"] <= share + 2
        assert (first["file"], other["file"]) == ("tp0-dp0.pt", f"tp0-dp{world // 2}.pt")
        assert (first["read"], other["read"]) == ([first["file"]], [other["file"]])
        assert min(start for start, _ in first["held"].values()) == 0
    # ZeRO-3 cuts every parameter, so a rank's parts are rounded up one by one.
    of_three = walked(tiny_model_dir, 3, 512, 0)
    assert of_three["states"] <= of_three["whole"] / 512 + len(of_three["held"])


def test_an_export_has_every_parameter_whole_on_any_number_of_ranks(tiny_model_dir: Path) -> None:
    with safe_open(tiny_model_dir / "model.safetensors", "pt") as file:
        shapes = {name: [*file.get_slice(name).get_shape()] for name in file.keys()}  # noqa: SIM118
    for stage in (1, 2, 3):
        found = [walked(tiny_model_dir, stage, world, 0) for world in WORLDS]
        assert [each["shapes"] for each in found] == [shapes] * len(WORLDS)
