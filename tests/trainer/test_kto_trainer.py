"""KTO: which pairs give the reference point, and ten steps that are those of TRL."""

from pathlib import Path

import pytest
import torch
import transformers

from openrlhf.cli.train_kto import main
from openrlhf.datasets.sampler import epoch_order
from openrlhf.datasets.unpaired_preference_dataset import UnpairedExample
from openrlhf.trainer.kto_trainer import mismatched_pairs
from openrlhf.utils.tracker import read_metrics
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, write_jsonl


def example(prompt: list[int], response: list[int], is_desirable: bool = True) -> UnpairedExample:
    token_ids = torch.tensor(prompt + response)
    return UnpairedExample(token_ids, torch.arange(len(token_ids)) >= len(prompt), is_desirable)


def pairs_of(*rows: UnpairedExample, max_len: int = 9) -> list[UnpairedExample]:
    """The mismatched pairs of one batch."""
    return mismatched_pairs(range(len(rows)), rows, max_len=max_len)


def test_a_mismatched_pair_is_a_prompt_with_the_response_of_the_next_row() -> None:
    pairs = pairs_of(example([1, 2], [3]), example([4], [5, 6]), example([7, 8], [9, 10]))
    assert [pair.token_ids.tolist() for pair in pairs] == [[1, 2, 5, 6], [4, 9, 10], [7, 8, 3]]
    assert [pair.loss_mask.int().tolist() for pair in pairs] == [[0, 0, 1, 1], [0, 1, 1], [0, 0, 1]]


def test_a_mismatched_pair_may_be_longer_than_any_row_of_its_batch() -> None:
    pairs = pairs_of(example([1, 2, 3], [4]), example([5], [6, 7, 8]), max_len=5)
    assert [pair.token_ids.tolist() for pair in pairs] == [[1, 2, 3, 6, 7], [5, 4]]
    assert [pair.loss_mask.int().tolist() for pair in pairs] == [[0, 0, 0, 1, 1], [0, 1]]


def test_a_mismatched_pair_has_the_response_to_another_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [example([1], [2]), example([1], [3]), example([4], [5]), example([4], [6])]
    pairs = [pair.token_ids.tolist() for pair in pairs_of(*rows)]
    assert pairs == [[1, 5], [1, 5], [4, 2], [4, 2]]
    assert not capsys.readouterr().err
    assert pairs_of(*rows[:2]) == []
    said = " ".join(capsys.readouterr().err.split())
    assert "a batch of 2 row(s) has no two prompts to tell the KL from, so its reference" in said


def test_a_pair_without_room_for_a_response_does_not_count() -> None:
    pairs = pairs_of(example([1, 2, 3], [4]), example([5], [6]), max_len=3)
    assert [pair.token_ids.tolist() for pair in pairs] == [[5, 4]]


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
    order = epoch_order(len(rows), 42, 0).tolist()
    # TRL puts a prompt before the response of the row before: in a batch read backwards, the next.
    backwards = [rows[row] for n in range(0, 80, 8) for row in reversed(order[n : n + 8])]
    logs = ten_steps_of_trl(folder / "model", backwards)
    steps = [
        record for record in read_metrics(folder / "ten" / "metrics.jsonl") if "kto_loss" in record
    ]
    assert len(steps) == len(logs) == 10
    for own, other in zip(steps, logs, strict=True):
        assert own["kto_loss"] == pytest.approx(other["loss"], abs=1e-6)
        # Of sums of log-probs of some -200 in fp32, whose last bit is worth 1.5e-5.
        assert own["kl"] == pytest.approx(other["kl"], abs=5e-5)
    assert max(log["kl"] for log in logs) > 0.5  # the reference point had a say
