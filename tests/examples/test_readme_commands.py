"""Each command that the README lists, in the set-up that it has unless told otherwise: with a tiny
model, and with the one of `make real-model`. README and getting-started give the flags where they
have an example, sizes apart.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from openrlhf.cli.main import COMMANDS
from openrlhf.config.methods import METHODS
from openrlhf.utils.tracker import read_metrics
from tests.helpers.documents import blocks, commands, named
from tests.source import ROOT

REAL_MODEL = ROOT / "models" / "smollm2-135m"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "getting-started.md")
TIMEOUT_S = 600
ROWS = {
    "pairs": [{"prompt": "What is 2 + 3?", "chosen": "5", "rejected": "6"}] * 4,
    "rated": [{"question": "What is 2 + 3?", "answer": str(n), "label": n == 5} for n in (5, 6)],
    "solutions": [{"input": "1+1=2e 2+3=5e", "label": ["a", "b"]}] * 2,
}
SIZES = "--max_len 128 --train_batch_size 2 --micro_train_batch_size 1"
SAMPLING = "--input_key question --apply_chat_template --prompt_max_len 64"
# Beside the flags of README, where it has an example of the command. Later flags win.
FLAGS = {
    "sft": "",
    "ppo-local": "--max_samples 16 --dump 1",
    "rm": f"--dataset pairs.jsonl --prompt_key prompt --apply_chat_template {SIZES}",
    "dpo": f"--dataset pairs.jsonl --prompt_key prompt --apply_chat_template {SIZES}",
    "kto": "--dataset rated.jsonl --input_key question --output_key answer --label_key label "
    f"--apply_chat_template {SIZES}",
    "prm": f"--dataset solutions.jsonl --placeholder_token e --reward_tokens a b {SIZES}",
    "kd": "--teacher_model output/sft --dataset held_out.jsonl --input_key question "
    f"--output_key answer --apply_chat_template {SIZES}",
    "ppo": "--prompt_data rated.jsonl --eval_dataset held_out.jsonl --eval_steps -1 "
    "--actor_num_gpus_per_node 1 --ref_num_gpus_per_node 1 --vllm_num_engines 1 "
    "--rollout_batch_size 2 --train_batch_size 16 --prompt_max_len 64 --generate_max_len 16",
    "eval": f"--eval_dataset held_out.jsonl --label_key answer {SAMPLING} --generate_max_len 16 "
    "--remote_rm_url reward.py --eval_n_samples_per_prompt 4",
    "infer": f"--dataset rated.jsonl {SAMPLING} --max_new_tokens 16 --temperature 0",
    "merge-lora": "--lora_path output/lora --output_path output/merged",
    "check": "sft --dataset problems.jsonl --input_key question --output_key answer",
}


@pytest.fixture(scope="module", params=["tiny", "real"])
def folder(request, tiny_tied_model_dir: Path, tmp_path_factory) -> Path:
    """A checkout as a reader has it, with the documents' files; `model` leads to the model."""
    if request.param == "real" and not REAL_MODEL.exists():
        pytest.skip("needs make real-model")
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "model").symlink_to(REAL_MODEL if request.param == "real" else tiny_tied_model_dir)
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for document in DOCUMENTS:
        for block in blocks("python", document):
            (folder / str(named(block))).write_text(block.text)
        for block in blocks("bash", document):
            commands(block, folder)
    return folder


def example(name: str, document: Path, folder: Path) -> list[str]:
    """The flags of the first example of a command in a document; none if it has none."""
    for block in blocks("bash", document):
        for words in commands(block, folder):
            if words[:2] == ["openrlhf", name]:
                return words[2:]
    return []


def start(folder: Path, *words: str, **pipes: int) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    cli = [sys.executable, "-m", "openrlhf.cli.main", *words]
    return subprocess.Popen(
        cli,
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **pipes,
    )


