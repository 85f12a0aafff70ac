"""One finite float per sample or a typed error that names the sample; 0.0 is a reward."""

import math
import textwrap
import time
from dataclasses import replace

import pytest
from PIL import Image

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.base import RewardBatch, RewardResult, concat_results
from openrlhf.rewards.function import CallableReward, UserFunctions
from openrlhf.utils import progress
from openrlhf.utils.images import Picture, read_picture


def batch_of(size: int, **columns: list[object]) -> RewardBatch:
    return RewardBatch(
        queries=[f"p{i}r{i}" for i in range(size)],
        prompts=[f"p{i}" for i in range(size)],
        responses=[f"r{i}" for i in range(size)],
        labels=[str(i) for i in range(size)],
        columns=columns,
        sample_ids=[f"0/{i}/0" for i in range(size)],
    )


def reward_from(tmp_path, code: str) -> UserFunctions:
    file = tmp_path / "my_reward.py"
    file.write_text(textwrap.dedent(code))
    return UserFunctions.load(file)


def answering(tmp_path, expression: str) -> UserFunctions:
    return reward_from(
        tmp_path,
        f"""
        import numpy, torch
        def reward_func(queries, prompts, labels):
            return {expression}
        """,
    )


@pytest.mark.parametrize(
    "rewards", ["[0.0, 1]", "(0.0, 1.0)", "torch.tensor([0, 1])", "numpy.array([0.0, 1.0])",
                "[torch.tensor(0.0), numpy.float32(1)]", "[False, True]",
                "[__import__('decimal').Decimal(0), __import__('fractions').Fraction(1)]"]
)  # fmt: skip
def test_lists_arrays_and_tensors_become_float32(tmp_path, rewards):
    result = answering(tmp_path, f"dict(rewards={rewards})").answer(batch_of(2))
    assert result.rewards == [0.0, 1.0] and {type(reward) for reward in result.rewards} == {float}
    assert result.scores is None and result.extra_logs == {}


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("[1.0, float('nan')]", "rewards of sample 0/1/0 is nan"),
        ("[float('inf'), 1.0]", "rewards of sample 0/0/0 is inf"),
        ("[1.0, 1e39]", "sample 0/1/0 is 1e.39, not a finite float32"),
        ("[1.0, 10**5000]", "sample 0/1/0 is inf, not a finite float32"),
        ("[1.0, 'x' * 10**6]", r"sample 0/1/0 is 'x+\.\.\.x+', not a number$"),
        ("[1.0, None]", "rewards of sample 0/1/0 is None, not a number"),
        ("[1.0, 'high']", "rewards of sample 0/1/0 is 'high', not a number"),
        ("[1.0]", "rewards has 1 values for 2 samples"),
        ("[]", "rewards has 0 values for 2 samples"),
        ("[1.0, 2.0, 3.0]", "rewards has 3 values for 2 samples"),
        ("torch.ones(2, 1)", r"rewards has shape \(2, 1\)"),
        ("torch.tensor(1.0)", r"rewards has shape \(\)"),
        ("1.0", "rewards is a float"),
        ("None", "rewards is a NoneType"),
    ],
)
def test_nonsense_is_an_error_that_names_the_file_and_the_sample(tmp_path, rewards, message):
    source = answering(tmp_path, f"dict(rewards={rewards})")
    with pytest.raises(RewardError, match=rf"my_reward.py:\d+: reward_func: .*{message}"):
        source.answer(batch_of(2))


def test_scores_and_extra_logs_come_per_sample_and_a_scalar_counts_for_all(tmp_path):
    result = answering(
        tmp_path,
        "dict(rewards=[1, 2], scores=[0, 1], extra_logs={'a': [3, 4], 'b': torch.tensor(5.0)})",
    ).answer(batch_of(2))
    assert result.scores == [0.0, 1.0]
    assert result.extra_logs["a"] == [3.0, 4.0]
    assert result.extra_logs["b"] == [5.0, 5.0]


@pytest.mark.parametrize("logs", ["{'a': [1]}", "{'a': 'x'}", "[1, 2]", "{'a': [1, 'x']}"])
def test_extra_logs_of_another_size_or_type_are_an_error(tmp_path, logs):
    with pytest.raises(RewardError, match=r"extra_logs"):
        answering(tmp_path, f"dict(rewards=[1, 2], extra_logs={logs})").answer(batch_of(2))


