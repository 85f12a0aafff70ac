"""What only this machine, the model and the user's code can tell is said before models load."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig

from openrlhf.commands.evaluate import gather_inputs
from openrlhf.commands.rl_inputs import pass_rate, prepare_inputs
from openrlhf.config.cli import parse_config
from openrlhf.config.evaluation import EvaluateConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError, Gathered
from openrlhf.trainer.local_cluster import engine_config, policy_dtype
from openrlhf.trainer.ray import vllm_engine
from openrlhf.trainer.ray.vllm_engine import create_vllm_engines
from openrlhf.utils.tokenizer import load_tokenizer
from tests.helpers.configs import rl_config
from tests.tiny import make_model, write_jsonl


def problem(model: Path, folder: Path, flags: str) -> str:
    """What the first check that fails says."""
    data = write_jsonl(folder / "rows.jsonl", [{"input": "q"}])
    words = f"--pretrain {model} --prompt_data {data} --save_path {folder / 'run'} "
    words += f"--remote_rm_url {folder / 'no_reward.py'} {flags}"
    with pytest.raises(ConfigError) as caught:
        prepare_inputs(parse_config(PPOConfig, words.split()).config, has_engines=False)
    return caught.value.problems[0]


def test_lengths_do_not_hide_a_column_that_is_not_there(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", max_position_embeddings=64)
    data = write_jsonl(tmp_path / "data.jsonl", [{"input": "a", "answer": "b"}])
    words = f"--pretrain {model} --prompt_data {data} --remote_rm_url r.py --label_key gold "
    words += "--prompt_max_len 32 --generate_max_len 64 --aux_loss_coef 0.1 --input_key question"
    config = parse_config(PPOConfig, words.split()).config
    with pytest.raises(ConfigError) as caught:
        prepare_inputs(config, has_engines=False)
    experts, lengths, question, gold, reward = caught.value.problems
    assert "32 + --generate_max_len 64 is more than the 64 positions" in lengths
    assert "has no experts" in experts
    assert question.startswith("column 'question' is not in the data set")
    assert gold.startswith("column 'gold' is not in the data set; columns found: input, answer.")
    assert reward.startswith("r.py is not a Python file that exists")


def test_the_text_that_is_mixed_in_is_part_of_the_data_that_a_run_resumes_on(
    tmp_path: Path,
) -> None:
    model = make_model(tmp_path / "model")
    data = write_jsonl(tmp_path / "rows.jsonl", [{"input": "q"}])
    words = f"--pretrain {model} --prompt_data {data} --ptx_coef 0.1 --save_path {tmp_path / 'run'}"
    words += f" --remote_rm_url http://localhost:1 --pretrain_data {tmp_path / 'texts.jsonl'}"
    found = []
    for text in ("a", "b"):
        write_jsonl(tmp_path / "texts.jsonl", [{"text": text}])
        inputs = prepare_inputs(parse_config(PPOConfig, words.split()).config, has_engines=False)
        inputs.reward_source.close()
        found.append(inputs.data)
    assert found[0].num_samples == found[1].num_samples == 1
    assert found[0] != found[1]


def test_what_a_model_says_of_sampling_is_used_or_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model")
    tokenizer = load_tokenizer(str(model))
    end, other = tokenizer.eos_token_id, tokenizer.pad_token_id
    tokenizer.eos_token = "<|pad|>"  # and the template ends turns with the other one
    tokenizer.save_pretrained(model)
    for file in ("config.json", "generation_config.json"):
        known = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps(known | {"eos_token_id": other, "top_k": 20}))
    data = write_jsonl(tmp_path / "rows.jsonl", [{"input": "q"}])
    words = f"--pretrain {model} --prompt_data {data} --eval_dataset {data} --stop ab cd "
    words += f"--stop_token_ids 9 --save_path {tmp_path / 'run'} --remote_rm_url http://localhost:1"
    inputs = prepare_inputs(parse_config(PPOConfig, words.split()).config, has_engines=False)
    inputs.reward_source.close()
    not_used = f"not used: top_k 20 of the generation config of {model}"
    said = capsys.readouterr().err
    assert f"{not_used}\n" in said
    assert "evaluation: --eval_dataset has the rows of the training data" in said
    words = words.replace("--prompt_data", "--eval_dataset").replace("--pretrain", "--models")
    gathered = Gathered()
    measured = gather_inputs(parse_config(EvaluateConfig, words.split()).config, gathered)
    measured.reward_source.close()
    assert f"{not_used}. Type --top_k 20 to use them" in capsys.readouterr().err
    for sampling in (inputs.sampling, inputs.eval_sampling, measured.sampling):
        assert sampling.stop == ("ab", "cd")
        assert sampling.stop_token_ids == (other, end, 9)


OWN_CODE = """
from openrlhf.utils.agent import AgentInstanceBase

