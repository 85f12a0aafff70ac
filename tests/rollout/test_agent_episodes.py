"""Every episode has one outcome: a reward or the name of what went wrong, and it comes in time."""

import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from openrlhf.errors import ConfigError
from openrlhf.rollout.agents import episodes
from openrlhf.rollout.agents.episode import EpisodeResult
from openrlhf.utils.agent import AgentError
from tests.helpers.processes import runs, wait_until
from tests.rollout.agent_fakes import (
    StreamingEngine,
    act_one,
    make_runner,
    request,
    says,
    setup_of,
    write_agent,
)

HEAD = """
import asyncio, os, sys, time, torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
DONE = {"rewards": 1.0, "environment_feedback": "", "done": True}
"""


def environment(body: str, header: str = "async def step(self, states)") -> str:
    lines = body.strip().splitlines()
    indented = "\n".join(f"        {line}" for line in lines)
    return f"{HEAD}\nclass AgentInstance(AgentInstanceBase):\n    {header}:\n{indented}\n"


def outcome(tmp_path, tokenizer, code, say=None, **limits):
    """How an agent's one episode ended, and how long it took."""
    began_s = time.monotonic()
    engine = StreamingEngine(say or says(tokenizer, "ok"))
    result = act_one(write_agent(tmp_path, code), engine, tokenizer, **limits)
    return result, time.monotonic() - began_s


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("raise ValueError('no')", "exception", "agent_func.py:8: ValueError: no"),
        ("sys.exit(3)", "exception", "agent_func.py:8: SystemExit: 3"),
        ("raise asyncio.CancelledError", "exception", "cancelled by its own code"),
        ("return None", "bad_answer", "step answered a NoneType, not a dict"),
        ("return {**DONE, 'rewards': None}", "bad_answer", "rewards is None, not a number"),
        ("return {**DONE, 'rewards': float('nan')}", "bad_answer", "rewards is nan"),
        ("return {**DONE, 'scores': 'high'}", "bad_answer", "scores is 'high', not a number"),
        ("return {**DONE, 'extra_logs': {'a': None}}", "bad_answer", "extra_logs['a'] is None"),
        ("return {**DONE, 'extra_log': {'a': 1}}", "bad_answer", "Write 'extra_logs'."),
        ("return {'reward': 1, 'done': True}", "bad_answer", "Write 'rewards'."),
        ("return {**DONE, 'done': 'yes'}", "bad_answer", "done is 'yes'. Return True or False"),
        (
            "return {**DONE, 'done': False, 'environment_feedback': 3}",
            "bad_answer",
            "environment_feedback is a int",
        ),
    ],
)
def test_a_fault_of_the_environment_has_a_name(body, kind, message, tmp_path, tiny_tokenizer):
    result, _ = outcome(tmp_path, tiny_tokenizer, environment(body))
    assert result.kind == kind
    assert message in str(result)


@pytest.mark.parametrize(
    ("body", "header"),
    [
        ("await asyncio.sleep(60)", "async def step(self, states)"),
        ("time.sleep(60)", "def step(self, states)"),  # plain: in a thread
        (
            "while True:\n    try:\n        await asyncio.sleep(60)\n"
            "    except asyncio.CancelledError:\n        pass",
            "async def step(self, states)",
        ),
    ],
    ids=["waits", "sleeps in a thread", "cannot be cancelled"],
)
def test_a_step_that_does_not_return_is_cut_off(body, header, tmp_path, tiny_tokenizer):
    code = environment(body, header)
    result, seconds = outcome(tmp_path, tiny_tokenizer, code, step_timeout_s=0.4)
    assert result.kind == "step_timeout"
    assert "AgentInstance.step did not return in 0.4 s" in str(result)
    assert seconds < 5


BLOCKED = "agent_func.py:9: blocked the event loop"


