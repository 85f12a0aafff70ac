"""Verifiable rewards that look at the text alone: pure functions of a response, 0.0 or 1.0."""

import re
from collections.abc import Sequence

# No two parts of these can match the same text in many ways, which would take long.
FENCE = re.compile(r"(\s*+)(`{3,}+|~{3,}+)[ \t]*+\{?\.?([^\s`{}]*+)[^`]*")
OPENED = re.compile(r"\s*+[^`]++(`{3,}+)[ \t]*+([A-Za-z][\w+#-]*+)\s*")  # behind words
NAMES = {"python": {"python", "python3", "py", "py3"}}


def matches(text: str, pattern: str) -> float:
    """Return 1.0 if a regular expression is found anywhere; `.` matches line ends too."""
    return float(re.search(pattern, text, re.DOTALL) is not None)


def matches_whole(text: str, pattern: str) -> float:
    """Return 1.0 if a regular expression matches the whole text, without blanks around it."""
    return float(re.fullmatch(pattern, text.strip(), re.DOTALL) is not None)


def has_tags_in_order(
    text: str, tags: Sequence[str] = ("think", "answer"), prompt: str = ""
) -> float:
    """Return 1.0 if the text is exactly `<think>...</think> <answer>...</answer>`: every tag once,
    in this order, nothing but blanks between them.

    If the prompt ends with the first opening tag, as the chat templates of some models do, the text
    goes on from there.
    """
    text = prompt[len(prompt.rstrip().removesuffix(f"<{tags[0]}>")) :] + text
    for tag in tags:
        if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
            return 0.0
    return matches_whole(text, r"\s*".join(f"<{re.escape(t)}>.*</{re.escape(t)}>" for t in tags))


def tag_content(text: str, tag: str) -> str | None:
    """Return the text in the last `<tag>...</tag>`; None without one."""
    start, end, _ = text.rpartition(f"</{tag}>")  # behind it nothing closes
    found = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", start + end, re.DOTALL)
    return found[-1].strip() if found else None


def code_block(text: str, language: str = "python") -> str | None:
    """Return the last fenced block of a language, or without one the last block of no language;
    None without either, or if the block is cut off.

    `py` and `python3` are Python, in capitals or not. What a model quotes as output after its
    program, in a block of no language, is not taken for the program, nor is a fence that a sentence
    names before the block itself.
    """
    names = NAMES.get(language.lower(), {language.lower()})
    blocks: dict[bool, str] = {}
    indent, fence, name, lines, behind = "", "", "", list[str](), None
    for line in re.split(r"\r?\n|(?=</think>)", text):
        found, content = FENCE.fullmatch(line), line.rstrip()
        is_quoted = behind and found and found[3] and not any(map(str.strip, lines))
        if found and (not fence or is_quoted):
            indent, fence, name, lines, behind = found[1], found[2], found[3].lower(), [], None
        elif not fence:
            if behind := OPENED.fullmatch(line):
                indent, fence, name, lines = "", behind[1], behind[2].lower(), []
        elif (
            content.endswith(fence)
            and fence not in (last := content.rstrip(fence[0]))
            and (last.strip() or len(last) < len(indent) + 4)  # else it stands in a docstring
        ):
            if last.strip():
                lines.append(last.removeprefix(indent) + "\n")
            if name in names or not name:
                blocks[bool(name)] = "".join(lines)
            fence = ""
        else:
            lines.append(line.removeprefix(indent) + "\n")
    return blocks.get(True, blocks.get(False))
