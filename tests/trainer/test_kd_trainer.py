"""Distillation through the command: the divergence falls, on the data's answers and on the
student's own; teachers of another vocabulary are refused.
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor

from openrlhf.algorithms.distillation import Distillation
from openrlhf.cli.train_kd import main
from openrlhf.config.cli import parse_config
from openrlhf.config.common import DeepSpeedConfig
from openrlhf.config.supervised import KDConfig
from openrlhf.datasets.sft_dataset import SFTExample
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import hf_model_of
from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.errors import ConfigError
from openrlhf.models.distillation import Student, Teacher, as_head
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.kd_trainer import KDTrainer, StudentAnswers, make_answers
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tokenizer import load_tokenizer
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, write_jsonl

FLAGS = (
    "--train_batch_size 16 --micro_train_batch_size 4 --learning_rate 3e-3 --max_epochs 4 "
    "--eval_split train --lr_warmup_ratio 0"
)
# The second goes on where the first ends.
RUNS = {
    "data": "--pretrain {}/model --kd_coef 0.9 --zero_stage 3",
    "on_policy": "--pretrain {}/data --kd_on_policy --kd_divergence jsd --kd_max_new_tokens 8 "
    "--zero_stage 2 --max_epochs 6",
}


def make_rows(num_rows: int, seed: int) -> list[dict]:
    """Four digits, and one of two words, three times."""
    draw = random.Random(seed)
    numbers = ["".join(draw.choices("0123456789", k=4)) for _ in range(num_rows)]
    return [{"input": n, "output": ("abc" if n[-1] < "5" else "xyz") * 3} for n in numbers]


def teach(path: Path) -> None:
    """Train a model on such rows in plain torch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    texts = [f"User: {r['input']}\nAssistant: {r['output']}<|end|>" for r in make_rows(32, seed=2)]
    ids = torch.tensor(tokenizer(texts)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)


def train(folder: Path, flags: str, run: str) -> None:
    main(
        f"--teacher_model {folder}/teacher {FLAGS} {flags.format(folder)} "
        f"--dataset {folder}/train.jsonl --eval_dataset {folder}/eval.jsonl "
        f"--save_path {folder}/{run}".split()
    )


def train_both(folder: Path) -> None:
    for name, flags in RUNS.items():
        train(folder, flags, name)


def train_on_policy(folder: Path) -> None:
    train(folder, RUNS["on_policy"], "two_ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kd")
    make_model(folder / "model")
    teach(make_model(folder / "teacher", hidden_size=96, seed=7))
    write_jsonl(folder / "train.jsonl", make_rows(64, seed=0))
    write_jsonl(folder / "eval.jsonl", make_rows(17, seed=1))
    return folder


def read_metrics(folder: Path, name: str) -> list[dict]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> dict[str, list[dict]]:
    run_ranks(train_both, 1, folder)
    return {name: read_metrics(folder, name) for name in RUNS}


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return (teacher.exp() * (teacher - student)).sum(-1)


def jensen_shannon(student: Tensor, teacher: Tensor) -> Tensor:
    middle = ((student.exp() + teacher.exp()) / 2).log()
    return (forward_kl(middle, student) + forward_kl(middle, teacher)) / 2


DIVERGENCES = {"data": forward_kl, "on_policy": jensen_shannon}