@pytest.mark.parametrize(
    ("code", "limits", "kind", "message"),
    [
        ("time.sleep(4)", {"step_timeout_s": 0.5}, "blocked", BLOCKED),
        ("while True: pass", {"step_timeout_s": 0.5}, "blocked", BLOCKED),
        ("os._exit(7)", {"num_tasks": 1}, "exception", "the agent ended its process (exit code 7)"),
    ],
)
def test_a_step_that_blocks_the_loop_or_ends_the_process_fails_alone(
    code, limits, kind, message, tmp_path, tiny_tokenizer
):
    body = f"if states['label'] == 'bad':\n    {code}\nawait asyncio.sleep(0.02)\nreturn DONE"
    engine = StreamingEngine(says(tiny_tokenizer, "ok"), delay_s=0.01)
    runner = make_runner(write_agent(tmp_path, environment(body)), engine, tiny_tokenizer, **limits)
    labels = {f"e{i}": "bad" if i == 3 else "good" for i in range(6)}
    results = runner.act([request(tiny_tokenizer, name=n, label=v) for n, v in labels.items()])
    failures = {name: r for name, r in results.items() if isinstance(r, AgentError)}
    assert list(failures) == ["e3"]
    assert failures["e3"].kind == kind
    assert message in str(failures["e3"])
    runner.close()


WRITES = """
import contextlib, pickle, stat

class Payload:
    def __reduce__(self):
        return open, ({made!r}, "w")

def write_to_all(data):
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, data)

packed = pickle.dumps(("result", 0, Payload()))
"""


@pytest.mark.parametrize(
    "data",
    [
        "len(packed).to_bytes(4, 'big') + packed",
        """b'{"kind": "result", '""",
        "b'\\xff' * 4",
    ],
    ids=["a pickle", "half a message", "the length of a long one"],
)
def test_what_an_agent_writes_to_open_descriptors_is_no_message(data, tmp_path, tiny_tokenizer):
    made = tmp_path / "made"
    code = environment(f"write_to_all({data})\nreturn DONE")
    head, body = code.split("DONE = ", 1)
    code = head + WRITES.format(made=str(made)) + "DONE = " + body
    result, seconds = outcome(tmp_path, tiny_tokenizer, code)
    assert result.reward == 1.0 and seconds < 20
    assert not made.exists()  # it was not unpickled here


@pytest.mark.parametrize(
    ("limits", "waited"),
    [({"step_timeout_s": 0.5}, "0.5 s"), ({"episode_timeout_s": 0.5}, "1.5 s")],
)
def test_a_stopped_process_is_ended_at_its_first_limit(
    limits, waited, tmp_path, tiny_tokenizer, monkeypatch
):
    monkeypatch.setattr(episodes, "GRACE_S", 1.0)
    code = environment("import signal\nos.kill(os.getpid(), signal.SIGSTOP)")
    result, seconds = outcome(tmp_path, tiny_tokenizer, code, **limits)
    assert (
        result.kind == "blocked"
        and f"agent_func.py: its process did not respond for {waited}" in str(result)
    )
    assert seconds < 20


def test_an_episode_that_cannot_be_is_refused(tiny_tokenizer):
    setup = setup_of(Path("agent_func.py"), tiny_tokenizer)
    segment = {
        "token_ids": [7, 8, 9],
        "action_mask": [False, True, True],
        "num_prompt_tokens": 1,
        "logprobs": [-0.5, -1.0],
        "weight_versions": [0, 0],
    }
    good = {"segments": [segment], "reward": 1.0, "score": None}
    assert episodes.checked(good, setup).segments[0].token_ids == [7, 8, 9]
    for change in (
        {"token_ids": [7, 8, len(tiny_tokenizer)]},
        {"logprobs": [-0.5]},
        {"logprobs": [-0.5, math.nan]},
        {"action_mask": [False, True]},
        {"weight_versions": ["x", 0]},
    ):
        with pytest.raises(AgentError, match="its process sent an episode that cannot be"):
            episodes.checked({**good, "segments": [{**segment, **change}]}, setup)
    for change in ({"reward": math.inf}, {"segments": []}, {"reward": "high"}):
        with pytest.raises(AgentError, match="its process sent an episode that cannot be"):
            episodes.checked({**good, **change}, setup)


STARTS = """
import subprocess
with open({pids!r}, "w") as file:
    for has_session in (False, True):
        child = subprocess.Popen(["sleep", "600"], start_new_session=has_session)
        print(child.pid, file=file)
"""


@pytest.mark.parametrize("ending", ["return DONE", "time.sleep(60)"])
def test_what_an_agent_started_ends_with_it(ending, tmp_path, tiny_tokenizer):
    pids = tmp_path / "pids"
    file = write_agent(tmp_path, environment(STARTS.format(pids=str(pids)) + ending))
    engine = StreamingEngine(says(tiny_tokenizer, "ok"))
    runner = make_runner(file, engine, tiny_tokenizer, step_timeout_s=1.0)
    runner.act([request(tiny_tokenizer)])  # one that blocks is ended
    runner.close()
    children = [int(pid) for pid in pids.read_text().split()]
    assert len(children) == 2
    wait_until(lambda: not any(map(runs, children)), seconds=10)


