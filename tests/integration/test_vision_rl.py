"""RL from images, from the command line: a tiny model that has learnt colours from noisy labels
learns them from rewards; one whose pictures say nothing does not.
"""

import io
import shutil
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas
import pytest
import torch
import transformers
from safetensors.torch import load_file

from openrlhf.cli import batch_inference, evaluate, replay, train_ppo, train_ppo_ray, train_sft
from openrlhf.cli import main as console
from openrlhf.utils.vision_families import FAMILIES
from tests.helpers import tiny_vision
from tests.helpers.documents import blocks, commands
from tests.helpers.stopped_runs import records, stopping_behind
from tests.integration.commands import exit_code, steps_of
from tests.source import ROOT
from tests.tiny import read_jsonl, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = list(tiny_vision.COLOURS)
NUM_STEPS = 60
# It also proves that functions see the pictures of their samples: else it would raise.
REWARD = """
def reward_func(queries, prompts, labels, responses, images):
    assert all(image.size == (28, 28) for [image] in images)
    return [float(response == label) for response, label in zip(responses, labels)]
"""
SFT = (
    "--input_key input --output_key output --apply_chat_template --max_epochs 1 --l2 0 "
    "--train_batch_size 32 --micro_train_batch_size 32 --learning_rate 2e-3 "
    "--lr_scheduler constant --lr_warmup_ratio 0 --adam_betas 0.9 0.95"
)
GRPO = (
    "--input_key input --label_key answer --advantage_estimator group_norm --init_kl_coef 0 "
    "--n_samples_per_prompt 8 --rollout_batch_size 16 --train_batch_size 128 "
    "--micro_train_batch_size 128 --micro_rollout_batch_size 128 --actor_learning_rate 1e-3 "
    "--lr_scheduler constant --lr_warmup_ratio 0 --adam_betas 0.9 0.95 --prompt_max_len 64 "
    "--generate_max_len 6 --eval_temperature 0 --eval_n_samples_per_prompt 1"
)


