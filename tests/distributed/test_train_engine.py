"""The gradient of a step is the sum over ranks and micro-batches, in every ZeRO stage; bad steps
change nothing.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from openrlhf.config.common import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed import collectives
from openrlhf.distributed.collectives import all_or_none
from openrlhf.distributed.strategy import (
    DeepSpeedStrategy,
    ModelSize,
    effective_stage,
    training_config,
)
from openrlhf.distributed.train_engine import TrainEngine, parameter_groups
from openrlhf.distributed.weights import stored_parameters
from openrlhf.errors import CheckpointError, ConfigError, NumericsError, SkippedUpdate
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.utils.packing import PackedBatch
from tests.distributed.spawn import run_ranks
from tests.helpers.gradients import full_gradients
from tests.models.helpers import command
from tests.tiny import Payload
from tests.tiny import make_model as make_tiny_model

CASES = {
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero3-zpg": {"zero_stage": 3, "zpg": 2},
    "zero2-offload": {"zero_stage": 2, "adam_offload": True},
    "zero2-bf16": {"zero_stage": 2, "param_dtype": "bf16"},
    "zero2-bf16-offload": {"zero_stage": 2, "param_dtype": "bf16", "adam_offload": True},
    "zero3-bf16": {"zero_stage": 3, "param_dtype": "bf16"},
}
OPTIM = OptimizerConfig(
    adam=AdamConfig(lr=1e-2, weight_decay=0.1), max_norm=0.5, lr_scheduler="linear"
)
NUM_STEPS = 4
NUM_SAMPLES = 12  # six micro-batches of two in a world of one, three per rank in a world of two


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, 4))


def test_biases_and_norms_do_not_decay_whatever_their_shape() -> None:
    experts = transformers.GptOssConfig(
        vocab_size=262, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    norms = transformers.CohereConfig(
        vocab_size=262, hidden_size=32, intermediate_size=64, num_hidden_layers=1, pad_token_id=0,
        num_attention_heads=4, num_key_value_heads=2, use_qk_norm=True,
    )  # fmt: skip
    for config, num_stacked in ((experts, 2), (norms, 2)):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        decayed, undecayed = (
            {names[id(parameter)] for parameter in group["params"]}
            for group in parameter_groups(model, OPTIM)
        )
        assert not [name for name in decayed if "norm" in name or name.endswith("bias")]
        stacked = [name for name in undecayed if model.get_parameter(name).ndim > 1]
        assert len(stacked) == num_stacked
        muon = OPTIM.model_copy(update={"optim": "muon"})
        in_muon = parameter_groups(model, muon)[0]["params"]
        assert in_muon and not {names[id(parameter)] for parameter in in_muon} & undecayed


def samples_of(step: int) -> Tensor:
    return torch.randn(NUM_SAMPLES, 16, generator=torch.Generator().manual_seed(step))


def loss_of(model: object, samples: Tensor) -> Tensor:
    return model(samples).float().pow(2).sum() / NUM_SAMPLES


def plain_loop(dtype: torch.dtype) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Gradient norms, first gradients and final weights of a bare torch loop over whole batches."""
    model = make_model()
    optimizer = torch.optim.AdamW(parameter_groups(model, OPTIM), lr=1e-2)
    norms, first = [], []
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / NUM_STEPS)
        optimizer.zero_grad()
        loss_of(model, samples_of(step)).backward()
        first = first or [p.grad.clone() for p in model.parameters()]
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return norms, first, [p.detach() for p in model.parameters()]


def full_weights(engine: TrainEngine) -> list[Tensor]:
    return [tensor.float().clone() for _, tensor in stored_parameters(engine.module)]


