"""Every supervised command, run as it is typed: what it learns holds on rows it never saw, and its
export gives in Hugging Face classes the numbers that were logged.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from openrlhf import api
from openrlhf.models.value_head import reward_mean_and_std
from openrlhf.trainer.sft_trainer import SFTTrainer
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.tracker import read_metrics
from tests.helpers.gradients import response_logprob
from tests.helpers.trained import HELD_OUT, TRAINED, load, make_runs, sequences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


def values_of(folder: Path, name: str, metric: str) -> list[float]:
    return [r[metric] for r in read_metrics(folder / name / "metrics.jsonl") if metric in r]


TEMPLATE = "User: {}\nAssistant: "


@torch.no_grad()
def logprobs(folder: Path, name: str, key: str, prompt: str = "{}") -> Tensor:
    model = load(folder / name)
    return torch.stack([response_logprob(model, *s) for s in sequences(folder / name, key, prompt)])


def test_fine_tuning_lowers_the_loss_and_leaves_a_whole_model(folder: Path) -> None:
    losses = values_of(folder, "sft", "gpt_loss")
    assert len(losses) == 12 and losses[0] > 5 and losses[-1] < losses[0] / 1.5
    records = read_metrics(folder / "sft" / "metrics.jsonl")
    evaluations = [record for record in records if "eval/gpt_loss" in record]
    assert [record["step"] for record in evaluations] == [5, 10, 12]
    last = evaluations[-1]
    assert last["eval/ppl"] == pytest.approx(math.exp(last["eval/gpt_loss"]))
    assert values_of(folder, "sft", "lr")[-1] == pytest.approx(3e-4)  # a tenth of the largest
    counts = [int(mask.sum()) for _, mask in sequences(folder / "sft", "chosen", TEMPLATE)]
    total = logprobs(folder, "sft", "chosen", TEMPLATE).sum().item()
    assert -total / sum(counts) == pytest.approx(last["eval/gpt_loss"], rel=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(folder / "sft").chat_template
    card = (folder / "sft" / "README.md").read_text()
    assert "transformers" in card and "Trained from `model`" in card
    assert (folder / "sft" / "config.yaml").is_file()


def test_fine_tuning_balances_the_experts(folder: Path) -> None:
    balance = values_of(folder, "experts", "aux_loss")
    assert balance[0] > 2.02  # two experts a token: 2 is perfect balance
    assert balance[-1] - 2 < (balance[0] - 2) / 2
    losses = values_of(folder, "experts", "gpt_loss")
    assert losses[-1] < losses[0] - 1


def test_a_reward_model_ranks_pairs_and_scores_as_logged(folder: Path) -> None:
    assert values_of(folder, "rm", "loss")[0] == pytest.approx(math.log(2), abs=0.05)
    assert values_of(folder, "rm", "eval/acc")[-1] >= 0.9
    model = load(folder / "rm", "SequenceClassification")
    with torch.no_grad():
        chosen, rejected = (
            torch.cat([model(ids[None]).logits[0] for ids, _ in sequences(folder / "rm", side)])
            for side in ("chosen", "rejected")
        )
    for scores, name in ((chosen, "eval/chosen_reward"), (rejected, "eval/reject_reward")):
        assert scores.mean().item() == pytest.approx(values_of(folder, "rm", name)[-1], abs=1e-4)
    (mean, std), scores = reward_mean_and_std(model.config), torch.cat([chosen, rejected])
    assert mean == pytest.approx(scores.mean().item(), abs=1e-4)
    assert std == pytest.approx(scores.std(correction=0).item(), rel=1e-4)


def test_preferences_raise_the_margin_as_the_export_has_it(folder: Path) -> None:
    for name in ("dpo", "dpo lora"):  # policy and reference are one
        first = read_metrics(folder / name / "metrics.jsonl")[0]
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-7)
        assert first["chosen_reward"] == first["reject_reward"] == 0.0
        assert values_of(folder, name, "loss")[-1] < 0.6
    assert values_of(folder, "dpo", "eval/reward_margin")[-1] > 0.5
    for side, name in (("chosen", "eval/chosen_reward"), ("rejected", "eval/reject_reward")):
        gap = logprobs(folder, "dpo", side) - logprobs(folder, "model", side)
        logged = values_of(folder, "dpo", name)[-1]
        assert logged == pytest.approx(0.1 * gap.mean().item(), abs=1e-5)


def test_labelled_answers_raise_the_margin_as_the_export_has_it(folder: Path) -> None:
    first = read_metrics(folder / "kto" / "metrics.jsonl")[0]
    assert first["kto_loss"] == pytest.approx(0.5, abs=1e-6)
    assert first["kl"] == pytest.approx(0.0, abs=1e-4)
    assert values_of(folder, "kto", "eval/reward_margin")[-1] > 0.5
    gaps = logprobs(folder, "kto", "output", TEMPLATE) - logprobs(
        folder, "model", "output", TEMPLATE
    )
    for label, name in ((1, "eval/chosen_reward"), (0, "eval/reject_reward")):
        mean = 0.1 * gaps[torch.tensor([row["label"] == label for row in HELD_OUT])].mean().item()
        assert values_of(folder, "kto", name)[-1] == pytest.approx(mean, abs=1e-5)


def test_a_judge_of_steps_gives_the_verdicts_that_were_logged(folder: Path) -> None:
    assert values_of(folder, "prm", "prm_loss")[0] == pytest.approx(math.log(2), abs=0.1)
    assert values_of(folder, "prm", "eval/acc")[-1] >= 0.95
    model = load(folder / "prm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "prm")
    marker, good, bad = tokenizer.convert_tokens_to_ids(["#", "+", "-"])
    hits, losses = [], []
    for row in HELD_OUT:
        ids = torch.tensor(tokenizer(row["steps"])["input_ids"])
        logits = model(ids[None]).logits[0][ids == marker][:, [good, bad]]
        for own, label in zip(logits.log_softmax(-1), row["labels"], strict=True):
            losses.append(-own["+-".index(label)].item())
            hits.append(int(own.argmax()) == "+-".index(label))
    assert values_of(folder, "prm", "eval/acc")[-1] == pytest.approx(sum(hits) / len(hits))
    mean = sum(losses) / len(losses)
    assert values_of(folder, "prm", "eval/prm_loss")[-1] == pytest.approx(mean, rel=1e-4)


def test_the_seconds_of_a_step_are_those_of_its_phases(folder: Path) -> None:
    for record in read_metrics(folder / "sft" / "metrics.jsonl"):
        if "timing/step_total" in record:
            phases = [record[f"timing/{p}"] for p in ("data", "forward_backward", "optimizer")]
            assert sum(phases) == pytest.approx(record["timing/step_total"])


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_its_rows_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(SFTTrainer):
        def compute_loss(self, *args: Any) -> tuple[Tensor, Metrics]:
            loss, metrics = super().compute_loss(*args)
            return loss * (math.nan if self.global_step == 1 else 1.0), metrics

    result = api.sft(
        trainer=Broken,
        pretrain=str(folder / "model"),
        dataset=str(folder / "train.jsonl"),
        input_key="input",
        output_key="chosen",
        train_batch_size=32,
        save_path=str(tmp_path / "run"),
    )
    assert [record["step"] for record in result.history] == [1, 3, 4, 5, 6]
    warned = capsys.readouterr().err
    assert "step 2 was skipped: its gradient is not finite (32 rows, such as " in warned
    row = int(warned.partition("train.jsonl: row ")[2].partition(",")[0])
    assert 1 <= row <= len(TRAINED)
