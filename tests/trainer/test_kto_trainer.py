"""KTO: which pairs give the reference point, and a run of the command that learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from openrlhf.algorithms.preference_loss import KTOOptions
from openrlhf.cli.train_kto import main
from openrlhf.config.common import DeepSpeedConfig
from openrlhf.datasets.sampler import EpochSampler
from openrlhf.datasets.unpaired_preference_dataset import UnpairedExample
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.models.actor import Actor, TokenStats
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.base_trainer import LoopSettings, Position
from openrlhf.trainer.kto_trainer import KTOTrainer
from openrlhf.trainer.preference import Reference, ReferencedSamples, mismatched_pairs
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tracking import NullTracker
from tests.distributed.spawn import meet_elsewhere, run_ranks
from tests.tiny import make_model, write_jsonl
from tests.trainer.gradients import ListedSamples, response_logprob

FLAGS = (
    "--input_key question --output_key answer --train_batch_size 16 --micro_train_batch_size 4 "
    "--learning_rate 2e-3 --beta 0.1 --max_epochs 4 --eval_split train --lr_warmup_ratio 0"
)


def example(prompt: list[int], response: list[int], is_desirable: bool = True) -> UnpairedExample:
    token_ids = torch.tensor(prompt + response)
    return UnpairedExample(token_ids, torch.arange(len(token_ids)) >= len(prompt), is_desirable)


def pairs_of(*rows: UnpairedExample, max_len: int = 9) -> list[UnpairedExample]:
    """The mismatched pairs of one batch."""
    samples = ListedSamples(rows, [len(row.token_ids) for row in rows])
    return mismatched_pairs(range(len(rows)), samples, max_len=max_len)


def test_a_mismatched_pair_is_a_prompt_with_the_response_of_the_next_row() -> None:
    pairs = pairs_of(example([1, 2], [3]), example([4], [5, 6]), example([7, 8], [9, 10]))
    assert [pair.token_ids.tolist() for pair in pairs] == [[1, 2, 5, 6], [4, 9, 10], [7, 8, 3]]
    assert [pair.loss_mask.int().tolist() for pair in pairs] == [[0, 0, 1, 1], [0, 1, 1], [0, 0, 1]]


def test_a_mismatched_pair_may_be_longer_than_any_row_of_its_batch() -> None:
    pairs = pairs_of(example([1, 2, 3], [4]), example([5], [6, 7, 8]), max_len=5)
    assert [pair.token_ids.tolist() for pair in pairs] == [[1, 2, 3, 6, 7], [5, 4]]
    assert [pair.loss_mask.int().tolist() for pair in pairs] == [[0, 0, 0, 1, 1], [0, 1]]


def test_a_row_alone_has_no_mismatched_pair() -> None:
    assert pairs_of(example([1], [2])) == []


class PlainEngine:
    """A model in this process, with what a loop asks of an engine."""

    device = torch.device("cpu")

    def __init__(self, module: Actor) -> None:
        self.module = module
        self.eval, self.train = module.eval, module.train

    @torch.no_grad()
    def __call__(self, batch: PackedBatch) -> TokenStats:
        return self.module(batch)


def kept_sums(model: Path, position: Position) -> tuple[dict, list[float]]:
    """What a run that starts at `position` keeps of pairs and of answers."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(1 + i % 5, 1 + i % 7) for i in range(11)]
    rows = [
        example(*(torch.randint(6, 250, (n,), generator=generator).tolist() for n in size))
        for size in sizes
    ]
    engine = PlainEngine(Actor(load_causal_lm(model)).eval())
    trainer = KTOTrainer(
        DeepSpeedStrategy(DeepSpeedConfig()),
        engine,  # type: ignore[arg-type]
        reference=Reference(engine),  # type: ignore[arg-type]
        options=KTOOptions(),
        max_len=12,
        samples=ListedSamples(rows, [sum(size) for size in sizes]),
        settings=LoopSettings(batch_size=4, micro_batch_size=3, max_epochs=3),
        tracker=NullTracker(),
    )
    trainer.position = position
    trainer.precompute_reference()
    kept = trainer.samples
    assert isinstance(kept, ReferencedSamples)
    return dict(kept.pair_sums), [kept[row].ref_sums for row in range(len(kept))]


