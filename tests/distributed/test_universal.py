"""A checkpoint of one number of ranks and ZeRO stage is taken up by any other, to the last bit of
weights and moments; a run that changes both goes on with the same rows and the same losses.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed import engine_state
from openrlhf.distributed.backend import shut_down
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.distributed.weights import stored_parameters
from openrlhf.errors import CheckpointError
from tests.distributed.spawn import meet_elsewhere, run_ranks
from tests.stopped_runs import records, stopping_behind
from tests.tiny import make_model, write_jsonl

pytestmark = pytest.mark.slow

FP32 = {
    "zero0": {"zero_stage": 0},
    "zero2": {"zero_stage": 2},
    "zero2-offload": {"zero_stage": 2, "adam_offload": True},
    "zero3": {"zero_stage": 3},
}
BF16 = {
    "zero2-bf16": {"zero_stage": 2, "param_dtype": "bf16"},
    "zero3-bf16": {"zero_stage": 3, "param_dtype": "bf16"},
}
OPTIM = OptimizerConfig(
    adam=AdamConfig(lr=1e-2, weight_decay=0.1), max_norm=0.5, lr_scheduler="linear"
)
NUM_STEPS = 4


def make_engine(options: dict, *, seed: int) -> TrainEngine:
    """A small net whose sizes no number of ranks divides, the first bias frozen."""
    ds = DeepSpeedConfig(**options, use_universal_ckpt=True)
    strategy = DeepSpeedStrategy(ds, seed=seed)
    strategy.setup()
    model = nn.Sequential(nn.Linear(5, 17), nn.LayerNorm(17), nn.Tanh(), nn.Linear(17, 3))
    model[0].bias.requires_grad_(requires_grad=False).zero_()
    return strategy.prepare_train(model, OPTIM, num_updates=NUM_STEPS)


def train(engine: TrainEngine, num_steps: int) -> list[float]:
    """Losses of steps on the same rows whatever the number of ranks."""
    losses = []
    dtype = next(engine.module.parameters()).dtype
    for step in range(num_steps):
        rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
        size = torch.distributed.get_world_size()
        own = rows[torch.distributed.get_rank() :: size]
        loss = engine(own).float().pow(2).sum() / len(rows)
        engine.backward(loss, is_last_micro_batch=True)
        engine.step()
        torch.distributed.all_reduce(loss := loss.detach())
        losses.append(loss.item())
    return losses


def states_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Every number that training goes on from."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {f"lp {name}": t.float().clone() for name, t in stored_parameters(engine.module)}
    if engine.zero_stage in (1, 2):  # 0.19.8 links the states of the first group only
        engine.engine.optimizer._hp_optimizer_states_linked = False
        engine.engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        if engine.zero_stage == 0:
            found[name] = p.detach().clone()
            state = engine.engine.basic_optimizer.state[p]
            found |= {f"{name} {key}": state[key].clone() for key in engine_state.MOMENTS}
        else:
            found[name] = safe_get_full_fp32_param(p).cpu()
            for key in engine_state.MOMENTS:
                found[f"{name} {key}"] = safe_get_full_optimizer_state(p, key).cpu()
    groups = engine.engine.basic_optimizer.param_groups
    found["decay"] = torch.tensor([group["weight_decay"] for group in groups])
    found["lr"] = torch.tensor([group["lr"] for group in groups])
    return found


def write_all(folder: Path) -> dict:
    """States of every case after two steps, and the losses of the next two."""
    results = {}
    for name, options in (FP32 | BF16).items():
        engine = make_engine(options, seed=1)
        train(engine, 2)
        results[name] = states_of(engine)
        engine.save_states(folder / f"world{torch.distributed.get_world_size()}" / name)
        results[name, "losses"] = train(engine, 2)
    shut_down()
    return results


def read_all(folder: Path) -> dict:
    """What every case makes of what every case of its type wrote, on two ranks and on one."""
    results = {}
    for cases in (FP32, BF16):
        for target, options in cases.items():
            for size in (1, 2):
                for source in cases:
                    engine = make_engine(options, seed=2)
                    engine.load_states(folder / f"world{size}" / source)
                    results[size, source, target] = states_of(engine)
                    results[size, source, target, "losses"] = train(engine, 2)
    engine = make_engine(FP32["zero3"], seed=3)
    engine.use_universal_ckpt = False
    for size in (1, 2):
        try:
            engine.load_states(folder / f"world{size}" / "zero2")
        except CheckpointError as error:
            results["refusal"] = str(error)
    shut_down()
    return results


def test_any_ranks_and_any_stage_go_on_with_the_same_numbers(tmp_path: Path) -> None:
    written = {size: run_ranks(write_all, size, tmp_path)[0] for size in (2, 1)}
    for size in (1, 2):
        for results in run_ranks(read_all, size, tmp_path):
            assert "Add --use_ds_universal_ckpt, or start" in results.pop("refusal")
            for (source_size, source, target, *is_losses), found in results.items():
                case = f"{source_size} ranks {source} -> {size} ranks {target}"
                if is_losses:
                    expected = written[source_size][source, "losses"]
                    tolerance = 1e-6 if target in FP32 else 1e-2
                    assert found == pytest.approx(expected, rel=tolerance, abs=tolerance), case
                    continue
                expected = written[source_size][source]
                assert found.keys() == expected.keys()
                for name, tensor in expected.items():
                    assert torch.equal(found[name].view_as(tensor), tensor), f"{case}: {name}"


# Three starts of one run: on two ranks, on one, on two again.
CHAINS = {
    "sft_lora": ("sft", "--input_key input --output_key output --lora_rank 4", (3, 2, 2)),
    "dpo": ("dpo", "--prompt_key input", (1, 3, 2)),
}
COMMON = (
    "--max_epochs 2 --train_batch_size 4 --micro_train_batch_size 2 --learning_rate 1e-3 "
    "--logging_steps 1 --lr_warmup_ratio 0 --l2 0.1 --save_steps 2 --load_checkpoint "
    "--use_ds_universal_ckpt"
)


def start(root: Path, chain: str, run: str, number: int) -> None:
    """One start of a chain's command."""
    meet_elsewhere()
    method, flags, stages = CHAINS[chain]
    run_dir = root / chain / run
    importlib.import_module(f"openrlhf.cli.train_{method}").main(
        [
            *("--pretrain", str(root / "model"), "--dataset", str(root / "rows.jsonl")),
            *(*COMMON.split(), *flags.split(), "--zero_stage", str(stages[number])),
            *("--save_path", str(run_dir), "--ckpt_path", str(run_dir / "ckpt")),
        ]
    )


