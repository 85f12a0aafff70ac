"""The bounded queue between generation and training: groups are generated on the event loop while
the trainer's thread trains; what may start and what is trained next, `AsyncController` decides.

An error on either side ends the run with that error. Every wait has a deadline, and a line says
what is waited for when nothing comes.
"""

import asyncio
import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.engines.base import SamplingSettings
from openrlhf.errors import EngineError
from openrlhf.rollout.async_controller import AsyncController, AsyncLimits, Key
from openrlhf.rollout.rollout import GroupStream, RolloutMaker
from openrlhf.rollout.step_sampler import StepSampler
from openrlhf.utils.console import notice
from openrlhf.utils.images import read_picture, write_pictures
from openrlhf.utils.metrics import Metrics, timed
from openrlhf.utils.progress import Quiet
from openrlhf.utils.rollout import Rollout, fields_of
from openrlhf.utils.rollout_files import images_of
from openrlhf.utils.threads import on_loop

WAIT_S = 4 * 3600.0  # for a prompt to be finished
CLOSE_S = 40.0  # until what runs must have ended

GROUPS = "finished_groups.pt"
OF_PROMPT = {"group_id", "row_id", "label", "datasource", "columns", "source_prompt"}
IMAGES = "finished_images"  # those of the samples, once each; they name them by their hashes

# A prompt whose samples wait for their step: its key, the steps that ended since it was started.
SavedGroup = tuple[Key, int, list[Rollout]]


