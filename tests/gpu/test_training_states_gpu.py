"""Training states that were away between phases, and fp16 with its loss scale; needs DeepSpeed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.collectives import all_or_none, shut_down
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.distributed.weights import stored_parameters
from tests.distributed.spawn import run_ranks
from tests.gpu.engines import DEVICES

OPTIM = OptimizerConfig(adam=AdamConfig(lr=1e-2), max_norm=1.0, lr_scheduler="constant")
NUM_STEPS = 4
CASES = {
    "zero2-bf16": {"zero_stage": 2, "param_dtype": "bf16"},
    "zero3-bf16": {"zero_stage": 3, "param_dtype": "bf16"},
    "zero3-fp32": {"zero_stage": 3, "param_dtype": "fp32"},
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))


def start(options: dict) -> TrainEngine:
    strategy = DeepSpeedStrategy(DeepSpeedConfig(**options), seed=1)
    strategy.setup()
    return strategy.prepare_train(make_model(), OPTIM, num_updates=100)


def samples_of(engine: TrainEngine, step: int) -> Tensor:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
    return x.to(engine.device, next(engine.module.parameters()).dtype)


def train_step(engine: TrainEngine, step: int, *, factor: float = 1.0) -> float:
    """One update towards answering zero; its gradient norm."""
    loss = engine(samples_of(engine, step)).float().pow(2).mean() * factor
    engine.backward(loss, is_last_micro_batch=True)
    return engine.step()


def weights_of(engine: TrainEngine) -> list[Tensor]:
    return [tensor.float().cpu().clone() for _, tensor in stored_parameters(engine.module)]


def memory_in_use() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def saved_keys(engine: TrainEngine, folder: Path) -> set[str]:
    """The names of a parameter's tensors in a checkpoint."""
    all_or_none(engine.take_states(folder))
    rank = torch.distributed.get_rank()
    parts = torch.load(folder / f"tp0-dp{rank}.pt", weights_only=True)
    return {key for part in parts.values() for key in part}


def train(options: dict, folder: Path, *, is_moved: bool) -> dict:
    """Weights and norms of a few steps; states that are moved leave after each step."""
    engine = start(options | {"enable_sleep": True})
    norms, freed, away, has_answered, grads_away = [], [], [], [], []
    for step in range(NUM_STEPS):
        if is_moved:
            engine.reload_states()
        norms.append(train_step(engine, step))
        if is_moved:
            before, answer = memory_in_use(), engine(samples_of(engine, 99)).detach()
            engine.offload_states()
            freed.append(before - memory_in_use())
            grads = getattr(engine.engine.optimizer, "grad_partitions_flat_buffer", None)
            grads_away.append(None if grads is None else grads.numel())
            away.append(sorted(kind.name for kind in engine.engine.optimizer.offloaded_states))
            # Experience is made while the optimizer is away.
            has_answered.append(torch.equal(answer, engine(samples_of(engine, 99)).detach()))
    if is_moved:
        engine.reload_states()
    result = {"norms": norms, "freed": freed, "away": away, "has_answered": has_answered}
    result |= {"grads_away": grads_away, "saved": saved_keys(engine, folder)}
    result["weights"] = weights_of(engine)
    return result


def train_both_ways(folder: Path) -> dict:
    results = {
        name: tuple(
            train(options, folder / f"{name}-{is_moved}", is_moved=is_moved)
            for is_moved in (False, True)
        )
        for name, options in CASES.items()
    }
    shut_down()
    return results


@pytest.mark.parametrize(
    ("device", "num_ranks"),
    [pytest.param("cuda", 1, marks=pytest.mark.gpu), ("cpu", 1), ("cpu", 2)],
)
def test_training_goes_on_as_if_its_states_had_never_been_away(tmp_path, device, num_ranks):
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("ranks take the GPUs that are there")
    num_parameters = sum(p.numel() for p in make_model().parameters())
    for results in run_ranks(train_both_ways, num_ranks, tmp_path):
        for name, (stayed, moved) in results.items():
            assert moved["norms"] == stayed["norms"], name
            assert all(map(torch.equal, moved["weights"], stayed["weights"])), name
            assert all(moved["has_answered"]), name
            assert all(
                {"hp_params", "lp_grads", "optim_states"} <= {*kinds} for kinds in moved["away"]
            )
            if device == "cuda":  # at least the two moments of Adam, fp32
                assert min(moved["freed"]) >= 2 * 4 * num_parameters, name
            assert moved["saved"] == stayed["saved"] >= {"fp32", "exp_avg", "exp_avg_sq"}, name
            is_zero3 = name.startswith("zero3") and num_ranks > 1  # one rank runs ZeRO-2
            assert moved["grads_away"] == [0 if is_zero3 else None] * NUM_STEPS, name


def train_in_fp16(folder: Path) -> dict:
    """Losses before and after some steps, one of which cannot but overflow."""
    results = {}
    for stage in (0, 2, 3):
        engine = start({"zero_stage": stage, "param_dtype": "fp16"})
        losses, norms, is_unchanged = [], [], []
        for step in range(40):
            before = weights_of(engine)
            norms.append(train_step(engine, step, factor=1e9 if step == 30 else 1.0))
            is_unchanged.append(all(map(torch.equal, before, weights_of(engine))))
            with torch.no_grad():
                losses.append(engine(samples_of(engine, 0)).float().pow(2).mean().item())
        results[stage] = {"losses": losses, "norms": norms, "is_unchanged": is_unchanged}
    shut_down()
    return results


@pytest.mark.parametrize("device", DEVICES)
def test_fp16_learns_and_skips_steps_that_overflow(tmp_path, device):
    if device == "cpu" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("DeepSpeed trains in fp16 on no CPU without AVX512-FP16")
    [results] = run_ranks(train_in_fp16, 1, tmp_path)
    for stage, found in results.items():
        skipped = [step for step, norm in enumerate(found["norms"]) if norm == float("inf")]
        assert 30 in skipped, stage
        assert len(skipped) < 20, stage  # it found a scale
        for step, is_unchanged in enumerate(found["is_unchanged"]):
            assert is_unchanged == (step in skipped), (stage, step)
        assert found["losses"][-1] < 0.5 * found["losses"][0], stage
