"""The policy's update is the same however the batch is cut; only idle work is skipped."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer

from openrlhf.algorithms.kl import kl_per_token
from openrlhf.algorithms.off_policy import Correction
from openrlhf.commands.rl_inputs import check_models, check_tokens
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.sft_dataset import SFTExample
from openrlhf.errors import ConfigError, Gathered
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm, load_sequence_model
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.update_plan import (
    PlannedStep,
    UpdateStep,
    mix_texts,
    seen_column,
)
from openrlhf.trainer.workers.critic_and_frozen import CriticModelActor, RewardModelActor
from openrlhf.trainer.workers.model_worker import UpdateNotes
from openrlhf.trainer.workers.policy import PolicyModelActor, correction_of
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.tokenizer import load_tokenizer, tokenizer_of
from tests.helpers.configs import rl_config
from tests.helpers.rollouts import rollout
from tests.helpers.updates import planned_shares
from tests.models.helpers import scores_of
from tests.tiny import make_model, make_reward_model, make_tokenizer


def make_actor(model: Path, tmp_path: Path, **sections: dict) -> PolicyModelActor:
    policy = {"model_name_or_path": str(model), "max_norm": 1e9, **sections.pop("actor", {})}
    config = PPOConfig.model_validate({"ds": {"zero_stage": 0}, **sections, "actor": policy})
    actor = PolicyModelActor(config, "actor", str(tmp_path))
    actor.setup()
    actor.init_model(num_updates=10)
    return actor


def test_what_ranks_of_the_same_model_copied_meanwhile_is_not_counted_twice(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make_actor(tiny_model_dir, tmp_path)
    monkeypatch.setattr("openrlhf.trainer.workers.model_worker.free_memory", lambda: 10**12)
    monkeypatch.setattr("openrlhf.distributed.folders.free_memory", lambda: 10**11)  # later
    actor.take_states(str(tmp_path), {})
    assert not list(tmp_path.rglob("*.pt"))  # a copy, which is written later
    assert actor.write_taken() == ""
    assert list(tmp_path.rglob("*.pt"))


def test_states_kept_for_a_replay_take_nothing_from_a_checkpoint_under_way(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    actor = make_actor(tiny_model_dir, tmp_path)
    checkpoint, dump = tmp_path / "checkpoint", tmp_path / "dump"
    for folder in (checkpoint, dump):
        folder.mkdir()
    [(node, _)] = actor.take_states(str(checkpoint), {}).items()
    assert actor.take_states(str(checkpoint), {node: 10**12}) == {node: 10**12}
    actor.save_states(str(dump))  # a step that fails, while the copy waits to be written
    assert actor.write_taken() == ""
    files = [sorted(p.name for p in (f / "actor").iterdir()) for f in (checkpoint, dump)]
    assert files[0] == files[1] != []
    assert "holds no copy" in actor.write_taken()  # nothing is no success

    def fail() -> None:
        raise KeyError("exp_avg")

    actor.taken = [fail]
    assert actor.write_taken() == "KeyError('exp_avg')"  # whatever it is, the controller hears it


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
    experience = Experience.from_rollouts(rollouts).laid_out()
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
    [steps] = planned_shares(experience, 1, train_batch_size=64, max_epochs=1, seed=0, kl_coef=0.1)
    actor.fit(steps)
    return held[0]


@pytest.mark.parametrize(
    ("loss_type", "aggregation", "with_kl"),
    [
        ("gspo", "token_mean", True),
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


def test_a_users_loss_sees_samples_whose_advantage_is_0(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "my_loss.py"
    file.write_text(
        "from openrlhf.algorithms.policy_loss import PolicyLossTerms\n"
        "def likely(logprobs_N, old_logprobs_N, *, advantages_N, num_actions_B, clip):\n"
        "    ratio_N = (logprobs_N - old_logprobs_N).exp().detach()\n"
        "    return PolicyLossTerms(-logprobs_N, ratio_N, ratio_N < 0, ratio_N.log())\n"
    )
    actor = make_actor(
        tiny_model_dir,
        tmp_path,
        actor={"policy_loss_type": f"{file}:likely"},
        algo={"kl": {"init_coef": 0.0}},
    )
    experience = ragged_experience()
    assert experience.advantages is not None
    experience = replace(experience, advantages=torch.zeros_like(experience.advantages))
    assert gradients(actor, experience, 64).norm() > 0.01


def test_an_adapter_has_no_dropout_in_rl(tiny_model_dir: Path, tmp_path: Path) -> None:
    lora = {"rank": 4, "dropout": 0.5}
    actor = make_actor(tiny_model_dir, tmp_path, ds={"zero_stage": 0, "lora": lora})
    dropouts = [m for m in actor.engine.module.modules() if isinstance(m, torch.nn.Dropout)]
    assert dropouts and {module.p for module in dropouts} == {0.0}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", None),
        ("--enable_vllm_is_correction", ("token", "clip", 0.5, 5.0)),
        (
            "--is_correction_level seq --is_correction_gating binary_kl "
            "--is_correction_clamp_survivors",
            ("seq", "mask", 0.0, 0.05, "binary_kl", True),
        ),
        (
            "--enable_vllm_is_correction --is_correction_type seq-mask-tis "
            "--is_correction_level seq",
            ("seq", "mask", 0.5, 5.0, "ratio", True),
        ),
    ],
)
def test_flags_are_the_correction(line: str, expected: tuple | None) -> None:
    assert correction_of(rl_config(line).algo.advantage) == (expected and Correction(*expected))


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


ICEPOP = {
    "is_correction_enable": True,
    "is_correction_type": "icepop",
    "is_correction_threshold": (0.5, 2.0),
}


def test_tokens_outside_the_band_lose_their_gradient(tiny_model_dir: Path, tmp_path: Path) -> None:
    """With all engine log-probs far off but those of one sample, only that one teaches."""
    actor = make_actor(tiny_model_dir, tmp_path, algo={"advantage": ICEPOP})
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
    algo, train = {"advantage": ICEPOP}, {"async_enable": True}
    actor = make_actor(tiny_model_dir, tmp_path, train=train, algo=algo)
    experience = replace(ragged_experience(8), old_logprobs=None)
    near = actor.compute_logprobs(experience)
    first = int(experience.num_actions[0])
    actor.weight_version = 3
    versions = torch.full((len(near),), 3)
    versions[:first] = 1
    off = near.clone()
    off[:first] -= math.log(4)  # the trainer finds them four times as likely
    experience = replace(experience, rollout_logprobs=off, weight_versions=versions)
    [steps] = planned_shares(experience, 1, train_batch_size=8, max_epochs=1, seed=0)
    metrics = actor.fit(steps).metrics.values()
    for age, expected in ((2, (4, 1, math.log(4))), (0, (1, 0, 0))):
        names = ("is_ratio", "is_cut_ratio", "logprobs_diff")
        found = tuple(metrics[f"{name}/stale_{age}"] for name in names)
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
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
        experience = ragged_experience(16)
        [steps] = planned_shares(experience, 1, train_batch_size=8, max_epochs=1, seed=0)
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


def test_an_update_on_policy_has_ratio_one_and_counts_its_micro_batches(
    tiny_model_dir: Path, tmp_path: Path, terminal: io.StringIO
) -> None:
    sizes = {"micro_batch_size": 1}
    actor = make_actor(tiny_model_dir, tmp_path, train=sizes, rollout=sizes)
    experience = replace(ragged_experience(8), old_logprobs=None)
    actor.compute_logprobs(experience)
    assert actor.health()[1:3] == (8, 8)
    [steps] = planned_shares(experience, 1, train_batch_size=8, max_epochs=1, seed=0)
    metrics = actor.fit(steps).metrics.values()
    assert actor.health()[1:3] == (8, 8)
    for text in ("log-probs of the policy", "updating the policy", "8/8"):
        assert text in terminal.getvalue()
    assert metrics["ratio_max"] == 1.0
    assert metrics["ppo_kl"] == metrics["ppo_clip_ratio"] == 0.0
    assert metrics["actor_grad_norm"] > 0


class Texts:
    """Text k is k + 2 times the token k."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> SFTExample:
        ids = torch.full((index + 2,), index)
        return SFTExample(ids, torch.arange(len(ids)) > 0)