def test_a_run_that_goes_on_keeps_bit_by_bit_what_the_first_start_did(tiny_model_dir) -> None:
    whole, answers = kept_sums(tiny_model_dir, Position())
    left, same_answers = kept_sums(tiny_model_dir, Position(4, 1, 4))
    assert len(whole) == 9 and len(left) == 5  # batches of three epochs, and from the fifth on
    assert left == {rows: whole[rows] for rows in left}
    assert answers == same_answers
    assert all(len(rows) == len(sums) for rows, sums in whole.items())


def make_rows(numbers: range) -> list[dict]:
    """Answers in words are wanted, answers in digits are not."""
    return [
        {
            "question": f"{n}?",
            "answer": f"yes {n % 7}" if n % 2 else f"99{n % 7}",
            "label": n % 2,
        }
        for n in numbers
    ]


def train(folder: Path, name: str = "run", flags: str = "") -> None:
    main(
        f"--pretrain {folder}/model --dataset {folder}/train.jsonl "
        f"--eval_dataset {folder}/eval.jsonl --save_path {folder}/{name} {FLAGS} {flags}".split()
    )


def train_both_ways(folder: Path) -> None:
    for name, lora in (("full", ""), ("lora", "--lora_rank 4 --learning_rate 1e-2")):
        few = f"--max_epochs 2 --max_samples 41 {lora}"  # the last batch of an epoch is smaller
        for way, flags in (("asked", few), ("kept", f"{few} --precompute_ref_log_probs")):
            meet_elsewhere()
            train(folder, f"{name}_{way}", flags)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kto")
    make_model(folder / "model")
    write_jsonl(folder / "train.jsonl", make_rows(range(96)))
    write_jsonl(folder / "eval.jsonl", make_rows(range(100, 133)))
    run_ranks(train, 1, folder)
    return folder


def read_metrics(folder: Path, name: str = "run") -> list[dict]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def both_ways(folder: Path) -> Path:
    run_ranks(train_both_ways, 2, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "lora"])
def test_reference_log_probs_computed_before_training_change_nothing(
    both_ways: Path, name: str
) -> None:
    asked, kept = (read_metrics(both_ways, f"{name}_{way}") for way in ("asked", "kept"))
    assert any(record.get("kl", 0) > 0.01 for record in asked)
    assert abs(asked[-1]["eval/reward_margin"]) > 0.1
    for a, b in zip(asked, kept, strict=True):
        names = [key for key in a if "timing" not in key and key not in ("time", "tokens_per_s")]
        assert {key: b[key] for key in names} == pytest.approx(
            {key: a[key] for key in names}, rel=1e-5, abs=1e-5
        )


def test_the_reward_margin_rises_on_rows_it_never_saw(folder: Path) -> None:
    records = read_metrics(folder)
    steps = [record for record in records if "kto_loss" in record]
    assert steps[0]["kto_loss"] == pytest.approx(0.5, abs=1e-6)  # policy and reference are one
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-4)
    margins = [record["eval/reward_margin"] for record in records if "eval/kto_loss" in record]
    assert len(margins) == 4
    assert margins[-1] > 1.5
    assert records[-1]["eval/chosen_reward"] > 0 > records[-1]["eval/reject_reward"]


