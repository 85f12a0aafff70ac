"""Comments beside fields and above them as their text in the API reference."""

import re

from griffe import Attribute, Docstring, Extension

# Behind the code of a line, or alone in it.
COMMENT = re.compile(r"^(?P<code>.*?)\s*(?<!\S)# (?P<text>.+)$")


class FieldComments(Extension):
    """An attribute of a class without docstring gets its comment as one."""

    def on_attribute_instance(self, *, attr: Attribute, **_: object) -> None:
        is_field = attr.parent is not None and attr.parent.is_class
        if is_field and attr.docstring is None and (text := comment_of(attr)):
            attr.docstring = Docstring(text[0].upper() + text[1:], parent=attr)


def comment_of(attr: Attribute) -> str:
    """Return the comment of a field: the lines above it, and what stands behind its last line."""
    lines, above = attr.lines_collection[attr.filepath], []  # type: ignore[index]
    assert attr.lineno and attr.endlineno
    for line in reversed(lines[: attr.lineno - 1]):
        found = COMMENT.match(line)
        if not found or found["code"].strip():
            break
        above.insert(0, found["text"])
    behind = COMMENT.match(lines[attr.endlineno - 1])
    return " ".join([*above, *([behind["text"]] if behind else [])])