DRIVER = """
import sys, time
from transformers import AutoTokenizer
from tests.rollout.agent_fakes import StreamingEngine, make_runner, request, says

if __name__ == "__main__":
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
    runner = make_runner(sys.argv[1], StreamingEngine(says(tokenizer, "ok")), tokenizer)
    runner.act([request(tokenizer)])
"""


@pytest.mark.faults
def test_agents_of_a_killed_driver_end_within_ten_seconds(tmp_path, tiny_model_dir):
    started = tmp_path / "pid"
    body = "import subprocess\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    body += f"open({str(started)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} .')\n"
    body += "time.sleep(600)"
    file = write_agent(tmp_path, environment(body, "def step(self, states)"))
    (tmp_path / "driver.py").write_text(DRIVER)
    root = str(Path(__file__).resolve().parents[2])
    words = [sys.executable, str(tmp_path / "driver.py"), str(file), str(tiny_model_dir)]
    driver = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": root})
    try:
        wait_until(lambda: started.exists() and started.read_text().endswith("."), seconds=60)
        pids = [int(word) for word in started.read_text().split()[:2]]
        assert all(map(runs, pids))
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: not any(map(runs, pids)), seconds=10)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ("{'reward': 1.0}", "no_tokens", "ended without a sampled token"),
        ("None", "bad_answer", "execute answered a NoneType"),
        ("{'reward': 1, 'Extra_Log': {}}", "bad_answer", "Write 'extra_logs'."),
        ("{'scores': 1.0}", "bad_answer", "reward is None"),
        ("{'reward': 10**400}", "bad_answer", "reward is inf in float32"),
        ("{'reward': 1e39}", "bad_answer", "reward is inf in float32. Return one finite number"),
        ("{'reward': 1, 'extra_logs': torch.ones(2)}", "bad_answer", "extra_logs is a Tensor"),
        ("{'reward': 1, 'truncated': torch.ones(2)}", "bad_answer", "truncated is tensor"),
    ],
)
def test_an_execute_must_sample_and_answer(answer, kind, message, tmp_path, tiny_tokenizer):
    turn = "" if kind == "no_tokens" else "await llm_engine.generate(prompt, sampling_params)\n"
    code = (
        f"{HEAD}\nclass AgentExecutor(AgentExecutorBase):\n"
        "    async def execute(self, prompt, label, sampling_params, llm_engine):\n"
        f"        {turn}        return {answer}\n"
    )
    code = code if turn else code.replace("        " * 2 + "return", "        return")
    result, _ = outcome(tmp_path, tiny_tokenizer, code)
    assert result.kind == kind
    assert message in str(result)


def test_an_executor_whose_init_fails_is_refused_before_anything_runs(tmp_path, tiny_tokenizer):
    code = HEAD + "\nclass AgentExecutor(MultiTurnAgentExecutor):\n    def __init__(self): 1 / 0\n"
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        act_one(
            write_agent(tmp_path, code), StreamingEngine(says(tiny_tokenizer, "ok")), tiny_tokenizer
        )


def test_a_full_context_ends_the_episode_and_counts_as_cut(tmp_path, tiny_tokenizer):
    body = "return {'rewards': 0.5, 'environment_feedback': 'more', 'done': False}"
    result, _ = outcome(tmp_path, tiny_tokenizer, environment(body), max_length=20)
    (segment,) = result.segments
    assert tiny_tokenizer.decode(segment.token_ids) == "hi" + "ok<|end|>more" * 2 + "ok<|end|>"
    assert len(segment.token_ids) == 19  # another "more" would be 23
    assert result.is_truncated
    assert (result.num_turns, result.reward) == (3, 1.5)


def test_a_turn_cut_by_a_limit_of_the_agents_own_does_not_cut_the_episode(tmp_path, tiny_tokenizer):
    body = (
        "states['sampling_params'].max_tokens = 1\n"
        "is_second = states['action_text'] == 'o'\n"
        "answer = {'done': is_second, 'sampling_params': states['sampling_params']}\n"
        "return {**DONE, **answer, 'rewards': float(states['is_truncated'])}"
    )
    result, _ = outcome(tmp_path, tiny_tokenizer, environment(body))
    assert result.reward == 1.0  # the second turn says that it was cut, the first that it was not
    assert (result.num_turns, result.is_truncated) == (2, False)


