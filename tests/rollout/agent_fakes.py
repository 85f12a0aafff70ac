"""What agents are tested with: an engine that says what a function tells it to, and shorthands."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent

from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.errors import EngineError
from openrlhf.rollout.agents.episode import AgentSetup, EpisodeRequest, EpisodeResult
from openrlhf.rollout.agents.episodes import agent_rollouts
from openrlhf.rollout.rollout import Rollouts
from openrlhf.rollout.scoring import FailurePolicy
from openrlhf.utils.agent import AgentError
from tests.rollout.stream_fakes import sampler_of, stopped

Say = Callable[[GenerationRequest], Sequence[int]]


def logprob_of(token: int) -> float:
    """The log-prob that the fake engine gives a token."""
    return -0.1 - token % 7 / 10


class FakeEngine:
    """Samples what `say` answers, cut to the room there is; the version can be moved on."""

    def __init__(self, say: Say, *, delay_s: float = 0.0) -> None:
        self.say = say
        self.delay_s = delay_s
        self.weight_version = 0
        self.requests: list[GenerationRequest] = []

    def complete(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        ids = tuple(self.say(request))
        is_cut = len(ids) > request.sampling.max_new_tokens
        ids = ids[: request.sampling.max_new_tokens]
        reason = "length" if is_cut or ids[-1] not in request.sampling.stop_token_ids else "stop"
        return Completion(ids, tuple(map(logprob_of, ids)), reason, self.weight_version)


class StreamingEngine(FakeEngine):
    """Answers each request by itself, as the engine with a step loop does."""

    sample = VLLMEngine.sample

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
        futures: list[Future[list[Completion]]] = [Future() for _ in requests]
        for future, request in zip(futures, requests, strict=True):
            if self.delay_s:
                threading.Timer(self.delay_s, self._answer, (future, request)).start()
            else:
                self._answer(future, request)
        return futures

    def abort(self, futures) -> Future[None]:
        """What is sampled is sampled to its end."""
        return stopped()

    def _answer(self, future: Future[list[Completion]], request: GenerationRequest) -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            try:
                future.set_result([self.complete(request)])
            except EngineError as error:
                future.set_exception(error)


class GrowingEngine(FakeEngine):
    """Samples token by token, and stops when it is told to."""

    sample = VLLMEngine.sample

    def __init__(self, say: Say, *, delay_s: float) -> None:
        super().__init__(say, delay_s=delay_s)
        self.aborted: set[Future[list[Completion]]] = set()
        self.num_sampled = 0  # tokens

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
        futures: list[Future[list[Completion]]] = [Future() for _ in requests]
        for work in zip(requests, futures, strict=True):
            threading.Thread(target=self._grow, args=work, daemon=True).start()
        return futures

    def abort(self, futures) -> Future[None]:
        self.aborted.update(futures)
        return stopped()

    @property
    def num_aborted(self) -> int:
        return len(self.aborted)

    def _grow(self, request, future: Future[list[Completion]]) -> None:
        whole = self.complete(request)
        for _ in whole.token_ids:
            time.sleep(self.delay_s)
            if future.cancelled():
                return
            self.num_sampled += 1
        future.set_result([whole])


def says(tokenizer, text: str, *, end: bool = True) -> Say:
    """An engine's `say` that always writes the same text."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return lambda request: [*ids, tokenizer.eos_token_id] if end else ids


# "two" begins anew in its second turn, which makes a second segment.
TWO_TURNS = """
    from openrlhf.utils.agent import AgentExecutorBase

    TRIES = {}

    class AgentExecutor(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, llm_engine):
            TRIES[prompt] = TRIES.get(prompt, 0) + 1
            if prompt == "bad" or prompt == "shy" and TRIES[prompt] == 1:
                raise ValueError(f"{prompt} at try {TRIES[prompt]}")
            first = await llm_engine.generate(prompt, sampling_params)
            begin = [] if prompt == "two" else first.prompt_token_ids
            ids = [*begin, *first.outputs[0].token_ids, *llm_engine.encode_feedback("??")]
            await llm_engine.generate(ids, sampling_params)
            return {"reward": len(prompt) / 2, "scores": 1.0, "extra_logs": {"num": 3}}
"""


