"""Every supervised command, run as it is typed: what it learns holds on rows it never saw, and its
export gives in Hugging Face classes the numbers that were logged.
"""

import math
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch import distributed as dist

from openrlhf import api
from openrlhf.cli import train_dpo, train_kto, train_prm, train_rm, train_sft
from openrlhf.commands.train_supervised import check_same_data
from openrlhf.config.common import DeepSpeedConfig
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.errors import DataError, NumericsError
from openrlhf.models.value_head import reward_mean_and_std
from openrlhf.trainer.sft_trainer import SFTTrainer
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.tracker import read_metrics
from tests.distributed.spawn import run_ranks
from tests.helpers.gradients import response_logprob
from tests.tiny import make_model, write_jsonl


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


def with_bad_steps(folder: Path, run: Path, *bad: int) -> api.Result:
    """A run whose loss is not a number in these steps."""

    class Broken(SFTTrainer):
        def compute_loss(self, *args: Any) -> tuple[Tensor, Metrics]:
            loss, metrics = super().compute_loss(*args)
            return loss * (math.nan if self.global_step + 1 in bad else 1.0), metrics

    return api.sft(
        trainer=Broken,
        pretrain=str(folder / "model"),
        dataset=str(folder / "train.jsonl"),
        input_key="input",
        output_key="chosen",
        train_batch_size=32,
        save_path=str(run),
    )


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_its_rows_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = with_bad_steps(folder, tmp_path / "run", 2)
    assert [record["step"] for record in result.history] == [1, 2, 3, 4, 5, 6]
    skipped = [record.get("num_skipped_updates") for record in result.history]
    assert skipped == [None, 1, *[None] * 4] and "gpt_loss" not in result.history[1]
    warned = capsys.readouterr().err
    assert "step 2 was skipped: its gradient is not finite (32 rows, such as " in warned
    row = int(warned.partition("train.jsonl: row ")[2].partition(",")[0])
    assert 1 <= row <= len(TRAINED)