def step(num_samples: int, num_ranks: int) -> PlannedStep:
    return PlannedStep([[]] * num_ranks, 6, num_samples)


def mixed(plan: list[PlannedStep], num_seen: int = 0) -> list[PlannedStep]:
    return mix_texts(plan, Texts(), num_seen=num_seen, seed=1)  # type: ignore[arg-type]


def rows_of(plan: list[PlannedStep]) -> list[list[int]]:
    """The texts of every optimizer step, all ranks together."""
    return [sorted(int(ids[0]) for texts in one.texts for ids in texts) for one in plan]


def test_each_step_gets_as_many_texts_as_samples_and_each_pass_every_text() -> None:
    first, second, third = rows_of(mixed([step(3, 2), step(2, 2), step(5, 2)]))
    assert (len(first), len(second), third) == (3, 2, [0, 1, 2, 3, 4])
    assert sorted(first + second) == [0, 1, 2, 3, 4]


def test_the_tokens_of_a_step_are_counted_over_all_ranks() -> None:
    [planned] = mixed([step(5, 3)])
    # Texts of 2 to 6 tokens, the first of each is given: 1 + 2 + 3 + 4 + 5.
    assert planned.num_text_tokens == 15
    sizes = [sum(map(len, texts)) for texts in planned.texts]
    assert sum(sizes) == 20 and max(sizes) <= 7


