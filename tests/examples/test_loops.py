"""The offline loops run to their ends with tiny models and vLLM, and the answers follow the reward.

The reward model is made by hand and scores a text by its share of vowels. The policy of the loops
that improve is untrained and types any of forty characters; that of conditional SFT has learnt to
answer with few or many vowels, as it comes.
"""

import importlib.util
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.integration.commands import run_command
from tests.tiny import as_openrlhf_saves, make_tokenizer, read_jsonl, write_jsonl

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
VOWELS = "aeiou"
NUM_PROMPTS = 96
GENERATE = "--max_new_tokens 8 --prompt_max_len 32 --ds.param_dtype fp32"
SCORE = "--max_len 64 --micro_batch_size 64 --ds.param_dtype fp32"
TRAIN = (
    "--train_batch_size 32 --micro_train_batch_size 32 --max_len 64 --ds.param_dtype fp32 "
    "--zero_stage 0 --lr_warmup_ratio 0 "
)
MIN_GAP = 0.35  # between the shares of vowels that were asked for; 0.58 was seen


def make_policy(folder: Path, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(tokenizer, 64, 2))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_judge(folder: Path, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    """A reward model as OpenRLHF saves it; its score is ten times the share of vowels it reads.

    Attention is even over the text; it copies the mark of a vowel, dimension 0, to dimension 1,
    where the head looks. Dimension 2 is large everywhere and keeps the norms the same.
    """
    config = config_of(tokenizer, 32, 1)
    config.num_labels = 1
    config.value_head_prefix = "score"
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        layer = model.model.layers[0]
        model.model.embed_tokens.weight[:, 2] = 10.0
        for vowel in VOWELS:
            model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(vowel), 0] = 1.0
        layer.self_attn.v_proj.weight[0, 0] = 1.0
        layer.self_attn.o_proj.weight[1, 0] = 1.0
        model.score.weight[0, 1] = 10.0
    made = folder.with_name(f"{folder.name}-made")
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    as_openrlhf_saves(made, folder, head="value_head")


def config_of(
    tokenizer: transformers.PreTrainedTokenizerFast, hidden_size: int, num_layers: int
) -> transformers.Qwen2Config:
    return transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def load_demo():
    path = EXAMPLES / "python" / "make_demo.py"
    spec = importlib.util.spec_from_file_location("make_demo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def variables_of(folder: Path, num_prompts: int) -> dict[str, str]:
    """What every loop needs: the models of a folder, and prompts that are written there."""
    prompts = [{"input": f"{n}+{n}="} for n in range(num_prompts)]
    return {
        "MODEL": str(folder / "policy"),
        "REWARD_MODEL": str(folder / "judge"),
        "DATA": str(write_jsonl(folder / "prompts.jsonl", prompts)),
        "INPUT_KEY": "input",
        "SAMPLES": "8",
        "GPUS": "1",
        "GENERATE_ARGS": GENERATE,
        "SCORE_ARGS": SCORE,
    }


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("loops")
    tokenizer = load_demo().make_tokenizer()
    make_policy(folder / "policy", tokenizer)
    make_judge(folder / "judge", tokenizer)
    return variables_of(folder, NUM_PROMPTS) | {"ITERATIONS": "3", "PROMPTS": str(NUM_PROMPTS)}


def run_loop(name: str, folder: Path, variables: dict[str, str]) -> None:
    env = {**os.environ, **variables, "OUT": str(folder)}
    run_command("bash", EXAMPLES / "scripts" / name, env=env, timeout=1160)


def vowel_share(rows: list[dict]) -> float:
    """The reward, counted: the mean share of vowels in the answers."""
    texts = [row["output"] for row in rows if row["output"]]
    return sum(sum(map(text.count, VOWELS)) / len(text) for text in texts) / len(texts)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "train_args"),
    [
        ("train_rejection_sampling_llama.sh", "--max_epochs 4 --learning_rate 3e-3"),
        ("train_iterative_dpo_llama.sh", "--max_epochs 4 --learning_rate 1e-3"),
    ],
)
def test_the_reward_of_the_answers_rises(variables, tmp_path, name, train_args):
    run_loop(name, tmp_path, variables | {"TRAIN_ARGS": TRAIN + train_args})
    shares = [vowel_share(read_jsonl(tmp_path / f"answers{i}.jsonl")) for i in range(3)]
    assert 0.05 < shares[0] < 0.2  # 5 of 46 tokens
    assert shares[2] > shares[0] + 0.15, shares
    assert (tmp_path / "model2" / "model.safetensors").is_file()
    model1 = (tmp_path / "model1" / "model.safetensors").stat().st_mtime_ns
    run_loop(name, tmp_path, variables)  # all is done: nothing is done again
    assert (tmp_path / "model1" / "model.safetensors").stat().st_mtime_ns == model1


