"""Comments beside fields and above them as their text in the API reference."""

import re

from griffe import Attribute, Docstring, Extension, Object

# Behind the code of a line, or alone in it.
COMMENT = re.compile(r"^(?P<code>.*?)\s*(?<!\S)# (?P<text>.+)$")


class FieldComments(Extension):
    """An attribute of a class without docstring gets its comment as one."""

    def on_attribute_instance(self, *, attr: Attribute, **_: object) -> None:
        if attr.docstring is None and isinstance(attr.parent, Object) and attr.parent.is_class:
            if text := comment_of(attr):
                attr.docstring = Docstring(text, parent=attr)


def comment_of(attr: Attribute) -> str:
    """Return the comment of a field: the lines above it, or what stands behind its last line."""
    lines, above = attr.lines_collection[attr.filepath], []  # type: ignore[index]
    assert attr.lineno and attr.endlineno
    for line in reversed(lines[: attr.lineno - 1]):
        found = COMMENT.match(line)
        if not found or found["code"].strip():
            break
        above.insert(0, found["text"])
    behind = COMMENT.match(lines[attr.endlineno - 1])
    return " ".join([*above, *([behind["text"]] if behind else [])])