def test_passes_go_on_where_earlier_updates_ended() -> None:
    whole = rows_of(mixed([step(n, 1) for n in (3, 4, 6, 2)]))
    assert rows_of(mixed([step(6, 1), step(2, 1)], num_seen=7)) == whole[2:]


TEXTS = ("hello there<|end|>", "good")


def config_of(policy: Path, reward: Path, flags: str = "") -> PPOConfig:
    words = f"--pretrain {policy} --reward_pretrain {reward} --prompt_data d {flags}"
    return parse_config(PPOConfig, words.split()).config


@pytest.fixture(scope="module")
def reward_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("rm") / "same")


@pytest.fixture(scope="module")
def foreign_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model whose ids are others than the policy's."""
    merges = [("h", "e"), ("l", "l"), ("o", "o")]
    path = make_reward_model(tmp_path_factory.mktemp("rm") / "foreign", vocab_size=280)
    tokenizer = make_tokenizer(path, merges)
    assert len(tokenizer) > 262
    state = json.loads((path / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (path / "tokenizer.json").write_text(json.dumps(state))
    return path


def rollouts_of(policy: Path) -> list[Rollout]:
    tokenizer = load_tokenizer(str(policy))
    made = []
    for k, text in enumerate(TEXTS):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        made.append(replace(rollout(ids[:2], ids[2:], group=k), response_text=text, prompt_text=""))
    return made


def scores_by_hand(path: Path) -> list[float]:
    """Scores of the texts as its tokenizer reads them."""
    tokenizer = load_tokenizer(str(path))
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    return scores_of(load_sequence_model(path, allow_fresh_head=False), rows).tolist()


def test_a_reward_model_reads_the_tokens_of_samples(
    tiny_model_dir: Path, reward_dir: Path, tmp_path: Path
) -> None:
    experience = Experience.from_rollouts(rollouts_of(tiny_model_dir)).laid_out()
    config = config_of(tiny_model_dir, reward_dir, "--micro_rollout_batch_size 1")
    check_tokens(config, tokenizer_of(config, config.policy_path))
    worker = RewardModelActor(config, "reward", str(tmp_path))
    worker.setup()
    worker.init_model(str(reward_dir))
    found = worker.compute_rewards(experience).tolist()
    assert found == pytest.approx(scores_by_hand(reward_dir), abs=1e-5)


def test_models_of_another_vocabulary_are_refused(tiny_model_dir: Path, foreign_dir: Path) -> None:
    config = config_of(tiny_model_dir, foreign_dir, f"--critic_pretrain {tiny_model_dir}")
    with pytest.raises(ConfigError, match="serve-rm with it, which reads texts"):
        check_tokens(config, tokenizer_of(config, config.policy_path))
    config = rl_config(f"--critic_pretrain {foreign_dir}", pretrain=tiny_model_dir)
    with pytest.raises(ConfigError, match=f"--critic_pretrain {tiny_model_dir}"):
        check_tokens(config, tokenizer_of(config, config.policy_path))


def test_a_reward_model_that_cannot_be_used_is_said_before_anything_starts(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    gathered = Gathered()
    check_models(config_of(tiny_model_dir, tiny_model_dir), gathered, has_engines=False)
    path = make_reward_model(tmp_path / "rm") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"std": 0.0}))
    config = config_of(tiny_model_dir, path.parent, "--normalize_reward")
    check_models(config, gathered, has_engines=False)
    headless, unscaled = gathered.problems
    assert f"{tiny_model_dir} has no value head. Give a reward model" in headless
    assert "std above 0" in unscaled


