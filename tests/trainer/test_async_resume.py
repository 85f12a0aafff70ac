"""An asynchronous run that was ended goes on: finished samples are kept to the token, what was on
its way is generated again, nothing is lost, done twice or too old.
"""

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.checkpoints import CheckpointStore, DataIdentity, RunCheckpoints
from openrlhf.engines.base import SamplingSettings
from openrlhf.rollout.rollout import FinishedGroup
from openrlhf.rollout.rollout_queue import SavedGroup, read_groups, write_groups
from openrlhf.trainer.ppo_state import RunState
from openrlhf.trainer.ppo_trainer_async import PPOTrainerAsync
from openrlhf.utils.images import read_picture
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import PromptRecord
from tests.helpers import rollouts as samples
from tests.helpers import tiny_vision
from tests.trainer.fakes import TrainerBroke, World, make_trainer


def run_until(trainer: PPOTrainerAsync, step: int, folder: Path) -> dict:
    """The state after a step of a run that breaks later, its files in a folder; empty when the run
    was over before.
    """
    saved = {}
    settle = trainer.queue.settle

    def settle_and_save(trained_groups: set[int]) -> None:
        settle(trained_groups)
        if trainer.state.global_step == step:
            groups = trainer.queue.finished_groups()
            time.sleep(0.001)  # the engines go on meanwhile
            saved.update(json.loads(json.dumps(trainer.state.state_dict())))
            write_groups(folder, groups, trainer.queue.sampling)

    trainer.queue.settle = settle_and_save  # type: ignore[method-assign]
    with suppress(TrainerBroke):
        trainer.fit()
    return saved


def kept_of(trainer: PPOTrainerAsync, folder: Path, **sampling: object) -> list[SavedGroup]:
    changed = replace(trainer.inputs.sampling, **sampling)  # type: ignore[arg-type]
    return read_groups(folder, trainer.inputs.prompts, changed)


def test_finished_samples_are_kept_to_the_token(tmp_path: Path) -> None:
    world = World(train_error_at=3, keeps_running=True, train_s=0.05)
    trainer = make_trainer(world, num_prompts=24, queue_size=2, num_at_once=12)
    taken = []
    outcome = trainer.sampler.outcome_of

    def noted(group: FinishedGroup, metrics: Metrics) -> str | None:
        taken.append(group)
        return outcome(group, metrics)

    trainer.sampler.outcome_of = noted  # type: ignore[method-assign]
    saved = run_until(trainer, 3, tmp_path)
    made = {group.key: group.rollouts for group in taken}
    kept = kept_of(trainer, tmp_path)
    assert len(kept) >= 8 and {age for _, age, _ in kept} >= {1, 2}
    pending = {tuple(key) for key in saved["sampler"]["ledger"]["pending"]}
    assert {key for key, *_ in kept} <= pending
    for key, _, rollouts in kept:
        assert len(rollouts) == 2
        for found, rollout in zip(rollouts, made[key], strict=True):
            row = key[1]
            assert (found.label, found.columns) == (f"label {row}", {"row": row})
            for name, value in vars(replace(rollout, group_id=0)).items():
                if name in ("token_ids", "action_mask", "logprobs", "weight_versions"):
                    assert getattr(found, name).equal(value)
                elif name not in ("label", "columns", "datasource"):  # of the data set
                    assert getattr(found, name) == value, name


def test_samples_that_would_be_made_in_another_way_now_are_not_taken_up(tmp_path: Path) -> None:
    trainer = make_trainer(World(train_error_at=1, train_s=0.02), num_prompts=24)
    run_until(trainer, 1, tmp_path)
    assert kept_of(trainer, tmp_path)
    assert not kept_of(trainer, tmp_path, temperature=0.5)


def test_a_checkpoint_holds_what_was_made_ahead_and_damage_to_it_is_seen(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)

    def saving(trainer: PPOTrainerAsync) -> RunState:
        config = PPOConfig.model_validate(
            {"ckpt": {"save_steps": 1, "path": str(tmp_path), "best_metric_key": "none"}}
        )
        trainer.state.checkpoints = RunCheckpoints(config.ckpt, DataIdentity("f", 24))
        trainer.state.checkpoints.saved = store.latest()
        return trainer.state

    trainer = make_trainer(World(train_error_at=2, train_s=0.02), num_prompts=24)
    saving(trainer)
    with suppress(TrainerBroke), trainer.state.checkpoints.finishing():
        trainer.fit()
    world = World(policy_version=2)
    again = make_trainer(world, num_prompts=24)
    saving(again).resume()
    saving(again).checkpoints = RunCheckpoints(again.config.ckpt, DataIdentity("f", 24))
    kept = kept_of(trainer, tmp_path / "global_step2")
    assert kept and [key for key, *_ in again.queue._kept] == [key for key, *_ in kept]
    again.fit()
    assert again.sampler.ledger.outcomes == {"trained": 24}
    assert not {key for key, *_ in kept} & set(world.submitted)
    with (tmp_path / "global_step2" / "finished_groups.pt").open("ab") as file:
        file.write(b" ")
    saved = store.latest()
    assert saved is not None and saved.step == 1


def test_finished_samples_keep_the_images_of_their_prompt_and_of_an_environment(tmp_path: Path):
    """Those of the prompt are read from the data set again: its file may be no PNG."""
    of_prompt = read_picture(tiny_vision.noise(28, 28))
    of_tool = read_picture(tiny_vision.noise(28, 56, 1))
    prompt = PromptRecord(4, "p", (7, 8), images=(of_prompt,))
    kept = samples.rollout([7, 8], [9], images=(of_prompt, of_tool))
    groups = [((0, 0), 1, [kept, samples.rollout([7, 8], [5])])]
    sampling = SamplingSettings()
    write_groups(tmp_path, groups, sampling)
    [(key, age, [first, second])] = read_groups(tmp_path, [prompt], sampling)  # type: ignore
    assert (key, age, second.images) == ((0, 0), 1, ())
    assert first.images[0] is of_prompt
    assert first.images[1].open() == of_tool.open()
