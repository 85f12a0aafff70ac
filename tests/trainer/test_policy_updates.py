"""The policy's update is the same however the batch is cut; only idle work is skipped."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from openrlhf.algorithms.off_policy import Correction
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.own_loss import find_policy_loss
from openrlhf.trainer.ppo_utils.replay_buffer import plan_updates
from openrlhf.trainer.ray import ppo_actor
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from tests.tiny import make_model
from tests.trainer.test_experience import rollout


def make_actor(model: Path, tmp_path: Path, **sections: dict) -> PolicyModelActor:
    config = PPOConfig.model_validate(
        {
            "actor": {
                "model_name_or_path": str(model),
                "max_norm": 1e9,
                **sections.pop("actor", {}),
            },
            "ds": {"zero_stage": 0},
            **sections,
        }
    )
    actor = PolicyModelActor(config, "actor", str(tmp_path))
    actor.setup()
    actor.init_model(num_updates=10)
    return actor


def ragged_experience(count: int = 64, *, with_ref: bool = False) -> Experience:
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    rollouts = [
        rollout(
            [draw(6, 260) for _ in range(draw(1, 9))],
            [draw(6, 260) for _ in range(draw(1, 25))],
            group=i // 4,
            reward=float(i % 3),
        )
        for i in range(count)
    ]
    experience = Experience.from_rollouts(rollouts)
    n = len(experience.rollout_logprobs)
    noise = torch.randn(3, n, generator=generator)
    return replace(
        experience,
        advantages=noise[0],
        old_logprobs=-5 + 0.3 * noise[1],
        ref_logprobs=-5 + 0.3 * noise[2] if with_ref else None,
    )


def gradients(actor: PolicyModelActor, experience: Experience, micro_batch: int) -> torch.Tensor:
    """The flat gradient of one optimizer step, taken just before it is applied."""
    held: list[torch.Tensor] = []

    def capture() -> float:
        grads = [p.grad.flatten().clone() for p in actor.actor.parameters() if p.grad is not None]
        held.append(torch.cat(grads))
        actor.engine.engine.zero_grad()
        return 1.0

    actor.engine.step = capture  # type: ignore[method-assign]
    train = actor.config.train.model_copy(update={"micro_batch_size": micro_batch})
    actor.config = actor.config.model_copy(update={"train": train})
    [steps] = plan_updates(experience, 1, train_batch_size=64, max_epochs=1, seed=0, kl_coef=0.1)
    actor.fit(steps)
    return held[0]


@pytest.mark.parametrize(
    ("loss_type", "aggregation", "with_kl"),
    [
        ("ppo", "token_mean", True),
        ("gspo", "token_mean", False),
        ("sapo", "seq_mean", False),
    ],
)
def test_gradients_do_not_depend_on_micro_batches(
    tiny_model_dir: Path, tmp_path: Path, loss_type: str, aggregation: str, with_kl: bool
) -> None:
    actor = make_actor(
        tiny_model_dir,
        tmp_path,
        actor={"policy_loss_type": loss_type, "entropy_coef": 0.01},
        algo={
            "loss_aggregation": aggregation,
            "kl": {"use_loss": with_kl, "estimator": "k3"},
            "advantage": {"is_correction_enable": True, "is_correction_level": "geometric"},
        },
    )
    experience = ragged_experience(with_ref=with_kl)
    whole = gradients(actor, experience, 64)
    assert whole.norm() > 1e-3
    for micro_batch in (8, 1):
        error = (gradients(actor, experience, micro_batch) - whole).norm() / whole.norm()
        assert error < 1e-5, f"micro-batches of {micro_batch}: relative error {error:.1e}"


def test_the_gradient_has_the_router_loss_of_every_sample(tmp_path: Path) -> None:
    mixtral = make_model(tmp_path, "mixtral", hidden_size=32, initializer_range=0.2)
    actor = make_actor(mixtral, tmp_path, actor={"aux_loss_coef": 0.5})
    experience = ragged_experience(24)
    whole = gradients(actor, experience, 24)
    for size in (5, 1):
        assert (gradients(actor, experience, size) - whole).norm() / whole.norm() < 1e-5
    reference = Actor(load_causal_lm(mixtral), with_aux_loss=True)
    batch = experience.packed()
    losses_B, weights_B = reference(batch).aux_loss, batch.num_targets
    ((losses_B * weights_B).sum() / weights_B.sum()).backward()
    # The head and the final norm stand behind the routers: they get none of it.
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()]
    expected = 0.5 * torch.cat([part.flatten() for part in parts])
    assert expected.norm() > 0.005
    silent = replace(experience, advantages=torch.zeros_like(experience.advantages))
    torch.testing.assert_close(gradients(actor, silent, 24), expected, atol=1e-5, rtol=1e-4)


def test_a_users_loss_is_imported_and_used(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "my_loss.py"
    file.write_text(
        "from openrlhf.algorithms.policy_loss import PolicyLossTerms\n"
        "def plain(logprobs_N, old_logprobs_N, *, advantages_N, num_actions_B, clip):\n"
        "    ratio_N = (logprobs_N - old_logprobs_N).exp()\n"
        "    no = ratio_N.detach() < 0\n"
        "    return PolicyLossTerms(-ratio_N * advantages_N, ratio_N.detach(), no, ratio_N.log())\n"
    )
    experience = replace(ragged_experience(), old_logprobs=None)  # ratio 1: nothing is clipped
    own = make_actor(tiny_model_dir, tmp_path, actor={"policy_loss_type": f"{file}:plain"})
    ppo = make_actor(tiny_model_dir, tmp_path)
    expected = gradients(ppo, experience, 64)
    assert (gradients(own, experience, 64) - expected).norm() / expected.norm() < 1e-5
    with pytest.raises(ConfigError, match="has no other; found: plain"):
        find_policy_loss(f"{file}:other")
    with pytest.raises(ConfigError, match="cannot be imported"):
        find_policy_loss("no_such_module:loss")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", None),
        ("--enable_vllm_is_correction", ("token", "clip", 0.5, 5.0)),
        (
            "--enable_vllm_is_correction --is_correction_type seq-mask-tis",
            ("seq", "mask", 0.5, 5.0, "ratio", True),
        ),
        (
            "--is_correction_level seq --is_correction_gating binary_kl "
            "--is_correction_clamp_survivors",
            ("seq", "mask", 0.5, 5.0, "binary_kl", True),
        ),
    ],
)
def test_flags_are_the_correction(line: str, expected: tuple | None, tmp_path: Path) -> None:
    needs = "--pretrain m --prompt_data d --remote_rm_url r.py"
    config = parse_config(PPOConfig, f"{needs} {line}".split()).config
    actor = PolicyModelActor(config, "actor", str(tmp_path))
    assert actor._correction() == (None if expected is None else Correction(*expected))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_kl_gradient_is_that_of_the_kl_whatever_the_estimator(
    tiny_model_dir: Path, tmp_path: Path, estimator: str
) -> None:
    """On-policy w is 1 and w * k2 is k2, whose gradient is the one of the KL."""
    experience = replace(ragged_experience(8, with_ref=True), old_logprobs=None)
    assert experience.advantages is not None
    experience = replace(experience, advantages=torch.zeros_like(experience.advantages))
    kl = {"use_loss": True, "init_coef": 0.1}

    def found(words: dict) -> torch.Tensor:
        return gradients(
            make_actor(tiny_model_dir, tmp_path, algo={"kl": kl | words}), experience, 8
        )

    expected = found({"estimator": "k2"})
    unbiased = found({"estimator": estimator, "unbiased_gradient": True})
    assert (unbiased - expected).norm() / expected.norm() < 1e-5


def test_tokens_outside_the_band_lose_their_gradient(tiny_model_dir: Path, tmp_path: Path) -> None:
    """With all engine log-probs far off but those of one sample, only that one teaches."""
    band = {"is_correction_enable": True, "is_correction_threshold": (0.5, 2.0)}
    masked = {**band, "is_correction_type": "icepop"}
    actor = make_actor(tiny_model_dir, tmp_path, algo={"advantage": masked})
    experience = replace(ragged_experience(8), old_logprobs=None)
    near = actor.compute_logprobs(experience)
    first = int(experience.num_actions[0])
    far = torch.cat([near[:first], near[first:] - 5])
    corrected = gradients(actor, replace(experience, rollout_logprobs=far), 8)
    assert experience.advantages is not None
    silent = experience.advantages.clone()
    silent[first:] = 0
    plain = make_actor(tiny_model_dir, tmp_path)
    expected = gradients(plain, replace(experience, advantages=silent), 8)
    assert (corrected - expected).norm() / expected.norm() < 1e-4


def test_importance_ratios_are_told_apart_by_staleness(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    advantage = {
        "is_correction_enable": True,
        "is_correction_type": "icepop",
        "is_correction_threshold": (0.5, 2.0),
    }
    actor = make_actor(
        tiny_model_dir, tmp_path, train={"async_enable": True}, algo={"advantage": advantage}
    )
    experience = replace(ragged_experience(8), old_logprobs=None)
    near = actor.compute_logprobs(experience)
    first = int(experience.num_actions[0])
    actor.weight_version = 3
    versions = torch.full((len(near),), 3)
    versions[:first] = 1
    off = near.clone()
    off[:first] -= math.log(4)  # the trainer finds them four times as likely
    experience = replace(experience, rollout_logprobs=off, weight_versions=versions)
    [steps] = plan_updates(experience, 1, train_batch_size=8, max_epochs=1, seed=0)
    metrics = actor.fit(steps).values()
    assert metrics["is_ratio/stale_2"] == pytest.approx(4, rel=1e-3)
    assert metrics["is_ratio/stale_0"] == pytest.approx(1, rel=1e-3)
    assert (metrics["is_cut_ratio/stale_2"], metrics["is_cut_ratio/stale_0"]) == (1, 0)
    assert metrics["logprobs_diff/stale_2"] == pytest.approx(math.log(4), rel=1e-3)
    assert metrics["logprobs_diff/stale_0"] == pytest.approx(0.0, abs=1e-6)
    assert "logprobs_diff/stale_1" not in metrics


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_average_of_the_weights_is_exported(
    tiny_model_dir: Path, tmp_path: Path, lora_rank: int
) -> None:
    actor = make_actor(
        tiny_model_dir,
        tmp_path,
        actor={"adam": {"lr": 1e-2}},
        train={"enable_ema": True, "ema_beta": 0.75},
        ds={"lora": {"rank": lora_rank}},
    )
    name = "layers.0.self_attn.q_proj.lora_A" if lora_rank else "model.norm.weight"

    def weight() -> torch.Tensor:
        parameters = actor.actor.model.named_parameters()
        return next(p for n, p in parameters if name in n).detach().clone()

    expected = weight()
    for _ in range(2):  # two optimizer steps each
        experience = replace(ragged_experience(16), old_logprobs=None)
        [steps] = plan_updates(experience, 1, train_batch_size=8, max_epochs=1, seed=0)
        for step in steps:
            actor.fit([step])
            expected = 0.75 * expected + 0.25 * weight()
    actor.export(str(tmp_path / "export"))
    file = "adapter_model.safetensors" if lora_rank else "model.safetensors"
    averaged = load_file(tmp_path / "export" / file)
    last = load_file(tmp_path / "export" / "policy" / file)
    stored = next(n for n in averaged if name in n)
    assert torch.allclose(averaged[stored], expected, atol=1e-6)
    assert torch.equal(last[stored], weight())
    assert not torch.allclose(averaged[stored], last[stored], atol=1e-4)


def test_an_export_has_the_chat_template_of_the_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    actor = make_actor(tiny_model_dir, tmp_path, data={"tokenizer_chat_template": template})
    actor.export(str(tmp_path / "export"))
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template == template


def test_forwards_and_updates_count_their_micro_batches(
    tiny_model_dir: Path, tmp_path: Path, terminal: io.StringIO
) -> None:
    sizes = {"micro_batch_size": 1}
    actor = make_actor(tiny_model_dir, tmp_path, train=sizes, rollout=sizes)
    experience = ragged_experience(8)
    actor.compute_logprobs(experience)
    assert actor.health().done_of == (8, 8)
    [steps] = plan_updates(experience, 1, train_batch_size=4, max_epochs=1, seed=0)
    actor.fit(steps)
    assert actor.health().done_of == (8, 8)  # 4 of each of two optimizer steps
    for text in ("log-probs of the policy", "updating the policy", "8/8"):
        assert text in terminal.getvalue()


def test_leaving_idle_samples_out_changes_nothing(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make_actor(tiny_model_dir, tmp_path)
    experience = ragged_experience()
    advantages = list(experience.advantages.split(experience.num_actions.tolist()))
    advantages[::2] = [torch.zeros_like(a) for a in advantages[::2]]
    experience = replace(experience, advantages=torch.cat(advantages))
    skipped = gradients(actor, experience, 8)
    monkeypatch.setattr(ppo_actor, "without_idle_samples", lambda step: step)
    everything = gradients(actor, experience, 8)
    assert (skipped - everything).norm() / everything.norm() < 1e-5


def test_the_ratio_is_exactly_one_on_policy(tiny_model_dir: Path, tmp_path: Path) -> None:
    actor = make_actor(tiny_model_dir, tmp_path)
    experience = replace(ragged_experience(), old_logprobs=None)
    [steps] = plan_updates(experience, 1, train_batch_size=64, max_epochs=1, seed=0)
    metrics = actor.fit(steps).values()
    assert metrics["ratio_max"] == 1.0
    assert metrics["ppo_kl"] == 0.0
    assert metrics["ppo_clip_ratio"] == 0.0
    assert metrics["actor_grad_norm"] > 0
