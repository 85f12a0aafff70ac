"""RL gradients are those of the textbook formulas on padded tensors, however the samples are cut:
micro-batches, ranks, ZeRO stages, ranks without a sample, rows that two of four ranks share.
"""

import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import NumericsError
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.update_plan import UpdateStep
from openrlhf.trainer.workers.critic_and_frozen import CriticModelActor
from openrlhf.trainer.workers.model_worker import ModelWorker
from openrlhf.trainer.workers.policy import PolicyModelActor
from tests.distributed.spawn import run_ranks
from tests.helpers.gradients import caught_gradients
from tests.helpers.rollouts import rollout
from tests.helpers.updates import planned_shares
from tests.tiny import make_model, make_reward_model

STAGES = {2: (0, 3), 4: (0, 2, 3)}
# None of them is the default of its flag.
CLIP_LOW, CLIP_HIGH, DUAL_CLIP, VALUE_CLIP, KL_COEF, ENTROPY_COEF = 0.1, 0.3, 1.5, 0.3, 0.1, 0.02
TEMPERATURE, MAX_NEW_TOKENS = 0.8, 32
# name -> aggregation; "idle" has samples without advantage and no other term, so they are left out
POLICY = {
    "token": "token_mean",
    "seq": "seq_mean",
    "idle": "token_mean",
}
VARIANTS = (*POLICY, "critic")
# name -> samples of the set, micro-batch size, token budget of a micro-batch
CUTS: dict[str, tuple[int, int, int | None]] = {
    "64 by 8": (64, 8, None),
    "64 by 100 tokens": (64, 1, 100),
    "3 one by one": (3, 1, None),
}


def ragged_set(count: int) -> Experience:
    """Samples of 2 to 32 tokens, every third one without advantage."""
    generator = torch.Generator().manual_seed(count)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    samples = [
        rollout([draw(6, 64) for _ in range(draw(1, 9))], [draw(6, 64) for _ in range(draw(1, 25))])
        for _ in range(count)
    ]
    experience = Experience.from_rollouts(samples).laid_out()
    noise = torch.randn(5, len(experience.rollout_logprobs), generator=generator)
    parts = list(noise[0].split(experience.num_actions.tolist()))
    parts[1::3] = [torch.zeros_like(part) for part in parts[1::3]]
    return replace(
        experience,
        advantages=torch.cat(parts),
        old_logprobs=-5.6 + 0.3 * noise[1],  # about those of the policy, one of 262 tokens
        ref_logprobs=-5.6 + 0.3 * noise[2],
        values=noise[3],
        returns=noise[3] + noise[4],
    )


# The textbook: one padded forward in double precision, formulas written out.


