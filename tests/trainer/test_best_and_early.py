"""The model of the best evaluation is kept, and a run ends early: when nothing improves, or when a
callback says so.
"""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from openrlhf import api
from openrlhf.errors import ConfigError
from openrlhf.trainer.base_trainer import BaseTrainer
from openrlhf.utils.outcome import num_since_best, stopped_early
from openrlhf.utils.tracker import Tracker, read_metrics
from tests.tiny import make_model, write_jsonl
from tests.trainer.fakes import EndsAt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows to learn, and held-out rows whose loss rises once those are learnt."""
    root = tmp_path_factory.mktemp("best")
    make_model(root / "model")
    rows = [{"input": f"{n}+{n}=", "output": "yes yes yes"} for n in range(32)]
    held_out = [{"input": f"{n}-{n}=", "output": "NO"} for n in range(16)]
    write_jsonl(root / "rows.jsonl", rows)
    write_jsonl(root / "held_out.jsonl", held_out)
    return root


def sft(folder: Path, name: str, **settings: object) -> api.Result:
    return api.sft(
        pretrain=str(folder / "model"),
        dataset=str(folder / "rows.jsonl"),
        output_key="output",
        train_batch_size=8,
        learning_rate=settings.pop("learning_rate", 5e-3),
        max_epochs=settings.pop("max_epochs", 10),
        save_path=str(folder / name),
        ckpt_path=str(folder / name / "ckpt"),
        **settings,
    )


def losses(result: api.Result) -> list[float]:
    return [r["eval/gpt_loss"] for r in result.history if "eval/gpt_loss" in r]


def test_a_run_ends_when_its_evaluations_do_not_improve_and_the_best_model_stays(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"eval_dataset": str(folder / "held_out.jsonl"), "eval_steps": 4, "save_steps": 4}
    result = sft(folder, "early", early_stop=2, **settings)
    found = losses(result)
    best = found.index(min(found))
    assert 0 < best == len(found) - 3 < 7
    said = capsys.readouterr().out
    assert (
        f"early stop: 2 evaluation(s) in a row were not better than gpt_loss {min(found):.3f}"
        in (said)
    )
    [kept] = (folder / "early" / "ckpt").glob("best_*")
    assert kept.name == f"best_global_step{4 * (best + 1)}_hf"
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(path) for path in (kept, folder / "early")
    ]
    assert not torch.equal(*(model.lm_head.weight for model in models))
    again = sft(folder, "early", early_stop=2, load_checkpoint=True, **settings)
    assert losses(again) == found
    said = capsys.readouterr().out
    assert "that run had finished: its model is in" in said and "evaluation" not in said
    patient = sft(folder, "early", early_stop=3, load_checkpoint=True, **settings)
    assert len(losses(patient)) == len(found) + 1


def test_an_evaluation_that_is_not_finite_is_never_the_best_and_counts_towards_an_early_stop(
    tmp_path: Path,
) -> None:
    name, kept = "eval/gpt_loss", []
    samples = SimpleNamespace(fingerprint="a")
    inputs = SimpleNamespace(eval_samples=samples)
    trainer = SimpleNamespace(best=None, global_step=0, config=None, inputs=inputs)
    trainer.best_metric, tracker = lambda config: name, Tracker(tmp_path)

    def evaluate(step: int, loss: float, is_kept: bool = True) -> None:
        trainer.global_step = step
        tracker.log(step, {name: loss})
        keep = lambda: kept.append(step) or is_kept  # noqa: E731
        BaseTrainer._keep_if_best(trainer, {name: loss}, keep)  # type: ignore[arg-type]

    for step, loss in ((1, math.nan), (2, 2.0), (3, 1.5), (4, math.nan)):
        evaluate(step, loss)
    assert kept == [2, 3] and num_since_best(tracker.records(), name) == 1
    evaluate(5, math.inf)
    evaluate(6, 1.5)  # an equal one came first
    assert kept == [2, 3] and num_since_best(tracker.records(), name) == 3
    evaluate(7, 1.0, is_kept=False)
    evaluate(8, 1.2)  # better than the one whose model is there
    assert kept == [2, 3, 7, 8]
    samples.fingerprint = "b"  # a loss of other rows is no measure of these
    evaluate(9, 1.9)
    assert kept == [2, 3, 7, 8, 9]
    nothing = [{"step": 1, name: None}, {"step": 2, name: None}, {"step": 2, "loss": 1.0}]
    assert num_since_best(nothing, name) == 2
    assert stopped_early(nothing, name) == "early stop: 2 evaluation(s) gave no finite gpt_loss"


def test_a_run_that_goes_on_before_its_best_model_looks_for_a_best_one_anew(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = str(folder / "held_out.jsonl")
    settings = {"eval_dataset": held_out, "eval_steps": 1, "save_steps": 2, "save_best": "acc"}
    root = folder / "anew" / "ckpt"
    sft(folder, "anew", max_epochs=1, **settings)
    [kept] = root.glob("best_*")
    kept.rename(root / "best_global_step3_hf")  # of a step that the run does not go on from
    shutil.rmtree(root / "global_step4")
    capsys.readouterr()
    sft(folder, "anew", max_epochs=1, load_checkpoint=True, **settings)
    said = capsys.readouterr()
    assert "the best model was of step 3: it was moved to" in said.out + said.err
    assert "best so far: step 3" in said.out
    [kept] = root.glob("best_*")
    assert kept.name in ("best_global_step3_hf", "best_global_step4_hf")


def test_the_best_model_stays_the_best_where_the_records_are_gone(folder: Path) -> None:
    settings = {"eval_dataset": str(folder / "held_out.jsonl"), "eval_steps": 2, "save_steps": 2}
    first = sft(folder, "gone", max_epochs=5, **settings)
    best = losses(first).index(min(losses(first)))
    root = folder / "gone" / "ckpt"
    [kept] = root.glob("best_*")
    assert kept.name == f"best_global_step{2 * (best + 1)}_hf" and best < len(losses(first)) - 1
    for path in (folder / "gone").iterdir():  # as on a new node, with the checkpoints alone
        if path.is_file():
            path.unlink()
    sft(folder, "gone", max_epochs=6, load_checkpoint=True, **settings)
    assert [path.name for path in root.glob("best_*")] == [kept.name]


def test_a_rate_that_a_resumed_run_ignored_is_not_taken_for_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"save_steps": 4, "load_checkpoint": True}
    sft(folder, "rate", max_epochs=1, **settings)
    ignored = "--learning_rate 1e-06 has no effect: 0.005 goes on with the checkpoint"
    for epochs, rate, is_said in ((2, 1e-6, True), (3, 1e-6, True), (4, 5e-3, False)):
        capsys.readouterr()
        sft(folder, "rate", max_epochs=epochs, learning_rate=rate, **settings)
        said = capsys.readouterr()
        assert (ignored in said.out + said.err) == ("has no effect" in said.out + said.err)
        assert (ignored in said.out + said.err) == is_said


def test_a_learning_rate_without_effect_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sft(folder, "small", max_epochs=1, learning_rate=1e-12)
    assert "of their size, which is lost in rounding" in capsys.readouterr().out


def test_no_best_model_is_kept_unasked_without_checkpoints(folder: Path) -> None:
    held_out = str(folder / "held_out.jsonl")
    sft(folder, "plain", max_epochs=1, eval_dataset=held_out)
    assert not (folder / "plain" / "ckpt").exists()
    sft(folder, "asked", max_epochs=1, eval_dataset=held_out, save_best="acc")
    assert [path.name for path in (folder / "asked" / "ckpt").iterdir()] == ["best_global_step4_hf"]


def test_a_metric_that_evaluations_lack_is_refused_before_the_model_is_loaded(folder: Path) -> None:
    held_out = str(folder / "held_out.jsonl")
    with pytest.raises(ConfigError, match=r"--save_best ppx is no metric .* gpt_loss, acc, or non"):
        sft(folder, "unknown", eval_dataset=held_out, save_best="ppx")
    for wish in ({"early_stop": 2}, {"save_best": True}):
        with pytest.raises(ConfigError, match=r"needs evaluations\. Type --eval_dataset, or leave"):
            sft(folder, "unknown", **wish)


def rl(folder: Path, name: str, **settings: object) -> list[dict[str, float]]:
    def reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        return [0.0 if columns["output"][k] == "NO" else len(c) for k, c in enumerate(completions)]

    result = api.ppo_local(
        reward=reward,
        pretrain=str(folder / "model"),
        prompt_data=str(folder / "rows.jsonl"),
        eval_dataset=str(folder / "held_out.jsonl"),
        label_key="output",
        advantage_estimator="group_norm",
        n_samples_per_prompt=2,
        rollout_batch_size=4,
        train_batch_size=8,
        generate_max_len=4,
        init_kl_coef=0,
        save_path=str(folder / name),
        ckpt_path=str(folder / name / "ckpt"),
        **settings,
    )
    return read_metrics(result.run_dir / "metrics.jsonl")


def test_an_rl_run_ends_early_too(folder: Path) -> None:
    records = rl(folder, "rl", early_stop=2, eval_steps=1)
    # The pass rate is 0 throughout: the first evaluation, before step 1, stays the best.
    assert [r["step"] for r in records if "eval/eval_default_pass1" in r] == [0, 1, 2]
    assert max(record["step"] for record in records) == 2
    assert (folder / "rl" / "ckpt" / "best_global_step0_hf" / "config.json").is_file()
    told = rl(folder, "rl_told", callbacks=[EndsAt(3)])
    assert [r["step"] for r in told if "eval/eval_default_pass1" in r] == [0, 3]
    assert (folder / "rl_told" / "model.safetensors").is_file()
