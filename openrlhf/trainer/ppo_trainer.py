"""The RL step on one screen: plain Python over groups of workers.

    broadcast_to_vllm()                              # engines hold the policy's weights
    while there are prompts:
        rollouts = generate()                        # samples with rewards, group by group
        experience = make_experience(rollouts)       # log-probs, values, KL, advantages
        for role in ("critic", "actor"):
            update(role, experience)                 # optimizer steps over global batches
        broadcast_to_vllm()                          # with a receipt of every tensor
        report, evaluate and save what is due

Ray, vLLM and DeepSpeed are behind the groups; formulas are in `algorithms`. Built by
`commands.train_rl`.
"""

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch

from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.sampler import PromptCursor
from openrlhf.engines.base import RolloutEngine
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.errors import (
    WITH_ITS_NODE,
    CheckpointError,
    EngineError,
    LostEngineError,
    LostRankError,
    RewardError,
)
from openrlhf.rollout.evaluation import evaluation_metrics
from openrlhf.rollout.rollout import RolloutMaker
from openrlhf.rollout.scoring import FailurePolicy
from openrlhf.rollout.step_sampler import NO_SIGNAL, GroupFilter, StepSampler
from openrlhf.trainer.local_cluster import Cluster
from openrlhf.trainer.ppo_dumps import RankFailure, StepDump
from openrlhf.trainer.ppo_inputs import RunInputs, say_dropped
from openrlhf.trainer.ppo_state import RunState
from openrlhf.trainer.ppo_updates import StepInputs, start_update, trained_roles
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import make_experience
from openrlhf.trainer.ppo_utils.update_plan import Skip, UpdateResult, seen_column
from openrlhf.trainer.ppo_utils.worker_group import Forward, wait_for_all
from openrlhf.trainer.workers.policy import PolicyModelActor
from openrlhf.utils import stopping
from openrlhf.utils.callbacks import Callback
from openrlhf.utils.console import notice, warn
from openrlhf.utils.memory import collecting_only_new_objects
from openrlhf.utils.metrics import Metrics, timed
from openrlhf.utils.outcome import num_since_best, reward_alone, say_outcome, stopped_early
from openrlhf.utils.progress import saying_what_is_awaited
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.rollout_files import images_of, rollout_row, write_rollouts
from openrlhf.utils.run_folder import DUMPS
from openrlhf.utils.samples import example_of, show_samples
from openrlhf.utils.step_line import RunClock, eval_line, hints, needed_history, step_line
from openrlhf.utils.threads import load_per_core
from openrlhf.utils.tracker import Tracker

SAMPLES_EVERY = 10  # steps until samples are shown again


