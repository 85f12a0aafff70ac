"""Adapters over a base in four bits, where bitsandbytes is installed: they learn, their gradients
pass through the base, and a run that stops goes on where it stood.
"""

from pathlib import Path

import pytest
import torch

from openrlhf.cli import train_ppo
from openrlhf.config.common import LoraConfig
from openrlhf.distributed.weights import stored_parameters
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import add_lora
from openrlhf.models.loading import load_causal_lm
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tracker import read_metrics
from tests.distributed.spawn import run_ranks
from tests.helpers.stopped_runs import records
from tests.helpers.supervised_runs import check_same, make_inputs, start, straight_and_resumed
from tests.integration.commands import argv
from tests.integration.conftest import REWARD_CODE
from tests.models.helpers import command
from tests.tiny import write_jsonl

pytest.importorskip("bitsandbytes")

BATCH_IDS = torch.arange(20, 40)
FLAGS = ("--load_in_4bit", "--lora_rank", "4")


def adapted(path: Path) -> Actor:
    """A policy in four bits with an adapter that is not zero."""
    actor = Actor(add_lora(load_causal_lm(path, command(load_in_4bit=True)), LoraConfig(rank=4)))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in actor.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return actor


def gradients(actor: Actor) -> dict[str, torch.Tensor]:
    actor.zero_grad()
    batch = PackedBatch.from_sequences([BATCH_IDS], [torch.arange(20) > 0])
    actor.train()(batch).logprobs.sum().backward()
    return {n: p.grad.clone() for n, p in actor.named_parameters() if p.grad is not None}


def dequantised(path: Path, actor: Actor) -> Actor:
    """The same policy with the base's weights as plain numbers."""
    import bitsandbytes.functional as F

    plain = Actor(add_lora(load_causal_lm(path), LoraConfig(rank=4)))
    own = dict(actor.named_parameters())
    for name, parameter in plain.named_parameters():
        state = getattr(own[name], "quant_state", None)
        value = own[name] if state is None else F.dequantize_4bit(own[name].data, state)
        parameter.data.copy_(value)
    return plain


def test_gradients_pass_through_the_base_before_and_after_an_evaluation(
    tiny_model_dir: Path,
) -> None:
    actor = adapted(tiny_model_dir)
    expected = gradients(dequantised(tiny_model_dir, actor))
    first = gradients(actor)
    with torch.no_grad():
        actor.eval()(PackedBatch.from_sequences([BATCH_IDS], [torch.arange(20) > 0]))
    second = gradients(actor)
    assert expected.keys() == first.keys() == second.keys() and len(first) == 2 * 2 * 7
    for name in expected:
        torch.testing.assert_close(first[name], expected[name], atol=1e-4, rtol=1e-3)
        assert torch.equal(first[name], second[name])


def test_weights_of_layers_without_an_adapter_are_sent_as_plain_numbers(tiny_model_dir: Path):
    lora = LoraConfig(rank=4, target_modules=["q_proj", "v_proj"])
    actor = Actor(add_lora(load_causal_lm(tiny_model_dir, command(load_in_4bit=True)), lora))
    sent, stored = dict(stored_parameters(actor)), load_causal_lm(tiny_model_dir).state_dict()
    assert {name: t.shape for name, t in sent.items()} == {
        name: t.shape for name, t in stored.items() if name in sent
    }
    for name, tensor in sent.items():
        assert tensor.is_floating_point(), name
        assert (tensor.float() - stored[name].float()).abs().max() < 0.1


def run_commands(root: Path) -> None:
    more = ("--max_epochs", "10", "--learning_rate", "1e-2")
    start(root, root / "long", "dpo_lora", *FLAGS, *more)
    straight_and_resumed(root, root / "stopped", "sft_lora", *FLAGS)


@pytest.mark.slow
def test_adapters_in_four_bits_learn_and_go_on_where_they_stood(tmp_path: Path) -> None:
    root = make_inputs(tmp_path)
    run_ranks(run_commands, 1, root)
    losses = [record["loss"] for record in records(root / "long") if "loss" in record]
    assert losses[-1] < 0.95 * losses[0]
    assert (root / "long" / "adapter_model.safetensors").is_file()
    check_same(root / "stopped", "sft_lora")


@pytest.mark.slow
def test_a_policy_in_four_bits_is_synced_to_vllm(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The engine gets the base as plain numbers with the adapter merged in, at every step."""
    (tmp_path / "reward.py").write_text(REWARD_CODE)
    prompts = [{"input": f"{i}+{i}=", "answer": str(2 * i)} for i in range(11)]
    train_ppo.main(
        argv(
            "--advantage_estimator rloo --n_samples_per_prompt 2 --init_kl_coef 0 --lora_rank 4 "
            "--load_in_4bit --bf16 --vllm_num_engines 1 --actor_learning_rate 1e-2 "
            "--label_key answer",
            pretrain=tiny_model_dir,
            prompt_data=write_jsonl(tmp_path / "prompts.jsonl", prompts),
            remote_rm_url=tmp_path / "reward.py",
            save_path=tmp_path / "run",
        )
    )
    steps = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in r]
    assert len(steps) == 2
    assert all(step["vllm_kl"] < 1e-3 and step["actor_grad_norm"] > 0 for step in steps)
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()