def test_batches_may_log_different_things():
    parts = [
        RewardResult([0.0], extra_logs={"a": [1.0]}),
        RewardResult([2.0], extra_logs={"b": [3.0]}),
    ]
    whole = concat_results(parts)
    assert whole.rewards == [0.0, 2.0] and whole.scores is None
    assert whole.extra_logs == {"a": [1.0, None], "b": [None, 3.0]}
    some = concat_results([RewardResult([0.0], scores=[1.0]), RewardResult([0.0])])
    assert some.scores == [1.0, None]  # refused with the whole step


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1", "has no reward_func; found: nothing public"),
        ("def a(): ...\ndef b(): ...", "has no reward_func; found: a, b"),
        ("reward_func = 3", "reward_func is a int, not a function"),
        (
            "def f(**columns): ...\nreward_funcs = [f]\nreward_weights = [1, 2]",
            "has 2 numbers for 1",
        ),
        ("def reward_func(): ...\nreward_weights = 0.5", "is no list of numbers: 0.5"),
        ("def reward_func(): ...\nreward_weights = ['a']", r"is no list of numbers: \['a'\]"),
        ("def reward_func(): ...\nreward_weights = [float('nan')]", "has the weight nan"),
    ],
)
def test_a_file_without_a_usable_function_is_refused_at_start(tmp_path, code, message):
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(ConfigError, match=message):
        UserFunctions.load(tmp_path / "bad.py")


def test_the_examples_score_what_they_say():
    queries = ["1+1=2", "1+1= 1,000 / no", "1+1=x", "1+1=1/2", "1+1=\\boxed{3, 2}"]
    labels = ["2", "1000", "2", 0.5, ["2", "3"]]
    batch = RewardBatch(queries, ["1+1="] * 5, [q[4:] for q in queries], labels)
    result = UserFunctions.load("examples/python/math_reward_func.py").answer(batch)
    assert result.rewards == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert result.extra_logs["has_answer"] == [1.0, 1.0, 0.0, 1.0, 1.0]
    words = RewardBatch(["pab abcd"], ["p"], ["ab abcd"], [None])
    assert math.isclose(
        UserFunctions.load("examples/python/reward_func.py").answer(words).rewards[0],
        0.3,
        rel_tol=1e-6,
    )


TASK = """
def exact(completions, **columns):
    return [1.0 if c == "r0" else None if c == "r1" else 0.0 for c in completions]

def reward_func(queries, prompts, labels):
    return {"rewards": [5.0, 6.0, 7.0], "scores": [0.0, 0.25, 0.5], "extra_logs": {"n": [1, 2, 3]}}
"""
STYLE = """
def short(completions, **columns):
    return [0.5] * len(completions)

def long(completions, **columns):
    return [2.0] * len(completions)

reward_funcs, reward_weights = [short, long], [1.0, 10.0]
"""


@pytest.fixture
def files(tmp_path):
    for name, code in (("task.py", TASK), ("style.py", STYLE)):
        (tmp_path / name).write_text(code)
    return str(tmp_path / "task.py"), str(tmp_path / "style.py")


def test_functions_of_several_files_are_added_with_their_weights_and_kept_by_name(files):
    task, style = files
    result = UserFunctions.load(f"{task}:exact,{style}", [1.0, 0.2]).answer(batch_of(3))
    # The file of a list has weight 0.2, its functions 0.2 x 1 and 0.2 x 10.
    assert result.rewards == pytest.approx([1 + 0.1 + 4, 0.1 + 4, 0.1 + 4])
    assert result.parts == {"exact": [1, None, 0], "short": [0.5] * 3, "long": [2] * 3}


def test_the_score_is_that_of_the_first_function_that_applies_to_a_sample(files):
    task, style = files
    plain = UserFunctions.load(f"{task}:exact,{style}:long").answer(batch_of(3))
    assert plain.scores == [1.0, 2.0, 0.0]  # `exact` says nothing of the second sample
    scoring = UserFunctions.load(f"{task},{style}:short").answer(batch_of(3))
    assert scoring.scores == [0.0, 0.25, 0.5]  # what it returns as scores goes before its rewards
    assert scoring.parts == {"task": [5, 6, 7], "short": [0.5] * 3}
    assert scoring.extra_logs == {"n": [1, 2, 3]}
    alone = UserFunctions.load(f"{style}:short").answer(batch_of(3))
    assert alone.scores is None and alone.parts == {}  # then the reward counts


