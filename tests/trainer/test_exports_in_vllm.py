"""What training leaves is served by vLLM as it is: a policy answers as in Transformers and gives
tokens the log-probs that the trainer gives them, a reward model scores as in the trainer, whole or
merged from an adapter.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
import transformers

from openrlhf.cli.lora_combiner import main as combine
from openrlhf.cli.train_dpo import main as train_dpo
from openrlhf.cli.train_kd import main as train_kd
from openrlhf.cli.train_kto import main as train_kto
from openrlhf.cli.train_prm import main as train_prm
from openrlhf.cli.train_rm import main as train_rm
from openrlhf.cli.train_sft import main as train_sft
from openrlhf.distributed.weights import hf_model_of
from openrlhf.models.actor import Actor
from openrlhf.trainer import rm_trainer
from openrlhf.trainer.base_trainer import BaseTrainer
from openrlhf.trainer.preference import PreferenceBatch
from openrlhf.trainer.rm_trainer import check_export
from openrlhf.utils.packing import PackedBatch
from tests.distributed.spawn import run_ranks
from tests.engines.helpers import greedy, load
from tests.tiny import make_model, write_jsonl
from tests.trainer.test_preference_runs import make_pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = (
    "--train_batch_size 8 --micro_train_batch_size 4 --max_epochs 2 --lr_warmup_ratio 0 "
    "--learning_rate 3e-3"
)
LORA = "--lora_rank 8 --lora_alpha 32"
REWARD_MODELS = ("rm", "rm_merged")
ANSWERS = "--dataset {folder}/labelled.jsonl --input_key question --output_key answer"
STEPS = "--dataset {folder}/steps.jsonl --placeholder_token # --reward_tokens + -"
POLICIES = {
    "sft": (train_sft, ANSWERS),
    "kto": (train_kto, f"{ANSWERS} --beta 0.1"),
    "kd": (train_kd, f"{ANSWERS} --teacher_model {{folder}}/teacher --kd_coef 0.5"),
    "prm": (train_prm, STEPS),
}
TEXTS = ("User: abc\nAssistant: aeiaei", "kjihgfedcba", "aei" * 20)
PROMPTS = ("abc", "kjihgfedcba", "aei")
NUM_TOKENS = 24
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
VLLM = {
    "dtype": "float32",
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "kv_cache_memory_bytes": 2**26,
    "max_model_len": 256,
    "max_num_seqs": 8,
}


def train(folder: Path) -> dict[str, tuple[list[list[int]], list[float]]]:
    """Train a policy and two reward models; texts and what the trainer scored them with."""
    scored = {}
    common = (
        f"--pretrain {folder}/model --dataset {folder}/rows.jsonl --prompt_key question {FLAGS}"
    )
    train_dpo(f"{common} --save_path {folder}/dpo --beta 0.1".split())

    def keep(run: object, path: Path, batch: PreferenceBatch, expected: torch.Tensor) -> None:
        parts = batch.packed.token_ids.split(list(batch.packed.seq_lengths))
        scored[path.name] = [ids.tolist() for ids in parts], expected.tolist()
        check_export(run, path, batch, expected)  # type: ignore[arg-type]

    rm_trainer.check_export = keep  # type: ignore[assignment]
    train_rm(f"{common} --save_path {folder}/rm".split())
    train_rm(f"{common} --save_path {folder}/rm_lora {LORA}".split())
    paths = f"--model_path {folder}/model --lora_path {folder}/rm_lora"
    combine(f"{paths} --output_path {folder}/rm_merged --is_rm".split())
    scored["rm_merged"] = scored.pop("rm_lora")
    return scored


def train_policies(folder: Path) -> dict[str, list[torch.Tensor]]:
    """Train by every other method; the trainers' log-probs of the texts, behind the first token of
    each.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    texts = [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXTS]
    masks = [torch.arange(len(ids)) > 0 for ids in texts]
    batch, found, fit = PackedBatch.from_sequences(texts, masks), [], BaseTrainer.fit

    def fit_and_look(self: BaseTrainer, **kwargs: object) -> None:
        fit(self, **kwargs)  # type: ignore[arg-type]
        with torch.no_grad():
            actor = Actor(hf_model_of(self.engine.module)).eval()
            found.append(list(actor(batch).logprobs.split([len(ids) - 1 for ids in texts])))

    BaseTrainer.fit = fit_and_look  # type: ignore[method-assign]
    for name, (command, flags) in POLICIES.items():
        words = f"--pretrain {folder}/model {FLAGS} {flags.format(folder=folder)}"
        command(f"{words} --save_path {folder}/{name}".split())
    return dict(zip(POLICIES, found, strict=True))


