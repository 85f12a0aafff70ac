"""What agents see as their engine: vLLM's manners in front, the recorded episode behind.

Every turn that is sampled through it, from whatever task of the episode, is noted in its trace.
"""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from openrlhf.engines.base import Completion, GenerationRequest, OnTokens
from openrlhf.errors import EngineError
from openrlhf.trainer.ppo_utils.agent_sampler import TurnSampler
from openrlhf.trainer.ppo_utils.agent_sampling import prompt_ids_of, turn_settings
from openrlhf.trainer.ppo_utils.agent_trace import (
    AgentLimits,
    EpisodeRequest,
    EpisodeTrace,
    Segment,
)
from openrlhf.utils.agent import AgentError, BadAnswerError, ContextFullError, OpenAISession
from openrlhf.utils.tokenizer import TextEncoder, Tokenizer

_PLAIN_START = "\n"  # text before feedback, so that it is encoded as a continuation


class Episode:
    """An episode that is being acted out."""

    def __init__(self, request: EpisodeRequest, *, vocab_size: int) -> None:
        self.request = request
        self.trace = EpisodeTrace(request.sample_id, vocab_size=vocab_size)
        self.answers: list[object] = []  # put into the result queue
        self.engine_error: EngineError | None = None  # ends the run, whatever user code makes of it
        self.sessions: list[object] = []  # of clients; they live as long as the episode
        self.turns: set[Future[list[Completion]]] = set()  # that the engine samples now
        self._num_requests = 0

    def next_request_id(self) -> str:
        """A name for the next turn."""
        self._num_requests += 1
        return f"{self.request.sample_id}/t{self._num_requests}"


CURRENT: contextvars.ContextVar[Episode] = contextvars.ContextVar("episode")
# Whether a task was begun by no other: a server's, which may work for any episode.
IS_LOOSE: contextvars.ContextVar[bool] = contextvars.ContextVar("is_loose", default=False)


def current_episode() -> Episode:
    """The episode that the running task belongs to; AgentError outside of one."""
    episode = CURRENT.get(None)
    if episode is None:
        raise AgentError(
            "the engine was called outside of an episode. Call it in execute, in its tasks or in "
            "asyncio.to_thread."
        )
    return episode


class ResultQueue:
    """The queue of the older executors: what is put becomes the answer of the running episode."""

    async def put(self, answer: object) -> None:
        """Answer the episode."""
        self.put_nowait(answer)

    def put_nowait(self, answer: object) -> None:
        """Answer the episode."""
        current_episode().answers.append(answer)


@dataclass(frozen=True)
class TokenLogprob:
    """One log-prob in vLLM's form."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class TurnOutput:
    """What was sampled in a turn, under vLLM's names."""

    text: str
    completion: Completion
    index: int = 0
    stop_reason: int | str | None = None

    @property
    def token_ids(self) -> list[int]:
        """Sampled ids with the stop token."""
        return list(self.completion.token_ids)

    @property
    def finish_reason(self) -> str:
        """ "stop" or "length"."""
        return self.completion.finish_reason

    @property
    def logprobs(self) -> list[dict[int, TokenLogprob]]:
        """One entry a token: {its id: its log-prob}."""
        pairs = zip(self.completion.token_ids, self.completion.logprobs, strict=True)
        return [{token: TokenLogprob(logprob)} for token, logprob in pairs]

    @property
    def cumulative_logprob(self) -> float:
        """Log-prob of all tokens together."""
        return sum(self.completion.logprobs)


@dataclass(frozen=True)
class TurnResult:
    """The answer of `generate`, under vLLM's names."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[TurnOutput] = field(default_factory=list)
    prompt: str | None = None
    finished: bool = True


class PendingTurn:
    """A turn on its way: await it, or iterate over it once, as over vLLM's generate."""

    def __init__(self, coroutine: Coroutine[Any, Any, TurnResult]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, None, TurnResult]:
        return self._coroutine.__await__()

    async def __aiter__(self) -> AsyncIterator[TurnResult]:
        yield await self._coroutine


class OpensSessions(Protocol):
    """A server that agents can talk to."""

    def open_session(
        self, episode: Episode, sampling_params: object, *, ignores_client_sampling: bool
    ) -> OpenAISession:
        """An address and a key for an episode."""