@pytest.fixture(scope="module")
def fickle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A policy that has learnt eight letters an answer, from none to all of them vowels."""
    folder, rng = tmp_path_factory.mktemp("fickle"), random.Random(0)
    tokenizer = make_tokenizer(folder)  # it has the signs that a score is written with
    make_policy(folder / "untrained", tokenizer)
    make_judge(folder / "judge", tokenizer)

    def answer() -> str:
        share = rng.random()
        return "".join(rng.choice("aei" if rng.random() < share else "bcdfgh") for _ in range(8))

    rows = [{"input": f"{n}+{n}=", "output": answer()} for n in rng.choices(range(100), k=4000)]
    write_jsonl(folder / "rows.jsonl", rows)
    paths = f"--pretrain {folder}/untrained --dataset {folder}/rows.jsonl --output_key output"
    flags = f"{paths} --apply_chat_template {TRAIN} --max_epochs 1 --learning_rate 3e-3"
    command = [sys.executable, "-m", "openrlhf.cli.train_sft", *flags.split()]
    subprocess.run([*command, "--save_path", folder / "policy"], check=True, timeout=300)
    return variables_of(folder, 384) | {
        "GENERATE_ARGS": GENERATE.replace("--max_new_tokens 8", "--max_new_tokens 12"),
        "TRAIN_ARGS": TRAIN + "--max_epochs 4 --learning_rate 3e-3",
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_model_of_conditional_sft_gives_the_reward_it_is_asked_for(fickle, tmp_path):
    run_loop("train_conditional_llama.sh", tmp_path, fickle)
    scored = read_jsonl(tmp_path / "scored.jsonl")
    wishes = [float(row["input"].rpartition(" <rm_score>: ")[2]) for row in scored]
    assert statistics.fmean(wishes) == pytest.approx(0, abs=0.01)  # z-scores
    assert statistics.pstdev(wishes) == pytest.approx(1, abs=0.01)
    assert statistics.correlation(wishes, [vowel_share([row]) for row in scored]) > 0.9
    high, low = (read_jsonl(tmp_path / f"{name}_scored.jsonl") for name in ("high", "low"))
    assert vowel_share(high) > vowel_share(low) + MIN_GAP
    rewards = [statistics.fmean(row["reward"] for row in rows) for rows in (high, low)]
    assert rewards[0] > rewards[1] + 0.5, rewards


MIN_GAIN_OF_PPO = 0.8  # in standard deviations of the reward model's scores; 1.7 was seen


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pipeline_raises_the_reward_of_the_model_it_trained(tmp_path: Path) -> None:
    run_loop("sft_rm_ppo.sh", tmp_path, {"SEED": "1"})
    [*_, last] = [r for r in read_jsonl(tmp_path / "rm" / "metrics.jsonl") if "eval/acc" in r]
    assert last["eval/acc"] > 0.95
    rewards = [r["reward"] for r in read_jsonl(tmp_path / "ppo" / "metrics.jsonl") if "reward" in r]
    assert sum(rewards[-3:]) / 3 > rewards[0] + MIN_GAIN_OF_PPO
