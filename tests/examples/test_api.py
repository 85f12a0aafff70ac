"""The Python of docs/python-api.md and the notebook run to their ends on a tiny model."""

import re
import runpy
from pathlib import Path
from pkgutil import resolve_name

import pytest

from openrlhf.errors import ConfigError
from openrlhf.utils.callbacks import Callback
from tests.source import ROOT
from tests.tiny import write_jsonl

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
PAGE = (ROOT / "docs" / "python-api.md").read_text()


@pytest.fixture(scope="module")
def names(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """All names that the code of the page has defined, run as one program."""
    folder = tmp_path_factory.mktemp("api")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    write_jsonl(folder / "chats.jsonl", [{"messages": turns * n} for n in (1, 2, 1, 2)])
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "three"}
    write_jsonl(folder / "pairs.jsonl", [pair] * 4)
    rows = [{"question": f"{n}+1=", "answer": f"{n + 1}"} for n in range(6)]
    write_jsonl(folder / "problems.jsonl", rows)
    code = "".join(re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    file = folder / "page.py"
    file.write_text(code.replace(MODEL, str(tiny_model_dir)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return runpy.run_path(str(file)) | {"folder": folder}


def test_a_run_returns_its_metrics_and_its_model(names: dict) -> None:
    import transformers

    focal = names["result"]
    assert 0 < focal.metrics["focal_loss"] < focal.metrics["gpt_loss"]
    assert [record["step"] for record in focal.history] == [1, 2]
    transformers.AutoModelForCausalLM.from_pretrained(names["folder"] / focal.model_path)


def test_settings_are_flags_and_what_is_wrong_is_raised(names: dict) -> None:
    model = names["config"].model
    assert (model.loss_type, model.beta) == ("ipo", 0.1)
    assert names["config"].adam.lr == 1e-6
    assert (names["folder"] / "output/dpo/model.safetensors").is_file()
    with pytest.raises(ConfigError, match=r"beside a config, which is frozen: beta\. Build"):
        names["dpo"](names["config"], beta=0.2)
    assert names["problems"] == ["bta is not a known name. Did you mean --beta?"]


def test_callbacks_see_every_step_evaluation_and_save(names: dict) -> None:
    watch = names["watch"]
    assert len(watch.rewards) == 2 and all(0 < reward <= 1 for reward in watch.rewards)
    assert watch.folders == [(1, "global_step1"), (2, "global_step2"), (2, "watched")]
    assert [step for step, _ in watch.evaluations] == [0, 2]


def test_a_callback_ends_a_run_with_its_model(names: dict) -> None:
    ended = names["ended"]
    assert [record["step"] for record in ended.history] == [1]
    assert (names["folder"] / ended.model_path / "model.safetensors").is_file()


def test_data_and_models_in_memory_are_kept_beside_the_run_that_reads_them(names: dict) -> None:
    run = names["in_memory"]
    assert run.metrics["eval/gpt_loss"] > 0
    kept = sorted(path.name for path in (names["folder"] / "output/in_memory_inputs").iterdir())
    dataset, eval_dataset, pretrain = kept
    assert dataset.endswith(".jsonl") and eval_dataset.endswith(".parquet")
    config = (run.run_dir / "config.yaml").read_text()
    assert all(f"in_memory_inputs/{name}\n" in config for name in (dataset, eval_dataset, pretrain))


def test_an_error_in_a_callback_ends_the_run_and_is_in_its_report(
    names: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(Callback):
        def on_step_end(self, trainer: object, step: int, metrics: object) -> None:
            raise ValueError(f"step {step}")

    monkeypatch.chdir(names["folder"])
    with pytest.raises(ValueError, match="step 1"):
        names["ppo_local"](
            reward=names["short_answers"],
            callbacks=[Fails()],
            **names["grpo"],
            save_path="output/failed",
        )
    report = Path("output/failed/report.html").read_text()
    assert "ended after step 1: ValueError: step 1" in report


def test_objects_of_another_kind_are_refused_before_a_model_is_loaded(names: dict) -> None:
    run, grpo, short = names["ppo_local"], names["grpo"], names["short_answers"]
    sft, dpo_trainer = names["sft"], "openrlhf.trainer.dpo_trainer:DPOTrainer"
    chats = {"pretrain": grpo["pretrain"], "dataset": str(names["folder"] / "chats.jsonl")}
    grpo = {**grpo, "prompt_data": str(names["folder"] / "problems.jsonl")}
    with pytest.raises(ConfigError, match=r"callbacks is <class .*Give a list of objects of cla"):
        sft(**chats, callbacks=Callback)
    with pytest.raises(ConfigError, match=r"callbacks is \[<class .*Give a list of objects of"):
        run(**grpo, reward=short, callbacks=[Callback])
    with pytest.raises(ConfigError, match=r"trainer is DPOTrainer\. Give a subclass of SFTTrainer"):
        sft(**chats, trainer=resolve_name(dpo_trainer))
    with pytest.raises(ConfigError, match=r"reward is 'a\.py', not a function\. Name files of"):
        run(**grpo, reward=["a.py"])
    with pytest.raises(ConfigError, match=r"Callback is a class\. Give an object of it\."):
        run(**grpo, reward=Callback)
    with pytest.raises(ConfigError, match=r"reward stands beside remote_rm_url\. Give one of them"):
        run(**grpo, reward=short, remote_rm_url="a.py")


def test_a_trainer_of_ones_own_adds_to_a_step(names: dict) -> None:
    lengths = [record["shortest_prompt"] for record in names["counted"].history]
    assert lengths and all(length > 0 for length in lengths)


def test_an_evaluation_returns_what_was_measured_of_each_model(names: dict) -> None:
    import pandas

    before, after = names["before"], names["after"]
    assert before.run_dir != after.run_dir
    assert (after.name, after.num_prompts) == ("output/grpo", {"default": 6})
    samples = pandas.read_parquet(names["folder"] / after.samples_path)
    rewards = samples.groupby("row").reward
    assert list(rewards.count()) == [4] * 6
    assert all(0 < reward <= 1 for reward in samples.reward)  # of short_answers
    found = after.estimates["default"]
    assert list(found) == ["pass@1", "pass@2", "pass@4", "reward"]
    assert found["pass@4"].mean == pytest.approx(rewards.max().mean())
    reach = 1.96 * rewards.mean().std() / 6**0.5
    mean = samples.reward.mean()
    assert found["reward"].interval == pytest.approx((mean - reach, mean + reach))
    assert (names["folder"] / "output/eval/report.html").is_file()


def test_a_config_names_functions_of_the_program_that_the_run_must_get(
    names: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(names["folder"])
    ppo_local, short = names["ppo_local"], names["short_answers"]
    both = ppo_local.config(reward=[short, short], reward_weights=(1, 0.5), **names["grpo"])
    assert both.reward.weights == (1, 0.5)
    config = ppo_local.config(reward=short, **names["grpo"])
    with pytest.raises(ConfigError, match="callable:short_answers is a function of a Python prog"):
        ppo_local(config)


def test_the_notebook_raises_the_reward_with_an_engine_and_formulas_alone(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MODEL": str(tiny_model_dir), "STEPS": "12", "LR": "3e-3"}.items():
        monkeypatch.setenv(name, value)
    found = runpy.run_path(str(ROOT / "examples" / "python" / "notebook_grpo.py"))
    first, last = found["mean_rewards"][:3], found["mean_rewards"][-3:]
    assert sum(last) > 1.5 * sum(first)