class TextCodec:
    """A tokenizer as episodes need it; one for each thread, for tokenizers are not shared."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.encoder = TextEncoder(tokenizer)

    def encode_prompt(self, text: str, request: EpisodeRequest) -> list[int]:
        """Ids of a prompt; the data set's own where the text is."""
        if text == request.prompt_text:
            return list(request.prompt_token_ids)
        return self.encoder.encode_prompts([text])[0]

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of text behind other text: no BOS, no prefix space."""
        return self.encoder.encode_segments([[_PLAIN_START, text]])[0][1]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


class TurnTaker:
    """Samples and records one turn of an episode; shared by the engine facade and the server."""

    def __init__(self, sampler: TurnSampler, limits: AgentLimits, *, vocab_size: int) -> None:
        self.sampler = sampler
        self.limits = limits
        self.vocab_size = vocab_size

    async def take(
        self,
        episode: Episode,
        prompt_ids: Sequence[int],
        params: object,
        codec: TextCodec,
        on_tokens: OnTokens | None = None,
        *,
        owner: Episode | None = None,
    ) -> tuple[str, Completion]:
        """Request id and completion; AgentError for what cannot be asked, EngineError."""
        episode.trace.check_open()
        prompt_ids = self._checked(prompt_ids, episode.trace.known_ids(prompt_ids))
        room = self.limits.max_length - len(prompt_ids)
        if room < 1:
            raise ContextFullError(
                f"a prompt of {len(prompt_ids)} tokens fills the context of "
                f"{self.limits.max_length}"
            )
        sampling = (owner or episode).request.sampling
        settings = turn_settings(params, sampling, room=room, encoder=codec.encoder)
        request_id = episode.next_request_id()
        request = GenerationRequest(request_id, tuple(prompt_ids), settings)
        try:
            completion = await self._sample(episode, request, on_tokens)
            fills_context = settings.max_new_tokens == room
            name = owner.request.sample_id if owner else None
            episode.trace.record(prompt_ids, completion, fills_context=fills_context, owner=name)
        except EngineError as error:
            episode.engine_error = error
            raise
        return request_id, completion

    def end(self, episode: Episode) -> tuple[Segment, ...]:
        """Close the episode's books, and stop sampling what it still waits for."""
        segments = episode.trace.close()
        self.sampler.abort(episode.turns.copy())
        return segments

    async def _sample(
        self, episode: Episode, request: GenerationRequest, on_tokens: OnTokens | None
    ) -> Completion:
        turn = self.sampler.start(request, on_tokens)
        episode.turns.add(turn)
        turn.add_done_callback(episode.turns.discard)
        if episode.trace.is_closed:  # since it was looked at above, by another thread
            self.sampler.abort([turn])
        return await self.sampler.wait(turn)

    def _checked(self, prompt_ids: Sequence[int], known_ids: Sequence[int]) -> list[int]:
        """The prompt, or BadAnswerError; long histories are looked at once, not in every turn."""
        if not prompt_ids:
            raise BadAnswerError("a prompt without a token. Give text or token ids.")
        new_ids = prompt_ids[len(known_ids) :]
        if not all(isinstance(token, int) for token in new_ids):
            raise BadAnswerError("the prompt is a list of other things than token ids.")
        if new_ids and (min(new_ids) < 0 or max(new_ids) >= self.vocab_size):
            raise BadAnswerError(f"the prompt has ids outside 0..{self.vocab_size - 1}")
        return [*known_ids, *new_ids]


class AgentEngine:
    """The `llm_engine` of agents."""

    def __init__(
        self, taker: TurnTaker, codec: TextCodec, server: Callable[[], OpensSessions]
    ) -> None:
        self._taker = taker
        self._codec = codec
        self._server = server  # started by the first episode that asks for it
        # Takes down what loose tasks sample. An episode whose answer names such tokens gets them.
        self.outside: Episode | None = None

    def generate(
        self,
        prompt: object = None,
        sampling_params: object = None,
        request_id: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **ignored: object,
    ) -> PendingTurn:
        """Sample one turn of the running episode; see `openrlhf.utils.agent.LLMEngine`."""
        owner = CURRENT.get(None)
        is_loose = self.outside is not None and (owner is None or IS_LOOSE.get())
        episode = self.outside if self.outside is not None and is_loose else current_episode()
        if owner is None or owner.trace.is_closed:
            owner = episode
        wanted = prompt if prompt_token_ids is None else prompt_token_ids
        ids, text = prompt_ids_of(wanted, lambda t: self._codec.encode_prompt(t, owner.request))
        return PendingTurn(self._generate(episode, owner, ids, text, sampling_params))

    async def _generate(
        self, episode: Episode, owner: Episode, ids: list[int], text: str | None, params: object
    ) -> TurnResult:
        taker = self._taker
        request_id, completion = await taker.take(episode, ids, params, self._codec, owner=owner)
        is_bare = bool(_value(params, "skip_special_tokens"))
        output = TurnOutput(
            self._codec.decode(completion.token_ids, skip_special_tokens=is_bare), completion
        )
        return TurnResult(request_id, ids, [output], text)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a whole prompt; those of the data set where the text is its own."""
        return self._codec.encode_prompt(text, current_episode().request)

    def encode_feedback(self, text: str) -> list[int]:
        """Ids of text that follows other text; special tokens spelled in it keep their meaning."""
        return self._codec.encode_continuation(text)

    def open_session(
        self, sampling_params: object = None, *, ignores_client_sampling: bool = False
    ) -> OpenAISession:
        """An address under which any OpenAI client talks to the policy in this episode."""
        return self._server().open_session(
            current_episode(), sampling_params, ignores_client_sampling=ignores_client_sampling
        )

    async def get_tokenizer(self) -> Tokenizer:
        """The policy's tokenizer."""
        return self._codec.tokenizer


def _value(params: object, name: str) -> object:
    if isinstance(params, Mapping):
        return params.get(name)
    return getattr(params, name, None)
