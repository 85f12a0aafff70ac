"""Progress bars: when they are drawn and what they show."""

import io
import time
from collections.abc import Iterator

import pytest
import transformers

from openrlhf.models.loading import load_causal_lm
from openrlhf.utils import progress as bars
from openrlhf.utils.progress import hide_bars, progress, saying_what_is_awaited, tracked


def test_nothing_is_drawn_without_a_terminal(capsys):
    with progress("loading", total=3) as advance:
        advance()
    assert capsys.readouterr() == ("", "")


def test_bars_show_their_work_and_how_much_of_it_is_done(terminal: io.StringIO):
    with progress("updating the policy", 8) as advance, progress("tokenising") as show:
        advance(3)
        show(completed=1, total=200)
        show(completed=10, total=200)
    with progress("again") as advance:  # after the display was closed
        advance(0, total=5)
    for text in ("updating the policy", "3/8", "tokenising", "10/200", "again", "0/5"):
        assert text in terminal.getvalue()


def test_only_work_that_lasts_shows_its_bar(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bars, "DELAY_S", 3600.0)
    with progress("reading", 1) as advance:
        advance()
    assert "reading" not in terminal.getvalue()
    monkeypatch.setattr(bars, "DELAY_S", 0.05)
    with progress("loading", 1):
        deadline = time.monotonic() + 30
        while "loading" not in terminal.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_bar_goes_when_its_work_fails(terminal: io.StringIO):
    def items() -> Iterator[int]:
        yield 1
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        list(tracked(items(), "reading"))
    assert not bars._shared[0].tasks and not bars._shared[0].live.is_started


def test_other_ranks_on_the_terminal_draw_nothing(terminal: io.StringIO, monkeypatch):
    monkeypatch.setattr(bars, "_hidden", [])
    hide_bars()
    with progress("loading", 3) as advance:
        advance()
    assert terminal.getvalue() == ""


def test_loading_a_model_moves_a_bar_with_its_name(terminal: io.StringIO, tiny_model_dir):
    hook = transformers.logging.set_tqdm_hook(None)
    load_causal_lm(tiny_model_dir)
    assert transformers.logging.set_tqdm_hook(hook) is None  # as it was before
    assert f"loading {tiny_model_dir.name}" in terminal.getvalue()


def test_who_does_not_start_is_named_until_it_has(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(bars, "SAY_AFTER_S", 0.1)
    with saying_what_is_awaited("vllm-0 to start: see run/logs/vllm-0*"):
        time.sleep(0.35)  # it is said after 0.1 and 0.2 s
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["waited 0 s for vllm-0 to start: see run/logs/vllm-0*"] * 2
    time.sleep(0.2)
    assert not capsys.readouterr().out
