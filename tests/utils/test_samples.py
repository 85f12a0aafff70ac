"""What the console shows of samples."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import rich.console
import torch

from openrlhf.utils import samples
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.samples import example_of, printable, shortened, show_samples, spread


def sample(reward: float, response: str = "4", label: object = "4") -> Rollout:
    return Rollout(
        sample_id="step1/0/0",
        group_id=0,
        row_id=0,
        token_ids=torch.tensor([7, 8]),
        action_mask=torch.tensor([False, True]),
        logprobs=torch.tensor([-0.5]),
        weight_versions=torch.zeros(1, dtype=torch.int32),
        finish_reason="stop",
        prompt_text="2+2=",
        response_text=response,
        label=label,
        reward=reward,
    )


def test_samples_are_plain_lines_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [replace(sample(1.0), score=0.5), sample(0.25, "[bold]\x1b[31m5\n6")]
    show_samples("step 10", shown, 2, file=Path("run/rollouts/step_000010.parquet"))
    assert capsys.readouterr().out == (
        "step 10: 2 of 2 samples, all in run/rollouts/step_000010.parquet\n"
        "  reward 0.25 | label 4 | 1 tokens, ended by stop\n"
        "  prompt: 2+2=\n"
        "  response: [bold]\\x1b[31m5\n"
        "  6\n"
        "\n"
        "  reward 1 | score 0.5 | label 4 | 1 tokens, ended by stop\n"
        "  prompt: 2+2=\n"
        "  response: 4\n"
    )


def test_a_panel_on_a_terminal_obeys_nothing_that_a_model_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, width=80, markup=False)
    monkeypatch.setattr(samples, "make_console", lambda: console)
    show_samples("step 10", [sample(1.0, "[red]\x1b]0;title\x07\x1b[2J")], 2, file=None)
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert "╭─ step 10: 1 of 1 samples ─" in drawn
    assert r"response: [red]\x1b]0;title\x07\x1b[2J" in drawn
    assert "\x1b]" not in drawn and "\x1b[2J" not in drawn


def test_shown_samples_reach_from_the_lowest_to_the_highest_reward() -> None:
    rewards = (3.0, 1.0, 4.0, 0.0, 2.0)
    for count, expected in ((0, []), (1, [0]), (2, [0, 4]), (3, [0, 2, 4]), (9, [0, 1, 2, 3, 4])):
        assert spread(sorted(rewards), count) == expected


def test_a_hint_shows_a_text_without_spaces() -> None:
    said = example_of(sample(0.0, response="好" * 300, label="\n 4 \n"), None)
    assert said.startswith(f' One of them: "{"好" * 200} ...", label "4", reward 0.')


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = shortened("a" * 300 + "b" * 300)
    assert text == "a" * 200 + " [... 200 characters ...] " + "b" * 200
    assert printable("é漢🙂\u202etxt\x9b1m\t") == r"é漢🙂\u202etxt\x9b1m\t"