def test_equal_names_and_a_wrong_name_are_refused(files):
    task, _ = files
    with pytest.raises(ConfigError, match=r"the same name: exact, exact\. Rename one"):
        UserFunctions.load(f"{task}:exact,{task}:exact")
    with pytest.raises(
        ConfigError, match=r"task\.py has no exakt; found: exact, reward_func\. Def"
    ):
        UserFunctions.load(f"{task}:exakt")


def test_a_callable_scores_in_this_process_and_may_hold_anything():
    seen = []

    async def noting(completions, **columns):
        seen.append(completions)
        return [float(len(seen))] * len(completions)

    source = CallableReward([noting, lambda queries, prompts, labels: [1.0] * len(queries)],
                            weights=[1.0, 10.0], batch_size=2)  # fmt: skip
    result = source.submit(batch_of(3)).result(timeout=10)
    assert seen == [["r0", "r1"], ["r2"]] and result.rewards == [11, 11, 12]
    assert result.parts == {"noting": [1, 1, 2], "<lambda>": [1, 1, 1]}
    failing = CallableReward(lambda queries, prompts, labels: [1 / 0])
    with pytest.raises(RewardError, match=r"test_function\.py:\d+: ZeroDivisionError"):
        failing.submit(batch_of(1)).result(timeout=10)
    unknown = CallableReward(lambda a: [1.0])
    with pytest.raises(ConfigError, match=r"test_function\.py:\d+: <lambda>\(a\) cannot be called"):
        unknown.check(["answer"])
    for one in (source, failing, unknown):
        one.close()


VERL_ROW = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert kwargs["level"] == extra_info["level"], kwargs
    is_right = data_source == "gsm8k" and ground_truth in solution_str
    return {"score": float(is_right), "acc": is_right, "pred": solution_str}
"""
VERL_LISTS = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos=None):
    return [float(g in s) for s, g in zip(solution_strs, ground_truths, strict=True)]
"""
QUERIES = """
def reward_func(queries, labels, prompts):
    return [float(q[len(p):].startswith(l)) for q, l, p in zip(queries, labels, prompts)]
"""
COLUMN = """
def reward_func(queries, prompts, labels, level, **kwargs):
    assert set(kwargs) == {"responses", "columns", "data_source", "extra_info", "is_truncated"}
    return [float(n) for n in level]
"""


def verl_batch(labels=("5", "6")) -> RewardBatch:
    columns = {
        "data_source": ["gsm8k"] * 2,
        "level": [1, 2],
        "extra_info": [{"level": 1}, {"level": 2}],
        "is_truncated": [False] * 2,
    }
    answers, queries = ["5, I think", "5"], ["2+3=5, I think<|end|>", "2+4=5<|end|>"]
    return RewardBatch(queries, ["2+3=", "2+4="], answers, list(labels), columns)


@pytest.mark.parametrize(
    ("code", "rewards"),
    [(VERL_ROW, [1, 0]), (VERL_LISTS, [1, 0]), (QUERIES, [1, 0]), (COLUMN, [1, 2])],
    ids=["a row of verl", "lists of verl", "another order", "a column"],
)
def test_arguments_go_by_name_in_the_forms_of_three_libraries(tmp_path, code, rewards):
    result = reward_from(tmp_path, code.lstrip()).answer(verl_batch())
    assert result.rewards == rewards
    if code is VERL_ROW:
        assert result.extra_logs == {"acc": [1, 0]}
        assert result.extra_columns == {"pred": ["5, I think", "5"]}


def test_the_accuracy_beside_verls_score_is_the_score_of_a_sample(tmp_path):
    code = VERL_ROW.replace('"score": float(is_right)', '"score": 2.0 * is_right - 1')
    result = reward_from(tmp_path, code.lstrip()).answer(verl_batch())
    assert (result.rewards, result.scores) == ([1.0, -1.0], [1.0, 0.0])
    plain = code.replace(', "acc": is_right', "")
    assert reward_from(tmp_path, plain.lstrip()).answer(verl_batch()).scores == [1.0, -1.0]
    mixed = code.replace("return {", "return -1.0 if not is_right else {")
    assert reward_from(tmp_path, mixed.lstrip()).answer(verl_batch()).scores == [1.0, -1.0]