def padded(experience: Experience) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and attention mask (B, L), and the mask of positions that predict an action."""
    rows = experience.token_ids.split(experience.seq_lengths.tolist())
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    columns = torch.arange(ids.size(1))
    ends = experience.seq_lengths[:, None]
    is_predicting = (columns < ends - 1) & (columns >= ends - 1 - experience.num_actions[:, None])
    return ids, (columns < ends).long(), is_predicting


def mean_over_step(values_N: Tensor, experience: Experience, aggregation: str) -> Tensor:
    if aggregation == "token_mean":
        return values_N.mean()
    parts = values_N.split(experience.num_actions.tolist())
    return torch.stack([part.mean() for part in parts]).mean()


def textbook_policy_loss(model: torch.nn.Module, experience: Experience, variant: str) -> Tensor:
    ids, attention_mask, is_predicting = padded(experience)
    logits = model(input_ids=ids, attention_mask=attention_mask).logits / TEMPERATURE
    distribution_N = torch.distributions.Categorical(logits=logits[is_predicting])
    logprobs_N = distribution_N.log_prob(ids.roll(-1, dims=1)[is_predicting])
    ratio_N = (logprobs_N - experience.old_logprobs).exp()
    free_N = ratio_N * experience.advantages
    clipped_N = ratio_N.clip(1 - CLIP_LOW, 1 + CLIP_HIGH) * experience.advantages
    gain_N = torch.minimum(free_N, clipped_N)
    floor_N = torch.where(experience.advantages < 0, DUAL_CLIP * experience.advantages, -torch.inf)
    for is_bound_N in (
        (ratio_N < 1 - CLIP_LOW) & (clipped_N < free_N),
        (ratio_N > 1 + CLIP_HIGH) & (clipped_N < free_N),
        gain_N < floor_N,
    ):
        assert len(experience) < 64 or is_bound_N.any(), "a bound holds no token"
    terms_N = -torch.maximum(gain_N, floor_N)
    if variant != "idle":
        log_ref_ratio_N = experience.ref_logprobs - logprobs_N
        terms_N = terms_N + KL_COEF * (log_ref_ratio_N.exp() - 1 - log_ref_ratio_N)
        terms_N = terms_N - ENTROPY_COEF * distribution_N.entropy()
    return mean_over_step(terms_N, experience, POLICY[variant])


def textbook_value_loss(model: torch.nn.Module, experience: Experience) -> Tensor:
    ids, attention_mask, is_predicting = padded(experience)
    hidden = model.model(input_ids=ids, attention_mask=attention_mask).last_hidden_state
    values_N = (hidden[is_predicting] @ model.score.weight.T).squeeze(-1)
    change_N = (values_N - experience.values).clip(-VALUE_CLIP, VALUE_CLIP)
    near_N = (experience.values + change_N - experience.returns) ** 2
    free_N = (values_N - experience.returns) ** 2
    assert len(experience) < 64 or (near_N > free_N).any(), "nothing is clipped"
    return 0.5 * torch.maximum(near_N, free_N).mean()


def textbook_gradient(folder: Path, variant: str, count: int) -> Tensor:
    experience = ragged_set(count)
    is_critic = variant == "critic"
    kind = "AutoModelForSequenceClassification" if is_critic else "AutoModelForCausalLM"
    path = folder / ("critic" if is_critic else "policy")
    model = getattr(transformers, kind).from_pretrained(path, dtype=torch.float64)
    if is_critic:
        textbook_value_loss(model, experience).backward()
    else:
        textbook_policy_loss(model, experience, variant).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


# The project: the same step through worker, DeepSpeed and the update loop.


def make_config(folder: Path, zero_stage: int, world_size: int) -> PPOConfig:
    optim = {"max_norm": 1e9, "adam": {"lr": 0.0}}  # steps are made, weights stay
    actor = {
        "model_name_or_path": str(folder / "policy"),
        "eps_clip_low_high": (CLIP_LOW, CLIP_HIGH),
        "dual_clip": DUAL_CLIP,
        **optim,
    }
    critic = {"model_name_or_path": str(folder / "critic"), "value_clip": VALUE_CLIP, **optim}
    return PPOConfig.model_validate(
        {
            "actor": {**actor, "entropy_coef": ENTROPY_COEF},
            "critic": critic,
            "ds": {"zero_stage": zero_stage, "ring_attn_size": 2 if world_size == 4 else 1},
            "algo": {"kl": {"use_loss": True, "estimator": "k3"}},
            "rollout": {"temperature": TEMPERATURE, "max_new_tokens": MAX_NEW_TOKENS},
        }
    )


def changed(config: PPOConfig, variant: str, cut: str) -> PPOConfig:
    _, micro_batch_size, max_tokens = CUTS[cut]
    train = config.train.model_copy(
        update={
            "micro_batch_size": micro_batch_size,
            "dynamic_batch_enable": max_tokens is not None,
            "max_tokens_per_gpu": max_tokens or 1,
        }
    )
    has_terms = variant != "idle"
    kl = config.algo.kl.model_copy(update={"use_loss": has_terms})
    algo = {"kl": kl, "loss_aggregation": POLICY.get(variant, "token_mean")}
    actor = {"entropy_coef": ENTROPY_COEF if has_terms else None}
    return config.model_copy(
        update={
            "train": train,
            "algo": config.algo.model_copy(update=algo),
            "actor": config.actor.model_copy(update=actor),
        }
    )


def own_steps(worker: ModelWorker, count: int) -> list[UpdateStep]:
    topology = worker.strategy.topology
    plan = planned_shares(
        ragged_set(count),
        topology.dp_size,
        train_batch_size=64,
        max_epochs=1,
        seed=0,
        kl_coef=KL_COEF,
    )
    # As the first of two updates: the old log-probs count, and clipping with them.
    return [replace(step, num_steps=2) for step in plan[topology.dp_rank]]


def run_stage(folder: Path, zero_stage: int, world_size: int) -> dict[tuple, Tensor]:
    config = make_config(folder, zero_stage, world_size)
    gradients = {}
    for worker_class, variants in ((PolicyModelActor, (*POLICY,)), (CriticModelActor, ("critic",))):
        worker = worker_class(config, "model", str(folder), num_ranks=world_size)
        worker.setup()
        worker.init_model(num_updates=1000)
        for variant in variants:
            for cut in CUTS:
                worker.config = changed(config, variant, cut)
                steps = own_steps(worker, CUTS[cut][0])
                with caught_gradients(worker) as caught:
                    worker.fit(steps)
                gradient = torch.cat([grad.flatten() for grad in caught])
                gradients[zero_stage, variant, cut] = gradient
        gradients[zero_stage, worker_class, "spoiled"] = spoiled(worker)
    return gradients


def spoiled(worker: ModelWorker) -> str:
    """Why updates are skipped whose loss is not finite on the last rank alone; there may be two in
    a row.
    """
    [good] = own_steps(worker, 64)
    step, version = good, worker.weight_version
    if worker.strategy.topology.dp_rank == worker.strategy.topology.dp_size - 1:
        huge = torch.full_like(step.samples.rollout_logprobs, torch.inf)
        step = replace(step, samples=replace(step.samples, advantages=huge, returns=huge))
    skip = worker.fit([step, good]).skip
    assert (skip.done, skip.left, worker.weight_version) == (0, 1, version)
    whole = worker.fit([good], num_done=1)
    assert whole.skip is None and worker.updates_done() == 2
    assert worker.weight_version == version + isinstance(worker, PolicyModelActor)
    values = whole.metrics.values()
    assert all(math.isfinite(value) for value in values.values())  # not those of the skipped one
    assert values["num_skipped_updates"] == (worker.rank == 0)
    assert [worker.fit([step]).skip.left for _ in range(2)] == [0, 0]
    with pytest.raises(NumericsError, match="; the gradient was not finite in 3 updates in a row"):
        worker.fit([step])
    return skip.why


def run_all_stages(folder: Path) -> dict[tuple, Tensor]:
    transformers.logging.disable_progress_bar()
    world_size = int(os.environ["WORLD_SIZE"])
    results: dict[tuple, Tensor] = {}
    for zero_stage in STAGES[world_size]:
        results |= run_stage(folder, zero_stage, world_size)
    torch.distributed.barrier()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gradients")
    make_model(folder / "policy", hidden_size=32, num_layers=1)
    make_reward_model(folder / "critic", hidden_size=32, num_layers=1)
    return folder


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
    ids=["2ranks", "2x2ranks"],
)
def results(request: pytest.FixtureRequest, folder: Path) -> list[dict[tuple, Tensor]]:
    return run_ranks(run_all_stages, request.param, folder)


def test_all_ranks_skip_an_update_whose_loss_is_not_finite_on_one(
    results: list[dict[tuple, Tensor]],
) -> None:
    for zero_stage in STAGES[len(results)]:
        for kind in (PolicyModelActor, CriticModelActor):
            [problem] = {own[zero_stage, kind, "spoiled"] for own in results}
            assert re.match(r"the loss is (inf|-inf|nan) for samples of groups", problem)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_the_textbooks_however_samples_are_cut(
    results: list[dict[tuple, Tensor]], folder: Path, variant: str
) -> None:
    expected = {n: textbook_gradient(folder, variant, n) for n in {c[0] for c in CUTS.values()}}
    for own in results:
        for zero_stage in STAGES[len(results)]:
            for cut in CUTS:
                count = CUTS[cut][0]
                error = (own[zero_stage, variant, cut] - expected[count]).norm()
                error = error / expected[count].norm()
                assert error < 1e-5, f"ZeRO {zero_stage}, {cut}: relative error {error:.1e}"
