"""One episode: what is asked for, what was sampled in it token by token, its result, and the engine
that its code sees.

What the engines of a run do not do is refused by name, never ignored: the trainer's log-probs are
taken with the run's temperature, and a sample drawn otherwise would silently be off-policy.
"""

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from openrlhf.engines.base import SEED_BITS, Completion, GenerationRequest, SamplingSettings
from openrlhf.errors import EngineError
from openrlhf.utils.agent import (
    AgentError,
    BadAnswerError,
    ContextFullError,
    OpenAISession,
    SamplingParams,
    as_number,
    check_keys,
    flag_of,
)
from openrlhf.utils.images import ImageProcessor, Picture, PictureError, read_picture
from openrlhf.utils.rollout import PromptRecord, checked_arrays
from openrlhf.utils.tokenizer import TextEncoder, Tokenizer, decode_rest, outside_vocabulary

_PLAIN_START = "\n"  # text before feedback, so that it is encoded as a continuation
FIXED = ("temperature", "top_p", "repetition_penalty")  # those of the run
# What a run does without, of sampling and of the OpenAI API: refused unless it asks for nothing, so
# is unset, zero, empty or as below.
UNSUPPORTED = (
    *("n", "best_of", "top_k", "min_p", "min_tokens", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "bad_words", "allowed_token_ids", "ignore_eos", "use_beam_search"),
    *("structured_outputs", "guided_decoding", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "response_format", "functions", "function_call", "modalities", "documents"),
    *("chat_template", "chat_template_kwargs", "echo", "continue_final_message", "top_logprobs"),
    *("truncate_prompt_tokens", "prompt_logprobs"),
)
NEUTRAL: dict[str, object] = {
    **{"n": 1, "best_of": 1, "top_k": -1},
    **{"response_format": {"type": "text"}, "modalities": ["text"]},
}


@dataclass(frozen=True)
class AgentSetup:
    """Settings of an agent worker, with the deadline of every wait.

    Example: `AgentSetup("agent.py", tokenizer, vocab_size=151_936, max_length=4096)`
    """

    path: str  # of the agent file
    tokenizer: Tokenizer
    vocab_size: int
    max_length: int  # tokens of an episode: prompt, turns and feedback
    num_tasks: int = 128  # episodes that a worker runs at once
    max_steps: int = 10_000  # turns of an episode
    step_timeout_s: float = 300.0  # of one call of the environment
    episode_timeout_s: float = 3600.0  # of all turns together, generation included
    image_processor: ImageProcessor | None = None  # of a policy that sees images
    may_mix: bool = False  # whether weights may change under an episode


@dataclass(frozen=True)
class EpisodeRequest:
    """One sample of one prompt, to be acted out.

    Example: `EpisodeRequest("step3/17/0", prompt, SamplingSettings(max_new_tokens=256))`
    """

    sample_id: str
    prompt: PromptRecord
    sampling: SamplingSettings


