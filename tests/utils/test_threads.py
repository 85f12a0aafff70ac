"""OpenMP's threads of a thread that has computed are given back."""

import os
import threading
import time

import torch

from openrlhf.utils.threads import release_cores


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


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))