def test_the_third_step_in_a_row_whose_gradient_is_not_finite_ends_the_run(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(NumericsError, match="the gradient was not finite in 3 updates in a row"):
        with_bad_steps(folder, tmp_path / "run", 1, 2, 4, 5, 6)


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


def texts(path: Path) -> list[dict]:
    return [{"prompt_token_ids": ids.tolist()} for ids, _ in sequences(path, "chosen")]


def prompt_logprobs(folder: Path) -> list[float]:
    """Log-probs of all tokens but the first of every text in vLLM."""
    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    llm = LLM(str(folder / "dpo"), **VLLM)  # type: ignore[arg-type]
    return [
        position[token_id].logprob
        for answer in llm.generate(texts(folder / "dpo"), sampling, use_tqdm=False)
        for position, token_id in zip(
            answer.prompt_logprobs[1:], answer.prompt_token_ids[1:], strict=True
        )
    ]


def score(folder: Path) -> list[float]:
    """Scores of the texts in vLLM."""
    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, PoolingParams

    llm = LLM(str(folder / "rm"), runner="pooling", convert="classify", **VLLM)  # type: ignore[arg-type]
    params = PoolingParams(use_activation=False)  # a score, not a probability
    found = llm.classify(texts(folder / "rm"), pooling_params=params, use_tqdm=False)
    return [answer.outputs.probs[0] for answer in found]


@pytest.mark.slow
@torch.no_grad()
def test_a_policy_gives_tokens_the_log_probs_it_has_in_transformers(folder: Path) -> None:
    [found] = run_ranks(prompt_logprobs, 1, folder)
    model, expected = load(folder / "dpo"), []
    for ids, _ in sequences(folder / "dpo", "chosen"):
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        expected += logprobs.gather(-1, ids[1:, None])[:, 0].tolist()
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_a_reward_model_scores_as_in_transformers(folder: Path) -> None:
    [found] = run_ranks(score, 1, folder)
    model = load(folder / "rm", "SequenceClassification")
    expected = [model(ids[None]).logits.item() for ids, _ in sequences(folder / "rm", "chosen")]
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 1e-3


def test_fp32_weights_of_a_16_bit_run_are_exported(folder: Path) -> None:
    state = load(folder / "fp32", "SequenceClassification").state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert all((tensor != tensor.bfloat16()).any() for tensor in state.values())


FLAGS = (
    "--train_batch_size 16 --micro_train_batch_size 16 --learning_rate 3e-3 --max_epochs 2 "
    "--eval_split train --lr_warmup_ratio 0"
)


TEXT = "--input_key input --output_key chosen"


STEPS = "--input_key steps --label_key labels --placeholder_token # --reward_tokens + -"


RUNS = {
    "sft": (train_sft, f"--pretrain {{}}/model {TEXT} --eval_steps 5"),
    "rm": (train_rm, "--pretrain {}/model --prompt_key input"),
    "dpo": (train_dpo, "--pretrain {}/model --prompt_key input --beta 0.1"),
    # The base under the adapter is its reference, also where it is named.
    "dpo lora": (
        train_dpo,
        "--pretrain {}/model --ref_pretrain {}/model --prompt_key input --beta 0.1 --lora_rank 8",
    ),
    "kto": (train_kto, "--pretrain {}/model --input_key input --output_key output --beta 0.1"),
    "prm": (train_prm, f"--pretrain {{}}/model {STEPS} --max_epochs 3"),
    "fp32": (
        train_rm,
        "--pretrain {}/model --prompt_key input --param_dtype bf16 --export_fp32 "
        "--learning_rate 1e-6",
    ),
    "experts": (
        train_sft,
        f"--pretrain {{}}/moe {TEXT} --aux_loss_coef 1 --optim muon --muon.lr 0.02 "
        "--learning_rate 1e-2 --gradient_checkpointing --ds.experts_implementation batched_mm",
    ),
}


def make_rows(num_rows: int, seed: int) -> list[dict]:
    """Answers in words are wanted, answers in digits are not; a step is good with an x in it."""
    draw = random.Random(seed)
    rows = []
    for n in range(num_rows):
        chosen, rejected = f"yes {draw.randrange(7)}", f"99{draw.randrange(7)}"
        is_good = [draw.random() < 0.5 for _ in range(3)]
        words = ["".join(draw.choices("abcd", k=3)) + "ex"[good] for good in is_good]
        rows.append(
            {
                "input": f"{draw.randrange(10_000)}?",
                "output": chosen if n % 2 else rejected,
                "label": n % 2,
                "chosen": chosen,
                "rejected": rejected,
                "steps": "".join(f"{word}#" for word in words),
                "labels": ["-+"[good] for good in is_good],
            }
        )
    return rows


TRAINED, HELD_OUT = make_rows(96, seed=0), make_rows(33, seed=1)


def run_commands(folder: Path) -> None:
    for name, (command, flags) in RUNS.items():
        data = f"--dataset {folder}/train.jsonl --eval_dataset {folder}/eval.jsonl"
        words = f"{FLAGS} {data} {flags.replace('{}', str(folder))} --save_path".split()
        command.main([*words, f"{folder}/{name}"])


def make_runs(folder: Path) -> Path:
    """Run every command in a folder; their models are named as in RUNS."""
    make_model(folder / "model")
    make_model(folder / "moe", "mixtral", hidden_size=32, initializer_range=0.2)
    write_jsonl(folder / "train.jsonl", TRAINED)
    write_jsonl(folder / "eval.jsonl", HELD_OUT)
    run_ranks(run_commands, 1, folder)
    return folder


def load(path: Path, kind: str = "CausalLM") -> Any:
    auto_class = getattr(transformers, f"AutoModelFor{kind}")
    model, info = auto_class.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def sequences(path: Path, key: str, prompt: str = "{}") -> list[tuple[Tensor, Tensor]]:
    """Ids and response mask of a column of the held-out rows, as training reads them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    found = []
    for row in HELD_OUT:
        before = tokenizer(prompt.format(row["input"]))["input_ids"]
        ids = torch.tensor([*before, *tokenizer(row[key] + "<|end|>")["input_ids"]])
        found.append((ids, torch.arange(len(ids)) >= len(before)))
    return found


def words_of_other_rows(folder: Path) -> list[str]:
    """What a rank is told where all have the same rows, and where each has its own."""
    DeepSpeedStrategy(DeepSpeedConfig()).setup()
    told = []
    for fingerprint in (0, dist.get_rank()):
        own: Any = SimpleNamespace(data=fingerprint, eval_samples=None)
        try:
            check_same_data(own)
        except DataError as error:
            told.append(str(error))
    return told


def test_ranks_that_read_other_rows_are_refused(tmp_path: Path) -> None:
    for [said] in run_ranks(words_of_other_rows, 2, tmp_path):
        assert said.startswith("The rows of rank 1 are not those of rank 0. Copy the data sets")