def test_numbers_beside_verls_score_may_be_numpys(tmp_path):
    code = VERL_ROW.replace('"acc": is_right', '"acc": numpy.bool_(is_right), "n": numpy.int64(3)')
    result = reward_from(tmp_path, "import numpy\n" + code.lstrip()).answer(verl_batch())
    assert result.scores == [1.0, 0.0] and result.extra_logs == {"acc": [1, 0], "n": [3, 3]}
    words = VERL_ROW.replace('"acc": is_right', '"acc": str(is_right)')
    with pytest.raises(RewardError, match="'acc' is 'True', not 0 or 1"):
        reward_from(tmp_path, words.lstrip()).answer(verl_batch())


@pytest.mark.parametrize(
    "code",
    [
        "def f(prompts, completions): return [len(p.append(c) or p) for p, c in "
        "zip(prompts, completions)]",
        "def f(completions, labels): return [len(label.append(0) or label) for label in labels]",
        "def f(completions, steps): return [len(each.append(0) or each) for each in steps]",
        "def f(queries, columns): return [len(s.append(0) or s) for s in columns['steps']]",
    ],
)
def test_samples_of_a_prompt_share_no_list_that_a_function_changes(tmp_path, code):
    messages, label, steps = [{"role": "user", "content": "p"}], [1], [1]
    batch = replace(
        batch_of(2, steps=[steps] * 2), labels=[label] * 2, source_prompts=[messages] * 2
    )
    function = reward_from(tmp_path, code)
    assert function.answer(batch).rewards == function.answer(batch).rewards == [2, 2]
    assert (len(messages), len(label), len(steps)) == (1, 1, 1)


def test_an_async_function_that_cancels_its_own_call_is_an_error(tmp_path):
    code = """
        import asyncio
        async def reward_func(queries, prompts, labels):
            judge = asyncio.ensure_future(asyncio.sleep(9))
            judge.cancel()
            return await judge
        """
    with pytest.raises(RewardError, match="cancelled by its own code"):
        reward_from(tmp_path, code).answer(batch_of(2))


def test_what_is_logged_under_one_name_is_not_lost(tmp_path):
    code = """
        def each(completions, log_metric):
            for completion, length in zip(completions, (1, 3)):
                log_metric("length", length)
            return {"rewards": [0.0, 0.0], "extra_logs": {"own": [1, 2]}}
        def first(completions, log_metric):
            log_metric("kind", [1, None])
            return [0.0, None]
        def second(completions, log_metric):
            log_metric("kind", [None, 2])
            return [None, 0.0]
        reward_funcs = [each, first, second]
        """
    logs = reward_from(tmp_path, code).answer(batch_of(2)).extra_logs
    assert logs == {"length": [2.0, 2.0], "own": [1.0, 2.0], "kind": [1.0, 2.0]}
    with pytest.raises(RewardError, match=r"log_metric\('length', …\) is called 2 times"):
        reward_from(tmp_path, code.replace("(1, 3)", "([1, 2], [3, 4])")).answer(batch_of(2))


@pytest.mark.parametrize("rest", ["**columns", "**labels", "*queries, **kwargs"])
def test_the_name_of_what_takes_the_rest_is_of_no_form(tmp_path, rest):
    name = rest.rpartition("*")[2]
    code = f"def f(prompts, {rest}): return [len({name}['completions']) for _ in prompts]"
    assert reward_from(tmp_path, code).answer(batch_of(2)).rewards == [2, 2]


def test_truths_of_verls_rows_are_read_without_a_label_key(tmp_path):
    batch = verl_batch(labels=("", ""))
    truths = [{"ground_truth": "5", "style": "rule"}, {"ground_truth": "7", "style": "rule"}]
    batch.columns["reward_model"] = truths  # type: ignore[index]
    assert reward_from(tmp_path, VERL_LISTS).answer(batch).rewards == [1, 0]
    batch.columns["reward_model"] = [truths[0], {"style": "rule"}]  # type: ignore[index]
    with pytest.raises(RewardError, match=r"sample 2 has no reward_model\.ground_truth"):
        reward_from(tmp_path, VERL_LISTS).answer(batch)


