"""Ten steps of every trainer give the numbers that were recorded: same seed, same data, CPU, fp32.

The commands run as a user types them, so a change of the code behind them leaves this file as it
is. `python -m tests.integration.test_same_numbers` records anew what is meant to differ.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.helpers.rows import make_row
from tests.integration.commands import run_command
from tests.tiny import make_model, read_jsonl, write_jsonl

RECORDED = Path(__file__).with_name("same_numbers.json")
NUM_STEPS = 10
# On the machine that recorded them they agree to 1e-6. Kernels for other CPUs round otherwise, and
# ten steps of Adam enlarge that: by up to 1.4e-5 on a CPU with AMX.
TOLERANCE = 1e-4

SUPERVISED = (
    "--pretrain {root}/model --dataset {root}/rows.jsonl --eval_dataset {root}/rows.jsonl "
    "--eval_split train --max_epochs 2 --train_batch_size 4 --micro_train_batch_size 2 "
    "--learning_rate 1e-3 --lr_warmup_ratio 0 --logging_steps 1 --save_path {run}"
)
SFT, PAIRS = "--input_key input --output_key output", "--prompt_key input"
# Top-p leaves the likeliest token alone: no random numbers, so the engine does not matter.
RL = (
    "--pretrain {root}/model --prompt_data {root}/prompts.jsonl --input_key input "
    "--label_key answer --agent_func_path {run}/agent.py --top_p 1e-6 --num_episodes 2 "
    "--n_samples_per_prompt 4 --rollout_batch_size 4 --train_batch_size 16 "
    "--micro_train_batch_size 4 --micro_rollout_batch_size 4 --prompt_max_len 64 "
    "--generate_max_len 32 --actor_learning_rate 1e-3 --lr_warmup_ratio 0 --save_path {run}"
)
CASES = {
    "sft": f"train_sft {SUPERVISED} {SFT}",
    "rm": f"train_rm {SUPERVISED} {PAIRS}",
    "dpo": f"train_dpo {SUPERVISED} {PAIRS} --beta 0.1",
    "kto": f"train_kto {SUPERVISED} {SFT} --label_key label",
    "prm": f"train_prm {SUPERVISED} --input_key steps --label_key labels "
    "--placeholder_token # --reward_tokens + -",
    "kd": f"train_kd {SUPERVISED} {SFT} --teacher_model {{root}}/teacher --kd_coef 0.5",
    "ppo": f"train_ppo {RL} --advantage_estimator gae --critic_learning_rate 1e-3 "
    "--init_kl_coef 0.05 --max_epochs 2",
    "grpo": f"train_ppo {RL} --advantage_estimator group_norm --init_kl_coef 0.01 "
    "--use_kl_loss --kl_estimator k3 --max_epochs 2",
    "reinforce_baseline": f"train_ppo {RL} --advantage_estimator reinforce_baseline "
    "--init_kl_coef 0.01 --entropy_loss_coef 0.001",
    "rloo": f"train_ppo {RL} --advantage_estimator rloo --init_kl_coef 0.05",
}
# Every sample of a prompt reads a tail of its own, which it takes by making a file: the greedy
# completions of a group differ, and no two workers take the same one.
AGENT = r"""
from itertools import count
from pathlib import Path

from openrlhf.utils.agent import AgentExecutorBase

TAILS = ["", " is", " makes?", " gives me:"]


def take_tail(prompt):
    for number in count():
        try:
            Path(__file__).with_name(f"{prompt.encode().hex()}.{number}").touch(exist_ok=False)
            return number % len(TAILS)
        except FileExistsError:
            pass


class AgentExecutor(AgentExecutorBase):
    async def execute(
        self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None
    ):
        tail = take_tail(prompt)
        ids = hf_tokenizer(prompt + TAILS[tail], add_special_tokens=False)["input_ids"]
        sampling_params.max_tokens = 5 + tail
        result = await llm_engine.generate(ids, sampling_params)
        reward = (sum(result.outputs[0].token_ids) % 16 + tail) / 16
        return {"reward": reward, "scores": min(reward, 1.0), "extra_logs": {"tail": tail}}
"""


def make_inputs(root: Path) -> None:
    """Write models, rows and prompts."""
    make_model(root / "model")
    make_model(root / "teacher", num_layers=1, seed=3)
    write_jsonl(root / "rows.jsonl", [make_row(i) for i in range(20)])
    prompts = [{"input": f"{i} and {3 * i}", "answer": str(4 * i)} for i in range(20)]
    write_jsonl(root / "prompts.jsonl", prompts)


def run_case(root: Path, case: str) -> list[dict[str, float]]:
    """Run a command in a process of one thread; return the records of its metrics.jsonl."""
    run = root / case
    run.mkdir()
    (run / "agent.py").write_text(AGENT)
    command, *flags = CASES[case].format(root=root, run=run).split()
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    run_command("-m", f"openrlhf.cli.{command}", *flags, env=env)
    return read_jsonl(run / "metrics.jsonl")


def run_cases() -> dict[str, list[dict[str, float]]]:
    """Run all commands, two at a time."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        make_inputs(Path(folder))
        return dict(zip(CASES, pool.map(partial(run_case, Path(folder)), CASES), strict=True))


def is_recorded(name: str) -> bool:
    """Return True for what follows from seed and data alone, and is not a difference near 0."""
    return not name.startswith(
        ("time", "timing", "token", "memory", "agent", "vllm_kl", "logprobs_diff")
    )


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, float]]]:
    return run_cases()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_give_the_recorded_numbers(
    found: dict[str, list[dict[str, float]]], case: str
) -> None:
    recorded = json.loads(RECORDED.read_text())[case]
    assert [record["step"] for record in found[case]] == [record["step"] for record in recorded]
    for record, expected in zip(found[case], recorded, strict=True):
        same = {name: record.get(name) for name in expected}
        assert same == pytest.approx(expected, rel=TOLERANCE, abs=1e-6), f"step {record['step']}"


def record_anew() -> None:
    """Write what the commands give today."""
    numbers = {
        case: [{name: value for name, value in line.items() if is_recorded(name)} for line in lines]
        for case, lines in run_cases().items()
    }
    text = json.dumps(numbers).replace("[{", "[\n{").replace("}, {", "},\n{")
    RECORDED.write_text(text.replace("}], ", "}\n],\n") + "\n")


if __name__ == "__main__":
    record_anew()