@dataclass
class Segment:
    """A run of tokens the policy went through without a break; T tokens, A of them sampled.

    A prompt that does not begin with a segment's tokens (a template that rewrites history, a
    branch) begins one of its own.

    Example: prompt [7, 8] sampled [9, 2], then prompt [7, 8, 9, 2, 5] sampled [4] is one segment,
    `token_ids` [7, 8, 9, 2, 5, 4] with `action_mask` [F, F, T, T, F, T].
    """

    token_ids: list[int]  # T
    action_mask: list[bool]  # T
    num_prompt_tokens: int  # before the first sampled one
    logprobs: list[float] = field(default_factory=list)  # A
    weight_versions: list[int] = field(default_factory=list)  # A
    num_turns: int = 0
    is_truncated: bool = False
    images: tuple[Picture, ...] = ()  # whose placeholders the tokens have, in order

    def begins(self, prompt_token_ids: Sequence[int], images: Sequence[Picture]) -> bool:
        """Return True if a prompt begins with these tokens and shows the same images there."""
        is_same_text = list(prompt_token_ids[: len(self.token_ids)]) == self.token_ids
        return is_same_text and tuple(images[: len(self.images)]) == self.images

    def extend(
        self, prompt_token_ids: Sequence[int], completion: Completion, images: tuple[Picture, ...]
    ) -> None:
        """Append what stands between the last turn and this one, and this turn; `images` are those
        of the whole prompt.
        """
        self.images = images
        between = prompt_token_ids[len(self.token_ids) :]
        self.token_ids += [*between, *completion.token_ids]
        self.action_mask += [False] * len(between) + [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.weight_versions += completion.token_versions
        self.num_turns += 1


@dataclass(frozen=True)
class EpisodeResult:
    """The result of an episode that has a reward.

    Example: `EpisodeResult((segment,), reward=1.0, seconds=2.5)`
    """

    segments: tuple[Segment, ...]
    reward: float
    score: float | None = None
    extra_logs: dict[str, float] = field(default_factory=dict)
    is_truncated: bool = False
    seconds: float = 0.0

    @property
    def num_turns(self) -> int:
        """Return the number of sampled turns."""
        return sum(segment.num_turns for segment in self.segments)


class Episode:
    """Records every turn of a running episode; turns may come from several threads."""

    def __init__(
        self,
        request: EpisodeRequest,
        setup: AgentSetup,
        ask: Callable[[str, GenerationRequest], Future[Completion]],
    ) -> None:
        """`ask` sends an episode's request to the engine; cancelling its future stops it."""
        self.request = request
        self.setup = setup
        self.ask = ask
        self.segments: list[Segment] = []
        self.answers: list[object] = []  # put into the result queue
        self.engine_error: EngineError | None = None  # ends the run, whatever user code makes of it
        self.images = [*request.prompt.images]  # whose placeholders prompts may have, in order
        self.has_joined = False  # True once there are images of feedback among them
        self.sessions: list[object] = []  # of clients; they live as long as the episode
        self.num_requests = 0
        self.is_closed = False
        self._lock = threading.Lock()

    def record(
        self,
        prompt_token_ids: Sequence[int],
        completion: Completion,
        images: Sequence[Picture] = (),
        *,
        fills_context: bool = True,
    ) -> None:
        """Note a turn; EngineError for an impossible one, AgentError after the end.

        `images` are those of the prompt. `fills_context`: the turn had all the room there was, so
        that cutting it cut the episode.
        """
        ids, logprobs = completion.token_ids, completion.logprobs
        checked_arrays(self.request.sample_id, ids, logprobs, vocab_size=self.setup.vocab_size)
        prompt = list(prompt_token_ids)
        with self._lock:
            self.check_open()
            begun = [s for s in self.segments if s.begins(prompt, images)]
            if not begun:
                begun = [Segment(prompt.copy(), [False] * len(prompt), len(prompt))]
                self.segments += begun
            segment = max(begun, key=lambda segment: len(segment.token_ids))
            segment.extend(prompt, completion, tuple(images))
            segment.is_truncated |= fills_context and completion.finish_reason == "length"

    def next_number(self) -> int:
        """Return the number of the next turn, counted from 1; from any thread."""
        with self._lock:
            self.num_requests += 1
            return self.num_requests

    def check_open(self) -> None:
        """Raise AgentError when the episode has ended."""
        if self.is_closed:
            raise AgentError(f"episode {self.request.sample_id} has ended", "episode_over")

    def close(self) -> None:
        """End the episode: refuse later turns."""
        with self._lock:
            self.is_closed = True


def result_of(episode: Episode, answer: object, outside: Episode) -> EpisodeResult:
    """Return the result of a closed episode whose `execute` returned `answer`; raises AgentError.

    `outside` recorded the turns that belong to no episode by their task.
    """
    path = episode.setup.path
    if answer is None and episode.answers:
        answer = episode.answers[-1]
    segments = take_segments(episode, answer, outside)
    if not segments:
        message = f"{path}: the episode ended without a sampled token"
        raise AgentError(message, "no_tokens")
    try:
        return scored(segments, answer)
    except BadAnswerError as error:
        raise BadAnswerError(f"{path}: {error}") from error


def take_segments(episode: Episode, answer: object, outside: Episode) -> tuple[Segment, ...]:
    """Return the samples of an episode.

    Tasks of a server sample for all episodes: an answer that names tokens gets exactly those, any
    other all that its own tasks have sampled.
    """
    named = named_tokens(answer)
    own, shared = episode.segments, outside.segments
    if named is not None and (not own or shared):
        for segment in [*own, *shared]:
            if (segment.token_ids, segment.action_mask) == named:
                outside.segments = [s for s in shared if s is not segment]
                return (segment,)
    return tuple(own)


def named_tokens(answer: object) -> tuple[list[int], list[bool]] | None:
    """Return tokens and mask of an answer's observation_tokens and action_ranges, if any."""
    ids = answer.get("observation_tokens") if isinstance(answer, Mapping) else None
    if not isinstance(ids, (list, tuple)):
        return None
    try:
        ranges = list(answer["action_ranges"])  # type: ignore[index]
        mask = [False] * ranges[-1][1]
        for start, stop in ranges:
            mask[start:stop] = [True] * (stop - start)
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return list(ids[: len(mask)]), mask


EXECUTE_KEYS = ("reward", "rewards", "score", "scores", "extra_logs", "truncated")


def scored(segments: tuple[Segment, ...], answer: object) -> EpisodeResult:
    """Return the result of an answer; raises BadAnswerError when it has no reward."""
    if not isinstance(answer, Mapping):
        raise BadAnswerError(
            f"execute answered a {type(answer).__name__}. Return a dict with reward."
        )
    check_keys(answer, EXECUTE_KEYS)
    score = one_of(answer, "score")
    logs = {} if answer.get("extra_logs") is None else answer["extra_logs"]
    is_cut = answer.get("truncated") is not None and flag_of(answer, "truncated")
    if not isinstance(logs, Mapping):
        raise BadAnswerError(f"extra_logs is a {type(logs).__name__}, not a dict")
    return EpisodeResult(
        segments,
        reward=as_number(one_of(answer, "reward"), "reward"),
        score=None if score is None else as_number(score, "scores"),
        extra_logs={
            str(name): as_number(value, f"extra_logs[{name!r}]") for name, value in logs.items()
        },
        is_truncated=is_cut or any(segment.is_truncated for segment in segments),
    )


def one_of(answer: Mapping[str, object], name: str) -> object:
    """Return the value under a name, or under its plural."""
    value = answer.get(name)
    return answer.get(f"{name}s") if value is None else value


CURRENT: contextvars.ContextVar[Episode | None] = contextvars.ContextVar("episode")


def named_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task:
    """Make a task that carries the name of its episode; task factory of the workers' loops.

    A task that no other began (a server's) may work for any episode, and belongs to none.
    """
    context = contextvars.copy_context()
    if asyncio.current_task(loop) is None:
        context.run(CURRENT.set, None)
    task: asyncio.Task = context.run(partial(asyncio.Task, coroutine, loop=loop, **options))
    episode = context.get(CURRENT, None)
    if episode is not None:
        task.set_name(episode.request.sample_id)
    return task


def current_episode() -> Episode:
    """Return the episode that the running task belongs to; AgentError outside of one."""
    episode = CURRENT.get(None)
    if episode is None:
        raise AgentError(
            "the engine was called outside of an episode. Call it in execute, in its tasks or in "
            "asyncio.to_thread."
        )
    return episode


class ResultQueue:
    """The queue of the older executors: what is put becomes the result of the running episode."""

    async def put(self, answer: object) -> None:
        """Note the result of the episode."""
        self.put_nowait(answer)

    def put_nowait(self, answer: object) -> None:
        """Note the result of the episode."""
        current_episode().answers.append(answer)


class TextCodec:
    """A tokenizer as episodes need it; one for each thread, for tokenizers are not shared."""

    def __init__(self, tokenizer: Tokenizer, processor: ImageProcessor | None = None) -> None:
        self.tokenizer, self.processor = tokenizer, processor
        self.encoder = TextEncoder(tokenizer)

    def encode_prompt(self, text: str, episode: Episode) -> tuple[list[int], list[Picture]]:
        """Return the ids of a prompt, the data set's own where the text is, and the images that it
        shows: the first ones of the episode.
        """
        prompt = episode.request.prompt
        if text == prompt.prompt_text:
            return list(prompt.prompt_token_ids), [*prompt.images]
        ids = self.encoder.encode_prompt(text)
        # What feedback has added may stand in a prompt that is not the first.
        images = episode.images if episode.has_joined else prompt.images
        shown = [*images[: self.num_placeholders(ids)]]
        return self.expanded(ids, shown), shown

    def prompt_ids(self, text: str, episode: Episode) -> list[int]:
        """Return the ids of a prompt alone."""
        return self.encode_prompt(text, episode)[0]

    def encode_continuation(self, text: str, images: Sequence[Picture] = ()) -> list[int]:
        """Return the ids of text that follows other text: no BOS, no prefix space."""
        return self.expanded(self.encoder.encode_segments([_PLAIN_START, text])[1], images)

    def num_placeholders(self, token_ids: Sequence[int]) -> int:
        """Return the number of ids that stand for an image, or for a part of one."""
        return 0 if self.processor is None else [*token_ids].count(self.processor.image_token_id)

    def expanded(self, token_ids: Sequence[int], images: Sequence[Picture]) -> list[int]:
        """Return the ids with as many placeholders as each image has tokens, instead of one."""
        if self.processor is None and images:
            raise BadAnswerError("there are images, and the policy is a model of texts alone")
        if self.processor is None or len(token_ids) == 0:
            return [*token_ids]
        try:
            return self.processor.expand(token_ids, images)
        except PictureError as error:
            token = self.tokenizer.convert_ids_to_tokens(self.processor.image_token_id)
            raise BadAnswerError(f"{error}. Write one {token} for each image.") from error

    def images_in(self, token_ids: Sequence[int], images: Sequence[Picture]) -> Sequence[Picture]:
        """Return these images if expanded ids show all of them, or none where they show none;
        raises BadAnswerError: ids do not say which of several they show.
        """
        if self.processor is None or self.num_placeholders(token_ids) == 0:
            return ()
        try:
            self.processor.placeholders(token_ids, images)
        except PictureError as error:
            raise BadAnswerError(
                f"the prompt does not show all images of the episode, each once: {error}. Give "
                "{'multi_modal_data': {'image': [...]}} beside it."
            ) from error
        return images

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids that stand behind others."""
        [text] = decode_rest(self.tokenizer, [token_ids], skip_special_tokens=skip_special_tokens)
        return text


async def sample_turn(
    episode: Episode,
    prompt_ids: Sequence[int],
    params: object,
    codec: TextCodec,
    images: Sequence[Picture] | None = None,
) -> Completion:
    """Sample and record one turn of an episode, on any thread and loop. `images` are those of the
    prompt; None: all those of the episode, if it shows any.

    Raises AgentError for what cannot be asked, EngineError.
    """
    episode.check_open()
    vocab_size = episode.setup.vocab_size
    check_prompt(prompt_ids, vocab_size=vocab_size)
    max_length = episode.setup.max_length
    room = max_length - len(prompt_ids)
    if room < 1:
        raise ContextFullError(
            f"a prompt of {len(prompt_ids)} tokens fills the context of {max_length}"
        )
    run = episode.request
    settings = turn_settings(params, run.sampling, room=room, vocab_size=vocab_size)
    number = episode.next_number()
    if settings.seed == run.sampling.seed:  # the turn has not chosen one
        settings = settings.for_part(number)
    name = f"{run.sample_id}/t{number}"
    seen = tuple(codec.images_in(prompt_ids, episode.images) if images is None else images)
    request = GenerationRequest(name, tuple(prompt_ids), settings, seen)
    try:
        completion = await asyncio.wrap_future(episode.ask(run.sample_id, request))
        fills_context = settings.max_new_tokens == room
        episode.record(prompt_ids, completion, seen, fills_context=fills_context)
    except EngineError as error:
        episode.engine_error = error
        raise
    return completion


def check_prompt(prompt_ids: Sequence[int], *, vocab_size: int) -> None:
    """Raise BadAnswerError for what are no token ids."""
    bad = outside_vocabulary(prompt_ids, vocab_size)
    if bad or not prompt_ids:
        seen = repr(bad[0]) if bad else "no token"
        raise BadAnswerError(
            f"the prompt has {seen}. Give text or token ids of 0..{vocab_size - 1}."
        )


@dataclass(frozen=True)
class PendingTurn:
    """A turn on its way: await it, or iterate over it once, as over vLLM's generate."""

    coroutine: Coroutine[Any, Any, Any]

    def __await__(self) -> Generator[Any, None, Any]:
        return self.coroutine.__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield await self.coroutine


class AgentEngine:
    """The `llm_engine` of agents."""

    def __init__(self, codec: TextCodec, open_session: Callable[..., OpenAISession]) -> None:
        self._codec = codec
        self._open_session = open_session
        # Record what tasks of no episode sample, for answers that name such tokens: one for each
        # kind of the running episodes, which are those of training and of an evaluation.
        self.outside: dict[SamplingSettings, Episode] = {}

    def generate(
        self,
        prompt: object = None,
        sampling_params: object = None,
        request_id: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **ignored: object,
    ) -> PendingTurn:
        """Sample one turn of the running episode: await it, or iterate over it with `async for`.

        `prompt` is text, token ids or {"prompt_token_ids": ids}; with "multi_modal_data" beside
        them, these are its images, else all those of the episode, if it shows any. The result has
        `.outputs[0]` with `.token_ids`, `.text`, `.logprobs` and `.finish_reason`, and
        `.prompt_token_ids`.
        """
        episode = CURRENT.get(None) or self._only_outside() or current_episode()
        wanted = prompt if prompt_token_ids is None else prompt_token_ids
        images, encode = images_of(wanted), self._codec.encoder.encode_prompt
        if images is None:
            encode = partial(self._codec.prompt_ids, episode=episode)
        ids, text = prompt_ids_of(wanted, encode)
        if images is not None and self._codec.num_placeholders(ids) == len(images):
            ids = self._codec.expanded(ids, images)
        return PendingTurn(self._generate(episode, ids, text, sampling_params, images))

    def _only_outside(self) -> Episode | None:
        """Return the one that records turns of no episode; raise AgentError where there are two."""
        if len(self.outside) > 1:
            raise AgentError(
                "a task of no episode sampled while training and an evaluation run side by side "
                "with different settings. Call the engine in execute, give servers the address of "
                "llm_engine.open_session, or evaluate with training's settings (--eval_temperature)"
            )
        return next(iter(self.outside.values()), None)

    async def _generate(
        self,
        episode: Episode,
        ids: list[int],
        text: str | None,
        params: object,
        images: Sequence[Picture] | None,
    ) -> SimpleNamespace:
        completion = await sample_turn(episode, ids, params, self._codec, images)
        is_bare = bool(named_values(params).get("skip_special_tokens"))
        said = self._codec.decode(completion.token_ids, skip_special_tokens=is_bare)
        return vllm_result(ids, text, said, completion)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a whole prompt; those of the data set where the text is its own. Before
        the first turn, the images that it does not show are none of the episode's.
        """
        episode = current_episode()
        ids, shown = self._codec.encode_prompt(text, episode)
        if not (episode.num_requests or episode.has_joined):
            episode.images = shown
        return ids

    def encode_feedback(self, text: str, images: Sequence[object] = ()) -> list[int]:
        """Return the ids of text that follows other text; special tokens keep their meaning. It has
        a placeholder for each of the images, which join those of the episode.
        """
        pictures = [read_image(image) for image in images]
        ids = self._codec.encode_continuation(text, pictures)
        if pictures:
            current_episode().images += pictures
            current_episode().has_joined = True
        return ids

    def decode_feedback(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens."""
        return self._codec.decode(token_ids)

    def open_session(self, sampling_params: object = None) -> OpenAISession:
        """Return the address under which OpenAI clients talk to the policy in this episode."""
        params = {k: v for k, v in named_values(sampling_params).items() if v is not None}
        return self._open_session(current_episode(), params)

    async def get_tokenizer(self) -> Tokenizer:
        """Return the policy's tokenizer."""
        return self._codec.tokenizer


def images_of(prompt: object) -> list[Picture] | None:
    """Return the images of a prompt in vLLM's form; None where it says nothing of them."""
    media = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if media is None:
        return None
    given = media.get("image") if isinstance(media, Mapping) else None
    return [read_image(image) for image in (given if isinstance(given, list) else [given])]


def read_image(value: object, *, allow_paths: bool = True) -> Picture:
    """Return an image of user code: Pillow's, encoded bytes, a path, or base64; raises
    BadAnswerError.
    """
    try:
        return read_picture(value, allow_paths=allow_paths)
    except PictureError as error:
        raise BadAnswerError(f"an image cannot be read: {error}") from error


def vllm_result(
    prompt_ids: list[int], prompt: str | None, text: str, completion: Completion
) -> SimpleNamespace:
    """Return a turn under the names of vLLM's RequestOutput."""
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    output = SimpleNamespace(
        index=0,
        text=text,
        token_ids=list(completion.token_ids),
        finish_reason=completion.finish_reason,
        stop_reason=None,
        logprobs=[
            {token: SimpleNamespace(logprob=logprob, rank=None, decoded_token=None)}
            for token, logprob in pairs
        ],
        cumulative_logprob=sum(completion.logprobs),
    )
    return SimpleNamespace(
        prompt=prompt, prompt_token_ids=prompt_ids, outputs=[output], finished=True
    )


def first_params(sampling: SamplingSettings, max_length: int) -> SamplingParams:
    """Return the sampling of an episode's start: the run's, with all of the context to fill."""
    return SamplingParams(
        max_tokens=max_length,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
    )


def turn_settings(
    params: object, run: SamplingSettings, *, room: int, vocab_size: int
) -> SamplingSettings:
    """Return the run's settings with what a turn may choose itself; at most `room` tokens.

    `params` is SamplingParams of ours or of vLLM, a mapping, or None. Raises BadAnswerError.
    """
    wanted = named_values(params)
    for name in FIXED:
        value = wanted.get(name)
        if value is not None and value != getattr(run, name):
            raise BadAnswerError(
                f"sampling_params.{name} is {value!r}, and the run samples with "
                f"{getattr(run, name)}. Leave it as it is."
            )
    for name in UNSUPPORTED:
        if wanted.get(name) and wanted[name] != NEUTRAL.get(name):
            raise BadAnswerError(
                f"sampling_params.{name} is {wanted[name]!r}, which engines of a run do not do. "
                "Leave it out."
            )
    limit = wanted.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise BadAnswerError(f"sampling_params.max_tokens is {limit!r}. Use a number above 0.")
    stops = wanted.get("stop_token_ids") or []
    if not isinstance(stops, (list, tuple)) or outside_vocabulary(stops, vocab_size):
        raise BadAnswerError(
            f"sampling_params.stop_token_ids is {stops!r}. Give a list of ids of "
            f"0..{vocab_size - 1}."
        )
    seed = wanted.get("seed")
    if seed is not None and not (type(seed) is int and 0 <= seed < 2**SEED_BITS):
        raise BadAnswerError(
            f"sampling_params.seed is {seed!r}. Give a whole number of 0..2**{SEED_BITS} - 1."
        )
    settings = replace(
        run,
        num_samples=1,
        max_new_tokens=room if limit is None else min(limit, room),
        seed=run.seed if seed is None else seed,
    )
    return settings.stopping_at(stop_texts(wanted), stops)


def named_values(params: object) -> dict[str, Any]:
    """Return the parameters by name, as far as they are known here."""
    names = (*FIXED, *UNSUPPORTED, "max_tokens", "stop_token_ids", "stop", "seed")
    names = (*names, "skip_special_tokens")
    if isinstance(params, Mapping):
        return {name: params[name] for name in names if name in params}
    return {name: getattr(params, name) for name in names if hasattr(params, name)}


def stop_texts(params: Mapping[str, Any]) -> list[str]:
    """Return the texts that end a turn besides those of the run; raises BadAnswerError."""
    stop = params.get("stop") or []
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, (list, tuple)) or not all(t and isinstance(t, str) for t in texts):
        raise BadAnswerError(f"sampling_params.stop is {stop!r}. Give a text, or a list of texts.")
    return [*texts]


def prompt_ids_of(
    prompt: object, encode: Callable[[str], list[int]]
) -> tuple[list[int], str | None]:
    """Return the token ids of a prompt in any of vLLM's forms, and its text where it was text."""
    text = None
    if isinstance(prompt, Mapping):
        text = prompt.get("prompt")
        prompt = prompt.get("prompt_token_ids", text)
    if isinstance(prompt, str):
        return encode(prompt), prompt
    if isinstance(prompt, Sequence):
        return list(prompt), text
    if hasattr(prompt, "tolist"):  # a tensor or an array
        return list(prompt.tolist()), text
    raise BadAnswerError(
        f"generate was given a {type(prompt).__name__}. Give text, token ids or "
        '{"prompt_token_ids": ids}.'
    )