def test_steps_that_run_out_count_as_cut(tmp_path, tiny_tokenizer):
    code = environment("return {**DONE, 'done': False}")
    result, _ = outcome(tmp_path, tiny_tokenizer, code, max_steps=3, max_length=1000)
    assert (result.num_turns, result.reward, result.is_truncated) == (3, 3.0, True)


def test_feedback_in_ids_is_text_for_the_next_step(tmp_path, tiny_tokenizer):
    ids = tiny_tokenizer("more", add_special_tokens=False)["input_ids"]
    body = (
        "if states['observation_text'] == 'hiok<|end|>more': return {**DONE, 'rewards': 2.0}\n"
        f"return {{**DONE, 'done': False, 'environment_feedback': {ids}}}"
    )
    result, _ = outcome(tmp_path, tiny_tokenizer, environment(body), max_length=1000)
    assert (result.num_turns, result.reward) == (2, 3.0)


def test_the_score_of_a_cut_episode_is_the_last_that_was_given(tmp_path, tiny_tokenizer):
    body = (
        "is_first = states['observation_text'] == 'hi'\n"
        "return {**DONE, 'done': False, **({'scores': 0.25} if is_first else {})}"
    )
    code = environment(body)
    result, _ = outcome(tmp_path, tiny_tokenizer, code, max_steps=3, max_length=1000)
    assert (result.num_turns, result.score, result.is_truncated) == (3, 0.25, True)


def test_no_more_episodes_run_at_once_than_allowed(tmp_path, tiny_tokenizer):
    code = "RUNNING = []\nMOST = []\n" + environment(
        "RUNNING.append(1)\nMOST.append(len(RUNNING))\nawait asyncio.sleep(0.02)\n"
        "RUNNING.pop()\nreturn {**DONE, 'extra_logs': {'most': max(MOST)}}"
    )
    file = write_agent(tmp_path, code)
    engine = StreamingEngine(says(tiny_tokenizer, "ok"))
    runner = make_runner(file, engine, tiny_tokenizer, num_tasks=5)
    results = runner.act([request(tiny_tokenizer, name=f"e{i}") for i in range(30)])
    assert max(result.extra_logs["most"] for result in results.values()) == 5
    runner.close()


WORDS = "one two three four five six seven"
DELAY_S = 0.02

TURN_EXECUTOR = """
import asyncio
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, llm_engine):
        turn = llm_engine.generate(prompt, sampling_params)
        {body}

async def wait(turn):
    return await turn
"""


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("await turn", "episode_timeout"),
        ("await asyncio.wait_for(wait(turn), 0.1)", "exception"),
        (
            "beside = asyncio.ensure_future(wait(turn)); await asyncio.sleep(0.1); 1 / 0",
            "exception",
        ),
    ],
    ids=["the episode runs out of time", "the agent waits no longer", "the agent fails beside it"],
)
def test_turns_end_with_their_episode(body, failure, tmp_path, tiny_tokenizer):
    code = TURN_EXECUTOR.format(body=body)
    engine = StreamingEngine(says(tiny_tokenizer, WORDS * 9), token_s=DELAY_S)
    result = act_one(write_agent(tmp_path, code), engine, tiny_tokenizer, episode_timeout_s=0.5)
    time.sleep(3 * DELAY_S)
    assert result.kind == failure, result
    sampled = engine.num_sampled
    time.sleep(5 * DELAY_S)
    assert engine.num_sampled == sampled < len(WORDS * 9) / 2  # it has stopped
    assert len(engine.aborted) == 1


NUM_AT_ONCE = 1000
# No episode ends before all of them have come to its first step.
ALL_AT_ONCE = f"""
    import asyncio
    from openrlhf.utils.agent import AgentInstanceBase

    THERE, ALL = [], asyncio.Event()

    class AgentInstance(AgentInstanceBase):
        async def step(self, states):
            THERE.append(1)
            if len(THERE) == {NUM_AT_ONCE}:
                ALL.set()
            await asyncio.wait_for(ALL.wait(), 15)
            return {{"rewards": 0.5, "environment_feedback": "", "done": True}}
"""


