"""Threads leave cores to others: OpenMP's own are given back, one that writes has low priority."""

import asyncio
import os
import signal
import threading
import time

import pytest
import torch

from openrlhf.utils.threads import NICE, LoopThread, release_cores, yield_cores


def test_a_thread_that_has_computed_gives_its_cores_back() -> None:
    counts = []

    def compute() -> None:
        torch.set_num_threads(3)
        for _ in range(2):  # threads are made anew
            counts.append(num_threads())
            torch.ones(1_000_000).exp()
            counts.append(num_threads())
            release_cores()
            time.sleep(0.05)  # threads that are told to end take a moment

    num_before = torch.get_num_threads()
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    torch.set_num_threads(num_before)
    first = counts[0]
    assert counts == [first, first + 2, first, first + 2]


def test_a_thread_that_leaves_cores_to_others_does_so_alone() -> None:
    found = []

    def write() -> None:
        yield_cores()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert found == [max(NICE, before)] and os.getpriority(os.PRIO_PROCESS, 0) == before


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("has_begun", [True, False])
def test_work_does_no_more_once_the_thread_that_waited_for_it_was_interrupted(
    has_begun: bool,
) -> None:
    loop, done = LoopThread("test"), list[str]()

    def hold() -> None:
        time.sleep(0.3)  # the other thread waits by now
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.3)

    async def work() -> None:
        if has_begun:
            hold()
        done.append("a prompt was drawn")
        await asyncio.sleep(60)
        done.append("and another")

    if not has_begun:
        loop.loop.call_soon_threadsafe(hold)
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    seen = [*done]
    time.sleep(1)
    assert done == seen
    loop.close()