def run_case(options: dict, folder: Path, name: str) -> dict:
    strategy = DeepSpeedStrategy(DeepSpeedConfig(**options), seed=1)
    strategy.setup()
    engine = strategy.prepare_train(make_model(), OPTIM, num_updates=NUM_STEPS)
    dtype = next(engine.module.parameters()).dtype
    norms, first, lrs = [], [], []
    for step in range(NUM_STEPS):
        micro_batches = strategy.topology.shard(samples_of(step).to(dtype).split(2))
        for index, samples in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            engine.backward(loss_of(engine, samples), is_last_micro_batch=is_last)
        first = first or full_gradients(engine)
        norms.append(engine.step())
        lrs.append(engine.lr)
    weights = full_weights(engine)
    names = [name for name, _ in stored_parameters(engine.module)]
    # One rank's loss is not a number: every rank must refuse, and nothing may change.
    factor = float("nan") if strategy.is_main else 1.0
    engine.backward(loss_of(engine, samples) * factor, is_last_micro_batch=True)
    with pytest.raises(SkippedUpdate):
        engine.step()
    all_or_none(engine.take_states(folder / f"{name}-skipped"))
    engine.num_skips_in_a_row = 0
    engine.load_states(folder / f"{name}-skipped")
    assert engine.num_skips_in_a_row == 1  # a run that resumes has no more to skip
    if strategy.is_main:  # the name that checkpoints have
        own = json.loads((folder / f"{name}-skipped" / "engine.json").read_text())
        assert own["num_skipped_updates"] == 1
    is_unchanged = all(map(torch.equal, weights, full_weights(engine)))
    engine.backward(loss_of(engine, samples), is_last_micro_batch=True)
    norm_after = engine.step()
    before_save = full_weights(engine)
    all_or_none(engine.take_states(folder / name))
    write = engine.take_states(folder / f"{name}-taken")
    num_bytes = engine.num_state_bytes()
    engine.backward(loss_of(engine, samples), is_last_micro_batch=True)
    engine.step()
    write()
    engine.load_states(folder / name)
    is_restored = all(map(torch.equal, before_save, full_weights(engine)))
    return {
        "norms": norms,
        "first": first,
        "lrs": lrs,
        "weights": weights,
        "names": names,
        "is_unchanged": is_unchanged,
        "norm_after": norm_after,
        "is_restored": is_restored,
        "num_bytes": num_bytes,
        "sharing": engine._sharing,
    }


def run_all_cases(folder: Path) -> dict:
    strategy = DeepSpeedStrategy(DeepSpeedConfig(), seed=1)
    strategy.setup()
    results = {
        name: run_case(options, folder / f"world{strategy.topology.world_size}", name)
        for name, options in CASES.items()
    }
    collectives.shut_down()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict]:
    return run_ranks(run_all_cases, 2, folder)


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], list[Tensor], list[Tensor]]:
    return plain_loop(torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_every_stage_trains_as_a_bare_loop_does(
    results: list[dict], expected: tuple, case: str
) -> None:
    norms, first, weights = expected
    tolerance = 0.03 if "bf16" in case else 1e-6
    for found in (rank_results[case] for rank_results in results):
        torch.testing.assert_close(
            torch.cat([g.flatten() for g in found["first"]]),
            torch.cat([g.flatten() for g in first]),
            rtol=tolerance,
            atol=tolerance * norms[0],
        )
        assert found["norms"] == pytest.approx(norms, rel=tolerance)
        if "bf16" not in case:
            for mine, theirs in zip(found["weights"], weights, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        expected_lrs = [1e-2 * (1 - step / NUM_STEPS) for step in range(1, NUM_STEPS + 1)]
        assert found["lrs"] == pytest.approx(expected_lrs, abs=1e-12)
        assert found["names"] == [
            f"{module}.{kind}" for module in (0, 1, 3) for kind in ("weight", "bias")
        ]
        # A bad gradient on one rank changes nothing anywhere; saved states bring weights back.
        assert found["is_unchanged"] and found["is_restored"]
        true_norm = results[0]["zero0"]["norm_after"]
        assert found["norm_after"] == pytest.approx(true_norm, rel=2 * tolerance)


def compare_frozen(folder: Path) -> dict:
    """Log-probs of one model in bf16: trained, frozen, and frozen in host memory."""
    strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=2, param_dtype="bf16"))
    strategy.setup()

    def load() -> Actor:
        return Actor(load_causal_lm(folder / "qwen2", command(param_dtype="bf16")))

    engines = {
        "trained": strategy.prepare_train(load(), OPTIM, num_updates=1),
        "frozen": strategy.prepare_eval(load()),
        "offloaded": strategy.prepare_eval(load(), offload=True),
    }
    ids = torch.randint(6, 262, (512,), generator=torch.Generator().manual_seed(0))
    row = PackedBatch.from_sequences([ids], [torch.arange(512) > 0])
    with torch.no_grad():
        return {name: engine(row).logprobs.float() for name, engine in engines.items()}