class RolloutQueue:
    """Samples generated ahead, bounded by `limits`; a context in which they are generated.

    Prompts, filter and ledger are those of `sampler`, whose state is that of the queue too.
    Finished samples are saved separately (`finished_groups`); what else was pending is generated
    again. The trainer's thread calls; all state belongs to the event loop of `maker`.
    """

    def __init__(
        self,
        sampler: StepSampler,
        maker: RolloutMaker,
        sampling: SamplingSettings,
        limits: AsyncLimits,
    ) -> None:
        self.sampler = sampler
        self.maker = maker
        self.loop = maker.loop
        self.sampling = sampling
        self.limits = limits
        self._controller = AsyncController(limits, sampler.ledger)
        self._groups: dict[Key, list[Rollout]] = {}  # finished, not yet taken
        self._kept: Sequence[SavedGroup] = ()  # finished ones of a checkpoint
        self._news = asyncio.Event()  # a group is finished, or generation has ended
        self._failed: dict[int, str] = {}  # row -> why, since the last step
        self._metrics = Metrics()
        self._has_weights = False  # whether the engines hold the policy
        self._idle_since: float | None = None  # nothing is generated, and there are prompts

    @on_loop
    async def __enter__(self) -> "RolloutQueue":
        """Get ready; generation begins with the first weights."""
        # The ledger may have come from a checkpoint since this was made.
        self._controller = AsyncController(self.limits, self.sampler.ledger)
        self._controller.is_exhausted = self.sampler.cursor.is_exhausted
        self._take_up_kept()
        self._has_weights = False
        self._stream = self.maker.open_stream(self.sampling)
        self._producer = asyncio.ensure_future(self._receive_all(self._stream))
        self._producer.add_done_callback(lambda _: self._news.set())
        return self

    @on_loop
    async def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Abandon what runs. The error that ended generation is raised when there is no other."""
        self._producer.cancel()
        await asyncio.wait([self._producer], timeout=CLOSE_S)
        if error is None and self._producer.done() and not self._producer.cancelled():
            self._producer.result()

    @property
    def has_failed(self) -> bool:
        """Return True once an error has ended generation."""
        producer = self._producer
        return producer.done() and not producer.cancelled() and producer.exception() is not None

    @property
    def is_over(self) -> bool:
        """Return True once every prompt has its outcome."""
        return self._controller.is_over

    @on_loop
    async def next_step(self) -> list[Rollout]:
        """Return the samples of the next step, with group ids from 0; none when no prompt is left.

        Raises what ended generation, EngineError when nothing comes in time.
        """
        controller = self._controller
        with timed("wait", self._metrics):
            await self._wait_until(lambda: controller.is_ready or controller.is_over, "samples")
        if controller.is_over:
            return []
        groups = [self._groups.pop(key) for key in controller.take()]
        self._metrics.add("queue/num_ready", len(controller.ready))
        self._metrics.add("queue/num_running", len(controller.running))
        return [replace(r, group_id=k) for k, group in enumerate(groups) for r in group]

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Let weights be sent inside: running samples are finished, or go on (partial rollout).

        While a step is under way nothing else starts before it is settled.
        """
        self._begin_sync()
        yield
        self._end_sync()

    @on_loop
    async def settle(self, trained_groups: set[int]) -> None:
        """Note that the step is done; raises AssertionError when a group did not reach it."""
        assert trained_groups == set(range(len(self._controller.taken))), (
            "groups were not trained on"
        )
        self._controller.update()
        self._controller.check()
        self._start_groups()

    @on_loop
    async def state_dict(self) -> dict[str, Any]:
        """Return the position in the prompts and their ledger, as JSON; what
        `finished_groups` gave before is pending in it.
        """
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken; before generation begins."""
        self.sampler.load_state_dict(state)

    @on_loop
    async def finished_groups(self) -> list[SavedGroup]:
        """Return the samples that wait for their step; between two steps."""
        controller = self._controller
        return [(key, controller.age(key), self._groups[key]) for key in controller.ready]

    def load_groups(self, folder: Path) -> None:
        """Take up what `finished_groups` gave and a folder keeps, after `load_state_dict`."""
        self._kept = read_groups(folder, self.sampler.prompts, self.sampling)
        if self._kept:
            notice(
                f"{len(self._kept)} prompts that were sampled ahead are trained on with the "
                "rewards that they got then."
            )

    @on_loop
    async def take_metrics(self) -> Metrics:
        """Return the metrics of generation, rewards and waiting since the last call."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics.merge(self._stream.take_metrics())

    @on_loop
    async def take_failed(self) -> dict[int, str]:
        """Return the reasons of prompts that failed since the last call, by row."""
        failed, self._failed = self._failed, {}
        return failed

    @on_loop
    async def _begin_sync(self) -> None:
        with timed("drain", self._metrics):
            self._controller.begin_sync()
            await self._wait_until(lambda: self._controller.may_sync, "running samples to finish")

    @on_loop
    async def _end_sync(self) -> None:
        self._has_weights = True
        if not self._controller.taken:
            self._controller.end_sync()
            self._start_groups()

    def _take_up_kept(self) -> None:
        taken = set(self._controller.restore({key: age for key, age, _ in self._kept}))
        self._groups = {key: rollouts for key, _, rollouts in self._kept if key in taken}
        if self._kept:
            num_left = len(self._controller.again)
            notice(
                f"{len(taken)} finished prompts of the checkpoint wait for their step, {num_left} "
                "that were on their way are generated again"
            )
        self._kept = ()

    async def _wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something that finished groups bring about."""
        start, quiet = time.monotonic(), Quiet()
        heard = start  # when a group was last finished
        while not is_so():
            if self._producer.done():
                self._producer.result()
            before, wait_s = time.monotonic(), quiet.say_after_s - quiet.seconds
            self._news.clear()
            try:
                left_s = heard + WAIT_S - before
                await asyncio.wait_for(self._news.wait(), min(wait_s, left_s))
                quiet.reset()
                heard = time.monotonic()
            except TimeoutError:
                waited_s = time.monotonic() - start
                line = f"waited {waited_s:.0f} s for {what}: {self._progress()}"
                if time.monotonic() - heard >= WAIT_S:
                    raise EngineError(line) from None
                if quiet.add(wait_s):
                    notice(line)

    def _progress(self) -> str:
        """Return the state of the samples that are waited for."""
        controller, num_unscored = self._controller, self.maker.scorer.num_unscored
        return (
            f"{len(controller.ready)} of the {self.limits.batch_size} prompts of a step are "
            f"finished, {len(controller.running)} are running, {num_unscored} of these wait for "
            "their rewards"
        )

    async def _receive_all(self, stream: GroupStream) -> None:
        """Note what becomes of every group, and start others in its place."""
        async with stream:
            while True:
                group = await stream.next()
                outcome = self.sampler.outcome_of(group, self._metrics)
                self._controller.finish(group.key, outcome)
                if group.failure is not None:
                    self._failed[self.sampler.prompts[group.key[1]].row_id] = group.failure
                if outcome is None:
                    self._groups[group.key] = group.rollouts
                self._start_groups()
                self._news.set()

    def _start_groups(self) -> None:
        """Start what may start; count the time in which nothing could."""
        controller = self._controller
        while self._has_weights and controller.may_admit() and (key := self._next_key()):
            controller.admit(key)
            episode, row = key
            self._stream.submit([(key, self.sampler.prompts[row])], tag=f"episode{episode}")
        now = time.monotonic()
        if self._idle_since is not None:
            seconds = now - self._idle_since
            self._metrics.add("timing/generation_blocked", seconds, reduction="sum")
        is_idle = self._has_weights and not controller.running and not controller.is_exhausted
        self._idle_since = now if is_idle else None

    def _next_key(self) -> Key | None:
        """Return the next prompt, those of before a restart first; None when there is none."""
        if self._controller.again:
            return next(iter(self._controller.again))
        cursor = self.sampler.cursor
        episode = cursor.episode
        rows = cursor.draw(1)
        self._controller.is_exhausted = cursor.is_exhausted
        return (episode, rows[0]) if rows else None


def write_groups(folder: Path, groups: Sequence[SavedGroup], sampling: SamplingSettings) -> None:
    """Write finished samples into a folder, token-exact; no file where there are none.

    What the data set says of a prompt is not kept: it is read there again. Raises OSError.
    """
    if groups:
        own = partial(fields_of, left_out=OF_PROMPT)
        kept = [(key, age, [own(r) for r in rollouts]) for key, age, rollouts in groups]
        for _, _, rollouts in groups:
            write_pictures(folder / IMAGES, images_of(rollouts))
        content = io.BytesIO()
        torch.save((repr(sampling), kept), content)
        (folder / GROUPS).write_bytes(content.getbuffer())


def read_groups(
    folder: Path, prompts: PromptDataset, sampling: SamplingSettings
) -> list[SavedGroup]:
    """Return the groups that `write_groups` wrote; none, which is said, where samples are made in
    another way now.
    """
    path = folder / GROUPS
    written, kept = torch.load(path, weights_only=True) if path.exists() else (None, [])
    groups: list[SavedGroup] = []
    if kept and written != repr(sampling):
        notice(
            f"{len(kept)} prompts that were sampled ahead are generated again: samples are drawn "
            "with other settings now"
        )
        return groups
    for key, age, rollouts in kept:
        # A step gives it its group id.
        prompt = prompts[key[1]]
        shared, known = {"group_id": 0, **prompt.of_samples}, {i.sha256: i for i in prompt.images}
        for own in rollouts:  # an agent's environment may have images too
            own["images"] = tuple(
                known.get(name) or read_picture(folder / IMAGES / f"{name}.png")
                for name in own.get("images", ())
            )
        groups.append((key, age, [Rollout(**shared | own) for own in rollouts]))
    return groups
