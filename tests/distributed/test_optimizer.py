"""Muon: which parameters it moves, orthogonal steps, the same ones in every ZeRO stage; and
learning rates that end exactly where their schedule ends, whatever its name and length.
"""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from openrlhf.config.common import (
    AdamConfig,
    DeepSpeedConfig,
    MuonConfig,
    OptimizerConfig,
    Schedule,
)
from openrlhf.distributed.collectives import all_or_none
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import (
    TrainEngine,
    make_schedule,
    parameter_groups,
    resume_schedule,
)
from openrlhf.distributed.weights import stored_parameters
from openrlhf.errors import ConfigError
from openrlhf.models.loading import load_causal_lm, load_sequence_model
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model as make_tiny_model

STAGES = {
    "zero0": {"zero_stage": 0},
    "zero3": {"zero_stage": 3},
    "zero2-offload": {"zero_stage": 2, "adam_offload": True},
    "zero2": {"zero_stage": 2},
    "zero2-bf16": {"zero_stage": 2, "param_dtype": "bf16"},
    "zero3-bf16": {"zero_stage": 3, "param_dtype": "bf16"},
}
OPTIM = OptimizerConfig(
    optim="muon",
    adam=AdamConfig(lr=1e-2, weight_decay=0.1),
    muon=MuonConfig(lr=0.05),
    lr_scheduler="constant",
    max_norm=0.1,
)
NUM_STEPS = 10
NUM_SAMPLES = 12
NUM_CLASSES = 8
TARGETS = torch.arange(NUM_SAMPLES) % NUM_CLASSES


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 48), nn.Tanh())
    return nn.Sequential(nn.Embedding(20, 16), layers, nn.Linear(48, NUM_CLASSES))


def loss_of(model: object, rows: Tensor) -> Tensor:
    return (
        nn.functional.cross_entropy(model(rows).float(), TARGETS[rows], reduction="sum")
        / NUM_SAMPLES
    )


def train(options: dict, folder: Path) -> dict:
    strategy = DeepSpeedStrategy(DeepSpeedConfig(**options), seed=1)
    strategy.setup()
    engine = strategy.prepare_train(make_model(), OPTIM, num_updates=NUM_STEPS)
    losses, first_steps = [], {}
    before = weights_of(engine)
    for step in range(NUM_STEPS):
        losses.append(take_step(engine, strategy))
        if step == 0:
            first_steps = {name: w - before[name] for name, w in weights_of(engine).items()}
    all_or_none(engine.take_states(folder))
    at_save = weights_of(engine)
    take_step(engine, strategy)
    after_save = weights_of(engine)
    engine.load_states(folder)
    assert all(torch.equal(tensor, at_save[name]) for name, tensor in weights_of(engine).items())
    take_step(engine, strategy)
    for name, tensor in weights_of(engine).items():
        torch.testing.assert_close(tensor, after_save[name], atol=1e-6, rtol=0)
    return {"losses": losses, "first_steps": first_steps, "weights": at_save, "next": after_save}


def go_on(folder: Path) -> dict[str, Tensor]:
    """Take one step from the states that two ranks saved; the weights after it."""
    strategy = DeepSpeedStrategy(DeepSpeedConfig(use_universal_ckpt=True), seed=1)
    strategy.setup()
    engine = strategy.prepare_train(make_model(), OPTIM, num_updates=NUM_STEPS)
    engine.load_states(folder / "zero2")
    take_step(engine, strategy)
    return weights_of(engine)


def take_step(engine: TrainEngine, strategy: DeepSpeedStrategy) -> float:
    total = 0.0
    micro_batches = strategy.topology.shard(torch.arange(NUM_SAMPLES).split(3))
    for index, rows in enumerate(micro_batches):
        loss = loss_of(engine, rows)
        total += loss.item()
        engine.backward(loss, is_last_micro_batch=index == len(micro_batches) - 1)
    engine.step()
    return strategy.all_reduce_sum({"loss": total})["loss"]


def weights_of(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.float().clone() for name, tensor in stored_parameters(engine.module)}


def train_all(folder: Path) -> dict:
    return {name: train(options, folder / name) for name, options in STAGES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("muon")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict]:
    """What each of two ranks found."""
    return run_ranks(train_all, 2, folder)


@pytest.mark.parametrize("case", STAGES)
def test_every_stage_takes_orthogonal_steps_and_goes_on_from_its_states(
    results: list[dict], case: str
) -> None:
    """The first step is the same one. Later ones part a little: Newton-Schulz works in bf16, where
    the last bit of a gradient may decide a rounding (seen: 0.003 in weights that moved by 0.5).
    """
    first_stage = results[0]["zero0"]
    for found in (rank_results[case] for rank_results in results):
        assert found["losses"][-1] < 0.5 * found["losses"][0]
        steps = found["first_steps"]
        assert all(step.any() for step in steps.values()), steps
        # The rate, times sqrt(48 / 16) for the shape, times singular values that five
        # Newton-Schulz steps bring near 1.
        values = torch.linalg.svdvals(steps["1.0.weight"]) / (0.05 * 3**0.5)
        assert values[:NUM_CLASSES].min() > 0.6 and values.max() < 1.3, values
        # The embedding's step is Adam's first: its rate, in the direction of the sign.
        embedding = steps["0.weight"][:NUM_SAMPLES]
        torch.testing.assert_close(embedding.abs().median(), torch.tensor(0.01), atol=1e-3, rtol=0)
        for name, first in first_stage["first_steps"].items() if "bf16" not in case else ():
            torch.testing.assert_close(steps[name], first, atol=1e-6, rtol=0)
            last = first_stage["weights"][name]
            torch.testing.assert_close(found["weights"][name], last, atol=0.02, rtol=0)