def test_a_frozen_model_in_16_bits_has_the_log_probs_of_the_trained_one(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "qwen2", num_heads=2, hidden_size=128, initializer_range=0.1)
    [found] = run_ranks(compare_frozen, 1, tmp_path)
    for name in ("frozen", "offloaded"):
        assert torch.equal(found[name], found["trained"]), name


def overflow_always(folder: Path) -> dict:
    """What the last of many updates without a finite gradient raises, by ZeRO stage."""
    found = {}
    for stage in (2, 3):
        strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage, param_dtype="fp16"))
        strategy.setup()
        engine = strategy.prepare_train(make_model(), OPTIM, num_updates=50)
        with pytest.raises(NumericsError) as caught:
            for _ in range(50):
                loss = loss_of(engine, samples_of(0).half()) * float("nan")
                engine.backward(loss, is_last_micro_batch=True)
                engine.step()
        found[stage] = str(caught.value)
    return found


def test_fp16_gradients_that_are_never_finite_end_in_our_words(tmp_path: Path) -> None:
    for found in run_ranks(overflow_always, 2, tmp_path):
        for said in found.values():
            assert said.startswith("the gradient was not finite in 20 updates in a row")


@pytest.mark.parametrize("case", CASES)
def test_states_written_while_training_goes_on_are_those_written_at_once(
    results: list[dict], folder: Path, case: str
) -> None:
    at_once, taken = folder / "world2" / case, folder / "world2" / f"{case}-taken"
    files = sorted(file.name for file in at_once.iterdir())
    assert len(files) == (2 if case == "zero0" else 3)
    assert results[0][case]["sharing"] == ([0] if case == "zero0" else [0, 1])
    for file in files:
        assert (at_once / file).read_bytes() == (taken / file).read_bytes()
    parts = [part for file in taken.glob("*.pt") for part in torch.load(file).values()]
    sizes = [part[key].nbytes for part in parts for key in part.keys() - {"start", "step"}]
    assert results[0][case]["num_bytes"] == sum(sizes)


def test_ranks_that_cannot_be_divided_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="--zpg 2: 3 ranks cannot be divided"):
        DeepSpeedStrategy(DeepSpeedConfig(zero_stage=3, zpg=2))


def test_full_determinism_is_switched_on_with_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(transformers.trainer_utils, "enable_full_determinism", seeds.append)
    DeepSpeedStrategy(DeepSpeedConfig(), seed=6).setup()
    assert round(torch.rand(1).item(), 4) == 0.5722 and not seeds
    DeepSpeedStrategy(DeepSpeedConfig(), seed=7, full_determinism=True).setup()
    assert seeds == [7]


STAGES = (0, 3)


def make_engine(stage: int, frozen: int, seed: int) -> TrainEngine:
    """Two layers, one of them frozen."""
    strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage), seed=seed)
    strategy.setup()
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[frozen].requires_grad_(False)
    return strategy.prepare_train(model, OptimizerConfig(), num_updates=3)


def take_steps(engine: TrainEngine, count: int) -> None:
    samples = torch.arange(12.0).view(4, 3) / 10
    for _ in range(count):
        engine.backward(engine(samples).pow(2).sum(), is_last_micro_batch=True)
        engine.step()


