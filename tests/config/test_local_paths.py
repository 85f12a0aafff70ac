"""What a command names and is not there is said with everything else, before anything heavy."""

from pathlib import Path

import pytest

from openrlhf.cli.runner import start_problems
from openrlhf.config.cli import parse_config
from openrlhf.config.local_paths import path_notices, path_problems
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.serving import BatchInferenceConfig, LoraCombinerConfig, ServeRewardConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.errors import ConfigError

PPO_NEEDS = "--pretrain org/m --prompt_data org/d --remote_rm_url http://host/get_reward "
SFT_NEEDS = "--pretrain org/m --dataset org/d "
DATA_REMEDY = (
    "Type a file (.jsonl, .json, .jsonl.gz, .json.gz, .csv, .parquet, .arrow), a folder of them, "
    "or a hub id."
)
MODEL_REMEDY = "Type a folder with a config.json, or a hub id such as org/name."


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a model, an adapter, rows, a folder of rows and a file of code."""
    for name in ("model", "adapter", "empty", "rows/part"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for name in ("rows.jsonl", "odd, name.jsonl", "code.py", "text"):
        (tmp_path / name).write_text("x")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "link.jsonl").symlink_to("nothing.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(config_class: type, line: str) -> list[str]:
    config = parse_config(config_class, line.split()).config
    return list(path_problems(config))


def test_all_of_a_line_are_said_with_its_other_problems() -> None:
    line = (
        "--pretrain ./none --prompt_data rows.jsonl,gone.jsonl --eval_dataset /gone/rows "
        "--remote_rm_url gone.py --gamma 2 "
        "--critic_pretrain ~/no-such-model"
    )
    with pytest.raises(ConfigError) as caught:
        parse_config(PPOConfig, line.split(), more_problems=start_problems)
    assert caught.value.problems == [
        "--gamma must be at most 1.0: 2. Type a value at most 1.0.",
        f"--eval_dataset /gone/rows does not exist. {DATA_REMEDY}",
        "--remote_rm_url gone.py does not exist. Type the path of a .py file.",
        f"--prompt_data gone.jsonl does not exist. {DATA_REMEDY}",
        f"--pretrain ./none does not exist. {MODEL_REMEDY}",
        f"--critic_pretrain {Path.home()}/no-such-model does not exist. {MODEL_REMEDY}",
    ]


RM = "--pretrain org/m --dataset org/d --eval_task rm "
WRONG = [
    (PPOConfig, PPO_NEEDS, "--pretrain rows.jsonl", " holds no config.json."),
    (PPOConfig, PPO_NEEDS, "--pretrain empty", " holds no config.json."),
    (PPOConfig, PPO_NEEDS, "--prompt_data link.jsonl", " does not exist."),
    (PPOConfig, PPO_NEEDS, "--prompt_data rows@no", " does not exist."),
    (PPOConfig, PPO_NEEDS, "--policy_loss_type gone.py:loss", " does not exist."),
    (PPOConfig, PPO_NEEDS, "--save_path text", " cannot be written: text: Not a directory."),
    # Root has the right to write there, and cannot.
    (SFTConfig, SFT_NEEDS, "--save_path /proc/a", " cannot be written: "),
    (SFTConfig, SFT_NEEDS, "--ckpt_path /proc/b", " cannot be written: "),
    (BatchInferenceConfig, RM, "--output_path /proc/a.jsonl", " cannot be written: "),
    (BatchInferenceConfig, RM, "--output_path rows", " is a folder. Type the path of a file that"),
    (ServeRewardConfig, "--reward_pretrain org/m ", "--token_file token", " does not exist."),
]


@pytest.mark.parametrize(("config_class", "needs", "words", "problem"), WRONG)
def test_a_path_that_is_not_there_is_one_line(
    config_class: type, needs: str, words: str, problem: str
) -> None:
    [line] = problems(config_class, needs + words)
    assert line.startswith(words + problem), line


@pytest.mark.parametrize(
    ("config_class", "line"),
    [
        (PPOConfig, PPO_NEEDS + "--pretrain model --critic_pretrain adapter"),
        (PPOConfig, PPO_NEEDS + "--prompt_data rows.jsonl,org/d@main,rows@part,rows"),
        (PPOConfig, PPO_NEEDS + "--remote_rm_url http://a:5000/x,http://b/y.py"),
        (PPOConfig, PPO_NEEDS + "--remote_rm_url code.py --policy_loss_type code.py:loss"),
        (PPOConfig, PPO_NEEDS + "--remote_rm_url exec:/nowhere/score.sh"),
        (SFTConfig, SFT_NEEDS + "--tokenizer_chat_template text"),
        (SFTConfig, SFT_NEEDS + "--load_checkpoint --ckpt_path ./nothing-yet --save_path ./new"),
        (SFTConfig, SFT_NEEDS + "--use_tensorboard"),
    ],
)
def test_what_is_there_or_may_be_elsewhere_passes(config_class: type, line: str) -> None:
    assert problems(config_class, line) == []


def test_a_root_of_checkpoints_that_nobody_named_is_tried_where_it_is_written_to() -> None:
    Path("ckpt").write_text("")  # the default is ./ckpt/checkpoints
    assert problems(SFTConfig, SFT_NEEDS + "--save_path run") == []
    [said] = problems(SFTConfig, SFT_NEEDS + "--save_path run --save_steps 2")
    assert said.startswith("--ckpt_path ./ckpt/checkpoints_sft cannot be written: ")


def test_the_home_folder_is_meant_by_its_sign_where_no_shell_has_seen_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "run.yaml"
    file.write_text("save_path: ~/run\nckpt_path: ~/ckpt\ndataset: ~/a.jsonl,~/b.jsonl\n")
    (tmp_path / "m").mkdir()
    for name in ("m/config.json", "a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}")
    words = ["--pretrain=~/m", "--config", str(file)]
    config = parse_config(SFTConfig, words).config
    assert config.model.model_name_or_path == f"{tmp_path}/m"
    assert config.data.dataset == f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    ckpt = config.ckpt
    assert (ckpt.output_dir, ckpt.path) == (f"{tmp_path}/run", f"{tmp_path}/ckpt")
    words = ["--model_path", "org/m", "--lora_path", "adapter", "--output_path", "~/merged"]
    assert parse_config(LoraCombinerConfig, words).config.output_path == f"{tmp_path}/merged"


def test_an_output_folder_that_is_a_model_which_is_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    line = f"--pretrain {tmp_path}/mine/ --dataset d --save_path "
    for output in ("mine", "link"):
        config = parse_config(SFTConfig, f"{line}{tmp_path}/{output}".split()).config
        assert list(path_notices(config)) == [
            f"--save_path {tmp_path}/{output} is the model of --pretrain: what the command writes "
            "replaces it. Type another --save_path to keep it."
        ]
    for output in ("other", "mine/run"):
        config = parse_config(SFTConfig, f"{line}{tmp_path}/{output}".split()).config
        assert list(path_notices(config)) == []
