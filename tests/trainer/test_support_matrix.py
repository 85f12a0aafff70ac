"""What goes together in training: every pair of settings trains as it should on four ranks, or is
refused in one line when the run starts. `python -m tests.trainer.test_support_matrix` prints the
table of docs/large-models.md.
"""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch

from openrlhf.cli import train_sft
from openrlhf.distributed.collectives import shut_down
from openrlhf.trainer.base_trainer import BaseTrainer
from openrlhf.utils.tracker import read_metrics
from tests.distributed.spawn import meet_elsewhere, run_ranks
from tests.helpers import tiny_vision
from tests.source import ROOT
from tests.tiny import make_model, write_jsonl

FEATURES = {
    "ring": "--ring_attn_size 2",
    "Ulysses": "--ring_attn_size 2 --cp_mode ulysses",
    "tensor parallel": "--ds_tensor_parallel_size 2",
    "ZeRO-1": "--zero_stage 1",
    "ZeRO-2": "--zero_stage 2",
    "ZeRO-3": "--zero_stage 3",
    "LoRA": "--lora_rank 4",
    "QLoRA": "--load_in_4bit --lora_rank 4",
    "padded rows": "",
    "experts": "",
    "images": "",
    "image tiles": "",
    "Adam offload": "--adam_offload",
    "sleep": "--deepspeed_enable_sleep",
    "dynamic batch": "--use_dynamic_batch --train_max_tokens_per_gpu 40",
    "DeepCompile": "--deepcompile",
}
SEEING = {"images": "qwen2_5_vl", "image tiles": "idefics3"}
MODELS = {"padded rows": "bloom", "experts": "mixtral", **SEEING}
# Values of one setting: no pair.
ONE_OF = [
    {"ring", "Ulysses"},
    {"ZeRO-1", "ZeRO-2", "ZeRO-3"},
    {"LoRA", "QLoRA"},
    {*MODELS},
]
# What is refused, and how the line begins.
REFUSED = {
    ("ring", "padded rows"): "--ring_attn_size 2: ",
    ("Ulysses", "padded rows"): "--ring_attn_size 2: ",
    ("tensor parallel", "ZeRO-3"): "--ds_tensor_parallel_size 2 with --zero_stage 3: ",
    ("tensor parallel", "LoRA"): "--ds_tensor_parallel_size 2 with --lora_rank: ",
    ("tensor parallel", "QLoRA"): "--ds_tensor_parallel_size 2 with --lora_rank: ",
    ("tensor parallel", "padded rows"): "--ds_tensor_parallel_size 2: ",
    ("tensor parallel", "experts"): "--ds_tensor_parallel_size 2: ",
    **{("ring", images): "--ring_attn_size 2: " for images in SEEING},
    **{("Ulysses", images): "--ring_attn_size 2: " for images in SEEING},
    **{("tensor parallel", images): "--ds_tensor_parallel_size 2: " for images in SEEING},
    **{("QLoRA", images): "--load_in_4bit: " for images in SEEING},
    ("ZeRO-3", "QLoRA"): "--load_in_4bit with --zero_stage 3: ",
    ("padded rows", "dynamic batch"): "--use_dynamic_batch: ",
    ("ring", "DeepCompile"): "--deepcompile with --ring_attn_size 2: ",
    ("Ulysses", "DeepCompile"): "--deepcompile with --ring_attn_size 2: ",
    ("tensor parallel", "DeepCompile"): "--ds_tensor_parallel_size 2 with --deepcompile: ",
}
NEEDS_GPU = "--deepcompile: torch sees no CUDA device"
PAIRS = [
    pair
    for pair in [*((name, name) for name in FEATURES), *combinations(FEATURES, 2)]
    if pair[0] == pair[1] or not any(set(pair) <= group for group in ONE_OF)
]
COMMON = (
    "--input_key input --output_key output --train_batch_size 8 --micro_train_batch_size 2 "
    "--learning_rate 1e-3 --max_epochs 1 --max_len 64 --lr_warmup_ratio 0"
)
NUM_STEPS = 3


def kind(pair: tuple[str, str]) -> tuple[str, str]:
    """Model and adapter: runs of one kind have the same losses."""
    family = next((MODELS[name] for name in pair if name in MODELS), "qwen2")
    return family, next((name for name in pair if name in ("LoRA", "QLoRA")), "")


