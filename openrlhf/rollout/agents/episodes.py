"""The samples of a prompt by way of agents: each is an episode, which comes with its reward.

Episodes run in worker processes. User code that blocks or ends its process costs its own episode:
the process is replaced, and the other episodes begin again. What a process sends is checked: a
model's code may have run in it.
"""

import asyncio
import itertools
import math
import multiprocessing
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from openrlhf.config.generation import GenerationRunConfig
from openrlhf.engines.base import Completion, GenerationRequest
from openrlhf.errors import EngineError, LostRankError
from openrlhf.rollout.agents.episode import AgentSetup, EpisodeRequest, EpisodeResult
from openrlhf.rollout.agents.worker import OUTSIDE, serve
from openrlhf.rollout.engine_pool import Dispatcher, SamplingEngine
from openrlhf.rollout.rollout import RolloutMaker, RolloutRequest
from openrlhf.rollout.scoring import FailurePolicy, GroupScorer
from openrlhf.utils.agent import AgentError
from openrlhf.utils.images import ImageProcessor, Picture, PictureError, read_picture
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import PromptRecord, Rollout
from openrlhf.utils.tokenizer import Tokenizer, decode_rest
from openrlhf.utils.worker_process import WorkerProcess

MAX_RESTARTS = 3  # of an episode whose process ended
GRACE_S = 5.0  # over the deadline of an episode, until the process is killed
BEAT_S = 1.0

# Engines have threads, which a fork loses; what takes long to import is imported once.
START_METHOD = "forkserver"
multiprocessing.get_context(START_METHOD).set_forkserver_preload(
    ["openrlhf.rollout.agents.worker", "transformers"]
)

AskEngine = Callable[[GenerationRequest], Coroutine[Any, Any, list[Completion]]]
REQUEST, RESULT = TypeAdapter(GenerationRequest), TypeAdapter(EpisodeResult)


def checked(found: object, setup: AgentSetup) -> EpisodeResult:
    """Return the result that a process sent; raises AgentError for one that cannot be."""
    problem = f"{setup.path}: its process sent an episode that cannot be"
    try:
        result = RESULT.validate_python(found)
    except ValidationError as error:
        raise AgentError(f"{problem}: {error.errors()[0]}", "bad_answer") from error
    numbers = [result.reward, result.score or 0.0, *result.extra_logs.values()]
    for segment in result.segments:
        segment.images = checked_images(segment.token_ids, segment.images, setup, problem)
        ids, num_sampled = segment.token_ids, sum(segment.action_mask)
        sizes = {num_sampled, len(segment.logprobs), len(segment.weight_versions)}
        is_known = all(0 <= token < setup.vocab_size for token in ids)
        if len(sizes) > 1 or len(ids) != len(segment.action_mask) or not is_known:
            raise AgentError(problem, "bad_answer")
        numbers += segment.logprobs
    if not all(map(math.isfinite, numbers)) or not result.segments:
        raise AgentError(problem, "bad_answer")
    return result


def checked_images(
    token_ids: Sequence[int], sent: Sequence[Picture], setup: AgentSetup, problem: str
) -> tuple[Picture, ...]:
    """Return the images that a process sent in base64; raise AgentError for those that are not what
    they say, or have no placeholders in the ids.
    """
    processor = setup.image_processor
    try:
        images = tuple(_decoded(image.data) for image in sent)
        if processor is not None:
            processor.placeholders(token_ids, images)
    except PictureError as error:
        raise AgentError(f"{problem}: {error}", "bad_answer") from error
    if images and processor is None:
        raise AgentError(f"{problem}: the policy sees no images", "bad_answer")
    return images


@lru_cache(256)
def _decoded(data: bytes) -> Picture:
    return read_picture(data.decode("ascii", "replace"), allow_paths=False)


