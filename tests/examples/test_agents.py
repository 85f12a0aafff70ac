"""The agents that are shown act: in the examples, and in the document about them."""

import re
from pathlib import Path

import pytest

from tests.rollout.agent_fakes import StreamingEngine, act_one, says

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "examples" / "python"


def turns(tokenizer, *texts):
    """An engine that says the texts one after the other."""
    left = list(texts)
    return StreamingEngine(lambda request: [*tokenizer.encode(left.pop(0)), tokenizer.eos_token_id])


def test_the_guessing_game_is_won_by_halving(tiny_tokenizer):
    engine = turns(tiny_tokenizer, "50", "I say 25", "37")
    result = act_one(PYTHON / "agent_func_multiturn.py", engine, tiny_tokenizer, label="37")
    assert result.reward == pytest.approx(0.9)
    assert (result.score, result.extra_logs) == (1.0, {"num_guesses": 3.0})
    text = tiny_tokenizer.decode(result.segments[0].token_ids)
    assert "50<|end|>\nLower.\nYour guess: I say 25<|end|>\nHigher.\nYour guess: 37" in text


def test_a_game_ends_after_seven_guesses(tiny_tokenizer):
    engine = StreamingEngine(says(tiny_tokenizer, "no"))
    result = act_one(
        PYTHON / "agent_func_multiturn.py", engine, tiny_tokenizer, label="37", max_length=1000
    )
    assert (result.num_turns, result.score) == (7, 0.0)
    assert result.reward == pytest.approx(-0.35)


def test_the_calculator_agent_calls_its_tool(tiny_tokenizer):
    pytest.importorskip("openai")
    call = (
        '<tool_call>{"name": "calculate", "arguments": {"expression": "3 * (4 + 5)"}}</tool_call>'
    )
    engine = turns(tiny_tokenizer, call, "It is 27")
    file = PYTHON / "agent_func_openai_server_executor.py"
    result = act_one(file, engine, tiny_tokenizer, label="27", max_length=1000)
    assert (result.reward, result.extra_logs) == (1.0, {"num_tool_calls": 1.0})
    assert "<|tool|>27<|end|>" in tiny_tokenizer.decode(result.segments[0].token_ids)


def test_the_agent_of_the_document_acts(tmp_path, tiny_tokenizer):
    text = (ROOT / "docs" / "agents.md").read_text()
    (code,) = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "agent_func.py").write_text(code)
    engine = turns(tiny_tokenizer, "one", "two")
    result = act_one(tmp_path / "agent_func.py", engine, tiny_tokenizer, label="two")
    assert (result.reward, result.num_turns, result.extra_logs) == (1.0, 2, {"num_tries": 2.0})
