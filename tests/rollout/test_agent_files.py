"""Agent files of both generations run as they were written."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

from openrlhf.errors import ConfigError
from openrlhf.rollout.agents.worker import load_agent
from tests.rollout.agent_fakes import (
    ENV,
    NEW,
    OPENAI_EXECUTOR,
    OWN_LOOP,
    StreamingEngine,
    act_one,
    make_runner,
    request,
    says,
    write_agent,
)

ROOT = Path(__file__).resolve().parents[2]
SEEDS = ROOT.parent / "shared" / "seeds"
OLD = """
    class AgentExecutor(AgentExecutorBase):
        def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
            super().__init__(
                AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue
            )

        async def execute(self, prompt, label, sampling_params):
            return await super().execute(prompt, label, sampling_params)
"""


@pytest.mark.parametrize("executor", [OLD, NEW, ""], ids=["0.8", "0.11", "instance alone"])
def test_both_shapes_of_executor_run_the_same_episode(executor, tmp_path, tiny_tokenizer):
    file = write_agent(tmp_path, dedent(ENV) + dedent(executor))
    result = act_one(file, StreamingEngine(says(tiny_tokenizer, "yes")), tiny_tokenizer)
    assert (result.reward, result.score, result.num_turns) == (0.75, 1.0, 3)
    assert result.extra_logs == {"num": 3.0}
    (segment,) = result.segments
    text = tiny_tokenizer.decode(segment.token_ids)
    assert text == "hi" + "yes<|end|>again" * 2 + "yes<|end|>"
    assert sum(segment.action_mask) == 3 * 4


def test_a_whole_execute_of_ones_own_drives_the_engine_as_vllm_is_driven(tmp_path, tiny_tokenizer):
    code = """
        from copy import deepcopy
        from openrlhf.utils.agent import AgentExecutorBase

        class AgentExecutor(AgentExecutorBase):
            def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
                self.llm_engine, self.hf_tokenizer = llm_engine, hf_tokenizer
                self.result_queue = result_queue

            async def execute(self, prompt, label, sampling_params):
                ids = self.hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
                params = deepcopy(sampling_params)
                params.max_tokens = 2
                first = await self.llm_engine.generate({"prompt_token_ids": ids}, params, "id-1")
                output = first.outputs[0]
                assert output.finish_reason == "length" and output.text == "ye"
                assert [list(entry) for entry in output.logprobs] == [[i] for i in output.token_ids]
                logprobs = [entry[i].logprob for entry, i in zip(output.logprobs, output.token_ids)]
                assert sum(logprobs) == output.cumulative_logprob
                async for last in self.llm_engine.generate(
                    prompt_token_ids=ids + output.token_ids, sampling_params=sampling_params
                ):
                    assert last.finished
                await self.result_queue.put({"reward": sum(logprobs)})
    """
    file = write_agent(tmp_path, code)
    result = act_one(file, StreamingEngine(says(tiny_tokenizer, "yes")), tiny_tokenizer)
    (segment,) = result.segments
    assert tiny_tokenizer.decode(segment.token_ids) == "hiyeyes<|end|>"
    assert result.reward == pytest.approx(sum(segment.logprobs[:2]))
    assert not result.is_truncated  # the first turn was as long as it asked for


def test_an_execute_with_a_loop_of_its_own_finds_what_the_older_base_had(tmp_path, tiny_tokenizer):
    file = write_agent(tmp_path, dedent(ENV) + dedent(OWN_LOOP))
    result = act_one(file, StreamingEngine(says(tiny_tokenizer, "yes")), tiny_tokenizer)
    assert (result.reward, result.score, result.num_turns) == (0.75, 1.0, 3)
    (segment,) = result.segments
    text = tiny_tokenizer.decode(segment.token_ids)
    assert text == "hi" + "yes<|end|>again" * 2 + "yes<|end|>"


def test_an_execute_may_end_with_ray_kill_of_its_environment(tmp_path, tiny_tokenizer):
    own_loop = dedent(OWN_LOOP) + "            ray.kill(instance)\n"
    file = write_agent(tmp_path, "import ray\n" + dedent(ENV) + own_loop)
    result = act_one(file, StreamingEngine(says(tiny_tokenizer, "yes")), tiny_tokenizer)
    assert (result.reward, result.num_turns) == (0.75, 3)


def test_an_agent_may_count_with_the_tokens_that_a_turn_may_have(tmp_path, tiny_tokenizer):
    code = """
        from openrlhf.utils.agent import AgentExecutorBase

        class AgentExecutor(AgentExecutorBase):
            async def execute(
                self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine
            ):
                ids = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
                sampling_params.max_tokens = min(sampling_params.max_tokens, max_length - len(ids))
                await self.generate(ids, sampling_params)
                return {"reward": sampling_params.max_tokens}
    """
    file = write_agent(tmp_path, code)
    engine = StreamingEngine(says(tiny_tokenizer, "yes " * 9))
    result = act_one(file, engine, tiny_tokenizer, max_length=20)
    assert result.reward == 18.0
    assert result.is_truncated  # the context was full: no limit of the agent's own


@pytest.mark.parametrize("start", ["first episode", "thread"])
def test_an_executor_that_serves_the_openai_api_itself_gets_its_own_tokens(
    start, tmp_path, tiny_tokenizer
):
    pytest.importorskip("openai")
    file = write_agent(tmp_path, f"START = {start!r}\n{OPENAI_EXECUTOR}")
    engine = StreamingEngine(lambda asked: [*asked.prompt_token_ids[1:3], 1], delay_s=0.02)
    runner = make_runner(file, engine, tiny_tokenizer)
    names = [f"{a}{b}" for a in "abc" for b in "ef"] * 2  # two samples of each prompt are alike
    requests = [request(tiny_tokenizer, text=t, name=f"{t}/{k}") for k, t in enumerate(names)]
    for part in (requests[:7], requests[7:]):  # the second begins when the first has ended
        for name, result in runner.act(part).items():
            (segment,) = result.segments
            turn = f"<|assistant|>{name[:2]}<|end|>"
            text = tiny_tokenizer.decode(segment.token_ids)
            assert text == f"<|user|>{name[:2]}<|end|>{turn}<|user|>again<|end|>{turn}"
            assert (sum(segment.action_mask), result.num_turns) == (6, 2)
            assert result.extra_logs == {"num_tokens": len(segment.token_ids)}
    runner.close()


def seed_file(tmp_path: Path) -> Path:
    for seed in sorted(SEEDS.glob("*.txt")):
        found = re.search(r"^```python\n(# agent_func\.py\n.*?)^```", seed.read_text(), re.M | re.S)
        if found:
            file = tmp_path / "agent_func.py"
            file.write_text(found[1])
            return file
    raise AssertionError("no document shows agent_func.py")


@pytest.mark.parametrize("source", ["the users' document", "agent_func.py"])
def test_the_agent_file_that_users_start_from_runs_as_it_is(source, tmp_path, tiny_tokenizer):
    if source == "agent_func.py":
        file = ROOT / "examples/python/agent_func.py"
    elif SEEDS.is_dir():
        file = seed_file(tmp_path)
    else:
        pytest.skip("the users' documents are not beside this checkout")
    for _ in range(4):  # it draws how often it asks
        result = act_one(file, StreamingEngine(says(tiny_tokenizer, "3")), tiny_tokenizer)
        assert 2 <= result.num_turns <= 4
        assert result.reward in (0.0, 1.0)
        assert result.score == result.reward == result.extra_logs["dummy_scores"]
        (segment,) = result.segments
        text = tiny_tokenizer.decode(segment.token_ids)
        feedback = "\n\nHuman: [INCORRECT]\nPlease analyze the issues and try again.\n</s>"
        assert text.count(feedback) == result.num_turns - 1
        assert "[CORRECT]" not in text  # nothing is sampled behind the last word


BASE = "from openrlhf.utils.agent import AgentInstanceBase"


def test_a_class_of_several_is_named(tmp_path):
    file = tmp_path / "agents.py"
    both = [f"class {name}(AgentInstanceBase):\n    def step(self, states): ..." for name in "AB"]
    run = "class C:\n    async def execute(self, prompt, label, sampling_params): ..."
    file.write_text("\n".join([BASE, *both, run]))
    loaded = [load_agent(f"{file}:{name}") for name in "ABC"]
    assert [
        (executor and executor.__name__, instance and instance.__name__)
        for executor, instance in loaded
    ] == [(None, "A"), (None, "B"), ("C", None)]
    with pytest.raises(ConfigError, match=r"agents.py has no D; found: A, B, C"):
        load_agent(f"{file}:D")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("VALUE = 1", "has no AgentExecutor; found: nothing public"),
        ("class AgentExecutor:\n    pass", "AgentExecutor has no async execute"),
        (
            "class AgentExecutor:\n    async def execute(self, question): ...",
            "AgentExecutor.execute: missing a required argument: 'question'",
        ),
        (
            "class AgentExecutor:\n    def __init__(self, tools): ...\n"
            "    async def execute(self, prompt, label, sampling_params): ...",
            "AgentExecutor.__init__: missing a required argument: 'tools'",
        ),
        (
            f"{BASE}\nclass AgentInstance(AgentInstanceBase):\n    def step(self): ...",
            "agent.py:3: step(self) cannot be called as it will be: too many positional arguments",
        ),
        (
            f"{BASE}\nclass AgentInstance(AgentInstanceBase):\n    def __init__(self, tools): ...\n"
            "    async def step(self, states): ...",
            "agent.py:3: AgentInstance.__init__: missing a required argument: 'tools'. Give it a",
        ),
        (f"{BASE}\nclass AgentInstance(AgentInstanceBase): ...", "AgentInstance has no step"),
        ("class AgentInstance:\n    pass", "write class AgentInstance(AgentInstanceBase)"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_file_that_cannot_act_is_refused_in_words(code, message, tmp_path):
    (tmp_path / "agent.py").write_text(code)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_agent(tmp_path / "agent.py")