def rows_of(folder: Path, name: str, count: int, *, noise: float = 0.0, is_blind: bool = False):
    """Rows with a picture each; `noise` of the outputs are other words, or the right one."""
    rng, rows = np.random.default_rng(len(name) + count), []
    (folder / "pictures").mkdir(exist_ok=True)
    for number in range(count):
        word = WORDS[rng.integers(4)]
        path = folder / "pictures" / f"{name}{number}.png"
        tiny_vision.colour("gray" if is_blind else word, rng).save(path)
        said = WORDS[rng.integers(4)] if rng.random() < noise else word
        asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
        rows.append({"input": asked, "images": [str(path)], "output": said, "answer": word})
    return write_jsonl(folder / f"{name}.jsonl", rows)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows the words and a little of the colours, and its data."""
    root = tmp_path_factory.mktemp("vision_rl")
    tiny_vision.make("qwen2_5_vl", root / "model")
    rows_of(root, "noisy", 80 * 32, noise=0.6)
    rows_of(root, "train", NUM_STEPS * 16)
    rows_of(root, "few", 24)
    rows_of(root, "eval", 64)
    (root / "reward.py").write_text(REWARD)
    paths = {"pretrain": root / "model", "dataset": root / "noisy.jsonl", "save_path": root / "sft"}
    assert exit_code(train_sft.main, [*words(paths), *SFT.split()]) == 0
    return root


def words(values: dict[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def train(
    root: Path,
    name: str,
    flags: str = "",
    *,
    main=train_ppo.main,
    data: str = "train",
    reward: str = "remote_rm_url reward.py",
):
    """Run GRPO; return its exit code."""
    flag, _, file = reward.partition(" ")
    paths = {
        "pretrain": root / "sft",
        "prompt_data": root / f"{data}.jsonl",
        "eval_dataset": root / "eval.jsonl",
        flag: root / file,
        "save_path": root / name,
        "ckpt_path": root / name / "ckpt",
    }
    return exit_code(main, [*words(paths), *GRPO.split(), *flags.split()])


def check_has_learnt(run_dir: Path) -> None:
    rewards = [step["reward"] for step in steps_of(run_dir)]
    assert len(rewards) == NUM_STEPS
    assert fmean(rewards[:3]) < 0.55
    assert fmean(rewards[-5:]) > 0.75
    [*_, last] = [r for r in records(run_dir) if "eval/eval_default_pass1" in r]
    assert last["eval/eval_default_pass1"] > 0.9
    # A step whose groups all have equal rewards updates nothing, and compares nothing.
    gaps = [step["vllm_kl"] for step in steps_of(run_dir) if "vllm_kl" in step]
    assert max(gaps) < 1e-6  # engine and trainer see the same pictures


MODES = {
    "own": (train_ppo.main, "--vllm_num_engines 0"),
    "vllm": (train_ppo.main, "--vllm_num_engines 1"),
    "ray": (train_ppo_ray.main, "--vllm_num_engines 1 --colocate_all_models"),
}


@pytest.mark.parametrize("mode", MODES)
def test_grpo_learns_colours_from_pixels(root: Path, mode: str, ray_cluster: None) -> None:
    main, flags = MODES[mode]
    assert train(root, mode, flags, main=main) == 0
    check_has_learnt(root / mode)


def test_grpo_learns_colours_while_it_generates(root: Path, ray_cluster: None) -> None:
    flags = "--vllm_num_engines 1 --async_train --async_queue_size 1 --partial_rollout"
    assert train(root, "async", flags, main=train_ppo_ray.main) == 0
    rewards = [step["reward"] for step in steps_of(root / "async")]
    # How stale samples are differs from run to run, and a policy may be lost behind what it learnt.
    best = max(fmean(rewards[k : k + 10]) for k in range(len(rewards) - 9))
    assert best > fmean(rewards[:3]) + 0.1
    # Engine and trainer agree on what is fresh.
    fresh = "vllm_kl/stale_0"
    gaps = [step[fresh] for step in steps_of(root / "async") if fresh in step]
    assert gaps and max(gaps) < 1e-6


def test_a_policy_whose_pictures_say_nothing_does_not_learn(root: Path) -> None:
    rows_of(root, "blind", NUM_STEPS * 16, is_blind=True)
    rows = read_jsonl(root / "eval.jsonl")
    assert train(root, "blind_run", "--vllm_num_engines 0 --eval_steps -1", data="blind") == 0
    # Of four words it can name the one that it always says.
    blind = rows_of(root, "blind_eval", len(rows), is_blind=True)
    paths = {"pretrain": root / "blind_run", "dataset": blind, "output_path": root / "blind.out"}
    flags = "--eval_task generate --input_key input --max_new_tokens 6 --greedy_sampling"
    assert exit_code(batch_inference.main, [*words(paths), *flags.split()]) == 0
    answers = read_jsonl(root / "blind.out")
    truths = [row["answer"] for row in read_jsonl(blind)]
    rights = [a["output"] == t for a, t in zip(answers, truths, strict=True)]
    assert fmean(rights) <= 0.35


SMALL = (
    "--rollout_batch_size 4 --train_batch_size 16 --n_samples_per_prompt 4 "
    "--micro_rollout_batch_size 8 --micro_train_batch_size 8 --num_episodes 1"
)


@pytest.mark.parametrize("kind", ["internvl", "idefics3"])
def test_families_with_tiles_are_trained_by_rewards_and_agree_with_the_engine(
    kind: str, tmp_path: Path, ray_cluster: None
) -> None:
    before = load_file(tiny_vision.make(kind, tmp_path / "sft") / "model.safetensors")
    rows_of(tmp_path, "few", 24)
    rows_of(tmp_path, "eval", 8)
    reward = "[sum(map(ord, response)) % 2.0 for response in responses]"  # they say no word
    (tmp_path / "reward.py").write_text(
        REWARD.partition("    return")[0] + f"    return {reward}\n"
    )
    flags = f"{SMALL} --vllm_num_engines 1 --colocate_all_models"
    assert train(tmp_path, "run", flags, main=train_ppo_ray.main, data="few") == 0
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 6
    assert max(step["vllm_kl"] for step in steps) < 1e-6
    after = load_file(tmp_path / "run" / "model.safetensors")
    tower = {*FAMILIES[kind].tower}
    assert any(tower & {*n.split(".")} and not torch.equal(before[n], after[n]) for n in before)
    _, info = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "run", output_loading_info=True
    )
    assert not any(info.values())


@pytest.fixture(scope="module")
def mixed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, and rows with two pictures of several tokens, with one of one, or none."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "sft").symlink_to(root / "sft")
    sizes = [[(56, 84), (84, 56)], [(28, 28)], []]
    rows = []
    for number in range(24):
        pictures, parts = [], [{"type": "text", "text": "?"}]
        for size in sizes[number % 3]:
            pictures.append(str(folder / f"{number}-{len(pictures)}.png"))
            tiny_vision.noise(*size, seed=number).save(pictures[-1])
            parts.insert(0, {"type": "image"})
        asked = [{"role": "user", "content": parts}]
        rows.append({"input": asked, "images": pictures, "answer": "red"})
    write_jsonl(folder / "few.jsonl", rows)
    write_jsonl(folder / "eval.jsonl", rows[:4])
    reward = "[sum(map(ord, response)) % 2.0 for response in responses]"
    (folder / "reward.py").write_text(
        f"def reward_func(queries, prompts, labels, responses):\n    return {reward}\n"
    )
    return folder


def check_agrees(run_dir: Path, num_steps: int = 6) -> None:
    """Every step is there, and engine and trainer computed the same in those that have updates."""
    steps = steps_of(run_dir)
    assert [step["step"] for step in steps] == [*range(1, num_steps + 1)]
    gaps = [step["logprobs_diff_max"] for step in steps if "logprobs_diff_max" in step]
    assert len(gaps) >= num_steps / 2 and max(gaps) < 1e-4  # places without the grid: 1e-3


ESTIMATORS = ("rloo", "reinforce", "reinforce_baseline", "dr_grpo", "flash_reinforce")


@pytest.mark.parametrize("case", [*ESTIMATORS, *(f"{name}, one process" for name in ESTIMATORS)])
def test_ranks_and_engine_agree_on_large_pictures_small_ones_and_none(
    mixed: Path, case: str, ray_cluster: None
) -> None:
    estimator, is_alone = case.partition(",")[::2]
    flags = f"{SMALL} --vllm_num_engines 1 --prompt_max_len 128 --advantage_estimator {estimator}"
    main = train_ppo.main if is_alone else train_ppo_ray.main
    flags += "" if is_alone else " --actor_num_gpus_per_node 2"
    assert train(mixed, case, flags, main=main, data="few") == 0
    check_agrees(mixed / case)


ENVIRONMENT = """
from PIL import Image
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"

