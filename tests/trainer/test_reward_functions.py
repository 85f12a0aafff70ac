"""Reward functions as TRL documents them give the right rewards, from the tokens an engine sampled
through worker processes to scored samples.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from textwrap import dedent

import pytest
from datasets import Dataset

from openrlhf.datasets.loading import load_rows
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.tokenized import RowFormat
from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.errors import RewardError
from openrlhf.rewards.workers import FunctionPool
from openrlhf.rollout.engine_pool import BatchedEngine
from openrlhf.rollout.rollout import SampleBatch
from openrlhf.rollout.scoring import FailurePolicy, GroupScorer, SourceScorer
from tests.rollout.stream_fakes import rollouts_of
from tests.tiny import write_jsonl

# One sample a row: what the policy says, the prompt, further columns.
SAID = ["<think>a</think>\\boxed{4}", "\\boxed{5}", "print(7)"]
TEXTS = ["2+2=", "2+3=", "write 7"]
COLUMNS = {"solution": ["4", "6", "7"], "task": ["math", "math", "code"]}


class SayingEngine:
    """Says one of the texts for each prompt, or for each sample of one, and its end token."""

    def __init__(self, tokenizer, texts: Sequence[str], version: int) -> None:
        self.tokenizer, self.texts, self.version = tokenizer, texts, version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        said = [(*self.tokenizer.encode(t), self.tokenizer.eos_token_id) for t in self.texts]
        completions = [Completion(ids, (-0.5,) * len(ids), "stop", self.version) for ids in said]
        if len(requests) == 1:
            return [completions[: requests[0].sampling.num_samples]]
        return [[completion] for completion in completions]


def score(
    folder: Path,
    tokenizer,
    code: str,
    *,
    prompts: Sequence[object] = TEXTS,
    data: PromptDataset | None = None,
    num_samples: int = 1,
    policy: FailurePolicy | None = None,
) -> SampleBatch:
    """The samples of the rows, or of `data`, scored by the functions of a file; the policy is at
    step 3 of 6.
    """
    file = folder / "rewards.py"
    file.write_text(dedent(code))
    rows = [
        {"prompt": prompt, **{name: values[k] for name, values in COLUMNS.items()}}
        for k, prompt in enumerate(prompts)
    ]
    data = data or PromptDataset(Dataset.from_list(rows), tokenizer, RowFormat("prompt"))
    engine = SayingEngine(tokenizer, SAID, version=3)
    with closing(FunctionPool(file, num_workers=1)) as pool:
        scorer = GroupScorer(SourceScorer(pool, 8, max_steps=6), policy or FailurePolicy(8))
        rollouts = rollouts_of(
            [BatchedEngine(engine.generate)], scorer, tokenizer, vocab_size=len(tokenizer)
        )
        return rollouts.generate_samples(list(data), SamplingSettings(num_samples), tag="t")


def parts(samples: SampleBatch) -> dict[str, list[float | None]]:
    """What each function said of each sample."""
    names = dict.fromkeys(name for r in samples.rollouts for name in r.reward_parts)
    return {name: [r.reward_parts.get(name) for r in samples.rollouts] for name in names}


# Each as its documentation describes the interface: some arguments by name, the others in **kwargs.
STANDARD = r"""
    import asyncio, re

    def by_length(completions, **kwargs):
        return [-abs(10 - len(completion)) for completion in completions]

    def by_tokens(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def by_column(completions, solution, **kwargs):
        found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
        contents = [match.group(1) if match else "" for match in found]
        return [1.0 if c == s else 0.0 for c, s in zip(contents, solution)]

    def by_equality(prompts, completions, solution):
        assert set(prompts) <= {"2+2=", "2+3=", "write 7"}, prompts
        return [float(c == f"\\boxed{{{int(s) - 1}}}") for c, s in zip(completions, solution)]

    def for_mathematics(prompts, completions, task, **kwargs):
        return [len(p) + 0.5 if t == "math" else None for p, t in zip(prompts, task)]

    def for_code(prompts, completions, task, **kwargs):
        return [2.0 if t == "code" else None for t in task]

    async def later(prompts, completions, **kwargs):
        await asyncio.sleep(0.01)
        return [0.25] * len(completions)

    def by_progress(completions, trainer_state, **kwargs):
        return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

    def with_logs(completions, solution, log_extra=None, log_metric=None, **kwargs):
        rewards = [float(s in c) for c, s in zip(completions, solution)]
        if log_extra:
            log_extra("golden", list(solution))
        if log_metric:
            log_metric("calls", 1)
        return rewards

    def of_everything(**kwargs):
        names = {"prompts", "completions", "completion_ids", "solution", "task", "trainer_state"}
        return [float(names <= set(kwargs))] * len(kwargs["completions"])

    reward_funcs = [by_length, by_tokens, by_column, by_equality, for_mathematics, for_code, later,
                    by_progress, with_logs, of_everything]
    reward_weights = [0, 0, 1, 1, 10, 1, 1, 0, 0, 0]
"""
LENGTHS = [len(text) for text in SAID]
EXPECTED = {
    "by_length": [-abs(10 - n) for n in LENGTHS],
    "by_tokens": [n + 1 for n in LENGTHS],  # the end token is one
    "by_column": [1, 0, 0],
    "by_equality": [0, 1, 0],
    "for_mathematics": [4.5, 4.5, None],
    "for_code": [None, None, 2],
    "later": [0.25] * 3,
    "by_progress": [0.5] * 3,
    "with_logs": [1, 0, 1],
    "of_everything": [1] * 3,
}


def test_functions_in_the_form_of_trl_score_texts_without_special_tokens(tmp_path, tiny_tokenizer):
    samples = score(tmp_path, tiny_tokenizer, STANDARD)
    assert parts(samples) == EXPECTED
    assert samples.metrics["extra/calls"] == 1  # a number for all samples of a call
    assert [r.reward for r in samples.rollouts] == [1 + 45 + 0.25, 1 + 45 + 0.25, 2 + 0.25]
    assert [r.extra_columns for r in samples.rollouts] == [{"golden": s} for s in ("4", "6", "7")]
    assert samples.metrics["reward/for_mathematics"] == 4.5  # of those it applies to


CONVERSATIONAL = r"""
    import re

    def form(completions, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        return [float(bool(re.match(r"^<think>.*?</think>", content))) for content in contents]

    def shape(prompts, completions, **kwargs):
        assert all([set(m) for m in c] == [{"role", "content"}] for c in completions)
        assert {m["role"] for c in completions for m in c} == {"assistant"}
        assert all(p[0] == {"role": "system", "content": "Think."} for p in prompts)
        assert {len(p) for p in prompts} == {2}  # without the answer
        return [float(len(prompt[-1]["content"])) for prompt in prompts]

    reward_funcs = [form, shape]
"""


def test_prompts_that_are_dialogues_come_as_messages_and_so_do_completions(
    tmp_path, tiny_tokenizer
):
    system, answer = {"role": "system", "content": "Think."}, {"role": "assistant", "content": "?"}
    dialogues = [[system, {"role": "user", "content": text}, answer] for text in TEXTS]
    samples = score(tmp_path, tiny_tokenizer, CONVERSATIONAL, prompts=dialogues)
    assert parts(samples) == {"form": [1, 0, 0], "shape": [4, 4, 7]}
    assert [r.reward for r in samples.rollouts] == [5, 4, 7]


def test_queries_hold_the_end_token_and_responses_do_not(tmp_path, tiny_tokenizer):
    code = """
        def reward_func(queries, prompts, labels, responses):
            assert set(labels) == {""}
            return [float(q == p + r + "<|end|>") for q, p, r in zip(queries, prompts, responses)]
    """
    samples = score(tmp_path, tiny_tokenizer, code)
    assert [r.reward for r in samples.rollouts] == [1, 1, 1]


def test_labels_and_columns_reach_a_function_as_they_stand_in_the_file(tmp_path, tiny_tokenizer):
    code = """
        def reward_func(queries, prompts, labels, facts, written):
            found = [repr([label, fact]) for label, fact in zip(labels, facts)]
            return [float(each == text) for each, text in zip(found, written)]
    """
    values = [(1, {"n": 1, "m": None}), (7, {"n": 0.5}), (10**20, {})]
    rows = [
        {"prompt": text, "label": label, "facts": fact, "written": repr([label, fact])}
        for text, (label, fact) in zip(TEXTS, values, strict=True)
    ]
    loaded = load_rows(str(write_jsonl(tmp_path / "rows.jsonl", rows)))
    data = PromptDataset(loaded, tiny_tokenizer, RowFormat("prompt", label_key="label"))
    samples = score(tmp_path, tiny_tokenizer, code, data=data)
    assert [r.reward for r in samples.rollouts] == [1, 1, 1]


FOR_MATHEMATICS = """
    def f(completions, task, **kwargs):
        return [1.0 if t == "math" else None for t in task]
"""


def test_a_prompt_that_no_function_applies_to_is_named(tmp_path, tiny_tokenizer):
    with pytest.raises(
        RewardError, match=r"applies to any sample of a prompt \(t/3/0\): all retur"
    ):
        score(tmp_path, tiny_tokenizer, FOR_MATHEMATICS)


def test_such_a_prompt_alone_is_dropped_where_groups_may_be(tmp_path, tiny_tokenizer):
    policy = FailurePolicy(8, drops=True)
    samples = score(tmp_path, tiny_tokenizer, FOR_MATHEMATICS, policy=policy)
    assert [r.sample_id for r in samples.rollouts] == ["t/1/0", "t/2/0"]
    assert list(samples.failed) == [2]


def test_a_sample_that_no_function_applies_to_is_left_out_of_its_group_and_counted(
    tmp_path, tiny_tokenizer
):
    code = """
        def f(completions, **kwargs):
            return [None if "boxed" not in c else float("4" in c) for c in completions]
    """
    samples = score(tmp_path, tiny_tokenizer, code, prompts=["write a number"], num_samples=3)
    assert [r.sample_id for r in samples.rollouts] == ["t/1/0", "t/1/1"]
    assert [r.reward for r in samples.rollouts] == [1, 0]
    assert samples.metrics["num_unscored_samples"] == 1


def test_the_first_batch_shows_the_arguments_of_a_sample_and_warns_of_empty_labels(
    tmp_path, tiny_tokenizer, capsys
):
    code = """
        def reward_func(queries, prompts, labels, task):
            return [float(label in q) for q, label, t in zip(queries, labels, task)]
    """
    score(tmp_path, tiny_tokenizer, code)
    out, err = capsys.readouterr()
    assert out.count("arguments of rewards for sample t/1/0\n") == 1
    assert "\n  queries: '2+2=<think>a</think>\\\\boxed{4}<|end|>'\n" in out
    assert "\n  labels: ''\n  task: 'math'\n" in out
    assert "rewards reads labels, and every label is empty. Name their column with" in err
    assert "--label_key: solution, task." in err


@pytest.mark.slow
def test_the_reward_functions_that_trl_ships_run_and_say_the_same(tmp_path, tiny_tokenizer):
    rewards = pytest.importorskip("trl.rewards")
    code = """
        from trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward

        too_long = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=10)
        reward_funcs = [accuracy_reward, think_format_reward, too_long]
    """
    dialogues = [[{"role": "user", "content": text}] for text in TEXTS]
    found = parts(score(tmp_path, tiny_tokenizer, code, prompts=dialogues))
    completions = [[{"role": "assistant", "content": text}] for text in SAID]
    ids = [[*tiny_tokenizer.encode(text), tiny_tokenizer.eos_token_id] for text in SAID]
    too_long = rewards.get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=10)
    assert found == {
        "accuracy_reward": rewards.accuracy_reward(completions, COLUMNS["solution"]),
        "think_format_reward": rewards.think_format_reward(completions),
        "soft_overlong_punishment_reward": pytest.approx(too_long(ids)),
    }
    assert all(len(set(values)) > 1 for values in found.values())
