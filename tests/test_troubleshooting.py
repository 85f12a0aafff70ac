"""Every message that the troubleshooting page quotes is printed, from first word to last."""

import ast
import re
from functools import cache

import pytest

from tests.source import ROOT, modules


def templates() -> list[str]:
    """Every text of the package, with an ellipsis for what is filled in."""
    found = []
    for module in modules():
        parts = {
            id(p) for n in ast.walk(module.tree) if isinstance(n, ast.JoinedStr) for p in n.values
        }
        for node in ast.walk(module.tree):
            if isinstance(node, ast.JoinedStr):
                texts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, texts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if id(node) in parts:
                    continue  # a piece of a message is none
                found.append(re.sub(r"\{[\w:%.]*\}", "…", node.value))
    return [re.sub("…+", "…", text.partition("\n")[0]) for text in found]


TEMPLATES = set(templates())
# Those with places to fill in, as the texts between the places.
WORDY = [t.split("…") for t in sorted(TEMPLATES) if "…" in t and re.search(r"[^\W…]", t)]
MAX_DEPTH = 3
TROUBLES = re.findall(
    r"^### (`+)(.+)\1$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE
)


@cache
def is_printed(text: str, depth: int = MAX_DEPTH) -> bool:
    """Whether the whole text is one of the package: a template, in whose places stand an ellipsis,
    nothing, or such texts; two of them where two places meet.
    """
    if text in ("", "…") or text in TEMPLATES:
        return True
    for pieces in WORDY if depth else ():
        if not all(piece in text for piece in pieces):
            continue
        for gap in ("(.*)", "(.*?)"):
            pattern = gap.join(map(re.escape, pieces))
            rest = "(.*)" if depth < MAX_DEPTH else ""
            found = re.fullmatch(pattern + rest, text)
            if found and all(is_printed(part, depth - 1) for part in found.groups()):
                return True
    return False


@pytest.mark.parametrize("message", [text for _, text in TROUBLES])
def test_every_message_of_the_troubleshooting_page_is_printed_as_it_stands(message: str) -> None:
    assert is_printed(message)


def test_the_troubleshooting_page_has_its_messages() -> None:
    assert len(TROUBLES) > 20