def test_an_update_returns_what_its_loss_first_saw_of_each_sample(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    algo = {"kl": {"use_loss": True, "estimator": "k3"}}
    actor = make_actor(tiny_model_dir, tmp_path, actor={"adam": {"lr": 1e-2}}, algo=algo)
    experience = ragged_experience(8, with_ref=True)
    before = actor.compute_logprobs(experience)
    [steps] = planned_shares(experience, 1, train_batch_size=4, max_epochs=2, seed=0, kl_coef=0.1)
    result = actor.fit(steps, ["new_logprobs", "kl"])
    assert sorted(result.sample_indices) == list(range(8))
    sizes = experience.num_actions
    seen, kl = (seen_column([result], name, sizes) for name in ("new_logprobs", "kl"))
    assert torch.allclose(kl, kl_per_token(seen, experience.ref_logprobs, estimator="k3"))
    is_same = [
        torch.allclose(*parts, atol=1e-5)
        for parts in zip(seen.split(sizes.tolist()), before.split(sizes.tolist()), strict=True)
    ]
    # The second update of the first epoch sees its samples under other weights.
    assert [place for place, same in enumerate(is_same) if same] == sorted(
        result.sample_indices[:4]
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", [-1.2, 0.8, 4]),
        ("--eps_clip 0.4", [-1.4, 0.6, 4]),
        ("--eps_clip 0.4 --eps_clip_low_high 0.1 0.3", [-1.3, 0.9, 4]),
        ("--dual_clip 3", [-1.2, 0.8, 3]),
    ],
)
def test_the_clip_range_of_the_policy(
    tiny_model_dir: Path, tmp_path: Path, flags: str, expected: list[float]
) -> None:
    worker = PolicyModelActor(rl_config(flags, pretrain=tiny_model_dir), "model", "unused")
    worker.setup()
    worker.init_model(num_updates=1)
    losses = []
    # A good token is twice as likely as before, a bad one a tenth, a bad one four times.
    for ratio, advantage in ((2.0, 1.0), (0.1, -1.0), (4.0, -1.0)):
        experience = Experience.from_rollouts([rollout([1], [2])]).laid_out()
        now = worker.compute_logprobs(experience)
        experience = replace(
            experience, advantages=torch.tensor([advantage]), old_logprobs=now - math.log(ratio)
        )
        step = UpdateStep(experience, num_tokens=1, num_samples=1, num_steps=2)
        loss, _ = worker.compute_loss(experience.packed(), experience, step, Metrics())
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("", 2.5**2 / 2), ("--value_clip 1", 2**2 / 2), ("--value_clip 4", 0.5**2 / 2)],
)
def test_the_clip_range_of_values(flags: str, expected: float) -> None:
    # From 0 to 3.5, where 3 is right: off by half, or by what the clipped change leaves.
    worker = CriticModelActor(rl_config(flags), "model", "unused")
    worker.engine = lambda batch: torch.tensor([3.5])  # type: ignore[assignment]
    experience = replace(
        Experience.from_rollouts([rollout([1], [2])]).laid_out(),
        values=torch.tensor([0.0]),
        returns=torch.tensor([3.0]),
    )
    step = UpdateStep(experience, num_tokens=1, num_samples=1)
    loss, _ = worker.compute_loss(experience.packed(), experience, step, Metrics())
    assert float(loss) == pytest.approx(expected)


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors: on a GPU it would wait for each."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_a_micro_batch_waits_for_no_number(tiny_model_dir: Path, tmp_path: Path) -> None:
    kl = {"use_loss": True, "init_coef": 0.1}
    actor = make_actor(tiny_model_dir, tmp_path, algo={"kl": kl})
    experience = ragged_experience(8, with_ref=True)
    [[step]] = planned_shares(experience, 1, train_batch_size=8, max_epochs=1, seed=0, kl_coef=0.1)
    notes = UpdateNotes(["new_logprobs"])
    with Reads() as reads:
        loss = actor._sample_loss(step, list(range(8)), notes)
        actor.engine.backward(loss, is_last_micro_batch=True)
    assert reads.count <= 1  # by Hugging Face, before the first layer
    assert notes.problem() is None and {"kl", "policy_loss"} <= notes.of_update.values().keys()
