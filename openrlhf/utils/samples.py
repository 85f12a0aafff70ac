"""Samples as a person reads them on the console.

What a model wrote is shown as text: it is no markup, and its control characters, which a terminal
would obey, are spelled out.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import rich.panel
import rich.text

from openrlhf.utils.console import log, make_console, notice
from openrlhf.utils.rollout import Rollout

Item = TypeVar("Item")
MAX_SHOWN = 400  # characters of a prompt or a response
MAX_IN_HINT = 200  # the same in a line


def show_samples(title: str, rollouts: Sequence[Rollout], count: int, *, file: Path | None) -> None:
    """Print `count` scored samples, from the lowest to the highest reward: in a panel on a
    terminal, as plain lines elsewhere and in the log. `file` holds all of them.
    """
    shown = spread(sorted(rollouts, key=lambda rollout: rollout.reward or 0.0), count)
    if not shown:
        return
    others = "" if file is None else f", all in {file}"
    title = f"{title}: {len(shown)} of {len(rollouts)} samples{others}"
    body = "\n\n".join(map(sample_text, shown))
    plain = f"{title}\n{textwrap.indent(body, '  ')}"
    console = make_console()
    if not console.is_terminal:
        notice(plain)
        return
    panel = rich.panel.Panel(rich.text.Text(body), title=rich.text.Text(title), title_align="left")
    console.print(panel, soft_wrap=False)
    log(plain)


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` items, or all, at equal distances, the first and the last among them."""
    if count >= len(items):
        return list(items)
    last = len(items) - 1
    return [items[k * last // max(count - 1, 1)] for k in range(count)]


def sample_text(rollout: Rollout) -> str:
    """Return reward, label, length and end of a sample, its prompt and its response."""
    score = "" if rollout.score is None else f" | score {rollout.score:g}"
    return (
        f"reward {rollout.reward:g}{score} | label {shortened(str(rollout.label))} | "
        f"{rollout.num_actions} tokens, ended by {rollout.finish_reason}\n"
        f"prompt: {shortened(rollout.prompt_text)}\nresponse: {shortened(rollout.response_text)}"
    )


def example_of(rollout: Rollout, file: Path | None) -> str:
    """Return a sentence that shows one sample, and where the others are."""
    response, label = map(_on_one_line, (rollout.response_text, str(rollout.label)))
    others = "" if file is None else f" All are in {file}."
    return f' One of them: "{response}", label "{label}", reward {rollout.reward:g}.{others}'


def _on_one_line(text: str) -> str:
    text = " ".join(text.split())
    return printable(text if len(text) <= MAX_IN_HINT else f"{text[:MAX_IN_HINT]} ...")


def shortened(text: str) -> str:
    """Return the beginning and the end of a long text, as it may be printed."""
    if len(text) > MAX_SHOWN:
        half = MAX_SHOWN // 2
        text = f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
    return printable(text)


def printable(text: str) -> str:
    """Spell out everything that is not printed but obeyed: escape sequences, marks of direction."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )
