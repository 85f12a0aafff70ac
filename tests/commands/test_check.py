"""`openrlhf check`: one list of everything that is wrong, and what a run would train and take."""

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

from openrlhf.cli import check, train_ppo_ray
from openrlhf.commands import check as check_module
from openrlhf.commands import check_rows
from openrlhf.commands.check import Plan, _rl_models
from openrlhf.commands.train_rl import worker_classes
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import Gathered
from openrlhf.trainer.local_cluster import local_demands
from tests.integration.commands import exit_code
from tests.tiny import make_model, make_reward_model, write_jsonl

REWARD = """
def reward_func(queries, prompts, labels):
    return [float(q[len(p):].startswith(label)) for q, p, label in zip(queries, prompts, labels)]
"""
SIZES = (
    "--advantage_estimator group_norm --n_samples_per_prompt 2 --rollout_batch_size 8 "
    "--train_batch_size 8 --micro_train_batch_size 4 --prompt_max_len 64 --generate_max_len 16 "
    "--label_key answer"
)


@pytest.fixture(autouse=True)
def folder(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with prompts, dialogues, a reward function and a model, and no Ray cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(1, 12)]
    write_jsonl("prompts.jsonl", rows)
    turns = [("user", "1+1?"), ("assistant", "2")]
    messages = [{"role": role, "content": content} for role, content in turns]
    write_jsonl("dialogues.jsonl", [{"messages": messages}] * 3)
    Path("reward.py").write_text(REWARD)
    Path("model").symlink_to(tiny_model_dir)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], words: list[str]) -> tuple[int, str, list[str]]:
    """Exit code, output and errors of a check in this process."""
    code = exit_code(check.main, words)
    said = capsys.readouterr()
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    return code, said.out, [line.removeprefix("error: ") for line in errors]


def ppo(**flags: str) -> list[str]:
    named = {
        "pretrain": "model",
        "prompt_data": "prompts.jsonl",
        "input_key": "question",
        "remote_rm_url": "reward.py",
        "save_path": "run",
        **flags,
    }
    return [
        "ppo",
        *SIZES.split(),
        *(word for name, value in named.items() for word in (f"--{name}", value)),
    ]


def test_a_check_says_what_would_be_trained_and_touches_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl("asked.jsonl", [{"question": "7+7=", "answer": "14"}])
    words = ppo(save_steps="5", ckpt_path="ckpt", eval_dataset="asked.jsonl")
    before = sorted(Path().iterdir())
    code, out, errors = run(capsys, words)
    assert (code, errors) == (0, [])
    for words in (
        "8 prompts x 2 samples = 16; 2 update(s) of 8 samples a step",
        "2 (11 prompts x 1 episode(s))",
        "1 x vLLM of 1 device(s) each",
        "gradients and optimizer + ",
        # The longest prompt has 6 tokens.
        "micro-batch of 88 tokens",
        "weights and cache",  # of the engine
        "this machine",
        "are free",
        "checkpoints  3 of ",
        " for the copy of a checkpoint, over all nodes; ",
        "prompts.jsonl: row 1: 4 tokens\n1+1=\n",
        "evaluation  1 prompts x 4 samples",
        "asked.jsonl: row 1: 4 tokens\n7+7=\n",
        "arguments of reward for sample row1/0",
        "reward of prompts.jsonl: row 1, label '2'\n  response '2': 1\n  response '4': 0\n",
        "reward of prompts.jsonl: row 2, label '4'\n  response '4': 1\n  response '2': 0\n",
    ):
        assert words in out
    assert out.endswith("no problem was found\n")
    assert sorted(Path().iterdir()) == before


