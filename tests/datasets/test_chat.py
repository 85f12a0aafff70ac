"""Messages in the forms people write them."""

from __future__ import annotations

from openrlhf.datasets.chat import to_messages


def test_the_two_message_forms_may_stand_in_one_file():
    # A table gives every message all four keys; those it does not have are null.
    messages = [
        {"role": "user", "content": "hi", "from": None, "value": None},
        {"role": None, "content": None, "from": "gpt", "value": "hello"},
    ]
    assert [(m["role"], m["content"]) for m in to_messages(messages)] == [
        ("user", "hi"),
        ("assistant", "hello"),
    ]