@contextmanager
def agents_over(
    engines: Sequence[FakeEngine],
    folder: Path,
    tokenizer,
    *,
    policy: FailurePolicy | None = None,
    code: str = TWO_TURNS,
) -> Iterator[Rollouts]:
    """Agents on these engines; they are ended with the block."""
    setup = setup_of(write_agent(folder, code), tokenizer, num_tasks=4)
    samplers = [sampler_of(engine) for engine in engines]
    agents = agent_rollouts(setup, samplers, policy or FailurePolicy(4))
    try:
        yield agents
    finally:
        agents.loop.run(agents.actor.close())
        agents.loop.close()


def settings(tokenizer, **changes) -> SamplingSettings:
    return SamplingSettings(**{"stop_token_ids": (tokenizer.eos_token_id,), **changes})


def prompts(tokenizer, texts: Sequence[str]) -> list[PromptRecord]:
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [
        PromptRecord(row, text, tuple(ids), label=f"label {row}", columns={"row": row})
        for row, (text, ids) in enumerate(zip(texts, encoded, strict=True))
    ]


def request(tokenizer, text: str = "hi", name: str = "e0", **changes) -> EpisodeRequest:
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    sampling = settings(tokenizer, **changes.pop("sampling", {}))
    prompt = PromptRecord(0, text, ids, **{"label": "L", **changes})
    return EpisodeRequest(name, prompt, sampling)


def write_agent(path: Path, code: str) -> Path:
    file = path / "agent_func.py"
    file.write_text(dedent(code))
    return file


def setup_of(file: Path, tokenizer, **limits) -> AgentSetup:
    limits = {"max_length": 256, "step_timeout_s": 20.0, **limits}
    return AgentSetup(str(file), tokenizer, len(tokenizer), **limits)


class EpisodeRunner:
    """Runs single episodes for a test; its event loop has a thread."""

    def __init__(self, setup: AgentSetup, engine) -> None:
        self.agents = agent_rollouts(setup, [sampler_of(engine)], FailurePolicy(4))

    def close(self) -> None:
        self.agents.loop.run(self.agents.actor.close())
        self.agents.loop.close()

    def act(self, requests: Sequence[EpisodeRequest]) -> dict[str, EpisodeResult | AgentError]:
        (worker,) = self.agents.actor.workers

        async def run(one: EpisodeRequest) -> EpisodeResult | AgentError:
            try:
                return await worker.run(one)
            except AgentError as error:
                return error

        async def all_of_them() -> list[EpisodeResult | AgentError]:
            return await asyncio.wait_for(asyncio.gather(*map(run, requests)), 30)

        results = self.agents.loop.run(all_of_them())
        return {one.sample_id: result for one, result in zip(requests, results, strict=True)}


def make_runner(file: Path, engine, tokenizer, **limits) -> EpisodeRunner:
    return EpisodeRunner(setup_of(file, tokenizer, **limits), engine)


def act(
    runner: EpisodeRunner, requests: Sequence[EpisodeRequest]
) -> dict[str, EpisodeResult | AgentError]:
    """Result or error of all episodes, by name; fails when one takes over half a minute."""
    return runner.act(requests)


def act_one(file: Path, engine, tokenizer, **options) -> EpisodeResult | AgentError:
    """One episode of an agent file: its result, or its error."""
    changes = {k: options.pop(k) for k in ("text", "sampling", "label") if k in options}
    runner = make_runner(file, engine, tokenizer, **options)
    try:
        return act(runner, [request(tokenizer, **changes)])["e0"]
    finally:
        runner.close()
