"""Commands: what --help says, errors as lines with an exit code, keys that stay secret, and the
environment variables that a run honours.

MASTER_ADDR and MASTER_PORT are torch's own: ranks of tests/distributed/spawn.py meet there. Numbers
of asynchronous training: test_settings.py; GPUs: tests/commands/test_infer.py.
"""

import os
import shlex
import subprocess
import sys
from importlib.metadata import version

import pytest

from openrlhf.cli import main as console
from openrlhf.cli.runner import Command
from openrlhf.config.base import walk
from openrlhf.config.cli import parse_config
from openrlhf.config.help import help_text
from openrlhf.config.methods import METHODS
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.errors import ConfigError, RewardError
from openrlhf.utils import threads
from tests.helpers.configs import CONFIGS
from tests.helpers.processes import OF_CALLER

NEEDS = ["--pretrain", "m", "--dataset", "d"]
HEAVY = ("torch", "transformers", "ray", "vllm", "deepspeed", "datasets", "numpy", "rich")
COMMANDS = [
    *METHODS,
    "ppo",
    "ppo-local",
    "replay",
    "eval",
    "check",
    "doctor",
    "report",
    "infer",
    "serve-rm",
    "merge-lora",
    "push",
    "chat",
]


def run(*argv, env=None):
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, check=False, env=env
    )


def command(work):
    """A command whose config is given to `work`."""
    return Command("openrlhf test", SFTConfig, lambda config: lambda: work(config))


def fail_with(error):
    def work(config):
        raise error

    with pytest.raises(SystemExit) as caught:
        command(work)(NEEDS)
    return caught.value.code


def test_help_of_every_command_imports_no_heavy_library():
    code = (
        "import sys; from openrlhf.cli.main import main\n"
        f"for name in {COMMANDS}:\n"
        "    main([name, '--help'])\n"
        f"    print('LOADED', name, [m for m in {HEAVY} if m in sys.modules])"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    lines = set(done.stdout.splitlines())
    for name in COMMANDS:
        words = "COMMAND FLAGS" if name == "check" else "[-h [all|WORD]] [OPTIONS]"
        before = {"eval": "MODELS ", "push": "MODEL ", "replay": "RUN ", "report": "RUNS "}
        words = before.get(name, "") + words
        assert {f"usage: openrlhf {name} {words}", f"LOADED {name} []"} <= lines


@pytest.mark.parametrize(
    ("word", "remedy"),
    [("ppo-locl", "Type openrlhf ppo-local."), ("gpo", "Type one of these:")],
)
def test_an_unknown_command_gets_the_nearest_or_the_list(word, remedy, capsys):
    with pytest.raises(SystemExit) as caught:
        console.main([word])
    assert caught.value.code == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == f"error: there is no command {word}. {remedy}"
    listed = [line.split()[0] for line in rest if line[:2] == "  "]
    assert listed == (COMMANDS if word == "gpo" else [])


@pytest.mark.parametrize("words", [["--version"], ["sft", "--version"]])
def test_the_version_is_one_line(words, capsys):
    console.main(words)
    assert capsys.readouterr().out == f"openrlhf {version('openrlhf')}\n"


@pytest.mark.parametrize("words", ["--help", "--version", "check --help", "sft --version"])
def test_a_reader_that_has_enough_ends_a_command_without_a_word(words):
    reader, writer = os.pipe()
    os.close(reader)
    start = [sys.executable, "-m", "openrlhf.cli.main", *words.split()]
    with os.fdopen(writer, "w") as output:
        done = subprocess.run(start, stdout=output, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_wrong_input_is_lines_and_exit_code_2():
    done = run("-m", "openrlhf.cli.train_sft", "--pretrain", "m", "--daatset", "d", "--lr", "x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: --daatset is not a known name. Did you mean --dataset?",
        "error: --lr is not a known name. Did you mean --adam.lr?",
        "error: No data set is named. Type --dataset with a file (.jsonl, .json, .jsonl.gz, "
        ".json.gz, .csv, .parquet, .arrow), a folder of them, or a hub id.",
    ]


def test_errors_end_in_their_exit_code(capsys):
    assert fail_with(ConfigError(["one", "two"])) == 2
    assert capsys.readouterr().err == "error: one\nerror: two\n"
    assert fail_with(RewardError("sample 3: nan")) == 3
    assert capsys.readouterr().err == "error: sample 3: nan\n"
    assert fail_with(KeyboardInterrupt()) == 130
    interrupted = "nothing was saved yet. Type the same command to start again"
    assert capsys.readouterr().err == f"error: interrupted: {interrupted}\n"
    assert fail_with(ZeroDivisionError("of ours")) == 4
    assert "Traceback" in capsys.readouterr().err


def test_a_key_moves_to_the_environment_and_out_of_the_arguments(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "old")
    monkeypatch.setattr(sys, "argv", ["train_sft", "--use_wandb=canary-9"])
    seen = []
    command(seen.append)([*NEEDS, "--use_wandb=canary-9"])
    assert os.environ["WANDB_API_KEY"] == "canary-9"
    assert sys.argv == ["train_sft", "--use_wandb=***"]
    assert seen[0].logger.wandb.key == "true"
    assert "canary" not in capsys.readouterr().err


def test_the_wrong_use_of_a_key_flag_does_not_print_the_key():
    done = run("-m", "openrlhf.cli.train_sft", *NEEDS, "--use_wandb", "canary-5", "stray")
    assert done.returncode == 2
    assert "canary" not in done.stderr + done.stdout


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "active"}])
def test_idle_threads_sleep_unless_the_user_says_how_they_wait(own, monkeypatch):
    for name in threads.IDLE_THREADS:
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    seen = {}
    command(lambda config: seen.update(os.environ))(NEEDS)
    found = {name: seen[name] for name in threads.IDLE_THREADS if name in seen}
    assert found == (own or threads.IDLE_THREADS)