class AgentInstance(AgentInstanceBase):
    num_steps = 0

    async def reset(self, states):
        assert [image.size for image in states["images"]] == [(28, 28)]
        return {"observation": states["observation"]}

    async def step(self, states):
        self.num_steps += 1
        return {
            "rewards": sum(map(ord, states["action_text"])) % 2.0,
            "environment_feedback": f"<|end|><|user|>{PLACE}?<|end|><|assistant|>",
            "environment_images": [Image.new("RGB", (56, 28), (0, 0, 120))],
            "done": self.num_steps == 2,
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)

    async def execute(self, prompt, label, sampling_params, **more):
        sampling_params.max_tokens = 6
        return await super().execute(prompt, label, sampling_params, **more)
"""
CLIENT = """
from openai import AsyncOpenAI
from openrlhf.utils.agent import OpenAIAgentExecutor

class AgentExecutor(OpenAIAgentExecutor):
    async def run(self, session, prompt, label):
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        picture = {"type": "image_url", "image_url": {"url": session.images[0]}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "?"}, picture]}]
        for _ in range(2):
            answer = await client.chat.completions.create(
                model=session.model, messages=messages, max_tokens=6
            )
            said = answer.choices[0].message
            messages.append(said.model_dump())
            messages.append({"role": "user", "content": [picture]})
        return {"reward": sum(map(ord, said.content)) % 2.0}