def test_the_logged_rewards_are_those_of_the_export(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "run")
    trained, first = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name)
        for name in ("run", "model")
    )
    rewards: dict[int, list[float]] = {0: [], 1: []}
    for row in make_rows(range(100, 133)):
        prompt = tokenizer(f"User: {row['question']}\nAssistant: ")["input_ids"]
        ids = torch.tensor([*prompt, *tokenizer(row["answer"] + "<|end|>")["input_ids"]])
        mask = torch.arange(len(ids)) >= len(prompt)
        with torch.no_grad():
            gap = response_logprob(trained, ids, mask) - response_logprob(first, ids, mask)
        rewards[row["label"]].append(0.1 * gap.item())
    logged = [record for record in read_metrics(folder) if "eval/kto_loss" in record][-1]
    for label, name in ((1, "eval/chosen_reward"), (0, "eval/reject_reward")):
        mean = sum(rewards[label]) / len(rewards[label])
        assert logged[name] == pytest.approx(mean, abs=1e-5)


def test_the_export_loads_and_prefers_wanted_answers(folder: Path) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "run")
    ids = tokenizer("User: 200?\nAssistant: yes 4<|end|>", return_tensors="pt")["input_ids"]
    trained, first = (load(folder / name)(ids, labels=ids).loss for name in ("run", "model"))
    assert trained < first


TEN_STEPS = (
    "--input_key prompt --output_key completion --train_batch_size 8 --micro_train_batch_size 2 "
    "--max_len 50 --learning_rate 3e-4 --lr_scheduler constant --lr_warmup_ratio 0 --max_epochs 1 "
    "--beta 0.1 --desirable_loss_weight 1.0 --undesirable_loss_weight 1.5 --zero_stage 0"
)


def uneven_rows() -> list[dict]:
    """80 rows of prompts and answers that are short or long, never both long: mismatched pairs are
    longer than rows, and some are over 50 tokens.
    """
    words = [("p" * 30, "r" * 4), ("p" * 3, "r" * 36), ("p" * 10, "r" * 8)]
    rows = []
    for number in range(80):
        prompt, completion = words[(number * number + number // 7) % 3]
        prompt, completion = f"{number}{prompt} ", f"{completion}{number % 7}"
        rows.append({"prompt": prompt, "completion": completion, "label": number % 3 > 0})
    return rows


def train_ten_steps(folder: Path) -> None:
    words = f"--pretrain {folder}/model --dataset {folder}/uneven.jsonl --save_path {folder}/ten"
    main(f"{words} --input_template {{}} {TEN_STEPS}".split())


def ten_steps_of_trl(model: Path, rows: list[dict]) -> list[dict]:
    """What TRL logs of ten steps on these rows in their order."""
    from datasets import Dataset
    from trl import KTOConfig
    from trl import KTOTrainer as TRLTrainer

    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for _ in range(2)
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    trainer = TRLTrainer(
        policy,
        reference,
        KTOConfig(
            output_dir=str(model.parent / "trl"),
            per_device_train_batch_size=8,
            train_sampling_strategy="sequential",
            max_steps=10,
            max_length=50,
            max_grad_norm=1.0,
            undesirable_weight=1.5,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.train()
    return [log for log in trainer.state.log_history if "kl" in log]


def test_ten_steps_are_those_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # of trainers that ran in this process
        monkeypatch.delenv(name, raising=False)
    rows, folder = uneven_rows(), tmp_path
    make_model(folder / "model")
    write_jsonl(folder / "uneven.jsonl", rows)
    run_ranks(train_ten_steps, 1, folder)
    order = EpochSampler(len(rows), seed=42).order(0).tolist()
    # TRL puts a prompt before the response of the row before: in a batch read backwards, the next.
    backwards = [rows[row] for n in range(0, 80, 8) for row in reversed(order[n : n + 8])]
    logs = ten_steps_of_trl(folder / "model", backwards)
    steps = [record for record in read_metrics(folder, "ten") if "kto_loss" in record]
    assert len(steps) == len(logs) == 10
    for own, other in zip(steps, logs, strict=True):
        assert own["kto_loss"] == pytest.approx(other["loss"], abs=1e-6)
        # Of sums of log-probs of some -200 in fp32, whose last bit is worth 1.5e-5.
        assert own["kl"] == pytest.approx(other["kl"], abs=5e-5)
    assert max(log["kl"] for log in logs) > 0.5  # the reference point had a say
