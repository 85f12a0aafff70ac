"""Generation and training side by side: bounded, balanced, and ended by the error of either."""

import operator
import random
from dataclasses import replace

import pytest
import torch

from openrlhf.errors import EngineError
from openrlhf.rollout import rollout_queue
from openrlhf.trainer.ppo_trainer_async import staleness_metrics
from openrlhf.utils.metrics import Metrics
from tests.trainer.fakes import (
    TrainerBroke,
    World,
    make_trainer,
    samples,
    staleness_histogram,
    steps_of,
)


def uneven(seconds: float):
    """Times of groups with a long tail, the same in every run."""
    return lambda key: seconds * random.Random(str(key)).choice((0.2, 0.5, 1.0, 4.0))


@pytest.mark.parametrize("queue_size", [1, 3])
@pytest.mark.parametrize("keeps_running", [False, True])
@pytest.mark.parametrize("slow", ["engine", "trainer"])
def test_either_side_may_be_slower(queue_size, keeps_running, slow):
    world = World(keeps_running=keeps_running, seconds_of=uneven(0.0005))
    trainer = make_trainer(world, num_prompts=42, queue_size=queue_size, num_at_once=12)
    core_of = operator.attrgetter("_controller")  # the queue makes it anew when it is entered

    def is_full():
        core = core_of(trainer.queue)
        is_bounded = core.num_outstanding == core.limits.max_outstanding
        return not world.running and (is_bounded or core.is_exhausted or core.is_syncing)

    if slow == "trainer":
        world.may_train = is_full
    else:
        world.seconds_of = lambda key: 0.5 if len(world.submitted) <= 12 else 0.0
    trainer.fit()
    assert trainer.sampler.ledger.outcomes == {"trained": 42}
    steps = steps_of(trainer)
    assert len(steps) == trainer.num_steps == 11 == world.policy_version
    histogram = staleness_histogram(trainer)
    assert sum(histogram.values()) == 84
    assert max(histogram) <= queue_size
    assert max(step["queue/num_ready"] for step in steps) <= 4 * queue_size
    is_mixed = any(step["mixed_version_ratio"] > 0 for step in steps)
    assert not is_mixed or keeps_running
    if slow == "trainer":  # the engines wait for a place
        assert max(histogram) == queue_size
        assert sum(step.get("timing/generation_blocked", 0.0) for step in steps) > 0
    else:  # the trainer waits: for samples, or for running ones to end
        assert sum(step["timing/wait"] + step.get("timing/drain", 0.0) for step in steps) > 0.02


def test_the_score_of_a_step_is_that_of_the_samples_it_trains_on():
    world = World(scores_of=lambda key: (float(key[1]), 0.0))
    trainer = make_trainer(world, num_prompts=40, queue_size=3)
    trainer.fit()
    steps = steps_of(trainer)
    assert len({step["reward"] for step in steps}) > 5
    assert [step["score"] for step in steps] == [step["reward"] for step in steps]


def test_an_error_of_the_trainer_ends_the_run_and_the_stream():
    world = World(
        train_error_at=2, seconds_of=lambda key: 60.0 if len(world.submitted) > 12 else 0.0
    )
    trainer = make_trainer(world, num_prompts=40)
    with pytest.raises(TrainerBroke):
        trainer.fit()
    assert world.was_cancelled and not world.running


@pytest.mark.parametrize(("num_slow", "what"), [(40, "samples"), (1, "running samples to finish")])
def test_every_wait_has_a_deadline(num_slow, what, monkeypatch):
    monkeypatch.setattr(rollout_queue, "WAIT_S", 0.4)
    slow = {} if num_slow == 40 else None
    world = World(seconds_of=lambda key: 60.0 if slow == {} or key == (0, order[4]) else 0.0)
    trainer = make_trainer(world, num_prompts=40, num_at_once=8)
    order = trainer.sampler.cursor.order(0).tolist()
    with pytest.raises(EngineError, match=f"waited 0 s for {what}"):
        trainer.fit()


def test_the_first_step_that_has_fresh_samples_compares_them_alone(capsys):
    assert make_trainer(World(), num_prompts=4).max_mismatch_kl == 1e-3
    trainer = make_trainer(World(), num_prompts=4, policy_dtype=torch.bfloat16)
    metrics = Metrics()
    metrics.add("vllm_kl", 5.0)
    metrics.add("vllm_kl/stale_1", 9.0)
    trainer.check_mismatch(metrics, 4)
    assert not trainer.has_checked_mismatch
    trainer.check_mismatch(Metrics(), 5)  # a step without a signal compares nothing
    metrics.add("vllm_kl/stale_0", 1.5)
    with pytest.raises(EngineError, match=r"mismatch KL 1\.50e\+00, limit 1e-01"):
        trainer.check_mismatch(metrics, 6)
    trainer.check_mismatch(metrics, 7)  # weights may have drifted by then


def stale(*versions):
    return replace(samples((0, 0), [1.0], [0])[0], weight_versions=torch.tensor(versions))


def test_staleness_is_counted_by_the_oldest_token():
    rollouts = [stale(3, 3, 3, 3), stale(1, 1, 2, 3), stale(2, 2, 2, 2), stale(2, 2, 2, 2)]
    values = staleness_metrics(rollouts, weight_version=3).values()
    assert values == {
        "staleness_mean": 1.0,
        "staleness_max": 2.0,
        "mixed_version_ratio": 0.25,
        "num_samples/stale_0": 1.0,
        "num_samples/stale_1": 2.0,
        "num_samples/stale_2": 1.0,
    }
