"""Bars: when they are drawn, where, what they say, and that they cost nothing."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import rich.console
import transformers

from openrlhf.models.loading import load_causal_lm
from openrlhf.utils import progress as bars
from openrlhf.utils.progress import Screen, counter, progress, tracked
from openrlhf.utils.progress_relay import ProgressRelay, RelayedDisplay
from tests.bars import Recorder, until

FOREVER_S = 3600.0


def test_nothing_is_drawn_where_nobody_watches(capsys):
    with progress("loading", total=3) as advance, counter("rows") as show:
        assert advance is bars.no_advance
        advance()
        show(10, 100)
    assert capsys.readouterr() == ("", "")


def test_a_bar_appears_once_its_work_lasts_and_goes_with_it(show_bars_on):
    display = Recorder()
    show_bars_on(display)
    with progress("reading", 8) as advance:
        until(display.appeared.is_set)  # though nothing is done yet
        advance(3)
        advance(total=9)
        assert display.shown == [("reading", 0, 8), ("reading", 3, 8), ("reading", 4, 9)]
        assert len(display.open) == 1
    assert not display.open


def test_what_is_done_soon_shows_no_bar(show_bars_on):
    display = Recorder(delay_s=FOREVER_S)
    show_bars_on(display)
    before = threading.active_count()
    with counter("reading") as show:
        show(10, 10)
    assert display.shown == []
    until(lambda: threading.active_count() <= before)  # the timer is gone too


def test_a_bar_does_not_appear_after_its_end(show_bars_on):
    display = Recorder(delay_s=0.02)
    show_bars_on(display)
    for _ in range(20):
        with progress("short"):
            time.sleep(0.001)
    num_shown = len(display.shown)
    time.sleep(0.1)
    assert len(display.shown) == num_shown and not display.open


def test_a_bar_goes_when_its_work_fails(show_bars_on):
    display = Recorder()
    show_bars_on(display)

    def items() -> Iterator[int]:
        yield 1
        until(display.appeared.is_set)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        list(tracked(items(), "reading"))
    assert not display.open


def test_a_screen_draws_all_bars_with_what_is_done_of_all():
    text = io.StringIO()
    terminal = rich.console.Console(file=text, force_terminal=True, width=100)
    screen = Screen(lambda: terminal)
    screen.show(1, "loading", 3, 8)
    screen.show(2, "updating the policy", 1, None)
    screen.show(1, "loading", 7, 8)
    screen.hide(1)
    screen.show(2, "updating the policy", 2, 64)
    screen.hide(2)
    screen.hide(2)  # twice is once
    for said in ("loading", "7/8", "updating the policy", "2/64"):
        assert said in text.getvalue()
    screen.show(3, "again", 0, 1)  # a new display after the last one was closed
    screen.hide(3)
    assert "again" in text.getvalue()


def test_loading_a_model_moves_a_bar_with_its_name(show_bars_on, tiny_model_dir):
    display = Recorder()
    show_bars_on(display)
    hook = transformers.logging.set_tqdm_hook(None)
    load_causal_lm(tiny_model_dir)
    assert transformers.logging.set_tqdm_hook(hook) is None  # as it was before
    assert f"loading {tiny_model_dir.name}" in display.descriptions


def test_bars_of_another_process_are_shown_by_the_relay():
    display = Recorder()
    relay = ProgressRelay(display)
    worker = RelayedDisplay(relay.address, "actor")
    worker.show(7, "updating the policy", 3, 64)
    until(display.appeared.is_set)
    assert display.shown == [("updating the policy", 3, 64)]
    worker.hide(7)
    until(lambda: not display.open)
    worker.show(8, "left over", 0, None)
    until(lambda: bool(display.open))
    relay.close()
    assert not display.open
    worker.show(9, "too late", 0, None)  # nobody listens, nothing is raised
    worker.close()
    assert "too late" not in display.descriptions


def test_strangers_draw_nothing():
    display = Recorder()
    relay = ProgressRelay(display)
    stranger = RelayedDisplay(relay.address.__class__("127.0.0.1", relay.address.port, "?"), "x")
    stranger.show(1, "surprise", 0, None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as raw:
        raw.sendto(b"no json \xff", ("127.0.0.1", relay.address.port))
    known = RelayedDisplay(relay.address, "actor")
    known.show(1, "known", 0, None)
    until(display.appeared.is_set)
    for end in (stranger, known, relay):
        end.close()
    assert display.shown == [("known", 0, None)]


@pytest.mark.parametrize("is_relayed", [False, True])
def test_a_move_costs_microseconds(show_bars_on, monkeypatch, is_relayed):
    monkeypatch.setattr(bars, "REFRESH_S", 0.1)  # as it is
    display = Recorder()
    relay = ProgressRelay(display)
    sender = RelayedDisplay(relay.address, "actor")
    show_bars_on(sender if is_relayed else display)
    with progress("updating", 50_000) as advance:
        until(display.appeared.is_set)
        start_s = time.perf_counter()
        for _ in range(50_000):
            advance()
        seconds = time.perf_counter() - start_s
    for end in (sender, relay):
        end.close()
    assert seconds / 50_000 < 20e-6  # 0.3 were seen