def test_a_run_on_ray_says_that_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import openrlhf.trainer.ray

    monkeypatch.setattr(openrlhf.trainer, "ray", openrlhf.trainer.ray)  # and put back
    for name in [name for name in sys.modules if name.startswith("openrlhf.trainer.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, [error] = run(capsys, ppo())
    assert code == 2 and error.startswith("This runs on Ray, which is not installed. Type pip")


def test_an_output_folder_that_is_the_model_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code(check.main, ppo(save_path="model"))
    assert "warning: --save_path model is the model of --pretrain" in capsys.readouterr().err


def test_a_forgotten_label_key_is_said_where_the_reward_reads_labels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ppo()
    place = words.index("--label_key")
    del words[place : place + 2]
    assert exit_code(check.main, words) == 0
    said = capsys.readouterr().err
    assert "every label is empty. Name their column with --label_key: answer." in said


def test_problems_of_all_stages_are_one_list(capsys: pytest.CaptureFixture[str]) -> None:
    Path("reward.py").write_text("x = 1\n")
    words = ppo(eval_dataset="gone.jsonl", input_key="quest", ring_attn_size="2")
    words += [
        "--train_batch_sise",
        "8",
        "--train_batch_size",
        "64",
        "--actor_num_gpus_per_node",
        "1",
    ]
    code, out, errors = run(capsys, words)
    assert code == 2
    parts = (
        "--train_batch_sise is not a known name",  # the command line
        "--train_batch_size 64 is more than the 16 samples",  # arithmetic
        "--eval_dataset gone.jsonl does not exist",  # files
        "actor: 1 rank(s) cannot be divided by --ring_attn_size 2",  # placement
        "column 'quest' is not in the data set",  # columns
        "reward.py has no reward_func",  # rewards
    )
    assert len(errors) == len(parts)
    for part, error in zip(parts, errors, strict=True):
        assert part in error
    assert "no problem" not in out


def test_a_machine_that_is_not_here_can_be_planned_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code, out, [error, *_] = run(capsys, ppo(actor_num_gpus_per_node="1"))
    assert code == 2
    assert error.startswith("Not enough GPUs: need 4, have 2.")
    words = [*ppo(actor_num_gpus_per_node="2"), "--colocate_all_models", "--bf16"]
    code, out, errors = run(capsys, words)
    assert (code, errors) == (0, [])
    assert "vllm           2        2  shared by all\n  need 2 x GPU, have 2\n" in out
    assert "95% of its GPU" in out
    code, out, errors = run(capsys, [*ppo(), "--bf16"])  # nobody placed anything
    assert (code, errors) == (0, [])
    assert "shared by all\n  need 2 x GPU, have 2\n" in out and "50% of its GPU" in out
    assert "a GPU of shared by all" in out


def test_target_modules_that_are_not_there_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = "sft --pretrain model --dataset dialogues.jsonl --save_path run --lora_rank 2 "
    code, _, [error] = run(capsys, [*words.split(), "--target_modules", "nowhere"])
    assert code == 2
    assert error.startswith("--target_modules nowhere: ")


def test_what_is_learnt_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    words = "sft --pretrain model --dataset dialogues.jsonl --save_path run --train_batch_size 2"
    code, out, errors = run(capsys, words.split())
    assert (code, errors) == (0, [])
    assert "has a chat template" not in out
    assert (
        "dialogues.jsonl: row 1: 9 tokens, 2 learnt\n<|user|>1+1?<|end|><|assistant|>«2<|end|>»"
        in out
    )
    assert "2 rows in micro-batches of 8 rows" in out


def test_a_row_whose_own_label_is_worth_no_more_than_another_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "def reward_func(queries, prompts, labels):\n"  # rewards 2, whatever is asked
    text += "    return [float(q[len(p):].startswith('2') and l == '2') for q, p, l in "
    Path("reward.py").write_text(f"{text}zip(queries, prompts, labels)]\n")
    exit_code(check.main, ppo())
    out, err = capsys.readouterr()
    assert "earns no more than another row's: prompts.jsonl: row 2. Look at" in err
    assert out.endswith("no problem was found, but 1 warning(s) above\n")


def test_what_a_reward_function_needs_and_rows_lack_is_one_line_with_their_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("reward.py").write_text("def f(prompts, outputs, solution):\n    return [1.0]\n")
    code, _, [other, error] = run(capsys, [*ppo(), "--train_batch_size", "64"])
    assert code == 2 and "--train_batch_size 64 is more than the 16 samples" in other
    assert error.startswith("reward.py:1: f(prompts, outputs, solution) cannot be called: unknown")
    assert "arguments: outputs, solution." in error
    assert error.endswith("of the rows: is_truncated, answer. Rename them, or give them defaults.")


def test_weights_of_the_functions_of_a_file_are_those_of_its_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = "def f(completions, **c):\n    return [1.0 for _ in completions]\n"
    Path("reward.py").write_text(f"{code}{code.replace('f(', 'g(')}reward_funcs = [f, g]\n")
    code, out, errors = run(capsys, [*ppo(), "--reward_weights", "1,0.5"])
    assert (code, errors) == (0, [])
    assert "response '2': 1.5" in out
    code, _, errors = run(capsys, [*ppo(), "--reward_weights", "1,0.5,2"])
    assert errors == [
        "--reward_weights has 3 values for the 2 functions of --remote_rm_url: f, g. Type one "
        "weight for each function."
    ]


def test_rows_and_rewards_are_tried_beside_other_problems(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "def reward_func(queries, prompts, labels):\n    return [float('nan')] * len(labels)\n"
    Path("reward.py").write_text(text)
    words = [*ppo(prompt_max_len="100000"), "--advantage_estimator", "reward.py:none"]
    code, out, errors = run(capsys, words)
    assert (code, len(errors)) == (2, 4)
    assert errors[0].startswith("reward.py has no none")
    assert "--prompt_max_len" in errors[1]
    for row, error in enumerate(errors[2:], start=1):
        name = f"row{row}"
        assert error.startswith(f"prompts.jsonl: row {row}: reward.py:1: reward_func: rewards of ")
        assert f"sample {name}/0 is nan" in error
    assert "prompts.jsonl: row 1: 4 tokens\n1+1=\n" in out


def test_an_error_in_a_reward_is_in_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    Path("reward.py").write_text("def reward_func(queries, prompts, labels):\n    return 1 / 0\n")
    assert exit_code(check.main, ppo()) == 2
    said = capsys.readouterr().err
    assert "reward.py:2: ZeroDivisionError" in said
    assert said.count("Traceback") == 1 and "    return 1 / 0\n" in said


def test_a_log_that_a_problem_names_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    Path("reward.py").write_text(
        "import os\n\ndef reward_func(queries, prompts, labels):\n"
        "    print('out of luck', flush=True)\n    os._exit(3)\n"
    )
    code, _, errors = run(capsys, ppo())
    [log] = {re.search(r"The end of (\S+):", error)[1] for error in errors}
    assert code == 2 and all("out of luck" in error for error in errors)
    assert "out of luck" in Path(log).read_text()


def test_a_missing_file_hides_nothing_of_another_with_a_longer_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl(
        "pre-rows.jsonl", [{"question": "1+1=", "answer": "2"}, {"question": "", "answer": ""}]
    )
    code, _, errors = run(capsys, ppo(prompt_data="pre-rows.jsonl", eval_dataset="rows.jsonl"))
    assert code == 2
    assert any("pre-rows.jsonl" in error for error in errors), errors


def test_models_of_one_process_share_its_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*ppo()[1:], "--vllm_num_engines", "1", "--zero_stage", "0"]
    config = parse_config(PPOConfig, flags).config
    demands = local_demands(config, worker_classes(config))
    models = _rl_models(config, None, demands)
    Plan(config, models, Gathered(), has_gpus=True, demands=demands).check_memory()
    titles = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert titles == ["actor", "ref", "vllm", "a GPU of this process"]


def evaluation(models: str, **flags: str) -> list[str]:
    named = {"eval_dataset": "prompts.jsonl", "input_key": "question", "label_key": "answer"}
    named |= {"prompt_max_len": "64", "generate_max_len": "16", "save_path": "out", **flags}
    words = (word for name, value in named.items() for word in (f"--{name}", value))
    return ["eval", *models.split(), *words]


def test_an_evaluation_is_checked_for_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().iterdir())
    Path("other").symlink_to(Path("model").resolve())
    code, out, errors = run(capsys, evaluation("model other", remote_rm_url="reward.py"))
    assert (code, errors) == (0, [])
    rewards = "reward of prompts.jsonl: row 1, label '2'\n  response '2': 1\n  response '4': 0\n"
    for words in ("prompts.jsonl: row 1: 4 tokens\n1+1=\n", rewards, "weights and cache"):
        assert out.count(words) == 2
    assert "\nother: 11 prompts x 4 samples\n" in out
    assert "optimizer" not in out and "disk" not in out  # nothing is trained
    Path("other").unlink()
    assert sorted(Path().iterdir()) == before


def test_all_problems_of_an_evaluation_are_one_list(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    words = evaluation("model ./gone run", remote_rm_url="reward.py", pass_k="9")
    code, _, errors = run(capsys, words)
    parts = ("--pass_k 9 cannot", "gone does not exist", "run holds no model, and")
    assert code == 2
    for part, error in zip(parts, errors, strict=True):
        assert part in error
    words = evaluation("model", remote_rm_url="reward.py", input_key="quest", vllm_num_engines="0")
    code, out, [error] = run(capsys, words)
    assert (code, "column 'quest' is not in the data set" in error) == (2, True)
    assert "MB weights + " in out  # its memory is known all the same


def test_a_command_that_is_none_gets_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, [error] = run(capsys, ["infer", "--pretrain", "model"])
    assert (code, error) == (2, "infer is no command that can be checked. Type one of these:")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "ppo --pretrain model --ring_attn_size 2 --actor_num_gpus_per_node 1",
            ("No prompt data", "There is no reward", "actor"),
        ),
        (
            "ppo --prompt_data prompts.jsonl --input_key quest",
            ("No model", "There is no", "column"),
        ),
        (
            "eval --remote_rm_url gone.py",
            ("No evaluation data", "No model", "--remote_rm_url gone"),
        ),
        (
            "ppo-local --pretrain model --prompt_data prompts.jsonl --input_key question",
            ("There is no reward",),
        ),
        ("kd --pretrain model --dataset prompts.jsonl --input_key quest", ("No teacher", "column")),
        ("prm --pretrain model --dataset gone.jsonl", ("No step end", "--dataset gone.jsonl")),
    ],
)
def test_what_is_not_named_hides_no_other_problem(words, said, capsys):
    code, _, errors = run(capsys, words.split())
    assert code == 2 and len(errors) == len(said)
    assert all(error.startswith(start) for error, start in zip(errors, said, strict=True)), errors


