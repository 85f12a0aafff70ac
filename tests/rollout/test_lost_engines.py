"""Engines that are lost while they sample: others, or the ones in their place, sample instead."""

import asyncio
from collections import Counter
from functools import partial

import pytest

from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.errors import EngineError, LostEngineError, LostRankError
from openrlhf.rollout.engine_pool import Dispatcher


class Engine:
    """Samples at once, but is lost with what it samples when the test says so."""

    def __init__(self) -> None:
        self.is_lost = False
        self.failure: EngineError | None = None
        self.waits_for: LostRankError | None = None
        self.num_taken = 0
        self.lost = asyncio.Event()

    @property
    def is_up(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return not self.is_lost

    def lose(self) -> None:
        self.is_lost = True
        self.lost.set()

    async def sample(self, request: GenerationRequest) -> list[Completion]:
        self.num_taken += 1
        if not self.is_lost and request.request_id.startswith("long"):
            await self.lost.wait()
        if self.is_lost:
            raise LostEngineError("vllm-0 died: pid 7 was killed by SIGKILL")
        return [Completion((5,), (-0.5,), "stop", 3)] * request.sampling.num_samples


def asked(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1, 2), SamplingSettings(num_samples=2))


def test_what_a_lost_engine_had_is_sampled_by_another_once() -> None:
    async def run() -> None:
        engines = [Engine(), Engine()]
        dispatcher = Dispatcher(engines)
        names = [f"long {k}" for k in range(6)]
        work = [asyncio.ensure_future(dispatcher.sample(asked(name))) for name in names]
        await asyncio.sleep(0.01)
        assert [engine.num_taken for engine in engines] == [3, 3]
        engines[0].lose()
        engines[1].lost.set()
        found = await asyncio.gather(*work)
        assert Counter(map(len, found)) == {2: 6}
        assert engines[0].num_taken == 3 and dispatcher._loads == [0, 0]
        await dispatcher.sample(asked("short"))
        assert engines[0].num_taken == 3  # it is not asked while it is away
        engines[0].is_lost = False
        await dispatcher.sample(asked("short"))
        assert engines[0].num_taken == 4

    asyncio.run(run())


def letters(text: str, version: int = 3, reason: str = "") -> Completion:
    """A token for each letter, with log-probs that tell them apart."""
    ids = tuple(map(ord, text))
    return Completion(ids, tuple(-float(i) for i in ids), reason, version)


def test_a_response_is_its_beginnings_and_its_rest_with_the_versions_of_each() -> None:
    whole = letters("ab", 3).followed_by(letters("c", 4)).followed_by(letters("de", 4, "stop"))
    assert (whole.token_ids, whole.logprobs) == (
        letters("abcde").token_ids,
        letters("abcde").logprobs,
    )
    assert (whole.finish_reason, whole.token_versions) == ("stop", (3, 3, 4, 4, 4))
    assert letters("ab").followed_by(letters("c")) == letters("abc")
    assert whole.followed_by(letters("", reason="length")).finish_reason == "length"


class Speller(Engine):
    """Samples the letters of a text; it is lost when it has told of some of them."""

    def __init__(self, told: dict[int, Completion] | None = None, version: int = 3) -> None:
        super().__init__()
        self.told, self.version = told, version
        self.asked: list[GenerationRequest] = []

    async def sample(self, request: GenerationRequest) -> list[Completion]:
        self.asked.append(request)
        if self.told is not None:
            self.is_lost, error = True, LostEngineError("vllm-0 died")
            error.made, self.told = self.told, None
            raise error
        num_known = len(request.prompt_token_ids) - 2
        text = "hello"[num_known:][: request.sampling.max_new_tokens]
        return [letters(text, self.version, "stop")] * request.sampling.num_samples


def spelled(
    engines: list[Engine], *, may_mix: bool = False, **sampling: object
) -> list[Completion]:
    settings = SamplingSettings(num_samples=3, max_new_tokens=5, **sampling)
    request = GenerationRequest("step1/7", (1, 2), settings)
    return asyncio.run(Dispatcher(engines, may_mix=may_mix).sample(request, home=0))


def test_what_is_known_of_a_lost_response_is_not_sampled_again() -> None:
    told = {0: letters("hel"), 2: letters("hello", reason="length")}
    lost, up = Speller(told), Speller()
    found = spelled([lost, up], seed=5)
    assert [each.token_ids for each in found] == [letters("hello").token_ids] * 3
    assert [each.finish_reason for each in found] == ["stop", "stop", "length"]
    first, second = up.asked  # the third one was whole
    assert first.prompt_token_ids == (1, 2, *letters("hel").token_ids)
    assert (first.sampling.max_new_tokens, first.sampling.num_samples) == (2, 1)
    assert (second.prompt_token_ids, second.sampling.seed) == ((1, 2), 6)
    assert first.sampling.seed not in (5, 6, 7)
    assert {first.request_id, second.request_id} == {"step1/7/0", "step1/7/1"}