def first_starts(root: Path) -> None:
    for chain in CHAINS:
        start(root, chain, "straight", 0)
        with stopping_behind(2):
            start(root, chain, "resumed", 0)


def second_starts(root: Path) -> None:
    for chain in CHAINS:
        with stopping_behind(4):
            start(root, chain, "resumed", 1)


def third_starts(root: Path) -> None:
    for chain in CHAINS:
        start(root, chain, "resumed", 2)


def convert_by_script(ckpt_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "scripts" / "ckpt_ds_zero_to_universal.sh"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CKPT_PATH": str(ckpt_path), "WORKERS": "2"}
    subprocess.run(["bash", script], env=env, check=True)
    assert list(ckpt_path.glob("global_step4/model_universal/manifest.json"))


def test_a_run_goes_from_two_ranks_to_one_and_back_with_the_same_losses(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    rows = [
        {
            "input": f"{i}+{i}=",
            "output": str(2 * i),
            "chosen": str(2 * i),
            "rejected": "?" * (1 + i % 3),
        }
        for i in range(11)
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    for starts, size in ((first_starts, 2), (second_starts, 1), (third_starts, 2)):
        run_ranks(starts, size, tmp_path)
        if size == 1:  # the ranks take what is converted
            convert_by_script(tmp_path / "dpo" / "resumed" / "ckpt")
    for chain in CHAINS:
        straight, resumed = (records(tmp_path / chain / run) for run in ("straight", "resumed"))
        assert [r["step"] for r in resumed] == [r["step"] for r in straight] == [1, 2, 3, 4, 5, 6]
        loss = "gpt_loss" if chain.startswith("sft") else "loss"
        for name, tolerance in ((loss, 1e-6), ("lr", 1e-12), ("grad_norm", 1e-5)):
            found, expected = ([r[name] for r in run] for run in (resumed, straight))
            assert found == pytest.approx(expected, rel=0, abs=tolerance), (chain, name)