def test_a_thousand_episodes_wait_at_once_without_threads_of_their_own(tmp_path, tiny_tokenizer):
    num_threads: list[int] = []
    num_before = threading.active_count()  # those that earlier tests of this process left

    class Watched(StreamingEngine):
        def submit(self, requests):
            num_threads.append(threading.active_count() - num_before)
            return super().submit(requests)

    file = write_agent(tmp_path, ALL_AT_ONCE)
    engine = Watched(says(tiny_tokenizer, WORDS * 4))
    runner = make_runner(file, engine, tiny_tokenizer, num_tasks=NUM_AT_ONCE)
    process = psutil.Process()
    began_s, before = time.monotonic(), process.memory_info().rss
    results = runner.act([request(tiny_tokenizer, name=f"e{i}") for i in range(NUM_AT_ONCE)])
    seconds, growth = time.monotonic() - began_s, process.memory_info().rss - before
    assert all(isinstance(result, EpisodeResult) for result in results.values())
    print(f"{seconds:.1f} s, {growth / 2**20:.0f} MiB, {max(num_threads)} threads")
    assert seconds < 20  # one after the other: over an hour
    assert growth < NUM_AT_ONCE * 100 * 2**10
    assert max(num_threads) < 40
    runner.close()


def test_a_script_without_a_main_guard_runs_once(tmp_path, tiny_model_dir):
    file = write_agent(tmp_path, environment("return DONE"))
    script = tmp_path / "train.py"
    script.write_text(
        f"""print("begun", flush=True)
from pathlib import Path
import transformers
from tests.rollout.agent_fakes import StreamingEngine, act_one, says

tokenizer = transformers.AutoTokenizer.from_pretrained("{tiny_model_dir}")
print(act_one(Path("{file}"), StreamingEngine(says(tokenizer, "ok")), tokenizer).reward)
"""
    )
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environ, check=False
    )
    assert done.stdout.split() == ["begun", "1.0"], done.stderr


# Samples from a task that no episode began, as a server of the agent's own does.
OF_NO_EPISODE = """
    import asyncio, threading
    from openrlhf.utils.agent import AgentExecutorBase

    class AgentExecutor(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, llm_engine):
            loop = asyncio.get_running_loop()
            async def sample():
                await asyncio.sleep(0.5)  # the others have begun
                return await llm_engine.generate(prompt)
            work = lambda: asyncio.run_coroutine_threadsafe(sample(), loop).result()
            found = await asyncio.to_thread(threading_of, work)
            ids, said = list(found.prompt_token_ids), list(found.outputs[0].token_ids)
            end = len(ids) + len(said)
            return {"reward": 1.0, "observation_tokens": ids + said,
                    "action_ranges": [(len(ids), end)]}

    def threading_of(work):
        found = []
        thread = threading.Thread(target=lambda: found.append(attempt(work)))
        thread.start()
        thread.join()
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def attempt(work):
        try:
            return work()
        except Exception as error:
            return error
"""


def test_a_turn_of_no_episode_has_the_settings_of_all_that_run_or_is_refused(
    tmp_path, tiny_tokenizer
):
    engine = StreamingEngine(says(tiny_tokenizer, "yes"))
    runner = make_runner(write_agent(tmp_path, OF_NO_EPISODE), engine, tiny_tokenizer)

    def act(*temperatures: float) -> list[object]:
        asked = [
            request(tiny_tokenizer, name=f"e{k}", sampling={"temperature": t, "seed": k})
            for k, t in enumerate(temperatures)
        ]
        return [*runner.act(asked).values()]

    try:
        assert [result.reward for result in act(0.6, 0.6)] == [1.0, 1.0]
        assert {r.sampling.temperature for r in engine.requests} == {0.6}
        assert len({r.sampling.seed for r in engine.requests}) == 2
        results = act(1.0, 0.6)
        assert any("side by side with different settings" in str(result) for result in results)
        of_kind = {"e0/outside/t1": 1.0, "e1/outside/t1": 0.6}  # of one that is left alone
        for asked in engine.requests[2:]:
            assert asked.sampling.temperature == of_kind[asked.request_id]
        assert [result.reward for result in act(1.0)] == [1.0]
        assert engine.requests[-1].sampling.temperature == 1.0
    finally:
        runner.close()
