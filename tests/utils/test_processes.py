"""What a process started is found by its mark wherever it went, and may be so many more."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.utils.processes import MARK_VARIABLE, end_marked, marked, new_mark, process_limit

TREE = """
import os, subprocess, sys
def leaf(**settings):
    return subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL, **settings).pid
if len(sys.argv) > 1:
    print(leaf(), leaf(start_new_session=True), flush=True)
    os._exit(0)  # the first has lost its parent, the second has left the session too
words = [sys.executable, sys.argv[0], "left"]
lost = subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout.split()
print(leaf(), leaf(start_new_session=True), *lost, flush=True)
sys.stdin.read()
"""


def test_what_left_its_parent_and_its_session_is_found_and_ended(tmp_path: Path) -> None:
    (tmp_path / "tree.py").write_text(TREE)
    mark = new_mark()
    top = subprocess.Popen(
        [sys.executable, str(tmp_path / "tree.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], MARK_VARIABLE: mark},
        start_new_session=True,
    )
    with top:
        try:
            assert top.stdout is not None
            others = list(map(int, top.stdout.readline().split()))
            assert len(others) == 4 and sorted(marked(mark)) == sorted([top.pid, *others])
            end_marked(mark, but=top.pid)
            assert marked(mark) == [top.pid]
        finally:
            top.kill()


def test_the_limit_on_processes_is_never_over_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (5, 10))
    assert process_limit(10**6) == 10
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (5, resource.RLIM_INFINITY))
    assert process_limit(10**6) > 10**6