"""
AGENTS = {
    "environment": (train_ppo.main, ENVIRONMENT, "--vllm_num_engines 1"),
    "client": (train_ppo_ray.main, CLIENT, "--vllm_num_engines 1 --colocate_all_models"),
}


@pytest.mark.parametrize("name", AGENTS)
def test_agents_with_images_train_the_policy_that_the_engine_samples(
    root: Path, name: str, ray_cluster: None
) -> None:
    """And so with several images in an episode, of which the prompt has one."""
    main, code, flags = AGENTS[name]
    if name == "client":
        pytest.importorskip("openai")
    (root / f"{name}.py").write_text(code)
    flags = f"{SMALL} {flags} --generate_max_len 60 --eval_steps -1 --max_samples 16"
    reward = f"agent_func_path {name}.py"
    assert train(root, name, flags, main=main, data="few", reward=reward) == 0
    check_agrees(root / name, num_steps=4)
    rows = pandas.concat(
        pandas.read_parquet(path) for path in (root / name / "rollouts").glob("*.parquet")
    )
    assert max(map(len, rows["images"])) == 2
    assert rows["reward"].nunique() > 1


def test_a_run_keeps_its_pictures_once_and_a_replay_has_its_numbers(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{SMALL} --vllm_num_engines 0 --max_epochs 2 --dump 2"
    assert train(root, "kept", flags, data="few") == 0
    run_dir = root / "kept"
    rows = pandas.read_parquet(run_dir / "rollouts" / "step_000002.parquet")
    names = {image["sha256"] for images in rows["images"] for image in images}
    assert len(names) == 4 and len(rows) == 16
    [[image], *_] = rows["images"]
    assert (image["width"], image["height"], image["num_tokens"]) == (28, 28, 1)
    assert rows["token_texts"][0][image["start"]] == "<|image_pad|>"
    assert names < {path.stem for path in (run_dir / "rollouts" / "images").glob("*.png")}
    dumped = [path.stem for path in (run_dir / "dumps" / "step_000002" / "images").iterdir()]
    assert sorted(dumped) == sorted(names)
    capsys.readouterr()
    assert exit_code(replay.main, [str(run_dir), "--step", "2"]) == 0
    said = capsys.readouterr().out
    assert "numbers are those of the run to the last bit" in said, said
    assert "data:image/png;base64," in (run_dir / "report.html").read_text()


def test_a_stopped_run_goes_on_as_if_it_had_not_been(root: Path) -> None:
    flags = f"{SMALL} --vllm_num_engines 0 --save_steps 2 --load_checkpoint --seed 3"
    assert train(root, "straight", flags, data="few") == 0
    with stopping_behind(2):
        train(root, "resumed", flags, data="few")
    assert train(root, "resumed", flags, data="few") == 0
    straight, resumed = (load_file(root / n / "model.safetensors") for n in ("straight", "resumed"))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_the_engine_of_a_run_that_goes_on_has_the_policy_and_the_tower_of_its_checkpoint(
    root: Path,
) -> None:
    flags = f"{SMALL} --vllm_num_engines 1 --save_steps 2 --load_checkpoint --eval_steps -1"
    with stopping_behind(2):
        train(root, "stopped", flags, data="few")
    assert train(root, "stopped", flags, data="few") == 0
    check_agrees(root / "stopped")
    assert any("logprobs_diff_max" in step for step in steps_of(root / "stopped")[2:4])


def test_evaluation_and_batch_inference_see_the_pictures(root: Path, tmp_path: Path) -> None:
    paths = {"dataset": root / "eval.jsonl", "remote_rm_url": root / "reward.py"}
    flags = "--input_key input --label_key answer --temperature 0 --generate_max_len 6"
    found = []
    for number in (0, 1):  # engines
        out = tmp_path / f"eval{number}"
        more = [*words(paths | {"save_path": out}), *flags.split(), "--n_samples_per_prompt", "1"]
        more += ["--vllm_num_engines", str(number)]
        assert exit_code(evaluate.main, [str(root / "sft"), *more]) == 0
        [record] = records(out)
        found.append(record["eval/eval_default_pass1"])
    assert found[0] == found[1] > 0.5
    for task in ("generate", "generate_vllm"):
        paths = {"pretrain": root / "sft", "dataset": root / "eval.jsonl"}
        paths |= {"output_path": tmp_path / f"{task}.jsonl", "eval_task": task}
        more = ["--input_key", "input", "--max_new_tokens", "6", "--greedy_sampling"]
        assert exit_code(batch_inference.main, [*words(paths), *more]) == 0
        rows = read_jsonl(tmp_path / f"{task}.jsonl")
        truths = [row["answer"] for row in read_jsonl(root / "eval.jsonl")]
        rights = [row["output"] == truth for row, truth in zip(rows, truths, strict=True)]
        assert fmean(rights) == pytest.approx(found[0])
        # What it wrote can be learnt from: the picture is beside the prompt.
        paths = {"pretrain": root / "model", "dataset": tmp_path / f"{task}.jsonl"}
        paths |= {"save_path": tmp_path / f"learnt_{task}"}
        assert exit_code(train_sft.main, [*words(paths), *SFT.split()]) == 0


SPLIT = {
    "zero3_own": "--actor_num_gpus_per_node 2 --zero_stage 3 --vllm_num_engines 0",
    "zero3_vllm": "--actor_num_gpus_per_node 2 --zero_stage 3 --vllm_num_engines 1",
    "adapter": "--lora_rank 4 --vllm_num_engines 1 --init_kl_coef 0.01",
    "frozen": "--freeze_visual_encoder --vllm_num_engines 1 --init_kl_coef 0.01 --use_kl_loss",
}


@pytest.mark.parametrize("case", SPLIT)
def test_ranks_adapters_and_a_frozen_tower_agree_with_the_engine(
    root: Path, case: str, ray_cluster: None
) -> None:
    assert train(root, case, f"{SMALL} {SPLIT[case]}", main=train_ppo_ray.main, data="few") == 0
    steps = steps_of(root / case)
    assert len(steps) == 6
    assert max(step["vllm_kl"] for step in steps) < 1e-6
    if case in ("adapter", "frozen"):
        name = "adapter_model.safetensors" if case == "adapter" else "model.safetensors"
        before, after = load_file(root / "sft" / "model.safetensors"), load_file(root / case / name)
        if case == "adapter":
            assert after and not any("visual" in key for key in after)
            return
        assert before.keys() == after.keys()
        moved = {key for key in before if not torch.equal(before[key], after[key])}
        assert moved and not any("visual" in key for key in moved)


def test_the_commands_of_the_document_train_and_talk(
    root: Path,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: the Ray of these tests was started in another folder."""
    (checkout / "pictures").mkdir()
    for word in ("red", "blue"):
        path = checkout / "pictures" / f"{word}.png"
        tiny_vision.colour(word, np.random.default_rng(0)).save(path)
    shutil.copytree(root / "sft", checkout / "output" / "colours")
    monkeypatch.setattr("sys.stdin", io.StringIO("Which colour?\nexit\n"))
    ran = []
    for block in blocks("bash", ROOT / "docs" / "vision.md"):
        for words in commands(block, checkout):
            if words[1] in ("ppo", "chat"):
                words[1] = words[1].replace("ppo", "ppo-local")
                assert exit_code(console.main, words[1:]) == 0
                ran.append(words[1])
    assert ran == ["ppo-local", "chat"]
    assert load_file(checkout / "output" / "colours-rl" / "model.safetensors")