def divergence_on_new_rows(folder: Path, student: str, name: str) -> float:
    """Mean over answer tokens, one text at a time, in plain torch."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = load(folder / student), load(folder / "teacher")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    values = []
    for row in make_rows(17, seed=1):
        prompt = tokenizer(f"User: {row['input']}\nAssistant: ")["input_ids"]
        ids = [*prompt, *tokenizer(row["output"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            both = [model(torch.tensor([ids])).logits[0].log_softmax(-1) for model in models]
        values.append(DIVERGENCES[name](*both)[len(prompt) - 1 : -1])
    return torch.cat(values).mean().item()


def logged_divergences(records: list[dict]) -> list[float]:
    return [r["eval/distil_loss"] for r in records if "eval/distil_loss" in r]


@pytest.mark.parametrize(("name", "start"), [("data", "model"), ("on_policy", "data")])
def test_the_divergence_to_the_teacher_falls_by_half_on_rows_it_never_saw(
    folder: Path, one_rank: dict, name: str, start: str
) -> None:
    before = divergence_on_new_rows(folder, start, name)
    after = logged_divergences(one_rank[name])[-1]
    assert 0 < after < before / 2
    assert divergence_on_new_rows(folder, name, name) == pytest.approx(after, rel=1e-4)


def test_two_ranks_sample_and_train_as_one(folder: Path, one_rank: dict) -> None:
    run_ranks(train_on_policy, 2, folder)
    two_ranks = read_metrics(folder, "two_ranks")
    for alone, together in zip(one_rank["on_policy"], two_ranks, strict=True):
        for key in {"gpt_loss", "distil_loss", "loss", "eval/distil_loss"} & alone.keys():
            assert together[key] == pytest.approx(alone[key], rel=1e-3)


def test_a_student_samples_with_its_adapter(folder: Path) -> None:
    line = f"--pretrain {folder}/teacher --teacher_model {folder}/teacher --dataset d "
    config = parse_config(KDConfig, f"{line} --kd_on_policy --lora_rank 4".split()).config
    student = KDTrainer.load_model(config, str(folder / "teacher"))
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    inputs = SimpleNamespace(
        model_path=str(folder / "model"),
        tokenizer=load_tokenizer(str(folder / "model")),
        samples=TwoSamples(),
    )
    run = SimpleNamespace(config=config, inputs=inputs, model=student)
    engine = make_answers(run)._engine  # type: ignore[arg-type]
    request = GenerationRequest(
        "r", (70, 71, 72), SamplingSettings(temperature=0, max_new_tokens=9)
    )
    [[answer]] = engine.generate([request])
    merged = copy.deepcopy(hf_model_of(student)).merge_and_unload()
    base = load_causal_lm(folder / "teacher")
    ids = torch.tensor([[70, 71, 72]])
    greedy, without = (
        model.generate(ids, do_sample=False, max_new_tokens=9, attention_mask=torch.ones_like(ids))
        for model in (merged, base)
    )
    num_told = len(answer.token_ids)
    assert answer.token_ids == tuple(greedy[0, 3 : 3 + num_told].tolist())
    assert without.tolist() != greedy.tolist()


class EchoEngine:
    """Answers each prompt with its last token, as often as there is room."""

    def generate(self, requests: list[GenerationRequest]) -> list[list[Completion]]:
        self.requests = requests
        return [
            [Completion(r.prompt_token_ids[-1:] * r.sampling.max_new_tokens, (), "length", 0)]
            for r in requests
        ]


class TwoSamples:
    lengths = torch.tensor([4, 3])

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> SFTExample:
        ids = ([1, 2, 3, 4], [5, 6, 7])[index]
        return SFTExample(torch.tensor(ids), torch.arange(len(ids)) >= 2 - index)


def test_an_answer_of_the_student_replaces_that_of_the_data_within_max_len() -> None:
    sampling = SamplingSettings(max_new_tokens=4)
    engine = EchoEngine()
    answers = StudentAnswers(TwoSamples(), engine, sampling, max_len=5)  # type: ignore[arg-type]
    strategy = DeepSpeedStrategy(DeepSpeedConfig())
    answers.answer([0], 1, strategy)
    assert answers[0].token_ids.tolist() == [1, 2, 2, 2, 2]
    assert answers[0].loss_mask.tolist() == [False, False, True, True, True]
    assert answers.lengths.tolist() == [5, 3]
    first_seed = engine.requests[0].sampling.seed
    answers.answer([1, 0], 2, strategy)
    assert [answers[row].token_ids.tolist() for row in (0, 1)] == [[1, 2, 2, 2, 2], [5, 5, 5, 5, 5]]
    assert engine.requests[1].sampling.seed != first_seed  # another step, another answer


def refusal(folder: Path, words: str) -> str:
    needs = f"--pretrain {folder}/model --dataset d "
    config = parse_config(KDConfig, (needs + words).split()).config
    with pytest.raises(ConfigError) as error:
        KDTrainer.check(config, load_tokenizer(str(folder / "model")))
    return str(error.value)


def test_a_teacher_with_fewer_logits_than_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    teacher = make_model(tmp_path / "narrow", vocab_size=200)
    assert "has 200 logits for 262 tokens" in refusal(folder, f"--teacher_model {teacher}")


def test_logits_that_only_the_teacher_has_are_left_out(folder: Path, tmp_path: Path) -> None:
    model = load_causal_lm(folder / "model")
    student = Student(model, coef=0.5, method=Distillation(kind="forward"))
    wide = Teacher(load_causal_lm(make_model(tmp_path / "wide", vocab_size=300)))
    ids, mask = torch.arange(10, 20), torch.ones(10, dtype=torch.bool)
    mask[0] = False
    batch = PackedBatch.from_sequences([ids], [mask])
    head = as_head(wide.head, wide(batch))
    narrow = replace(head, weight_VH=head.weight_VH[:262])
    assert len(head.weight_VH) == 300
    for found, expected in zip(student(batch, head)[:3], student(batch, narrow)[:3], strict=True):
        assert torch.equal(found, expected)
    student(batch, head).loss.backward()
    assert model.get_output_embeddings().weight.grad.abs().sum() > 0


def test_a_teacher_with_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    teacher = make_model(tmp_path / "other")
    path = teacher / "tokenizer.json"
    core = json.loads(path.read_text())
    vocab = core["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(core))
    assert f"token 'a' is {vocab['a']} there, {vocab['b']} here" in refusal(
        folder, f"--teacher_model {teacher}"
    )


def test_sampling_from_split_weights_is_refused(folder: Path) -> None:
    line = refusal(folder, f"--teacher_model {folder}/teacher --kd_on_policy --zero_stage 3")
    assert "--zero_stage 2" in line