def weights_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in stored_parameters(engine.module)}


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_weights_are_not_saved_and_those_of_the_start_stay(
    tmp_path: Path, stage: int
) -> None:
    first = make_engine(stage, frozen=0, seed=1)
    all_or_none(first.take_states(tmp_path / "model"))
    [path] = (tmp_path / "model").glob("*.pt")
    assert set(torch.load(path, weights_only=True)) == {"1.weight", "1.bias"}
    second = make_engine(stage, frozen=0, seed=2)
    before, expected = weights_of(second), weights_of(first)
    second.load_states(tmp_path / "model")
    found = weights_of(second)
    assert torch.equal(found["1.weight"], expected["1.weight"])
    assert torch.equal(found["0.weight"], before["0.weight"])
    assert not torch.equal(found["0.weight"], expected["0.weight"])


@pytest.mark.parametrize("written", STAGES)
@pytest.mark.parametrize("read", STAGES)
def test_what_one_stage_writes_another_goes_on_from(
    tmp_path: Path, written: int, read: int
) -> None:
    first, second = make_engine(written, frozen=0, seed=1), make_engine(read, frozen=0, seed=1)
    take_steps(first, 2)
    all_or_none(first.take_states(tmp_path / "model"))
    second.use_universal_ckpt = True
    second.load_states(tmp_path / "model")
    for engine in (first, second):
        take_steps(engine, 2)
    torch.testing.assert_close(
        weights_of(second)["1.weight"], weights_of(first)["1.weight"], rtol=0, atol=1e-7
    )


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    engine = make_engine(0, frozen=0, seed=1)
    all_or_none(engine.take_states(tmp_path / "model"))
    [path] = (tmp_path / "model").glob("*.pt")
    torch.save({"1.weight": Payload(tmp_path / "owned")}, path)
    with pytest.raises(CheckpointError, match="is no file of tensors"):
        engine.load_states(tmp_path / "model")
    assert not (tmp_path / "owned").exists()


def test_a_checkpoint_of_other_trained_weights_is_refused(tmp_path: Path) -> None:
    all_or_none(make_engine(0, frozen=0, seed=1).take_states(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=r"lacks weights of 0\.weight\. Train"):
        make_engine(0, frozen=1, seed=1).load_states(tmp_path / "model")


def train_in_three_worlds(folder: Path) -> int:
    for is_opened_by_others in (False, False, True):
        if is_opened_by_others:
            torch.distributed.init_process_group(
                "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
            )
        strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=0), seed=1)
        strategy.setup()
        strategy.prepare_train(make_model(), OPTIM, num_updates=NUM_STEPS)
        torch.distributed.destroy_process_group()  # as vLLM does when its engine ends
    return 3


def test_a_trainer_starts_where_somebody_else_has_closed_the_groups(tmp_path: Path) -> None:
    assert run_ranks(train_in_three_worlds, 1, tmp_path) == [3]


FP32 = ModelSize(torch.float32, num_parameters=1000, num_copies=2)
BF16 = ModelSize(torch.bfloat16, num_parameters=1000, num_copies=2)
ALONE = ModelSize(torch.float32, num_parameters=1000, num_copies=1)


@pytest.mark.parametrize(
    ("stage", "facts", "options", "runs_as"),
    [
        (2, FP32, {}, 2),
        (2, ALONE, {}, 0),
        (3, ALONE, {}, 0),
        (3, replace(BF16, num_copies=1), {"enable_sleep": True}, 2),
        (3, ALONE, {"config": "offloaded_parameters.json"}, 3),
        (2, ALONE, {"adam_offload": True}, 2),
        (3, replace(BF16, num_copies=1), {"adam_offload": True}, 3),
        (0, FP32, {"adam_offload": True}, 1),
        (0, ALONE, {"enable_sleep": True}, 1),
        (1, BF16, {}, 2),
        (0, BF16, {}, 2),
        (3, BF16, {}, 3),
        (0, FP32, {}, 0),
    ],
)
def test_the_stage_that_runs(stage: int, facts: ModelSize, options: dict, runs_as: int):
    assert effective_stage(DeepSpeedConfig(zero_stage=stage, **options), facts) == runs_as