@pytest.mark.parametrize(
    ("code", "column"),
    [(VERL_ROW, "ground_truth"), (VERL_LISTS, "ground_truth"), (VERL_LISTS, "ground_truths"),
     (QUERIES, "labels")],
)  # fmt: skip
def test_without_a_label_key_the_column_of_a_parameters_own_name_is_read(tmp_path, code, column):
    batch = verl_batch(labels=("", ""))
    batch.columns[column] = ["5", "7"]  # type: ignore[index]
    function = reward_from(tmp_path, code)
    assert function.answer(batch).rewards == [1, 0]
    assert function.answer(replace(batch, labels=["4", "5"])).rewards == [0, 1]


def test_a_label_wins_over_a_column_of_its_name(tmp_path):
    function = reward_from(tmp_path, "def f(completions, labels):\n    return labels")
    assert function.answer(replace(batch_of(2, labels=[5, 6]), labels=[1, 2])).rewards == [1, 2]
    assert function.answer(replace(batch_of(2, labels=[5, 6]), labels=["", ""])).rewards == [5, 6]


@pytest.mark.parametrize(
    ("signature", "unknown"),
    [
        ("(prompts, outputs, answers)", "outputs, answers"),
        ("(completions, solution, **columns)", "solution"),
        ("(queries, prompts, labels, /)", "queries, prompts, labels"),
        ("(*args, **kwargs)", "args"),
        ("(data_source, solution_str, truth)", "truth"),
    ],
)
def test_an_argument_of_no_known_name_is_refused_and_the_columns_are_named(
    tmp_path, signature, unknown
):
    found = reward_from(tmp_path, f"def my_reward{signature}:\n    return [1.0]")
    with pytest.raises(ConfigError) as caught:
        found.answer(batch_of(1, answer=["5"], level=[1]))
    [problem] = caught.value.problems
    assert f"my_reward.py:1: my_reward{signature} cannot be called: unknown arg" in problem
    assert f"arguments: {unknown}. Arguments go by name. Known are queries, prompts" in problem
    assert "and the columns of the rows: answer, level. Rename them" in problem
    with pytest.raises(ConfigError, match="columns of the rows: question"):
        found.check(RewardBatch.of_columns(["question"]))


def test_what_a_function_is_given_of_the_first_sample_is_shown_in_short(tmp_path):
    code = """
        def reward_func(queries, prompts, labels, columns, responses=None, other=3):
            return [float(len(c)) for c in (queries, labels, columns) if responses]
    """
    batch = batch_of(2, answer=["5" * 500, "6"])
    [(name, shown)] = reward_from(tmp_path, code).shown(batch).items()
    assert name == "my_reward"
    assert [*shown] == ["queries", "prompts", "labels", "columns", "responses"]
    assert shown["queries"] == "'p0r0'" and shown["labels"] == "'0'"
    assert shown["columns"].startswith("{'answer': '5555") and len(shown["columns"]) < 200
    trl = "def f(completions, **kwargs):\n    return [1.0 for c in completions]"
    shown = reward_from(tmp_path, trl).shown(batch)["f"]
    assert shown["completions"] == "'r0'" and "'labels': '0'" in shown["**"]


def test_samples_that_no_function_applies_to_have_no_reward(tmp_path):
    code = "def f(completions, **columns):\n    return [1.0, None]"
    result = reward_from(tmp_path, code).answer(batch_of(2))
    assert result.rewards == [1.0, None]


@pytest.mark.parametrize(("key", "meant"), [("score", "scores"), ("Extra_Log", "extra_logs")])
def test_a_key_that_is_nearly_right_is_refused_and_another_is_noted(tmp_path, key, meant):
    answer = f"{{'rewards': [1.0], 'ms': 3, '{key}': [1.0]}}"
    with pytest.raises(RewardError, match=f"the answer has the key '{key}'. Write '{meant}'"):
        answering(tmp_path, answer).answer(batch_of(1))
    assert answering(tmp_path, "{'rewards': [1.0], 'ms': 3}").answer(batch_of(1)).unread == ["ms"]
    assert answering(tmp_path, "{'rewards': [1.0], 3: 'ms'}").answer(batch_of(1)).unread == ["3"]
    with pytest.raises(RewardError, match=r"has no 'rewards'; it has \['0'.*\.\.\.\]$"):
        answering(tmp_path, "{str(i): 1 for i in range(10**5)}").answer(batch_of(1))