def prompt_logprobs(folder: Path) -> list[list[float]]:
    """What the model in model.txt gives the texts in vLLM."""
    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, SamplingParams

    path = (folder / "model.txt").read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    prompts = [{"prompt_token_ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    answers = LLM(path, **VLLM).generate(prompts, sampling, use_tqdm=False)  # type: ignore[arg-type]
    return [
        [
            position[token_id].logprob
            for position, token_id in zip(
                answer.prompt_logprobs[1:], answer.prompt_token_ids[1:], strict=True
            )
        ]
        for answer in answers
    ]


def generate(folder: Path) -> list[tuple[int, ...]]:
    """Greedy answers of vLLM to the prompts."""
    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, SamplingParams

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "dpo")
    prompts = [{"prompt_token_ids": tokenizer(text)["input_ids"]} for text in PROMPTS]
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm = LLM(str(folder / "dpo"), **VLLM)  # type: ignore[arg-type]
    answers = llm.generate(prompts, sampling, use_tqdm=False)  # type: ignore[arg-type]
    return [tuple(answer.outputs[0].token_ids) for answer in answers]


def score(folder: Path) -> list[float]:
    """Scores of vLLM for the texts in texts.pt of the model in model.txt."""
    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, PoolingParams

    texts = [{"prompt_token_ids": ids} for ids in torch.load(folder / "texts.pt")]
    path = (folder / "model.txt").read_text()
    llm = LLM(path, runner="pooling", convert="classify", **VLLM)  # type: ignore[arg-type]
    params = PoolingParams(use_activation=False)  # a score, not a probability
    found = llm.classify(texts, pooling_params=params, use_tqdm=False)  # type: ignore[arg-type]
    return [answer.outputs.probs[0] for answer in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    make_model(folder / "model")
    rng = random.Random(0)
    pairs = [make_pair(rng) for _ in range(64)]
    write_jsonl(folder / "rows.jsonl", pairs)
    answers = [
        {"question": pair["question"], "answer": pair[side], "label": int(side == "chosen")}
        for pair in pairs[:32]
        for side in ("chosen", "rejected")
    ]
    write_jsonl(folder / "labelled.jsonl", answers)
    steps = [f"{pair['question']}#{pair['chosen']}#" for pair in pairs]
    write_jsonl(folder / "steps.jsonl", [{"input": s, "label": ["+", "-"]} for s in steps])
    make_model(folder / "teacher", seed=3)
    return folder


@pytest.fixture(scope="module")
def scored(folder: Path) -> dict[str, tuple[list[list[int]], list[float]]]:
    [scored] = run_ranks(train, 1, folder)
    return scored  # type: ignore[return-value]


def test_a_trained_policy_answers_in_vllm_as_in_transformers(folder: Path, scored: dict) -> None:
    model, base = load(folder / "dpo"), load(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "dpo")
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    expected = [greedy(model, NUM_TOKENS, prompt) for prompt in prompts]
    assert expected != [greedy(base, NUM_TOKENS, prompt) for prompt in prompts]
    [found] = run_ranks(generate, 1, folder)
    assert found == expected


@pytest.mark.parametrize("name", REWARD_MODELS)
def test_a_reward_model_scores_in_transformers_as_in_the_trainer(
    folder: Path, scored: dict, name: str
) -> None:
    texts, expected = scored[name]
    auto_class = transformers.AutoModelForSequenceClassification
    model, info = auto_class.from_pretrained(folder / name, output_loading_info=True)
    assert not any(info.values())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / name)
    batch = tokenizer.pad({"input_ids": texts}, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        single = [model.eval()(torch.tensor([ids])).logits.item() for ids in texts]
        padded = model(**batch).logits.squeeze(-1).tolist()
    assert single == pytest.approx(expected, abs=1e-4)
    assert padded == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", REWARD_MODELS)
def test_a_reward_model_scores_in_vllm_as_in_the_trainer(
    folder: Path, scored: dict, tmp_path: Path, name: str
) -> None:
    texts, expected = scored[name]
    assert max(expected) - min(expected) > 0.1
    torch.save(texts, tmp_path / "texts.pt")
    (tmp_path / "model.txt").write_text(str(folder / name))
    [found] = run_ranks(score, 1, tmp_path)
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def policies(folder: Path) -> dict[str, list[torch.Tensor]]:
    [policies] = run_ranks(train_policies, 1, folder)
    return policies  # type: ignore[return-value]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_gives_tokens_in_vllm_the_log_probs_of_the_trainer(
    folder: Path, policies: dict, tmp_path: Path, name: str
) -> None:
    base = load(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    (tmp_path / "model.txt").write_text(str(folder / name))
    [found] = run_ranks(prompt_logprobs, 1, tmp_path)
    for text, actual, expected in zip(TEXTS, found, policies[name], strict=True):
        assert actual == pytest.approx(expected.tolist(), abs=1e-4)
        ids = torch.tensor(tokenizer(text)["input_ids"])
        with torch.no_grad():
            untrained = base(ids[None]).logits[0, :-1].log_softmax(-1)
        before = untrained.gather(-1, ids[1:, None])[:, 0]
        assert (expected - before).abs().max() > 0.01  # training changed them