class AgentWorker:
    """Runs episodes in one process at a time, on one engine, whose cache knows their past turns."""

    def __init__(self, setup: AgentSetup, ask_engine: AskEngine) -> None:
        self.setup = setup
        self.ask_engine = ask_engine
        self.num_episodes = 0  # that it was given and has not ended
        self._room = asyncio.Semaphore(setup.num_tasks)
        self._starting = asyncio.Lock()
        self._process: WorkerProcess | None = None
        self._acting: set[str] = set()  # sample ids
        self._turns: dict[asyncio.Future[object], str] = {}  # that are sampled -> sample id
        self._lost: dict[str, LostRankError] = {}  # by sample id: what ended a turn of it

    async def process(self) -> WorkerProcess:
        """Return the process, a new one where the last has ended; raises ConfigError."""
        async with self._starting:
            if self._process is None or self._process.is_over:
                self._process = await WorkerProcess.start(
                    serve, self.setup.path, self.setup, serve=self._sample, method=START_METHOD
                )
                self._watching = asyncio.ensure_future(self._watch(self._process))
            return self._process

    async def _watch(self, process: WorkerProcess) -> None:
        """End a process whose event loop is held for longer than a step may take."""
        limit_s = self.setup.step_timeout_s
        with suppress(ConnectionError, TimeoutError):
            while True:
                await process.call("alive", timeout_s=limit_s)
                await asyncio.sleep(min(limit_s / 4, BEAT_S))

    async def run(self, request: EpisodeRequest) -> EpisodeResult:
        """Return the result of an episode; raises AgentError, EngineError.

        Raises ConfigError where the executor cannot be made again.
        """
        self.num_episodes += 1
        try:
            async with self._room:
                for _ in range(1 + MAX_RESTARTS):
                    try:
                        return await self._act(request)
                    except ConnectionError as error:  # the process ended under it
                        last_words = f"{self.setup.path}: the agent {error}"
        finally:
            self.num_episodes -= 1
        raise AgentError(last_words)

    async def _act(self, request: EpisodeRequest) -> EpisodeResult:
        process = await self.process()
        sample_id, path = request.sample_id, self.setup.path
        limit_s = self.setup.episode_timeout_s + GRACE_S
        self._acting.add(sample_id)
        try:
            found = await process.call("run", request, timeout_s=limit_s)
            return checked(found, self.setup)
        except TimeoutError:  # it could not even say where it is
            waited = f"did not respond for {min(limit_s, self.setup.step_timeout_s):g} s"
            raise AgentError(f"{path}: its process {waited}", "blocked") from None
        except AgentError as error:
            if error.kind == "blocked":
                process.kill(ConnectionError("was replaced"))
            raise
        except EngineError as error:  # it has passed through the process, which knows no roles
            of_anybody = [why for name, why in self._lost.items() if name.endswith(OUTSIDE)]
            raise self._lost.get(sample_id) or next(iter(of_anybody), error) from error
        finally:
            self._lost.pop(sample_id, None)
            self._acting.remove(sample_id)
            if not self._acting:
                self._lost.clear()
            # Turns of no episode that is known may be anybody's, as long as there is one.
            over = [t for t, owner in self._turns.items() if owner == sample_id or not self._acting]
            for turn in over:
                turn.cancel()
            if over:  # an engine cannot sleep, and its model not be trained, meanwhile
                await asyncio.wait(over)

    async def _sample(self, sample_id: str, value: object) -> Completion:
        """Sample a turn for the process."""
        try:
            request = REQUEST.validate_python(value)
        except ValidationError as error:
            raise AgentError(f"no request: {error.errors()[0]}", "bad_answer") from error
        ids, sent = request.prompt_token_ids, request.images
        request = replace(request, images=checked_images(ids, sent, self.setup, "no request"))
        turn = asyncio.ensure_future(self.ask_engine(request))
        self._turns[turn] = sample_id
        try:
            return (await turn)[0]
        except LostRankError as error:
            self._lost[sample_id] = error
            raise
        finally:
            del self._turns[turn]

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._watching.cancel()
            await self._process.close()


