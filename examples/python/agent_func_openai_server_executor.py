"""An agent that was written for the OpenAI API, with a calculator as its tool.

openrlhf train_ppo_ray ... --label_key answer \
    --agent_func_path examples/python/agent_func_openai_server_executor.py

Needs `pip install openai`. Any other client or framework that takes a base URL will do.
"""

import ast
import asyncio
import json
import operator
from typing import Any

from openai import AsyncOpenAI, BadRequestError

from openrlhf.rewards.math_grader import math_equal
from openrlhf.utils.agent import OpenAIAgentExecutor, OpenAISession

MAX_TURNS = 6
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Work out an arithmetic expression such as 3 * (4 + 5).",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


class AgentExecutor(OpenAIAgentExecutor):
    """Talks to the policy until it answers without calling the tool."""

    async def run(self, session: OpenAISession, prompt: str, label: Any) -> dict[str, Any]:
        """1 for an answer whose number is that of the label, GSM8K's solutions included."""
        messages: list[Any] = [{"role": "user", "content": prompt}]
        num_calls, text = 0, ""
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            for _ in range(MAX_TURNS):
                try:
                    answer = await client.chat.completions.create(
                        model=session.model, messages=messages, tools=[CALCULATE]
                    )
                except BadRequestError as error:
                    if error.code != "context_length_exceeded":
                        raise
                    break
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                text = message.content or ""
                if not message.tool_calls:
                    break
                num_calls += len(message.tool_calls)
                messages += [_result(call) for call in message.tool_calls]
        is_right = await asyncio.to_thread(math_equal, text, str(label))
        return {
            "reward": float(is_right),
            "scores": float(is_right),
            "extra_logs": {"num_tool_calls": num_calls},
        }


def _result(call: Any) -> dict[str, str]:
    expression = str(json.loads(call.function.arguments).get("expression", ""))
    return {"role": "tool", "tool_call_id": call.id, "content": calculate(expression)}


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and brackets; else what is wrong with it."""
    try:
        return f"{_value(ast.parse(expression, mode='eval').body):g}"
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return float(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("only numbers, + - * / and brackets")