class TwoMatrices(nn.Module):
    """One of Muon's, one of Adam's; the gradient of both is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False)])
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x).sum() + self.head(x).sum()


FIRST_MOMENTS = {"momentum_buffer": 0.05, "exp_avg": 0.1}  # the part of the first gradient in them


def add_up(folder: Path) -> dict:
    """Mean gradients of one large micro-batch and 64 small ones, from the optimizer's moments."""
    found = {}
    for stage in (2, 3):
        strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage, param_dtype="bf16"))
        strategy.setup()
        engine = strategy.prepare_train(TwoMatrices(), OPTIM, num_updates=2)
        for index in range(65):
            x = torch.full((8,), 2.0**-9 if index else 1.0, dtype=torch.bfloat16)
            loss = engine(x) * float(strategy.is_main)
            engine.backward(loss, is_last_micro_batch=index == 64)
        engine.step()
        for state in engine.engine.basic_optimizer.state.values():
            for key in FIRST_MOMENTS.keys() & state.keys():
                moments = state[key].float()
                found[stage, key] = (moments[moments != 0] / FIRST_MOMENTS[key]).mean().item()
    return found


def test_micro_batches_are_summed_in_fp32(tmp_path: Path) -> None:
    for found in run_ranks(add_up, 2, tmp_path):
        assert {key for _, key in found} == FIRST_MOMENTS.keys()
        assert list(found.values()) == pytest.approx([1 + 64 / 512] * len(found), abs=0.005)


def test_muon_with_an_offloaded_optimizer_in_16_bits_is_refused() -> None:
    strategy = DeepSpeedStrategy(DeepSpeedConfig(param_dtype="bf16", adam_offload=True))
    with pytest.raises(ConfigError, match="sums micro-batches in 16 bits"):
        strategy.prepare_train(make_model(), OPTIM, num_updates=1)


def test_muons_momentum_goes_on_with_fewer_ranks(folder: Path, results: list[dict]) -> None:
    [found] = run_ranks(go_on, 1, folder)
    for name, tensor in results[0]["zero2"]["next"].items():
        torch.testing.assert_close(found[name], tensor, atol=0.01, rtol=0)
        assert not torch.allclose(found[name], results[0]["zero2"]["weights"][name], atol=1e-5)


@pytest.mark.parametrize("head", ["lm_head", "score"])
def test_embeddings_heads_norms_and_biases_are_left_to_adam(tmp_path: Path, head: str) -> None:
    load = load_causal_lm if head == "lm_head" else load_sequence_model
    model = load(make_tiny_model(tmp_path, "qwen2"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, decayed, undecayed = (
        {names[id(p)] for p in group["params"]} for group in parameter_groups(model, OPTIM)
    )
    assert muon == {n for n in names.values() if ".layers." in n and n.endswith("_proj.weight")}
    assert {f"{head}.weight", "model.embed_tokens.weight"} == decayed
    assert undecayed == set(names.values()) - muon - decayed
    groups = parameter_groups(model, OPTIM)
    assert [group["lr"] for group in groups] == [0.05, 0.01, 0.01]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]


PEAK = 1e-3
END_VALUES = {
    "linear": 0.0,
    "cosine": 0.0,
    "cosine_with_restarts": 0.0,
    "polynomial": 0.1 * PEAK,
    "constant": PEAK,
    "constant_with_warmup": PEAK,
    "cosine_with_min_lr": 0.1 * PEAK,
    "cosine_warmup_with_min_lr": 0.1 * PEAK,
    "warmup_stable_decay": 0.1 * PEAK,
}


def make(name: str, num_updates: int, warmup_ratio: float = 0.1) -> LambdaLR:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    optim = OptimizerConfig(
        lr_scheduler=name, adam=AdamConfig(lr=PEAK), lr_warmup_ratio=warmup_ratio, min_lr_ratio=0.1
    )
    return make_schedule(optimizer, optim, num_updates=num_updates)


def run(rate: LambdaLR, num_updates: int) -> list[float]:
    """The rate each update used, then the one it stands at."""
    used = [rate.get_last_lr()[0]]
    for _ in range(num_updates):
        rate.step()
        used.append(rate.get_last_lr()[0])
    return used


@pytest.mark.parametrize("num_updates", [1, 7, 40])
@pytest.mark.parametrize("name", END_VALUES)
def test_after_the_last_update_the_rate_is_the_end_value(name: str, num_updates: int) -> None:
    used = run(make(name, num_updates), num_updates)
    assert used[-1] == pytest.approx(END_VALUES[name], abs=1e-12)


@pytest.mark.parametrize("name", get_args(Schedule))
def test_every_name_works_and_resumes(name: str) -> None:
    straight = run(make(name, 20), 20)
    first = make(name, 20)
    run(first, 8)
    second = make(name, 20)
    resume_schedule(second, first.state_dict())
    assert run(second, 12) == pytest.approx(straight[8:], abs=1e-15)


@pytest.mark.parametrize("name", get_args(Schedule))
def test_warm_up_may_take_the_whole_run(name: str) -> None:
    used = run(make(name, 10, warmup_ratio=1.0), 10)
    assert all(0 <= rate <= PEAK for rate in used)


def test_a_polynomial_may_end_where_it_begins() -> None:
    optim = OptimizerConfig(lr_scheduler="polynomial", min_lr_ratio=1.0, adam=AdamConfig(lr=PEAK))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    assert run(make_schedule(optimizer, optim, num_updates=5), 5) == [PEAK] * 6


def test_a_run_of_one_update_does_not_spend_it_on_warm_up() -> None:
    assert make("cosine_with_min_lr", 1, warmup_ratio=0.03).get_last_lr() == [PEAK]
