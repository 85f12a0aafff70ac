"""The memory that a check promises: states by hand, activations against what autograd keeps."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openrlhf.commands.check_memory import (
    Model,
    Share,
    activations,
    peaks_of,
    shape_of,
    share_of,
)
from openrlhf.config.common import DeepSpeedConfig, LoraConfig, OptimizerConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.utils.packing import PackedBatch
from tests.tiny import make_model

COMMAND = SFTConfig()


def share(path: Path, dtype: str, num_ranks: int, **flags: object) -> tuple[int, Share]:
    """Weights of the model, and the share of a rank."""
    ds = DeepSpeedConfig(param_dtype=dtype, **flags)
    model = Model(str(path), trains=True, num_ranks=num_ranks)
    shape = shape_of(model, COMMAND, ds, is_cuda=False)
    return shape.num_parameters, share_of(shape, model, ds)


def test_states_are_what_zero_leaves_on_a_rank(tiny_model_dir: Path) -> None:
    count, alone = share(tiny_model_dir, "fp32", 1)
    # fp32 on one rank: gradients and two moments, no master weights.
    assert (alone.weights, alone.states) == (4 * count, 12 * count)
    _, first = share(tiny_model_dir, "fp32", 4, zero_stage=1)
    # Whole gradients, a quarter of the master weights and two moments.
    assert (first.weights, first.states) == (4 * count, 4 * count + 12 * count / 4)
    _, second = share(tiny_model_dir, "bf16", 4, zero_stage=2)
    # Gradients, master weights and two moments in fp32, a quarter of each.
    assert (second.weights, second.states) == (2 * count, 16 * count / 4)
    _, third = share(tiny_model_dir, "bf16", 4, zero_stage=3)
    assert (third.weights, third.states) == (2 * count / 4, 16 * count / 4)
    _, offloaded = share(tiny_model_dir, "bf16", 4, zero_stage=3, adam_offload=True)
    assert (offloaded.states, offloaded.host) == (0, 16 * count / 4)
    # Below stage 3 gradients are summed on the device, unless in 16 bits, or the weights are fp32.
    for stage_2, on_device in [({}, 4), ({"grad_accum_dtype": "bf16"}, 0)]:
        _, offloaded = share(tiny_model_dir, "bf16", 4, adam_offload=True, **stage_2)
        assert (offloaded.states, offloaded.host) == (
            on_device * count / 4,
            (16 - on_device) * count / 4,
        )
    _, adapter = share(tiny_model_dir, "bf16", 1, lora=LoraConfig(rank=2))
    assert adapter.states < 0.1 * 16 * count


def bytes_alive() -> int:
    """The size of all tensors of this process."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_deepspeed_holds_what_is_promised(tmp_path: Path, dtype: str) -> None:
    path = make_model(tmp_path, hidden_size=256, num_heads=8)
    ds = DeepSpeedConfig(param_dtype=dtype)
    strategy = DeepSpeedStrategy(ds)
    strategy.setup()
    before = bytes_alive()
    engine = strategy.prepare_train(
        Actor(load_causal_lm(path, SFTConfig(ds=ds))), OptimizerConfig(), num_updates=2
    )
    ids_T = torch.arange(8)
    for _ in range(2):  # the first step makes the moments
        out = engine(PackedBatch.from_sequences([ids_T], [ids_T > 0]))
        engine.backward(out.logprobs.sum(), is_last_micro_batch=True)
        del out
        held = bytes_alive() - before
        engine.step()
    _, promised = share(path, dtype, 1)
    assert held == pytest.approx(promised.weights + promised.states, rel=0.02)


def test_a_frozen_model_that_is_offloaded_takes_host_memory(tiny_model_dir: Path) -> None:
    ds, model = DeepSpeedConfig(param_dtype="bf16"), Model(str(tiny_model_dir))
    shape = shape_of(model, COMMAND, ds, is_cuda=False)
    kept, offloaded = share_of(shape, model, ds), share_of(shape, replace(model, offload=True), ds)
    size = 2 * shape.num_parameters
    assert (kept.weights, kept.states, kept.host) == (size, 0, 0)
    assert (offloaded.weights, offloaded.host) == (0, size)
    assert offloaded.in_one_memory().states == size  # a CPU has no other memory


def test_sleep_takes_the_engine_and_the_other_states_out_of_the_peak() -> None:
    actor, critic = Share(10, 40, 7), Share(10, 40, 3)
    flags = {"engine": 50, "engine_sleeps": False, "states_sleep": False}
    assert peaks_of([actor, critic], **flags) == (150, 157)
    # Training the actor: both weights and the actor's states; generating: weights and the engine.
    flags |= {"engine_sleeps": True, "states_sleep": True}
    assert peaks_of([actor, critic], **flags) == (70, 70)
    assert peaks_of([actor, critic], **flags | {"engine": 30}) == (60, 67)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_micro_batch_takes_about_what_autograd_keeps(
    tmp_path: Path, dtype: str, recomputes: bool
) -> None:
    path = make_model(tmp_path, hidden_size=128, num_layers=4, num_heads=4, intermediate_size=384)
    command = SFTConfig(ds=DeepSpeedConfig(param_dtype=dtype))
    actor = Actor(load_causal_lm(path, command))
    if recomputes:
        actor.gradient_checkpointing_enable(False)
    actor.train()
    ids_T, is_target_T = torch.arange(512) % 200, torch.arange(512) > 0
    batch = PackedBatch.from_sequences([ids_T] * 4, [is_target_T] * 4)
    weights = {p.untyped_storage().data_ptr() for p in actor.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = actor(batch)
    model = Model(str(path), trains=True, recomputes=recomputes, num_tokens=2048)
    shape = shape_of(model, command, command.ds, is_cuda=False)
    expected = activations(shape, model, command.ds)
    if recomputes:  # one layer of the backward pass is yet to come
        expected -= activations(shape, replace(model, trains=False), command.ds)
    assert expected == pytest.approx(sum(kept.values()), rel=0.1)
    del out
