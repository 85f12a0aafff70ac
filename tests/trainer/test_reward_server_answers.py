"""Answers that are kept for a second try take little memory, whatever was asked."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from openrlhf.trainer.reward_server import answers as module
from openrlhf.trainer.reward_server.answers import Answers, size_of
from openrlhf.trainer.reward_server.request import MAX_ID_CHARS

MIB = 2**20


def answering(answer):
    """Work that gives this answer and counts how often it was done."""

    async def compute():
        compute.count += 1
        return answer

    compute.count = 0
    return compute


def test_the_largest_answers_stay_below_fifty_megabytes():
    async def fill(answers):
        for number in range(2 * module.MAX_ANSWERS):
            ids = ["\U0001f600" * (MAX_ID_CHARS - 1) + chr(index) for index in range(256)]
            answer = {"rewards": [float(index) for index in range(256)], "ids": ids}
            await answers.get(f"id-{number}", b"body", answering(answer))

    tracemalloc.start()
    try:
        answers = Answers()
        asyncio.run(fill(answers))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert module.MAX_BYTES / 2 < held < 50 * 10**6


def test_the_oldest_answers_go_first_and_their_bytes_with_them(monkeypatch):
    work = answering({"rewards": [1.0], "ids": ["a" * 200]})
    size = size_of({"rewards": [1.0], "ids": ["a" * 200]})
    monkeypatch.setattr(module, "MAX_BYTES", 3 * size)

    async def ask(answers, names):
        for name in names:
            await answers.get(name, b"body", work)

    answers = Answers()
    asyncio.run(ask(answers, "abc" + "abc"))
    assert work.count == 3
    asyncio.run(ask(answers, "d" + "dcb" + "a"))  # a went for d, b for a
    assert work.count == 5
    asyncio.run(ask(answers, "cda"))
    assert work.count == 5


def test_the_size_of_an_answer_counts_its_lists_and_texts():
    assert size_of({"ids": ["a" * 1000] * 3, "rewards": []}) > 3000
    assert size_of({"extra_logs": {"judge": [0.5] * 100}}) > 100 * (8 + 24)


def test_an_answer_under_way_does_not_keep_later_ones_from_being_forgotten(monkeypatch):
    monkeypatch.setattr(module, "MAX_ANSWERS", 2)

    async def ask():
        answers, gate = Answers(), asyncio.Event()

        async def slow():
            await gate.wait()
            return {"rewards": [2.0]}

        first = asyncio.ensure_future(answers.get("slow", b"body", slow))
        await asyncio.sleep(0)
        work = answering({"rewards": [1.0]})
        for name in "abca":
            await answers.get(name, b"body", work)
        gate.set()
        assert await first == {"rewards": [2.0]}
        return work.count

    assert asyncio.run(ask()) == 4  # only one of a, b and c is kept beside the slow one


@pytest.mark.parametrize("num_turns", range(6))
def test_an_answer_whose_client_leaves_as_it_comes_is_forgotten_in_its_turn(monkeypatch, num_turns):
    monkeypatch.setattr(module, "MAX_BYTES", 1)  # nothing is kept for long

    async def ask():
        answers, gate = Answers(), asyncio.Event()

        async def gated():
            await gate.wait()
            return {"rewards": [1.0]}

        left = asyncio.ensure_future(answers.get("left", b"body", gated))
        await asyncio.sleep(0.01)
        gate.set()
        for _ in range(num_turns):  # of the event loop, between the answer and the client's end
            await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        work = answering({"rewards": [2.0]})
        return await answers.get("left", b"other", work)  # the id is free again

    assert asyncio.run(ask()) == {"rewards": [2.0]}