@pytest.mark.parametrize(("rank", "num_lines"), [("0", 1), ("1", 0)])
def test_one_rank_of_several_says_the_notices(rank, num_lines, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    command(lambda config: None)([*NEEDS, "--trust_remote_code"])
    assert len(capsys.readouterr().err.splitlines()) == num_lines


def test_flags_stand_in_groups_with_values_help_names_and_defaults():
    text = help_text(PPOConfig, "openrlhf ppo", ["all"])
    assert text.startswith(
        "usage: openrlhf ppo [-h [all|WORD]] [OPTIONS]\n\nReinforcement learning: PPO"
    )
    assert "\nactor.adam options:\n  `adam.*`: AdamW.\n\n  --actor.adam.lr FLOAT" in text
    words = " ".join(text.split())
    for said in (
        "--ds.zero_stage {0,1,2,3} ZeRO stage. Also --zero_stage. (default: 2)",
        "--algo.kl.target FLOAT|none KL to adapt to; unset: fixed. Also "
        "--kl_target. (default: none)",
        "--actor.adam.betas FLOAT FLOAT Adam betas. Also --adam_betas. (default: 0.9 0.95)",
        "--rollout.stop_token_ids INT ...|none Token ids that end a response.",
        "--train.async_num_tasks INT Agents of an engine. Also --async_num_tasks. Environment: "
        "OPENRLHF_ASYNC_NUM_TASKS. (default: 128)",
        "--use_ms ModelScope instead of the Hugging Face hub. (default: false)",
    ):
        assert said in words
    text = " ".join(help_text(SFTConfig, "openrlhf sft", ["all"]).split())
    assert "(default: 'User: {}\\nAssistant: ')" in text


@pytest.mark.parametrize("config_class", CONFIGS)
def test_every_name_of_every_flag_is_in_the_help(config_class):
    text = help_text(config_class, "x", ["all"], width=90)
    words = set(text.replace(".\n", "\n").replace(". ", " ").split())
    for leaf in walk(config_class):
        assert leaf.field.description.split()[0] in text
        assert {f"--{name}" for name, _ in leaf.names} <= words, leaf.path
    broken = [line for line in text.splitlines() if "{" not in line]  # choices stay on one line
    assert max(map(len, broken)) <= 104  # the notes at the top are not broken


@pytest.mark.parametrize("config_class", [c for c in CONFIGS if c.essentials])
def test_help_without_a_word_is_where_to_start_and_at_most_twenty_settings(config_class):
    text = help_text(config_class, "openrlhf x")
    shown = {leaf.path for leaf in walk(config_class) if f"\n  {leaf.flag} " in text}
    assert shown == {*config_class.essentials}
    assert len(config_class.essentials) <= 20
    start = text.split("Start here:\n  openrlhf x ")[1].split("  openrlhf check x ...")[0]
    parse_config(config_class, shlex.split(start.replace("\\\n", " ")))  # a command as it stands


def test_help_about_a_word_is_the_settings_that_hold_it(capsys):
    console.main(["dpo", "--help", "LoRA", "alpha"])
    flags = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "  --" in line]
    assert flags == ["--ds.lora.alpha"]
    with pytest.raises(SystemExit) as caught:
        console.main(["dpo", "--help", "zero_stge"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "error: openrlhf dpo has no setting about zero_stge. Did you mean --help zero_stage? "
        "--help all lists all of them.\n"
    )


SFT_NEEDS = ["--pretrain", "m", "--dataset", "d", "--save_path", "run"]


@pytest.mark.parametrize(
    ("words", "with_it", "without"),
    [
        ([], "/logs", None),
        (["--use_tensorboard"], "/logs", "run/tensorboard"),
        (["--use_tensorboard", "true"], "/logs", "run/tensorboard"),
        (["--report_to", "tensorboard"], "/logs", "run/tensorboard"),
        (["--use_tensorboard", "/mine"], "/mine", "/mine"),
        (["--use_tensorboard", "false"], None, None),
        (["--use_tensorboard", "0"], None, None),
        (["--use_tensorboard", "yes"], "/logs", "run/tensorboard"),
        (["--report_to", "none"], None, None),
        (["--report_to", "wandb"], None, None),
    ],
)
def test_the_folder_of_tensorboard(
    monkeypatch: pytest.MonkeyPatch, words: list[str], with_it: str | None, without: str | None
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "/logs")
    assert parse_config(SFTConfig, SFT_NEEDS + words).config.logger.tensorboard_dir == with_it
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR")
    assert parse_config(SFTConfig, SFT_NEEDS + words).config.logger.tensorboard_dir == without


def test_the_hub_is_the_callers() -> None:
    code = (
        "from openrlhf.utils.framework_logs import quiet_frameworks; quiet_frameworks(); "
        "from huggingface_hub import constants as c, get_token; "
        "print(c.HF_HOME, c.ENDPOINT, c.HF_HUB_OFFLINE, get_token())"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | OF_CALLER)
    found = ["/caches/hf", "http://mirror.example", "True", "hf_token_of_mine"]
    assert result.stdout.split() == found, result.stderr
