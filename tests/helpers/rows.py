"""Rows that every supervised method can read."""

from tests.tiny import CHAT_TEMPLATE


def make_row(i: int) -> dict:
    """Make a row that every supervised method can read."""
    return {
        "input": f"{i}+{i}=",
        "output": f"{2 * i}, which is even" if i % 4 == 0 else str(2 * i),
        "chosen": str(2 * i) * (1 + i % 2),
        "rejected": "?" * (1 + i % 3),
        "label": i % 3 != 0,
        "steps": f"{i}#{2 * i}#" * (1 + i % 2),
        "labels": ["+", "-+"[i % 2]] * (1 + i % 2),
    }


PLAIN_TEMPLATE = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