def two(first, second):
    return first

def three(first, second, third):
    return first

class Game(AgentInstanceBase):
    async def step(self, observation, action):
        return {}
"""


def test_functions_of_the_users_are_held_against_their_calls_before_models_load(
    refuse: Callable, tiny_model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_CODE)
    data = write_jsonl(tmp_path / "rows.jsonl", [{"input": "q"}])
    words = f"--pretrain {tiny_model_dir} --prompt_data {data} --save_path {tmp_path / 'run'} "
    words += f"--policy_loss_type {file}:two --advantage_estimator {file}:three "
    words += f"--agent_func_path {file}:Game"
    code, said = refuse("train_ppo", words.split())
    *_, estimator, loss, game = said.splitlines()
    assert code == 2
    assert estimator.startswith(f"error: {file}:7: three(first, second, third) cannot be called")
    assert loss.startswith(f"error: {file}:4: two(first, second) cannot be called")
    assert game == (
        f"error: {file}:11: step(self, observation, action) cannot be called as it will be: "
        "missing a required argument: 'action'. Write step(self, states, **kwargs)."
    )


STARTS_A_SERVER = """
import subprocess
from pathlib import Path

server = subprocess.Popen(["sleep", "1000"], start_new_session={own_session})
Path(__file__).with_suffix(".pid").write_text(str(server.pid))
"""


@pytest.mark.parametrize("own_session", [False, True])
def test_what_an_agents_file_starts_does_not_outlive_the_check_of_the_file(
    refuse: Callable, tiny_model_dir: Path, tmp_path: Path, *, own_session: bool
) -> None:
    file = tmp_path / "own.py"
    file.write_text(STARTS_A_SERVER.format(own_session=own_session) + OWN_CODE)
    data = write_jsonl(tmp_path / "rows.jsonl", [{"input": "q"}])
    words = f"--pretrain {tiny_model_dir} --prompt_data {data} --agent_func_path {file}:Game"
    assert refuse("train_ppo", words.split())[0] == 2
    pid = int((tmp_path / "own.pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_argument_of_a_reward_function_that_rows_lack_is_refused_before_models_load(
    refuse: Callable, tiny_model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def f(prompts, outputs, solution):\n    return [1.0]\n")
    data = write_jsonl(tmp_path / "rows.jsonl", [{"input": "q", "answer": "a"}] * 256)
    words = f"--pretrain {tiny_model_dir} --prompt_data {data} --save_path {tmp_path / 'run'} "
    code, said = refuse("train_ppo", [*words.split(), "--remote_rm_url", str(file)])
    *_, line = said.strip().splitlines()
    assert code == 2
    assert line.startswith(f"error: {file}:1: f(prompts, outputs, solution) cannot be called: ")
    assert "unknown arguments: outputs, solution." in line and "is_truncated, answer." in line


def test_a_users_error_shows_its_own_traceback(
    refuse: Callable, tiny_model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text("def loss(pairs, options):\n    return pairs.sums\n")
    row = {"input": "q", "chosen": "a", "rejected": "b"}
    data = write_jsonl(tmp_path / "rows.jsonl", [row])
    words = f"--pretrain {tiny_model_dir} --dataset {data} --save_path {tmp_path / 'run'} "
    words += f"--prompt_key input --loss_type {file}:loss"
    code, said = refuse("train_dpo", words.split())
    assert code == 2
    assert said.startswith(f'Traceback (most recent call last):\n  File "{file}", line 2, in loss')
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {file}:2: AttributeError: 'PairLogps' object has no attribute")


@pytest.mark.parametrize(
    "flags",
    ["--generate_max_len 100000", "--prompt_max_len 100000 --generate_max_len 8"],
)
def test_lengths_that_are_said_to_fit_the_model_do(
    tiny_model_dir: Path, tmp_path: Path, flags: str
) -> None:
    said = problem(tiny_model_dir, tmp_path, flags)
    assert "positions of the model" in said
    remedy = said.partition("Type ")[2].rstrip(".").partition(" or ")[0]
    assert "positions" not in problem(tiny_model_dir, tmp_path, f"{flags} {remedy}")


@pytest.mark.parametrize(("has_gpus", "stored", "flags", "expected"), [
    (True, "float32", "", torch.float32),
    (False, "bfloat16", "", torch.float32),
    (True, "float32", "--bf16", torch.bfloat16),
])  # fmt: skip
def test_the_engine_holds_the_type_of_the_trainer(
    tmp_path: Path, has_gpus: bool, stored: str, flags: str, expected: torch.dtype
) -> None:
    LlamaConfig(dtype=stored).save_pretrained(tmp_path)
    config = rl_config(flags, pretrain=tmp_path)
    assert policy_dtype(config, has_gpus=has_gpus) == expected
    assert engine_config(config, dtype=expected)["dtype"] == str(expected).removeprefix("torch.")


def test_every_engine_draws_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start_actor(kind: type, arguments: tuple, slot: object, **options: object) -> None:
        started.append(arguments[0]["seed"])

    monkeypatch.setattr(vllm_engine, "start_actor", start_actor)
    slots: list[dict[str, Any]] = [{}] * 4
    for resume_step in range(3):
        settings = engine_config(rl_config(), dtype=torch.float32, resume_step=resume_step)
        create_vllm_engines(settings, slots, run_dir="run")
    assert len(set(started)) == 12


def config(**ckpt: object) -> PPOConfig:
    return PPOConfig.model_validate({"ckpt": ckpt, "eval": {"dataset": "d"}})


EVAL_PROMPTS = [SimpleNamespace(datasource=name) for name in ("math", "code", "math")]


@pytest.mark.parametrize(
    ("ckpt", "expected"),
    [
        ({}, ("eval/eval_math_pass1", False)),  # no checkpoints: no best model
        ({"save_steps": 5}, ("eval/eval_math_pass1", True)),
        ({"save_steps": 5, "best_metric_key": "none"}, ("eval/eval_math_pass1", False)),
        ({"best_metric_key": "eval_code_pass4"}, ("eval/eval_code_pass4", True)),
        ({"best_metric_key": "eval/eval_code_pass1"}, ("eval/eval_code_pass1", True)),
    ],
)
def test_the_best_model_is_chosen_by(ckpt: dict, expected: tuple[str, bool]) -> None:
    found = pass_rate(config(**ckpt), EVAL_PROMPTS)  # type: ignore[arg-type]
    assert (found, config(**ckpt).ckpt.keeps_best) == expected
    assert pass_rate(config(**ckpt), None) is None


def test_an_unknown_metric_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"pass9 is no pass rate .* eval/eval_code_pass1, or no"):
        pass_rate(config(best_metric_key="pass9"), EVAL_PROMPTS)  # type: ignore[arg-type]