def test_a_reward_model_scores_two_rows(capsys, monkeypatch):
    make_reward_model(Path("reward_model"))
    words = ppo(reward_pretrain="reward_model")
    words = [word for word in words if word not in ("--remote_rm_url", "reward.py")]
    code, out, errors = run(capsys, words)
    assert (code, errors) == (0, [])
    model = transformers.AutoModelForSequenceClassification.from_pretrained("reward_model")
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    for row, responses in ((1, ("2", "4")), (2, ("4", "2"))):
        told = "".join(rf"\n  response '{each}': (\S+)" for each in responses)
        [found] = re.findall(rf"prompts.jsonl: row {row}, label '{responses[0]}'{told}\n", out)
        for response, score in zip(responses, found, strict=True):
            ids = [*tokenizer.encode(f"{row}+{row}={response}"), tokenizer.eos_token_id]
            expected = model(torch.tensor([ids])).logits.item()
            assert float(score) == pytest.approx(expected, rel=1e-4)

    def load_without_room(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(check_rows, "load_sequence_model", load_without_room)
        code, out, errors = run(capsys, [*words, "--label_kex", "x"])
    assert (code, len(errors)) == (2, 1)  # nothing else is lost
    assert "the reward models were not tried: out of memory" in out
    monkeypatch.setattr(check_module, "ROOM", 0.0)
    code, out, errors = run(capsys, words)
    assert (code, errors) == (0, [])
    assert "the reward models were not tried: they have no room here" in out


def test_heads_that_vllm_cannot_compute_are_refused_before_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_model("narrow", hidden_size=48, num_heads=2)  # 24 numbers a head
    code, _, [error] = run(capsys, ppo(pretrain="narrow"))
    assert code == 2
    assert error.startswith(
        "narrow has attention heads of size 24, and vLLM on a CPU computes those"
    )
    assert exit_code(train_ppo_ray.main, ppo(pretrain="narrow")[1:]) == 2
    assert error in capsys.readouterr().err
    assert run(capsys, ppo(pretrain="narrow", vllm_num_engines="0"))[0] == 0


def test_heads_that_the_workers_of_an_engine_cannot_share_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, errors = run(capsys, ppo(vllm_num_engines="1", vllm_tensor_parallel_size="3"))
    assert (code, errors) == (
        2,
        [
            "--vllm_tensor_parallel_size 3: model has 2 attention heads, not a multiple of it. "
            "Type a divisor."
        ],
    )


AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    async def step(self, states, **kwargs):
        is_right = states["action_text"].startswith(states["label"])
        return {"rewards": 2.0 * is_right, "environment_feedback": "", "done": DONE}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def test_an_agent_plays_two_rows_with_their_labels_as_responses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ppo(agent_func_path="agent.py", label_key="answer", vllm_num_engines="1")
    words = [word for word in words if word not in ("--remote_rm_url", "reward.py")]
    Path("agent.py").write_text(AGENT.replace("DONE", "True"))
    code, out, _ = run(capsys, words)
    assert code == 0
    assert "reward of an episode of prompts.jsonl: row 2, label '4'\n  response '4" in out
    assert out.count("': 2\n") == 2
    Path("agent.py").write_text(AGENT.replace("DONE", "missing"))
    code, _, [error] = run(capsys, words)
    assert code == 2
    assert "row 1: exception" in error and "name 'missing' is not defined" in error