class AgentEpisodes:
    """Acts out the samples of prompts, with one worker process for each engine."""

    in_rounds = False

    def __init__(
        self, setup: AgentSetup, engines: Sequence[SamplingEngine], policy: FailurePolicy
    ) -> None:
        self.tokenizer, self.image_processor = setup.tokenizer, setup.image_processor
        self.policy = policy
        self.may_mix = setup.may_mix
        sample = Dispatcher(engines, may_mix=setup.may_mix).sample
        self.workers = [AgentWorker(setup, partial(sample, home=k)) for k in range(len(engines))]

    async def start(self) -> None:
        """Start the workers; raises ConfigError for a file that cannot act."""
        await asyncio.gather(*(worker.process() for worker in self.workers))

    async def close(self) -> None:
        """End the workers."""
        await asyncio.gather(*(worker.close() for worker in self.workers))

    async def samples_of(self, request: RolloutRequest) -> list[Rollout]:
        """Return the rollouts of all episodes; AgentError when one has failed after its retries."""
        prompt, metrics = request.prompt, request.metrics
        sampling = request.sampling
        asked = [
            EpisodeRequest(f"{request.name}/{k}", prompt, sampling.for_sample(k))
            for k in range(sampling.num_samples)
        ]
        episodes = [asyncio.ensure_future(self.run(each, metrics)) for each in asked]
        try:
            results = await asyncio.gather(*episodes)
        except AgentError as error:
            named = AgentError(f"row {prompt.row_id + 1}: {error.kind}: {error}")
            raise named.in_user_code(error.user_traceback) from error
        finally:
            for episode in episodes:  # the others, if one has failed
                episode.cancel()
            await asyncio.wait(episodes)
        rollouts = [
            rollout
            for each, result in zip(asked, results, strict=True)
            for rollout in self.rollouts_of(prompt, each.sample_id, result, request.group_id)
        ]
        num_tokens = sum(rollout.num_actions for rollout in rollouts)
        metrics.add("num_generated_tokens", num_tokens, reduction="sum")
        return rollouts

    async def run(self, request: EpisodeRequest, metrics: Metrics) -> EpisodeResult:
        """Return the result of an episode, which begins anew as often as the policy says.

        Raises AgentError when the last try has failed, EngineError where the engine failed.
        """
        sample_id, sampling = request.sample_id, request.sampling
        for num_tries in itertools.count(1):
            try:
                result = await self._of_one_version(request)
            except LostRankError:
                raise
            except EngineError as error:
                raise EngineError(f"sample {sample_id}: {error}") from error
            except AgentError as error:
                metrics.add(f"agent/num_failed_{error.kind}", 1, reduction="sum")
                if num_tries > self.policy.num_retries:
                    raise
                metrics.add("num_reward_retries", 1, reduction="sum")
                other = f"try{num_tries + 1}"  # which draws other numbers
                request = replace(
                    request, sample_id=f"{sample_id}/{other}", sampling=sampling.for_part(other)
                )
            else:
                add_metrics(result, metrics)
                return result
        raise AssertionError("unreachable")

    async def _of_one_version(self, request: EpisodeRequest) -> EpisodeResult:
        """Return the result of an episode, which begins anew if its engine was replaced by one that
        has later weights; raise AgentError where that happens again and again.
        """
        for _ in range(1 + MAX_RESTARTS):
            worker = min(self.workers, key=lambda worker: worker.num_episodes)
            result = await worker.run(request)
            versions = {v for segment in result.segments for v in segment.weight_versions}
            if self.may_mix or len(versions) <= 1:
                return result
        raise AgentError(f"its engine was replaced {1 + MAX_RESTARTS} times while it ran")

    def rollouts_of(
        self, prompt: PromptRecord, sample_id: str, result: EpisodeResult, group_id: int
    ) -> list[Rollout]:
        """Return one rollout for each segment of an episode; images of the prompt are the same
        objects in all of them.
        """
        own = {image.sha256: image for image in prompt.images}
        pad = None if self.image_processor is None else self.image_processor.image_token_id
        return [
            Rollout(
                sample_id=f"{sample_id}#{index}" if index else sample_id,
                episode_id=sample_id,
                group_id=group_id,
                token_ids=torch.tensor(segment.token_ids, dtype=torch.int32),
                action_mask=torch.tensor(segment.action_mask, dtype=torch.bool),
                logprobs=torch.tensor(segment.logprobs, dtype=torch.float32),
                weight_versions=torch.tensor(segment.weight_versions, dtype=torch.int32),
                finish_reason="length" if result.is_truncated else "stop",
                prompt_text=self.tokenizer.decode(segment.token_ids[: segment.num_prompt_tokens])
                if index
                else prompt.prompt_text,
                response_text=self._rest(segment.token_ids[segment.num_prompt_tokens :]),
                **prompt.of_samples
                | {"images": tuple(own.get(image.sha256, image) for image in segment.images)}
                | {"num_image_tokens": segment.token_ids.count(pad)},  # type: ignore[arg-type]
                reward=result.reward,
                score=result.score,
                extra_logs=result.extra_logs,
            )
            for index, segment in enumerate(result.segments)
        ]

    def _rest(self, token_ids: Sequence[int]) -> str:
        [text] = decode_rest(self.tokenizer, [token_ids], skip_special_tokens=False)
        return text


def agent_rollout_maker(
    setup: AgentSetup, engines: Sequence[SamplingEngine], policy: FailurePolicy
) -> RolloutMaker:
    """Return the maker of rollouts by agents, whose workers have started; raises ConfigError."""
    agents = AgentEpisodes(setup, engines, policy)
    maker = RolloutMaker(agents, GroupScorer(None, policy))
    maker.loop.run(agents.start())
    return maker


def add_metrics(result: EpisodeResult, metrics: Metrics) -> None:
    """Note how long an episode was."""
    metrics.add("agent/num_turns", result.num_turns)
    metrics.add("agent/episode_s", result.seconds)
    metrics.add("agent/num_segments", len(result.segments))


def agent_setup(
    config: GenerationRunConfig,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    image_processor: ImageProcessor | None,
) -> AgentSetup:
    """Return the settings of the agents of a run."""
    return AgentSetup(
        str(config.train.agent_func_path),
        tokenizer,
        vocab_size,
        max_length=config.total_len,
        num_tasks=config.train.async_num_tasks,
        step_timeout_s=config.reward.timeout_s,
        episode_timeout_s=config.train.agent_timeout_s,
        image_processor=image_processor,
        may_mix=config.mixes_versions,
    )