class PPOTrainer:
    """Synchronous RL: PPO, REINFORCE++ and the group estimators."""

    mismatch_metric = "vllm_kl"  # of samples that the policy itself has made

    def __init__(
        self,
        config: PPOConfig,
        inputs: RunInputs,
        cluster: Cluster,
        *,
        forwards: Mapping[str, Forward],
        maker: RolloutMaker,
        state: RunState,
        tracker: Tracker,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config, self.inputs, self.maker = config, inputs, maker
        self.groups, self.engines = cluster.groups, cluster.engines
        self.recovery = cluster.recovery
        self.updates_side_by_side = cluster.updates_side_by_side
        self.state, self.phases, self.tracker = state, state.phases, tracker
        self.callbacks = callbacks
        self.num_steps = len(inputs.updates)  # at most
        self.forwards = forwards
        # Half precision rounds.
        self.max_mismatch_kl = 1e-3 if cluster.policy_dtype == torch.float32 else 0.1
        self.has_checked_mismatch = False  # True once engine and trainer were compared
        self.has_said_reward_alone = False  # True once the hint of `reward_alone` was printed
        self.is_ended = False  # True once a callback or --early_stop has asked to end the run
        self._ended_at = 0  # the step at which it was asked
        self._evaluated_at = -1  # the step of the last evaluation, also of one without rewards
        self._step_rollouts: list[Rollout] = []  # of the step under way; kept if a rank is lost
        self._step = 0  # its number
        self._generation_metrics = Metrics()  # of these rollouts
        # The sampler before it drew their prompts; None if a queue did, which keeps a ledger.
        self._sampler_state: dict[str, Any] | None = None
        self._failure: RankFailure | None = None  # in the last step that was not finished
        self._kept_step_s: dict[int, float] = {}  # seconds of each step since this start
        self._has_skipped = False  # True once an update was skipped, in this run
        self._sending = threading.Lock()  # held while weights are sent
        self._has_sync_failed = False  # True if an engine failed when weights were sent last
        if self.recovery is not None:
            self.recovery.prepare(
                self.phases.device_lock, self.update_engine, sleeps=bool(self.phases.engines)
            )
        algo, train = config.algo, config.train
        low, high = algo.dynamic_filtering_range or (-math.inf, math.inf)
        teaching = GroupFilter(low, high, algo.dynamic_filtering_max_empty)
        self.sampler = StepSampler(
            inputs.prompts,
            PromptCursor(len(inputs.prompts), train.seed, num_episodes=train.num_episodes),
            batch_size=config.rollout.batch_size,
            group_filter=teaching if algo.dynamic_filtering_enable else None,
            num_at_once=config.rollout.vllm_generate_batch_size,
            policy=FailurePolicy.of(config.reward, config.rollout.batch_size),
        )
        state.sampler = self.sampler

    @collecting_only_new_objects()
    def fit(self, lost: LostRankError | None = None) -> None:
        """Run all episodes from where the run stands; evaluate before the first step, every
        `--eval_steps`, at the end. If a rank was `lost` after that, go on from the last checkpoint.
        """
        is_begun, is_finished, why = lost is not None, False, lost
        if lost is None:
            self.state.note_begin()
        while not is_finished:
            try:
                if why is not None:
                    self.start_again(why)
                    why = None
                if not is_begun:
                    self.begin()
                    is_begun = True
                # Behind the samples of the last step there are no prompts left.
                while self._step_rollouts or not self.is_over:
                    self.do_step()
                self.finish()
                is_finished = True
            except LostRankError as error:
                if error.role not in self.state.groups:
                    raise
                if stopping.is_asked():  # it would be started again for nothing
                    with suppress(LostRankError, CheckpointError):
                        self.wait_for_save()
                    raise stopping.Interrupted(self.state.checkpoints.how_to_go_on()) from error
                self.note_rank_failure(error)
                why = error
        self.tracker.close()

    def begin(self) -> None:
        """Send the engines their first weights; evaluate the policy before its first step."""
        self.broadcast_to_vllm()
        if self.state.global_step == 0:
            self.evaluate(global_step=0)
        self.end_if_stalled()
        self.clock = RunClock(self.state.global_step)  # the pace leaves out the first evaluation

    def finish(self) -> None:
        """Log, evaluate and save what is left of the last step."""
        state = self.state
        self.log(state.global_step)
        self.check_has_learnt()
        evaluated = [self._evaluated_at, *(found["step"] for found in state.evaluations[-1:])]
        if state.global_step not in evaluated:
            self.evaluate(state.global_step)
        self.save_if_due(is_last=True)
        self.say_goodput()

    def do_step(self) -> None:
        """Make a step, with the samples of one that a lost rank has interrupted if there are any;
        report, evaluate and save what is due.
        """
        state, metrics, moved_s = self.state, Metrics(), self.phases.moving_s
        with timed("step_total", metrics):
            if not self._step_rollouts:
                self._generation_metrics = Metrics()
                self._step = state.global_step + 1
                self._step_rollouts = self.generate_unless_stopped(self._generation_metrics)
            metrics.merge(self._generation_metrics)
            if rollouts := self._step_rollouts:
                state.global_step += 1
                try:
                    experience = self.train_step(rollouts, state.global_step, metrics)
                except stopping.Left:  # before any weights were changed
                    self.leave_step()
                self._step_rollouts = []
                file = self.write_samples(rollouts, experience, metrics)
        if not rollouts:  # no prompt had a signal, or a reward
            if not self.is_over:
                state.unlogged.merge(metrics)
            return
        if moving_s := self.phases.moving_s - moved_s:
            metrics.add("moving_s", moving_s, reduction="sum")
        self._kept_step_s[state.global_step] = metrics["timing/step_total"]
        self.report(state.global_step, metrics, rollouts, file)
        for callback in self.callbacks:
            callback.on_step_end(self, state.global_step, self.values_of(metrics))
        every = self.config.eval.steps
        if self.is_over or (every > 0 and state.global_step % every == 0):
            self.evaluate(state.global_step)
            self.end_if_stalled()
        self.save_if_due()
        if stopping.is_asked() and not self.is_over:
            self.stop()

    def note_rank_failure(self, why: LostRankError) -> None:
        """Raise EngineError if the same step has ended a rank in the same way before."""
        step, before = self._step, self._failure
        is_at_work = self._step_rollouts and self.state.global_step == step
        if not is_at_work or WITH_ITS_NODE in str(why):  # samples do not end a node
            return
        self._failure = RankFailure.of(why, step, self._step_rollouts)
        if self._failure == before:
            dump = self.dump_of(self._step_rollouts, step)
            kept = f" It was kept: {dump.how_to_replay}" if dump.is_kept else ""
            raise EngineError(
                f"{why}. Step {step} has ended in this way before, with the same prompts: it is "
                f"not made a third time.{kept}"
            ) from why

    def start_again(self, why: LostRankError) -> None:
        """Go on from the last checkpoint with new ranks in place of lost ones, and with the samples
        of the step under way where they are of its policy.
        """
        lost_at, failed = time.monotonic(), None
        try:
            self.wait_for_save()  # one under way is whole, or lost with the rank
        except LostRankError:
            pass
        except CheckpointError as error:  # one too many: the model is exported by the new ranks
            failed = error
        saved = self.state.checkpoints.last()
        last_step = 0 if saved is None else saved.step
        if self._step != last_step + 1 or self.has_lost_generation:
            self._step_rollouts = []
        if self._ended_at > last_step:
            self.is_ended = False  # what asked for it is asked again
        self._evaluated_at = -1  # the loss may have been during it
        resampling = nullcontext() if self._step_rollouts else self.resampling()
        with resampling, self.phases.training(), self._sending:
            self.state.start_again(why, saved, keeps_samples=bool(self._step_rollouts))
            for engine in self.engines:
                engine.waits_for = None
        self.tracker.rewind(self.state.global_step)
        self._kept_step_s = {
            k: s for k, s in self._kept_step_s.items() if k <= self.state.global_step
        }
        self.broadcast_to_vllm()
        seconds, step = time.monotonic() - lost_at, self.state.global_step
        notice(f"{why.role} is up again after {seconds:.1f} s: going on behind step {step}")
        if failed is not None:
            raise failed

    @property
    def has_lost_generation(self) -> bool:
        """Return True once an error has ended the generation that runs during training."""
        return False

    @contextmanager
    def resampling(self) -> Iterator[None]:
        """Drop the samples of later steps, and generate none inside the block."""
        yield

    def end(self) -> None:
        """End the run after this step, as after its last: it is evaluated, saved and exported."""
        self.is_ended, self._ended_at = True, self.state.global_step

    def end_if_stalled(self) -> None:
        """End the run if as many evaluations as --early_stop says were not better than the best."""
        name, most = self.inputs.pass_rate, self.config.eval.early_stop
        records = self.tracker.records() if most else []
        if name and records and num_since_best(records, name) >= most:
            notice(stopped_early(records, name))
            self.end()

    @property
    def goodput(self) -> float:
        """Return the share of the time since the start that went into steps that were kept."""
        return sum(self._kept_step_s.values()) / max(self.clock.elapsed_s, 1e-9)

    def say_goodput(self) -> None:
        """Say what losses of processes have cost, if there were any."""
        num_losses = self.recovery.num_losses if self.recovery is not None else 0
        if num_losses:
            elapsed_s = self.clock.elapsed_s
            notice(
                f"goodput {self.goodput:.0%}: {num_losses} loss(es) of processes; "
                f"{(1 - self.goodput) * elapsed_s:.0f} of {elapsed_s:.0f} s were not spent in "
                "steps that were kept"
            )

    def say_evaluations(self) -> None:
        """Say what was best, and warn of a policy that became worse than its best."""
        found, steps = self.state.evaluations, self.tracker.records()
        say_outcome(self.inputs.pass_rate, found, steps, where=self.location_of)

    def location_of(self, step: int) -> object:
        """Return the folder of the policy of a step, or words that say it was not kept."""
        state = self.state
        if step == state.global_step:
            return self.inputs.run_dir
        unkept = "not kept, --save_best keeps the best" if step else self.config.policy_path
        return state.checkpoints.find(step) or unkept

    def check_has_learnt(self) -> None:
        """Raise RewardError when no prompt of the whole run could be trained on."""
        if self.state.global_step == 0:
            ledger = self.sampler.ledger
            outcomes = ", ".join(f"{count} {name}" for name, count in ledger.outcomes.items())
            rate = " (pass rate 0 %)" if NO_SIGNAL in ledger.outcomes else ""
            raise RewardError(
                f"no prompt could be trained on: {ledger.num_drawn} drawn, {outcomes}{rate}. Look "
                "at the rewards; nothing was saved."
            )

    @property
    def is_over(self) -> bool:
        """Return True once every prompt was trained on, filtered or failed, or `end` was called."""
        return self.is_ended or self.sampler.cursor.is_exhausted

    def generate_unless_stopped(self, metrics: Metrics) -> list[Rollout]:
        """Generate the next step's samples; leave them when the user asks to stop."""
        try:
            with stopping.leavable():
                return self.generate(self.state.global_step + 1, metrics)
        except KeyboardInterrupt:
            if stopping.is_overdue():  # the policy may still generate: it cannot be saved
                raise
            self.stop()

    def leave_step(self) -> NoReturn:
        """End the run with the state before the step under way, whose prompts come again."""
        self.state.global_step -= 1
        if self._sampler_state is not None:
            self.sampler.load_state_dict(self._sampler_state)
        self.stop()

    def stop(self) -> NoReturn:
        """Save and end the run because the user asked for it."""
        if self.recovery is not None:  # no save waits for an engine to start
            self.recovery.close()
        for engine in self.engines:  # they may be at work, and are not needed any more
            with suppress(EngineError):
                if engine.is_up:
                    engine.call(VLLMEngine.shutdown)
        self.phases.engines.clear()
        for role in self.groups.keys() - self.state.groups.keys():
            self.groups[role].close()  # one that starts again may hold the devices
        self.wait_for_save()
        with self.phases.training():
            saved, outcome = self.state.checkpoints.save_last(self.state)
        self.call_on_save(saved)
        self.tracker.close()
        raise stopping.Interrupted(outcome)

    def generate(self, global_step: int, metrics: Metrics) -> list[Rollout]:
        """Return the scored rollouts of a step; with dynamic sampling, groups with a signal."""
        maker = self.maker
        before = self._sampler_state = self.sampler.state_dict()
        try:
            with self.phases.rollout():
                stream = maker.open_stream(self.inputs.sampling)
                samples = maker.loop.run(self.sampler.collect(stream, f"step{global_step}"))
        except KeyboardInterrupt:
            self.sampler.load_state_dict(before)  # the prompts of the step come again
            raise
        metrics.merge(samples.metrics)
        say_dropped(samples.failed, self.inputs.prompts)
        return samples.rollouts

    def train_step(
        self, rollouts: Sequence[Rollout], global_step: int, metrics: Metrics
    ) -> Experience:
        """Do an RL step after generation; return its samples with what was computed for them."""
        self.check_versions(rollouts)
        dump = self.dump_of(rollouts, global_step)
        is_again = self._failure is not None and self._failure.is_of(global_step, rollouts)
        suspect = self._failure if is_again else None
        with self.phases.training(), dump.watching():
            if suspect is not None:  # if it ends a rank again, nothing can be read any more
                dump.write(says=dump.is_chosen, error=suspect.how)
            with timed("make_experience", metrics):
                experience, noted = make_experience(
                    self.config, self.forwards, rollouts, self.state.kl_coef
                )
            dump.take(experience)
            with timed("ppo_train", metrics):
                experience, updated = self.ppo_train(experience, dump)
            dump.note(updated)
        metrics.merge(noted).merge(updated)
        self.check_mismatch(metrics, global_step)
        if "actor" in trained_roles(self.config, global_step) or self.phases.needs_weights:
            with timed("broadcast", metrics):
                self.broadcast_to_vllm()
        if "kl" in metrics:
            self.state.adapt_kl_coef(metrics["kl"], len(rollouts))
        self.state.sampler.settle(set(experience.group_ids.tolist()))
        if suspect is not None and not (dump.is_chosen or dump.has_failed):
            dump.remove()
        return experience

    def ppo_train(self, experience: Experience, dump: StepDump) -> tuple[Experience, Metrics]:
        """Update the critic, then the policy (unless the critic still warms up alone); return the
        experience with the log-probs that the policy's loss saw.
        """
        state, metrics = self.state, Metrics()
        roles = trained_roles(self.config, state.global_step)
        results: dict[str, list[UpdateResult]] = {}
        for at_once in [roles] if self.updates_side_by_side else [[role] for role in roles]:
            results |= self._update(at_once, experience, dump)
        for result in chain(*results.values()):
            metrics.merge(result.metrics)
        if "actor" in results:
            state.weight_version += 1
            state.num_texts += len(experience) * self.config.train.max_epochs
            seen = seen_column(results["actor"], "new_logprobs", experience.num_actions)
            experience = replace(experience, new_logprobs=seen)
        return experience, metrics

    def _update(
        self, roles: Sequence[str], experience: Experience, dump: StepDump
    ) -> dict[str, list[UpdateResult]]:
        """Update these models at the same time; return the results by role. An optimizer step that
        is skipped gets a warning, and the next ones are made.
        """
        results: dict[str, list[UpdateResult]] = {}
        num_done = dict.fromkeys(roles, 0)
        while num_done:
            results |= self._fit(num_done, experience, dump)
            skips = {role: skip for role in num_done if (skip := results[role][0].skip)}
            for role, skip in skips.items():
                self._note_skip(role, skip, dump)
            num_done = {role: skip.done + 1 for role, skip in skips.items() if skip.left}
        return results

    def _note_skip(self, role: str, skip: Skip, dump: StepDump) -> None:
        """Say that an optimizer step was skipped; keep the first one of the run for a replay."""
        step = dump.step_inputs.global_step
        warn(f"step {step}: an update of the {role} was skipped, its weights stay: {skip.why}.")
        if not dump.has_failed and (dump.is_chosen or not self._has_skipped):
            dump.keep_failed(skip.why)
        self._has_skipped = True

    def _fit(
        self, num_done: Mapping[str, int], experience: Experience, dump: StepDump
    ) -> dict[str, list[UpdateResult]]:
        """Make the optimizer steps of each role that come after its first `num_done`."""
        calls = {}
        with ExitStack() as awake:
            for role, count in num_done.items():
                is_actor = role == "actor"
                dump.begun.append(role)
                awake.enter_context(self.phases.update(self.groups[role]))
                calls[role] = start_update(
                    self.config,
                    self.groups[role],
                    experience,
                    dump.step_inputs,
                    role=role,
                    texts=self.inputs.texts if is_actor else None,
                    columns=["new_logprobs"] if is_actor else [],
                    num_done=count,
                )
            return wait_for_all(calls)

    def dump_of(self, rollouts: Sequence[Rollout], global_step: int) -> StepDump:
        """Return the context that keeps a step for a replay, if it is chosen or fails."""
        state = self.state
        return StepDump(
            self.inputs.run_dir / DUMPS / f"step_{global_step:06d}",
            StepInputs(global_step, state.kl_coef, state.num_texts, self.inputs.updates),
            rollouts,
            state.groups,
            self.phases,
            is_chosen=global_step in (self.config.logger.dump_steps or ()),
        )

    def broadcast_to_vllm(self) -> None:
        """Send the policy's weights to the engines; returns only when every engine has proved to
        hold them, or is being replaced.
        """
        if self.engines:
            with self.phases.sync(), self._sending:
                self._send([engine for engine in self.engines if engine.is_up])

    def update_engine(self, engine: Any) -> None:
        """Send the policy's weights to an engine in place of a lost one, and let it be used; raise
        LostEngineError if it is lost, too.
        """
        with self._sending:
            try:
                failed = self._send([engine])
            except LostRankError as why:
                engine.waits_for = why  # whoever has no engine meanwhile starts the trainer again
                raise
            for reason in failed:
                raise LostEngineError(reason)
            engine.is_lost = False

    def _send(self, engines: Sequence[RolloutEngine]) -> list[str]:
        """Send the weights, and send them again to engines whose peers have failed. Replace engines
        that have failed themselves; return their reasons.
        """
        actor, keep_running = self.groups["actor"], self.config.train.partial_rollout_enable
        send, num_engines = PolicyModelActor.broadcast_to_vllm, len(self.engines)
        lost: list[str] = []
        tried: list[RolloutEngine] = []
        while engines:
            arguments = (engines, keep_running, num_engines, self._has_sync_failed)
            with saying_what_is_awaited("the engines to take the weights"):
                failed = actor.call(send, *arguments)[0]
            self._has_sync_failed = bool(failed)
            again = []
            for index, (reason, is_lost) in failed.items():
                if is_lost or engines[index] in tried:
                    engines[index].lose(LostEngineError(reason))
                    lost.append(reason)
                elif engines[index].is_up:
                    again.append(engines[index])
                else:  # one in place of a lost one: yet another begins anew
                    lost.append(reason)
            tried, engines = [*tried, *again], again
        return lost

    def save_if_due(self, *, is_last: bool = False) -> None:
        """Begin to save a checkpoint every `--save_steps`; save one of the end."""
        checkpoints = self.state.checkpoints
        if is_last or checkpoints.is_written:
            self.wait_for_save()
        if checkpoints.is_due(self.state, is_last=is_last):
            self.wait_for_save()
            with self.phases.training():
                checkpoints.save(self.state)
            if self.phases.needs_weights:
                self.broadcast_to_vllm()
        if is_last:
            self.wait_for_save()

    def wait_for_save(self) -> None:
        """Wait for a save under way, and tell the callbacks of the checkpoint."""
        self.call_on_save(self.state.checkpoints.wait_for_save())

    def call_on_save(self, saved: tuple[int, Path] | None) -> None:
        """Tell the callbacks of a checkpoint, if there is one."""
        for callback in self.callbacks if saved else ():
            callback.on_save(self, *saved)

    def evaluate(self, global_step: int) -> None:
        """Log pass@n and pass@1 on the evaluation prompts; keep the best model. If rewards fail,
        warn and go on; before the first step, when nothing would be lost, raise RewardError.
        """
        inputs, prompts = self.inputs, self.inputs.eval_prompts
        if prompts is None:
            return
        self._evaluated_at = global_step
        policy = replace(self.sampler.policy, step_size=len(prompts))
        try:
            with self.phases.rollout():
                samples = self.maker.generate_samples(
                    list(prompts), inputs.eval_sampling, tag=f"eval{global_step}"
                )
            policy.check_dropped(list(samples.failed.values()), of="the evaluation")
        except RewardError as error:
            if global_step == 0:
                raise
            warn(f"no evaluation at step {global_step}, training goes on: {error}")
            return
        say_dropped(samples.failed, prompts)
        file = write_rollouts(
            inputs.run_dir,
            global_step,
            [rollout_row(rollout, inputs.image_processor) for rollout in samples.rollouts],
            num_kept=self.config.rollout.num_kept_files,
            kind="eval_step",
            token_texts=inputs.token_texts,
            images=images_of(samples.rollouts),
        )
        values = evaluation_metrics(samples.rollouts, (inputs.eval_sampling.num_samples, 1))
        self.tracker.log(global_step, values)
        notice(eval_line(global_step, values))
        count = self.config.logger.print_samples
        show_samples(f"eval at step {global_step}", samples.rollouts, count, file=file)
        for callback in self.callbacks:
            callback.on_evaluate(self, global_step, values)
        if not self.has_said_reward_alone and (words := reward_alone(self.tracker.records())):
            notice(f"hint: {words}")
            self.has_said_reward_alone = True
        if (name := inputs.pass_rate) in values:
            self.state.note_evaluation(name, {"step": global_step} | values)

    def check_versions(self, rollouts: Sequence[Rollout]) -> None:
        """Refuse samples that are further behind the policy than allowed, or of several versions
        unasked.
        """
        train, now = self.config.train, self.state.weight_version
        limit = train.async_queue_size if train.async_enable else 0
        spans: dict[str, tuple[int, int]] = {}  # an agent's episode is a sample of several parts
        for rollout in rollouts:
            if rollout.num_actions:
                name = rollout.episode_id or rollout.sample_id
                oldest, newest = (int(version) for version in rollout.weight_versions.aminmax())
                before = spans.get(name, (oldest, newest))
                spans[name] = min(oldest, before[0]), max(newest, before[1])
        for name, (oldest, newest) in spans.items():
            is_mixed = oldest < newest and not train.partial_rollout_enable
            if is_mixed or newest > now or now - oldest > limit:
                versions = sorted({oldest, newest})
                raise EngineError(
                    f"sample {name} was sampled under weights {versions}, the policy is at {now}, "
                    f"and {limit} behind is allowed"
                )

    def check_mismatch(self, metrics: Metrics, global_step: int) -> None:
        """Refuse to go on when engine and trainer disagree in the first step that compares them."""
        limit, name = self.max_mismatch_kl, self.mismatch_metric
        if self.has_checked_mismatch or name not in metrics:
            return
        self.has_checked_mismatch = True
        if metrics[name] > limit:
            raise EngineError(
                f"engine and trainer disagree about the sampled tokens at step {global_step}: "
                f"mismatch KL {metrics[name]:.2e}, limit {limit:.0e}. "
                "Check temperature, dtype and attention on both sides."
            )

    def generation_s(self, metrics: Metrics) -> float:
        """Return the seconds in which the tokens that the step's metrics count were generated."""
        return metrics["timing/step_total"]

    def report(
        self,
        global_step: int,
        metrics: Metrics,
        rollouts: Sequence[Rollout],
        file: Path | None,
    ) -> None:
        """Print hints and samples, which lie in `file`; every `--logging_steps` the line and the
        log of all steps since.
        """
        seconds = self.generation_s(metrics)
        speed = metrics["num_generated_tokens"] / seconds
        metrics.add("tokens_per_s", speed, weight=seconds)
        self.state.note_step(metrics)
        if global_step % self.config.logger.logging_steps == 0:
            self.log(global_step)
        values = self.values_of(metrics)
        for line in hints(values, self.state.history, example=example_of(rollouts[0], file)):
            notice(line)
        self.state.history = needed_history([*self.state.history, values])
        is_first_shown = global_step == 1 and self.inputs.eval_prompts is None
        if global_step % SAMPLES_EVERY == 0 or is_first_shown:
            count = self.config.logger.print_samples
            show_samples(f"step {global_step}", rollouts, count, file=file)

    def write_samples(
        self, rollouts: Sequence[Rollout], experience: Experience, metrics: Metrics
    ) -> Path | None:
        """Write the samples of the step with what was computed for them; return the file."""
        with timed("write_samples", metrics):
            rows = [rollout_row(rollout, self.inputs.image_processor) for rollout in rollouts]
            for row, columns in zip(rows, experience.learned_columns(), strict=True):
                row.update(columns)
            num_kept = self.config.rollout.num_kept_files
            step = self.state.global_step
            return write_rollouts(
                self.inputs.run_dir,
                step,
                rows,
                num_kept=num_kept,
                token_texts=self.inputs.token_texts,
                images=images_of(rollouts),
            )

    def log(self, global_step: int) -> None:
        """Write one line, the metrics file, the sinks; nothing where all steps are logged."""
        state = self.state
        if state.num_unlogged:
            values = self.values_of(state.unlogged, num_steps=state.num_unlogged)
            state.unlogged, state.num_unlogged = Metrics(), 0
            self.tracker.log(global_step, values)
            notice(step_line(global_step, self.num_steps, values, self.clock))

    def values_of(self, metrics: Metrics, *, num_steps: int = 1) -> dict[str, float]:
        """Return the reduced numbers of one step or several, and what follows from them; times are
        those of a step.
        """
        values = metrics.values()
        values["load_per_core"] = load_per_core()
        values["goodput"] = self.goodput
        times = {name: v / num_steps for name, v in values.items() if name.startswith("timing/")}
        return values | times
