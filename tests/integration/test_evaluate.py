"""`openrlhf eval` measures what a run of RL would, of one model or several."""

import json
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from textwrap import dedent

import pandas
import pytest

from openrlhf.algorithms.evaluation import wilson_interval
from openrlhf.cli import evaluate
from openrlhf.distributed.checkpoints import find_model
from openrlhf.errors import ConfigError
from tests.integration.commands import run_command
from tests.rewards.servers import RewardServer
from tests.rollout.agent_fakes import ENVIRONMENT, NEW
from tests.tiny import make_model, make_reward_model, read_jsonl, write_jsonl

REWARDS = """
def letter(completions, **columns):
    return [float(c[:1].isalpha()) for c in completions]

def short(completions, **columns):
    return [1.0 / (1 + len(c)) for c in completions]
"""
SIZES = "--generate_max_len 6 --prompt_max_len 64 --vllm_num_engines 0"
NUM_SAMPLES = 4


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a run that has not ended with its best model, prompts, and rewards."""
    root = tmp_path_factory.mktemp("evaluate")
    make_model(root / "model")
    make_model(root / "ckpt" / "best_global_step2_hf", seed=1)
    (root / "ckpt" / "global_step4_hf").mkdir()
    (root / "run").mkdir()
    (root / "run" / "config.yaml").write_text(f"ckpt: {{path: {root}/ckpt, save_steps: 2}}\n")
    rows = [{"input": f"{i}+{i}=", "answer": "x", "datasource": "ab"[i % 2]} for i in range(7)]
    write_jsonl(root / "prompts.jsonl", rows)
    (root / "rewards.py").write_text(REWARDS)
    return root


@pytest.fixture(scope="module")
def evaluated(given: Path) -> tuple[Path, str]:
    """The folder of an evaluation of both, and what it said."""
    out, said = given / "out", pytest.MonkeyPatch()
    words = f"{given}/model {given}/run --eval_dataset {given}/prompts.jsonl --label_key answer"
    words += f" --remote_rm_url {given}/rewards.py:letter,{given}/rewards.py:short"
    words += f" --reward_weights 1,0.5 --eval_n_samples_per_prompt {NUM_SAMPLES} --pass_k 2 4"
    words += " --eval_temperature 1"
    lines: list[str] = []
    with said.context() as patch:
        for module in ("commands.evaluate", "distributed.checkpoints"):
            patch.setattr(f"openrlhf.{module}.notice", lines.append)
        evaluate.main(f"{words} {SIZES} --save_path {out}".split())
    return out, "\n".join(lines)


def samples(folder: Path) -> pandas.DataFrame:
    return pandas.read_parquet(folder / "rollouts" / "eval_step_000000.parquet")


def metrics_of(folder: Path) -> Mapping[str, float]:
    [record] = read_jsonl(folder / "metrics.jsonl")
    return record


@pytest.mark.parametrize("model", ["model", "run"])
def test_the_metrics_are_those_of_the_samples_that_are_kept(
    evaluated: tuple[Path, str], model: str
) -> None:
    rows, metrics = samples(evaluated[0] / model), metrics_of(evaluated[0] / model)
    assert len(rows) == 7 * NUM_SAMPLES and set(rows.datasource) == {"a", "b"}
    for source, of_source in [("all", rows), *rows.groupby("datasource")]:
        scores = [list(group.score) for _, group in of_source.groupby("row")]
        for k in (1, 2, 4):
            expected = fmean(fmean(map(max, combinations(row, k))) for row in scores)
            assert metrics[f"eval/eval_{source}_pass{k}"] == pytest.approx(expected)
        assert metrics[f"eval/eval_{source}_reward"] == pytest.approx(of_source.reward.mean())
    of_prompts = [group.score.mean() for _, group in rows.groupby("row")]
    assert metrics["eval/eval_all_pass1_stderr"] == pytest.approx(stdev(of_prompts) / 7**0.5)


def test_the_first_function_gives_the_score_and_each_is_kept_by_name(
    evaluated: tuple[Path, str],
) -> None:
    rows, metrics = samples(evaluated[0] / "model"), metrics_of(evaluated[0] / "model")
    parts = pandas.DataFrame(list(rows.reward_parts))
    assert list(parts) == ["letter", "short"] and 0 < parts.letter.mean() < 1
    assert list(rows.score) == list(parts.letter)
    assert list(rows.reward) == pytest.approx(list(parts.letter + 0.5 * parts.short))
    assert metrics["reward/letter"] == pytest.approx(parts.letter.mean())
    assert metrics["reward/short"] == pytest.approx(parts.short.mean())


def test_a_table_shows_every_model_and_data_source(evaluated: tuple[Path, str]) -> None:
    out, said = evaluated
    root, metrics = out.parent, metrics_of(out / "run")
    assert said.splitlines()[0] == f"{root}/run: {root}/ckpt/best_global_step2_hf"
    assert f"evaluating {root}/run: 7 prompts x 4 samples\nmodel  " in said
    head, *lines = [line.split() for line in said.splitlines()[3:10]]
    assert head == ["model", "data", "prompts", "pass@1", "pass@2", "pass@4", "reward"]
    assert [line[:3] for line in lines] == [
        [f"{root}/{model}", source, count]
        for model in ("model", "run")
        for source, count in (("a", "4"), ("b", "3"), ("all", "7"))
    ]
    assert "eval_all_pass1" in (out / "report.html").read_text()  # of both models
    mean, error = metrics["eval/eval_all_reward"], metrics["eval/eval_all_reward_stderr"]
    reach = 1.96 * error
    assert lines[5][-3:] == [f"{mean:.3f}", f"[{mean - reach:.3f},", f"{mean + reach:.3f}]"]
    mean, error = metrics["eval/eval_all_pass1"], metrics["eval/eval_all_pass1_stderr"]
    low, high = wilson_interval(mean, error, 7)
    assert lines[5][3:6] == [f"{mean:.3f}", f"[{low:.3f},", f"{high:.3f}]"]


def run(root: Path, out: Path, models: str, flags: str) -> None:
    words = f"{models} --eval_dataset {root}/prompts.jsonl --label_key answer {SIZES} {flags}"
    evaluate.main(f"{words} --save_path {out}".split())


GREEDY = "--eval_temperature 0 --eval_n_samples_per_prompt 1"


def test_vllm_and_the_model_itself_give_the_same_samples_and_rewards_of_models(
    given: Path, tmp_path: Path
) -> None:
    models = f"{given}/model {given}/ckpt"
    scored = f"{GREEDY} --reward_pretrain {make_reward_model(tmp_path / 'rm')}"
    run(given, tmp_path / "own", models, scored)
    run(given, tmp_path / "vllm", models, f"{scored} --vllm_num_engines 1")
    for folder in ("model", "ckpt"):
        own, others = samples(tmp_path / "own" / folder), samples(tmp_path / "vllm" / folder)
        assert list(own.response) == list(others.response)
        assert list(own.reward) == pytest.approx(list(others.reward), rel=1e-4)
        metrics = metrics_of(tmp_path / "own" / folder)
        assert metrics["eval/eval_all_pass1"] == pytest.approx(own.reward.mean())


@pytest.mark.slow
def test_vllm_in_the_process_and_a_reward_function_end_well(given: Path, tmp_path: Path) -> None:
    words = f"{given}/model --eval_dataset {given}/prompts.jsonl --label_key answer"
    words += f" --remote_rm_url {given}/rewards.py:short --prompt_max_len 64 --generate_max_len 6"
    said = run_command("-m", "openrlhf.cli.evaluate", *words.split(), "--save_path", tmp_path)
    assert f"samples and metrics: {tmp_path}" in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_several_engines_run_on_ray(given: Path, tmp_path: Path) -> None:
    scored = f"{GREEDY} --reward_pretrain {make_reward_model(tmp_path / 'rm')}"
    run(given, tmp_path / "one", f"{given}/model", scored)
    run(given, tmp_path / "two", f"{given}/model", f"{scored} --vllm_num_engines 2")
    one, two = samples(tmp_path / "one"), samples(tmp_path / "two")
    assert list(one.response) == list(two.response)
    assert list(one.reward) == pytest.approx(list(two.reward), rel=1e-4)


def test_a_server_scores_an_evaluation(given: Path, tmp_path: Path) -> None:
    with RewardServer() as server:  # it returns the length of a query
        run(given, tmp_path / "out", f"{given}/model", f"{GREEDY} --remote_rm_url {server.url}")
    rows = samples(tmp_path / "out")
    assert list(rows.reward) == list(map(len, rows.prompt + rows.response))


def test_an_agent_is_evaluated_by_its_own_rewards(given: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ENVIRONMENT + dedent(NEW))
    flags = f"--agent_func_path {tmp_path}/agent.py --generate_max_len 64"
    run(given, tmp_path / "out", f"{given}/model", flags)
    rows, metrics = samples(tmp_path / "out"), metrics_of(tmp_path / "out")
    assert metrics["agent/num_turns"] >= 1
    assert metrics["eval/eval_all_reward"] == pytest.approx(rows.reward.mean())


def test_a_run_stands_for_its_exported_its_best_or_its_last_model(tmp_path: Path) -> None:
    folder, root = tmp_path / "run", tmp_path / "ckpt"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"ckpt: {{path: {root}, save_steps: 3}}\n")
    (root / "global_step9").mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"{folder} holds no model, and {root} no checkpoint"):
        find_model(str(folder))
    for name in ("global_step5_hf", "global_step12_hf"):
        (root / name).mkdir()
    assert find_model(str(folder)) == find_model(str(root)) == f"{root}/global_step12_hf"
    (root / "best_global_step3_hf").mkdir()
    assert find_model(str(folder)) == f"{root}/best_global_step3_hf"
    state = root / "global_step9" / "state.json"
    state.write_text(json.dumps({"run_dir": str(folder.resolve())}))
    assert find_model(str(folder)) == f"{root}/best_global_step3_hf"
    state.write_text(json.dumps({"run_dir": "/of/another"}))
    with pytest.raises(ConfigError, match=f"the checkpoints in {root} are another run's"):
        find_model(str(folder))
    state.unlink()
    (folder / "config.yaml").write_text(f"ckpt: {{path: {root}, save_steps: -1}}\n")
    with pytest.raises(ConfigError, match=f"the checkpoints in {root} are another run's"):
        find_model(str(folder))
    (folder / "config.json").write_text("{}")
    assert find_model(str(folder)) == str(folder)
    assert find_model("org/name") == "org/name"


def test_what_is_wrong_is_said_before_a_model_is_loaded(
    given: Path, tmp_path: Path, refuse
) -> None:
    needs = f"{given}/model --eval_dataset {given}/prompts.jsonl --save_path {tmp_path}"
    code, error = refuse("evaluate", f"{needs} --pass_k 8".split())
    assert code == 2
    reward, k = error.splitlines()
    assert reward.startswith("error: There is no reward. Type --reward_pretrain")
    assert k == (
        "error: --pass_k 8 cannot be estimated from the 4 samples of a prompt. Type a number from "
        "1 to 4, or --n_samples_per_prompt 8."
    )
    (tmp_path / "metrics.jsonl").touch()
    code, error = refuse("evaluate", f"{needs} --remote_rm_url {given}/rewards.py:short".split())
    assert (code, error.splitlines()) == (
        2,
        [
            f"error: --save_path {tmp_path} holds the records of a run. Type another folder, or "
            "leave --save_path out."
        ],
    )
