"""Checks of the text of a response: tags and blocks of code."""

import time

import pytest

from openrlhf.rewards.text_checks import code_block, has_tags_in_order, tag_content


def test_tags_stand_once_and_in_their_order() -> None:
    good = "<think>a\nb</think>\n<answer>4</answer>"
    assert has_tags_in_order(good) == 1.0
    assert has_tags_in_order("well " + good) == 0.0
    assert has_tags_in_order(good + good) == 0.0
    assert has_tags_in_order("<answer>4</answer><think>a</think>") == 0.0
    assert has_tags_in_order("<a>x</a>", ["a"]) == 1.0
    assert tag_content(good, "answer") == "4"
    assert tag_content("<answer>4", "answer") is None


def test_a_prompt_may_open_the_first_tag() -> None:
    rest = "a\n</think>\n<answer>4</answer>"
    opened = "<|im_start|>assistant\n<think>\n"
    assert has_tags_in_order(rest, prompt=opened) == 1.0
    assert has_tags_in_order(rest) == 0.0
    assert has_tags_in_order("<think>" + rest, prompt=opened) == 0.0
    assert has_tags_in_order("<think>" + rest, prompt="Write <think> and <answer>.\n") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = 1\n```",
        "```py\nx = 1\n```",
        "```Python\nx = 1\n```",
        "```python3\nx = 1\n```",
        "``` python \nx = 1\n```",
        "```python\r\nx = 1\r\n```\r\n",
        '```{.python title="a"}\nx = 1\n```',
        "~~~python\nx = 1\n~~~",
        "````python\nx = 1\n````",
        "1. So:\n   ```python\n   x = 1\n   ```",
        "```\nx = 1\n```",
        "Here: ```python\nx = 1\n```",
        "<think>```python\nx = 0\n```</think>\n```python\nx = 1\n```",
        "Here: ```python\nx = 1\n```\nOutput:\n```\n2\n```",
        "```python\nx = 1```",
    ],
)
def test_a_block_of_python_is_found_however_it_is_marked(text: str) -> None:
    assert code_block("Well:\n" + text) == "x = 1\n"


def test_of_several_blocks_the_last_one_of_the_language_is_taken() -> None:
    first, second, shell, output = (
        f"```{name}\n{line}\n```\n"
        for name, line in [("python", "x = 1"), ("py", "x = 2"), ("bash", "ls"), ("", "2")]
    )
    assert code_block(first + "better:\n" + second + "prints\n" + output) == "x = 2\n"
    assert code_block(shell + "and then\n" + first) == "x = 1\n"
    assert code_block(shell + "prints\n" + output) == "2\n"
    assert code_block(first + shell, "bash") == "ls\n"
    assert code_block(shell) is None and code_block("no code") is None
    assert code_block(first + "```python\nx =") == "x = 1\n"
    assert code_block("````python\n```\n````") == "```\n"


def test_a_line_with_a_fence_of_its_own_does_not_end_a_block() -> None:
    program = 'def f(x):\n    """Doubles:\n    ```f(2)```\n    """\n    return 2 * x\n'
    assert code_block(f"```python\n{program}```") == program


def test_a_block_that_is_only_named_in_a_sentence_is_replaced_by_the_real_one() -> None:
    block = "```python\nx = 1\n```"
    assert code_block("I write it in ```python\n" + block) == "x = 1\n"
    assert code_block("I write it in ```python\n\n" + block) == "x = 1\n"
    assert code_block("Here: ```python\n```\nBetter:\n" + block) == "x = 1\n"
    assert code_block("Here: ````md\na\n" + block + "\n````", "md") == "a\n" + block + "\n"


@pytest.mark.parametrize(
    "part", ["a ", "a", " ", "`", "~", "``` ", "```a", "\n", "x```\n", "<answer>"]
)
def test_no_text_takes_long(part: str) -> None:
    middle = part * (200_000 // len(part))
    for start in ("", "```python\n", "```", "~~~", "x```python ", "x```python\n"):
        for end in ("", "`", "!"):
            before = time.process_time()
            code_block(start + middle + end)
            tag_content(start + middle + end, "answer")
            has_tags_in_order(start + middle + end)
            assert time.process_time() - before < 1


def test_a_fence_in_a_docstring_does_not_end_the_block() -> None:
    program = 'def f():\n    """\n    ```\n    f()\n    ```\n    """\n'
    assert code_block(f"```python\n{program}```") == program
