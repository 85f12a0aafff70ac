"""The tables of docs/hardware.md are what `openrlhf check` works out for models of these sizes.
`python -m tests.trainer.test_hardware_guide` prints them.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from openrlhf.commands import check_memory as memory
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.models.actor import Actor
from openrlhf.models.loading import empty_model, load_config
from openrlhf.utils.packing import PackedBatch
from tests.source import ROOT

# Hidden size, layers, heads, key heads, MLP, vocabulary; the smallest ties its embeddings.
SIZES = {
    "1.5B": (1536, 28, 12, 2, 8960, 151_936),
    "7B": (3584, 28, 28, 4, 18_944, 152_064),
    "14B": (5120, 48, 40, 8, 13_824, 152_064),
    "32B": (5120, 64, 40, 8, 27_648, 152_064),
    "72B": (8192, 80, 64, 8, 29_568, 152_064),
}
TIED = ("1.5B",)
COMMON = "--pretrain m --prompt_data d --remote_rm_url r.py --bf16 --gradient_checkpointing"
NUM_TOKENS = 8192  # of a micro-batch
WITNESSED_TOKENS = 4096
# Column of the first table -> number of ranks and flags.
TRAINING = {
    "1 GPU": (1, "--zero_stage 2"),
    "1 GPU, `--lora_rank 16`": (1, "--zero_stage 2 --lora_rank 16"),
    "8 GPUs, ZeRO-2": (8, "--zero_stage 2"),
    "8 GPUs, ZeRO-3": (8, "--zero_stage 3"),
    "8 GPUs, ZeRO-3, `--adam_offload`": (8, "--zero_stage 3 --adam_offload"),
    "32 GPUs, ZeRO-3": (32, "--zero_stage 3"),
}
# Column of the second table -> which models there are beside the policy: trained or not.
ROLES = {
    "GRPO, no reference": (),
    "GRPO with a reference": (False,),
    "PPO: critic, reference, reward model": (True, False, False),
}


def make_config(folder: Path, name: str) -> str:
    hidden, layers, heads, key_heads, inner, vocabulary = SIZES[name]
    config = transformers.Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        tie_word_embeddings=name in TIED,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder / name)
    return str(folder / name)


@cache
def shape(path: str, flags: str):
    command = parse_config(PPOConfig, [*COMMON.split(), *flags.split()]).config
    return memory.shape_of(memory.Model(path, trains=True), command, command.ds, is_cuda=True)


def share(path: str, num_ranks: int, flags: str, *, trains: bool = True):
    ds = parse_config(PPOConfig, [*COMMON.split(), *flags.split()]).config.ds
    model = memory.Model(
        path, trains=trains, recomputes=trains, num_ranks=num_ranks, num_tokens=NUM_TOKENS
    )
    adapter = "--lora_rank 16" if "lora" in flags else ""
    return memory.share_of(shape(path, adapter), model, ds)


def in_gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.0f}"


def training_cell(path: str, num_ranks: int, flags: str) -> str:
    found = share(path, num_ranks, flags)
    host = f" (+{in_gb(num_ranks * found.host)} in host memory)" if found.host else ""
    return in_gb(found.weights + found.states + found.work) + host


def rl_cell(path: str, partners: tuple[bool, ...]) -> str:
    flags = "--zero_stage 3"
    shares = [share(path, 8, flags), *(share(path, 8, flags, trains=t) for t in partners)]
    _, peak = memory.peaks_of(shares, engine=0.0, engine_sleeps=True, states_sleep=True)
    return in_gb(peak)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(folder: Path) -> list[str]:
    paths = {name: make_config(folder, name) for name in SIZES}
    training = [
        [n, *(training_cell(p, *how) for how in TRAINING.values())] for n, p in paths.items()
    ]
    rl = [[n, *(rl_cell(p, partners) for partners in ROLES.values())] for n, p in paths.items()]
    return [table(["model", *TRAINING], training), table(["model", *ROLES], rl)]


@pytest.mark.slow
def test_the_guide_has_the_numbers_that_check_works_out(tmp_path):
    guide = (ROOT / "docs" / "hardware.md").read_text()
    for expected in tables(tmp_path):
        assert expected in guide, f"python -m tests.trainer.test_hardware_guide\n{expected}"


def witnessed(path: str, *, recomputes: bool) -> int:
    """Bytes at the peak of a forward and backward pass that torch walks without memory, with
    gradients that are taken away as soon as they are there, as ZeRO does.
    """
    command = parse_config(PPOConfig, COMMON.split()).config
    model_config = load_config(path)
    model = empty_model(model_config, command, dtype=torch.bfloat16, scores=False)
    token_ids = torch.zeros(WITNESSED_TOKENS, dtype=torch.int64)
    batch = PackedBatch.from_sequences([token_ids], [torch.arange(len(token_ids)) > 0])
    # Known before: a tensor without memory does not say where its numbers are true.
    assert len(batch.targets) + 1 == len(batch.position_ids) == int(batch.cu_seqlens[-1])
    with FakeTensorMode(allow_non_fake_inputs=True):
        actor = Actor(model.to_empty(device="cpu")).train()
        if recomputes:
            actor.gradient_checkpointing_enable()
        for parameter in actor.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        tracker = MemTracker()
        tracker.track_external(actor)
        with tracker:
            actor(batch).logprobs.sum().backward()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("name", ["7B", "72B"])
def test_the_estimate_of_a_micro_batch_is_within_a_tenth_of_what_torch_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, recomputes: bool
) -> None:
    monkeypatch.setitem(SIZES, "72B", (8192, 16, *SIZES["72B"][2:]))  # all 80 take five minutes
    path = make_config(tmp_path, name)
    command = parse_config(PPOConfig, COMMON.split()).config
    model = memory.Model(path, trains=True, recomputes=recomputes, num_tokens=WITNESSED_TOKENS)
    shape = memory.shape_of(model, command, command.ds, is_cuda=False)
    estimate = shape.num_bytes(command.ds) + memory.activations(shape, model, command.ds)
    assert estimate == pytest.approx(witnessed(path, recomputes=recomputes), rel=0.1)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        print("\n\n".join(tables(Path(folder))))