def run(folder: Path, name: str, family: str, flags: str) -> list[float] | str:
    """The losses of a run on this world, or the lines that refuse it."""
    meet_elsewhere()
    rows = "pictures.jsonl" if family in SEEING.values() else "rows.jsonl"
    words = f"--pretrain {folder}/{family} --dataset {folder}/{rows} {COMMON} {flags}"
    out = folder / name.replace(" ", "-")
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), sleeping("sleep" in name):
        try:
            train_sft.main([*words.split(), "--save_path", str(out), "--logging_steps", "1"])
        except SystemExit as end:
            if end.code:
                return errors.getvalue()
        finally:
            shut_down()
    return [r["gpt_loss"] for r in read_metrics(out / "metrics.jsonl") if "gpt_loss" in r]


@contextlib.contextmanager
def sleeping(is_on: bool) -> Iterator[None]:
    """A block in which training states are away between steps, as an RL run puts them."""
    train_step = BaseTrainer.train_step

    def between_sleeps(self: BaseTrainer, rows: object) -> object:
        self.engine.reload_states()
        metrics = train_step(self, rows)  # type: ignore[arg-type]
        self.engine.offload_states()
        return metrics

    if is_on:
        BaseTrainer.train_step = between_sleeps  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        BaseTrainer.train_step = train_step  # type: ignore[method-assign]


def run_all(folder: Path) -> dict[tuple[str, str], tuple[list[float], list[float] | str]]:
    """For every pair the losses of its kind alone, and its own."""
    plain: dict[tuple[str, str], list[float] | str] = {}
    found = {}
    for pair in PAIRS:
        family, adapter = kind(pair)
        if (family, adapter) not in plain:
            flags = f"--zero_stage 0 {FEATURES.get(adapter, '')}"
            plain[family, adapter] = run(folder, f"plain {family} {adapter}", family, flags)
        flags = " ".join(FEATURES[name] for name in dict.fromkeys(pair))
        stage = "" if "--zero_stage" in flags else f"--zero_stage {2 * ('DeepCompile' in pair)}"
        own = run(folder, " and ".join(pair), family, f"{stage} {flags}")
        found[pair] = plain[family, adapter], own
        if int(os.environ["RANK"]) == 0:
            with (folder / "progress.txt").open("a") as log:
                log.write(json.dumps([pair, *found[pair]]) + "\n")
    return found  # type: ignore[return-value]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict:
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("matrix")
    make_inputs(folder)
    return run_ranks(run_all, 4, folder)[0]  # type: ignore[return-value]


def make_inputs(folder: Path) -> None:
    """Models and rows; of those with images only every third has one, so ranks differ."""
    for family in {"qwen2", *MODELS.values()} - {*SEEING.values()}:
        make_model(folder / family, family, num_heads=8, num_kv_heads=4)
    for family in SEEING.values():
        tiny_vision.make(family, folder / family)
    tiny_vision.noise(28, 56).save(folder / "it.png")
    rows = [{"input": f"{n}+{n}=", "output": str(2 * n) * (1 + n % 3)} for n in range(24)]
    write_jsonl(folder / "rows.jsonl", rows)
    seen = [row | {"images": ["it.png"] if n % 3 == 0 else []} for n, row in enumerate(rows)]
    write_jsonl(folder / "pictures.jsonl", seen)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_a_pair_trains_as_it_does_alone_or_is_refused(outcomes: dict, pair: tuple) -> None:
    expected, found = outcomes[pair]
    if (reason := refusal(pair)) is not None:
        assert isinstance(found, str), found
        lines = [line for line in found.splitlines() if line.startswith("error: ")]
        assert lines[0].startswith(f"error: {reason}"), found
        assert len(lines) == 1 or "QLoRA" in pair, found
        return
    assert not isinstance(found, str), found
    assert len(expected) == len(found) == NUM_STEPS
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def refusal(pair: tuple[str, str]) -> str | None:
    """How the line begins that refuses a pair on CPU ranks."""
    return REFUSED.get(pair) or (NEEDS_GPU if "DeepCompile" in pair else None)


def cell(pair: tuple[str, str]) -> str:
    if pair in REFUSED:
        return "no"
    return "yes" if refusal(pair) is None else "GPU"


def table() -> str:
    """The pairs as the document shows them."""
    names = list(FEATURES)
    lines = ["| | " + " | ".join(names[:-1]) + " |", "|" + "---|" * len(names)]
    for row, name in enumerate(names[1:], start=1):
        cells = []
        for other in names[:row]:
            is_pair = (other, name) in PAIRS
            cells.append(cell((other, name)) if is_pair else "–")
        cells += [""] * (len(names) - 1 - row)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_document_shows_this_table() -> None:
    assert table() in (ROOT / "docs" / "large-models.md").read_text()


if __name__ == "__main__":
    print(table())