def test_weights_are_those_of_sources_or_of_functions(files):
    task, style = files
    batch = batch_of(3)
    assert UserFunctions.load(style, [2.0, 0.5]).answer(batch).rewards[0] == 2 * 0.5 + 5 * 2.0
    assert UserFunctions.load(style, [2.0]).answer(batch).rewards[0] == 2 * (0.5 + 10 * 2.0)
    with pytest.raises(ConfigError) as caught:
        UserFunctions.load(f"{task}:exact,{style}", [1.0])
    assert str(caught.value) == (
        "--reward_weights has 1 values for the 3 functions of --remote_rm_url: exact, short, "
        "long. Type one weight for each function."
    )


RED = read_picture(Image.new("RGB", (4, 2), (255, 0, 0)))
SEES = """
def reward_func(queries, prompts, labels, images):
    return [sum(image.size[0] for image in of_sample) for of_sample in images]
""", """
def redness(completions, images):
    return [sum(image.getpixel((0, 0))[0] for image in of_sample) for of_sample in images]
""", """
def compute_score(data_source, solution_str, ground_truth, images=None):
    return len(images)
""", """
def any_columns(completions, **columns):
    return [len(images) for images in columns["images"]]
""", """
def one_image(completions, image, **columns):
    return [0 if seen is None else seen.size[0] for seen in image]
"""  # fmt: skip


@pytest.mark.parametrize(
    ("code", "rewards"),
    zip(SEES, [[4, 0, 8], [255, 0, 510], [1, 0, 2], [1, 0, 2], [4, 0, 4]], strict=True),
)
def test_a_function_of_any_form_sees_the_images_of_each_sample(tmp_path, code, rewards):
    functions = reward_from(tmp_path, code)
    seen = replace(batch_of(3), images=[(RED,), (), (RED, RED)])
    assert functions.answer(seen).rewards == rewards
    [part] = seen.parts(2)[1:]
    assert functions.answer(part).rewards == rewards[2:]


def test_a_function_that_sees_images_gets_empty_lists_where_there_are_none(tmp_path):
    assert reward_from(tmp_path, SEES[0]).answer(batch_of(2)).rewards == [0, 0]
    none = replace(batch_of(2), images=[(), ()])
    assert reward_from(tmp_path, SEES[3]).answer(none).rewards == [0, 0]
    own = batch_of(2, images=["a", "bc"])  # a column of a run without images
    assert reward_from(tmp_path, SEES[3]).answer(own).rewards == [1, 2]


def test_a_function_that_sees_one_image_gets_none_where_there_is_none(tmp_path):
    """It is known before there are samples: the column of images is none of the others."""
    one_image = reward_from(tmp_path, SEES[4])
    one_image.check(RewardBatch.of_columns(["is_truncated", "answer"]))
    assert one_image.answer(replace(batch_of(2), images=[(), ()])).rewards == [0, 0]
    own = batch_of(2, image=[RED.open(), None])  # a column of a run without images
    assert one_image.answer(own).rewards == [4, 0]


def test_images_are_decoded_once_and_each_sample_has_its_own(tmp_path, monkeypatch):
    """A function may draw on them."""
    seen, decode = [], Picture.open
    monkeypatch.setattr(Picture, "open", lambda self: (seen.append(self), decode(self))[1])
    code = """
def drawing(queries, prompts, labels, images):
    found = []
    for [image] in images:
        found.append(float(image.getpixel((0, 0)) == (255, 0, 0)))
        image.putpixel((0, 0), (0, 0, 0))
    return found
"""
    batch = replace(batch_of(2), images=[(RED,), (RED,)])
    assert reward_from(tmp_path, code).answer(batch).rewards == [1, 1]
    assert seen == [RED]


def test_images_that_no_function_reads_are_not_decoded(tmp_path):
    batch = replace(batch_of(1), images=[(Picture(b"no picture", "", 1, 1),)])
    assert answering(tmp_path, "[1.0]").answer(batch).rewards == [1.0]


def test_a_function_of_this_process_that_does_not_end_is_named(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SAY_AFTER_S", 0.1)

    def slow(queries, prompts, labels):
        time.sleep(0.3)
        return [1.0] * len(queries)

    source = CallableReward(slow)
    batch = RewardBatch(["q"], ["p"], ["r"], ["l"], sample_ids=["step7/4/0"])
    assert source.submit(batch).result().rewards == [1.0]
    source.close()
    assert "waited 0 s for slow to score sample step7/4/0" in capsys.readouterr().out