def test_sixteen_bit_gradients_are_summed_in_fp32_unless_the_user_says_otherwise():
    config = training_config(DeepSpeedConfig(), OptimizerConfig(), BF16)
    assert config["bf16"]["enabled"] and config["data_types"] == {"grad_accum_dtype": "fp32"}
    asked = training_config(DeepSpeedConfig(grad_accum_dtype="bf16"), OptimizerConfig(), BF16)
    assert asked["data_types"] == {"grad_accum_dtype": "bf16"}


def write(path: Path, tree: object) -> DeepSpeedConfig:
    path.write_text(json.dumps(tree))
    return DeepSpeedConfig(zero_stage=2, config=str(path))


def test_auto_is_filled_and_other_keys_are_kept(tmp_path: Path) -> None:
    ds = write(
        tmp_path / "ds.json",
        {
            "train_batch_size": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 123, "overlap_comm": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            "comms_logger": {"enabled": True},
        },
    )
    config = training_config(ds, OptimizerConfig(), ALONE)
    assert config["gradient_clipping"] == 1.0
    assert config["zero_optimization"]["stage"] == 2
    assert config["zero_optimization"]["reduce_bucket_size"] == 123
    assert config["zero_optimization"]["overlap_comm"] is False
    assert config["comms_logger"] == {"enabled": True}
    assert not {"scheduler", "optimizer"} & config.keys()  # they are made outside


def test_an_optimizer_of_the_json_is_said_to_be_without_use(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    given = {
        "optimizer": {"type": "Lamb", "params": {"lr": "auto"}},
        "scheduler": {"type": "OneCycle"},
    }
    training_config(write(tmp_path / "ds.json", given), OptimizerConfig(), ALONE)
    said = " ".join(capsys.readouterr().err.split())
    assert "not used: optimizer.type, scheduler.type. --optim and --lr_scheduler decide" in said


def test_what_is_left_out_of_our_settings_is_no_contradiction(tmp_path: Path) -> None:
    zero = {"offload_optimizer": {"device": "none"}, "zero_hpz_partition_size": 1}
    ds = write(tmp_path / "ds.json", {"zero_optimization": zero})
    config = training_config(ds, OptimizerConfig(), FP32)
    assert "offload_optimizer" not in config["zero_optimization"]


def test_parameters_that_a_json_offloads_have_no_states_to_sleep(tmp_path: Path) -> None:
    ds = write(tmp_path / "ds.json", {"zero_optimization": {"offload_param": {"device": "cpu"}}})
    with pytest.raises(ConfigError, match=r"offload_param in .* with --deepspeed_enable_sleep"):
        training_config(ds.model_copy(update={"enable_sleep": True}), OptimizerConfig(), FP32)


def test_every_contradiction_is_named_with_its_flag(tmp_path: Path) -> None:
    ds = write(
        tmp_path / "ds.json",
        {
            "zero_optimization": {"stage": 3},
            "gradient_clipping": 5.0,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        },
    )
    with pytest.raises(ConfigError) as caught:
        training_config(ds, OptimizerConfig(), FP32)
    lines = caught.value.problems
    assert len(lines) == 3
    assert "zero_optimization.stage is 3, but --zero_stage decides it" in lines[0]
    assert "gradient_clipping is 5.0, but --max_norm decides it" in lines[1]
    assert "warmup_num_steps is 10, but --lr_warmup_ratio decides it" in lines[2]


def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    ds = write(tmp_path / "ds.json", [1])
    with pytest.raises(ConfigError, match=r"--deepspeed_config .* is not a JSON object"):
        training_config(ds, OptimizerConfig(), FP32)