def test_engines_may_be_lost_one_after_the_other_in_the_middle_of_a_response() -> None:
    engines = [Speller({k: letters("h") for k in range(3)}), Speller({0: letters("el")}), Speller()]
    found = spelled(engines)
    assert [each.token_ids for each in found] == [letters("hello").token_ids] * 3


@pytest.mark.parametrize(("may_mix", "versions"), [(True, (3, 4, 4, 4, 4)), (False, (4,) * 5)])
def test_a_response_is_of_several_policies_only_where_that_is_allowed(
    may_mix: bool, versions: tuple[int, ...]
) -> None:
    engines = [Speller({k: letters("h") for k in range(3)}), Speller(version=4)]
    assert {each.token_versions for each in spelled(engines, may_mix=may_mix)} == {versions}


def test_a_request_that_is_cancelled_while_others_finish_it_waits_for_each_engine() -> None:
    class Slow(Speller):
        async def sample(self, request: GenerationRequest) -> list[Completion]:
            self.asked.append(request)
            number = len(self.asked)
            try:
                await asyncio.sleep(30)
            finally:  # the engine takes a while to stop it
                await asyncio.sleep(0.05 * number)
            raise AssertionError

    async def run() -> None:
        slow = Slow()
        dispatcher = Dispatcher([Speller({k: letters("h") for k in range(3)}), slow])
        settings = SamplingSettings(num_samples=3, max_new_tokens=5)
        asked = dispatcher.sample(GenerationRequest("step1/7", (1, 2), settings), home=0)
        work = asyncio.ensure_future(asked)
        while len(slow.asked) < 3:
            await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.wait([work])
        assert work.cancelled() and dispatcher._loads == [0, 0]

    asyncio.run(run())


def test_a_response_that_a_text_ends_is_sampled_anew_and_greedy_ones_once() -> None:
    told = {0: letters("hel")}
    up = Speller()
    assert len(spelled([Speller(told), up], stop=("lo",))) == 3
    assert [each.prompt_token_ids for each in up.asked] == [(1, 2)]
    up = Speller()
    assert len(spelled([Speller(told), up], temperature=0.0)) == 3
    assert [len(each.prompt_token_ids) for each in up.asked] == [5]


def test_an_engine_that_waits_for_a_lost_rank_is_not_waited_for() -> None:
    async def run() -> None:
        lost, up = Engine(), Engine()
        alone = asyncio.ensure_future(Dispatcher([lost]).sample(asked("long")))
        both = Dispatcher([lost, up])
        await asyncio.sleep(0.01)
        lost.lose()
        lost.waits_for = LostRankError("actor rank 0 of 1 died")
        with pytest.raises(LostRankError, match="actor rank 0"):
            await asyncio.wait_for(alone, 5)
        assert len(await both.sample(asked("short"))) == 2  # the other one has its weights

    asyncio.run(run())


def test_a_single_engine_is_waited_for() -> None:
    async def run() -> None:
        engine = Engine()
        work = asyncio.ensure_future(Dispatcher([engine]).sample(asked("long")))
        await asyncio.sleep(0.01)
        engine.lose()
        await asyncio.sleep(0.1)
        assert not work.done() and engine.num_taken == 1
        engine.is_lost = False  # the event stays set: the next sample comes at once
        assert len(await work) == 2 and engine.num_taken == 2

    asyncio.run(run())


def test_an_engine_that_cannot_be_replaced_ends_the_wait() -> None:
    async def run() -> None:
        engine = Engine()
        work = asyncio.ensure_future(Dispatcher([engine, Engine()]).sample(asked("long")))
        await asyncio.sleep(0.01)
        engine.failure = EngineError("3 restart(s) of vllm within an hour are allowed")
        engine.lose()
        with pytest.raises(EngineError, match=r"3 restart\(s\) of vllm"):
            await work

    asyncio.run(run())


def test_an_engine_of_this_process_that_has_failed_is_not_asked_for_ever() -> None:
    class Failed(VLLMEngine):
        def __init__(self) -> None:
            self._end = RuntimeError("CUDA error: out of memory")

        async def sample(self, request: GenerationRequest) -> list[Completion]:
            self._check_is_up()
            return []

    async def run() -> None:
        with pytest.raises(LostEngineError, match="is down: CUDA error: out of memory"):
            await asyncio.wait_for(Dispatcher([Failed()]).sample(asked("short")), 5)

    asyncio.run(run())


def test_turns_of_an_agent_stay_with_its_engine_while_that_is_up() -> None:
    async def run() -> None:
        engines = [Engine(), Engine()]
        second = partial(Dispatcher(engines).sample, home=1)
        for _ in range(3):
            await second(asked("short"))
        engines[1].lose()
        await second(asked("short"))
        engines[1].is_lost = False
        await second(asked("short"))
        assert [engine.num_taken for engine in engines] == [1, 5]

    asyncio.run(run())