def run(folder: Path, *words: str, said: str | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """Run a command, which must end well and without a traceback; return what it printed."""
    with start(folder, *words, stdin=subprocess.PIPE) as process:
        try:
            output, _ = process.communicate(said, timeout=timeout_s)
        finally:
            process.kill()
    assert process.returncode == 0, output[-4000:]
    assert "Traceback" not in output, output[-4000:]
    return output


def flags(name: str, folder: Path) -> list[str]:
    model = ["--model_path" if name == "merge-lora" else "--pretrain", "model"]
    written = example(name, DOCUMENTS[0], folder)
    return [*written, *FLAGS[name].split(), *([] if name == "check" else model)]


# The others read what sft, rm and ppo-local write.
TRAINING = dict.fromkeys(("sft", "rm", "ppo-local", *METHODS, "ppo", "eval"))


def test_every_command_of_the_readme_is_here():
    without_flags = {"replay", "report", "serve-rm", "chat", "doctor"}
    needs_an_account = {"push"}
    assert set(COMMANDS) == set(FLAGS) | without_flags | needs_an_account


def test_getting_started_repeats_the_first_training_of_the_readme():
    readme, getting_started = (
        [block.text for language in ("bash", "python") for block in blocks(language, document)]
        for document in DOCUMENTS
    )
    first = [text for text in readme if "held_out.jsonl" in text or "def reward_func" in text]
    assert len(first) == 2
    assert set(first) <= set(getting_started)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", TRAINING)
def test_a_command_writes_its_run_folder(name, folder):
    run(folder, name, *flags(name, folder), "--save_path", f"output/{name}")
    written = {path.name for path in (folder / "output" / name).iterdir()}
    assert {"config.yaml", "metrics.jsonl", "report.html", "logs"} <= written
    if name != "eval":
        model = {"config.json", "tokenizer.json", "chat_template.jinja", "curves.png"}
        assert model <= written


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_the_first_training_of_the_readme_learns(folder):
    if (folder / "model").resolve() != REAL_MODEL.resolve():
        pytest.skip("a random model has nothing to learn from")
    words = [*example("ppo-local", DOCUMENTS[0], folder), "--pretrain", "model"]
    run(folder, "ppo-local", *words, timeout_s=3 * TIMEOUT_S)
    before, *steps, after = read_metrics(folder / "output" / "sums" / "metrics.jsonl")
    rewards = [step["reward"] for step in steps]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.3, rewards  # 64 samples each: 5 standard errors
    assert after["eval/eval_default_pass1"] > before["eval/eval_default_pass1"] + 0.15


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_a_step_is_replayed_and_runs_are_reported(folder):
    assert "step 1" in run(folder, "replay", "output/ppo-local", "--step", "1")
    said = run(folder, "report", "output/ppo-local", "output/ppo", "--output", "both.html")
    assert "report: both.html" in said and (folder / "both.html").is_file()


@pytest.mark.slow
def test_doctor_looks_at_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with start(tmp_path, "doctor") as process:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == (2 if "\nfix " in said else 0), said
    assert "torch" in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_an_adapter_is_merged_into_a_model(folder):
    lora = ["--lora_rank", "4", "--save_path", "output/lora"]
    run(folder, "sft", *flags("sft", folder), *lora)
    run(folder, "merge-lora", *flags("merge-lora", folder))
    run(folder, "check", *flags("check", folder), "--pretrain", "output/merged")


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_vllm_and_hugging_face_give_the_same_greedy_responses(folder):
    found = []
    for task in ("generate_vllm", "generate"):
        path = folder / "output" / f"{task}.jsonl"
        words = ["--eval_task", task, "--output_path", str(path)]
        run(folder, "infer", *flags("infer", folder), *words)
        rows = map(json.loads, path.read_text().splitlines())
        found.append([row["output"] for row in rows])
    assert found[0] == found[1]
    assert (folder / "model").resolve() != REAL_MODEL or "5" in found[0][0]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_a_reward_model_is_served(folder):
    with start(folder, "serve-rm", "--reward_pretrain", "output/rm", "--port", "0") as process:
        try:
            said = next(line for line in process.stdout if line.startswith("ready: "))
            body = json.dumps({"query": ["What is 2 + 3? 5"], "prompts": ["What is 2 + 3?"]})
            request = urllib.request.Request(
                said.split()[1], body.encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert len(json.load(response)["rewards"]) == 1
        finally:
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_getting_started_is_true_of_the_model(folder):
    sizes = [*("--pretrain", "model"), *("--max_samples", "16")]
    words = example("ppo-local", DOCUMENTS[1], folder)
    run(folder, "check", "ppo-local", *words, *sizes)
    run(folder, "ppo-local", *words, *sizes)
    words = example("chat", DOCUMENTS[1], folder)
    asked = {"said": "What is the capital of France?\n"}
    assert run(folder, "chat", *words, **asked).count("\n> ") >= 2  # sampled: any words
    said = run(folder, "chat", *words, "--greedy_sampling", **asked)
    assert (folder / "model").resolve() != REAL_MODEL or "Paris" in said
