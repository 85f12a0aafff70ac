"""The console's words, the hints' thresholds, and the frameworks' chatter kept off the screen."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from openrlhf.config.base import Caution
from openrlhf.utils import console, step_line
from openrlhf.utils.framework_logs import put_back, redirect_framework_logs

METRICS = {
    "reward": 0.4121,
    "response_length": 5.25,
    "kl": 0.0021,
    "ppo_clip_ratio": 0.003,
    "actor_grad_norm": 0.52,
    "tokens_per_s": 1832.0,
    "timing/generation": 0.9,
    "timing/make_experience": 0.3,
    "timing/ppo_train": 0.8,
    "timing/broadcast": 0.1,
    "timing/step_total": 2.14,
}


def test_step_line_shows_numbers_and_phase_split():
    assert step_line.step_line(12, 60, METRICS) == (
        "step 12/60 | reward 0.412 | len 5.2 | kl 0.0021 | clip 0.3% | grad 0.52 | tok/s 1.8k"
        " | 2.1s: gen 0.9 logp 0.3 train 0.8 sync 0.1"
    )


def test_step_line_of_supervised_training_shows_loss_and_rate():
    line = step_line.step_line(3, 10, {"gpt_loss": 1.25, "lr": 5e-6, "grad_norm": 2.0})
    assert line == "step 3/10 | loss 1.2500 | grad 2 | lr 5e-06"


def test_step_line_ends_with_the_time_since_the_start_and_until_the_end(monkeypatch):
    monkeypatch.setattr(step_line.time, "monotonic", lambda: 1200.0)
    # It went on behind step 10 and made two steps in 200 s; 48 are left.
    clock = step_line.RunClock(first_step=10, start_s=1000.0)
    line = step_line.step_line(12, 60, {"reward": 1.0}, clock)
    assert line == "step 12/60 | reward 1.000 | elapsed 3m20s | eta 1h20m"


def test_eval_line_puts_the_standard_error_behind_its_mean():
    values = {"eval/eval_math_pass1": 0.5, "eval/eval_math_pass1_stderr": 0.0123, "eval/len": 3.0}
    assert step_line.eval_line(20, values) == "eval at step 20 | math_pass1 0.5 ±0.012 | len 3"


def test_counts_and_times_are_short():
    counts = [console.format_count(n) for n in (950, 1832, 3_100_000, 7.24e9)]
    assert counts == ["950", "1.8k", "3.1M", "7.2B"]
    times = [console.format_seconds(s) for s in (0.4, 59.6, 200, 3600 * 2 + 300, 86400 + 4 * 3600)]
    assert times == ["0s", "1m00s", "3m20s", "2h05m", "1d04h"]


def test_a_step_that_waits_for_other_programs_is_hinted():
    first, busy = {"tokens_per_s": 300.0}, {"tokens_per_s": 50.0, "load_per_core": 1.6}
    busy["timing/step_total"] = 30.0
    [line] = step_line.hints(busy, [first, first])
    assert "6 times as long for a token" in line and "1.6 threads wanted each core" in line
    assert step_line.hints(busy | {"load_per_core": 1.0}, [first]) == []  # the run's own threads
    assert step_line.hints(busy | {"tokens_per_s": 100.0}, [first]) == []


def test_equal_rewards_are_hinted_once_per_spell():
    red, green = {"group_reward_std": 0.0}, {"group_reward_std": 0.2}
    assert "teaches nothing" in step_line.hints(red, [green])[0]
    assert step_line.hints(red, [green, red]) == []
    assert len(step_line.hints(red, [red, green])) == 1
    [line] = step_line.hints(red, [green], example=" One of them: {ok}.")
    assert line.endswith("more --n_samples_per_prompt. One of them: {ok}.")


def rl(**values: float) -> dict[str, float]:
    """A step of an RL run that learns."""
    step = {"group_reward_std": 0.2, "reward": 0.5, "actor_lr": 1e-6, "actor_update_ratio": 1e-5}
    return step | {"kl": 0.01} | values


def test_a_learning_rate_that_is_far_too_high_is_named_instead_of_the_temperature():
    equal = {"group_reward_std": 0.0, "reward": 0.1, "actor_lr": 1e-3}
    without_kl = {name: value for name, value in rl().items() if name != "kl"}
    for metrics, history, signs in (
        (rl(kl=8.0), [rl()], "the KL to the reference rose from 0.01 to 8 in one step"),
        (rl(actor_update_ratio=0.48), [rl()], "an update changes the weights by 48% of their"),
        (rl(kl=8.0, **equal), [rl(), *[rl(kl=8.0)] * 2], "than before, and the KL is 8"),
        (
            without_kl | equal | {"actor_update_ratio": 0.005},
            [without_kl],
            "than before, and an update changes the weights by 0.5%",
        ),
        ({"gpt_loss": 9.0, "lr": 1e-2}, [{"gpt_loss": 2.0, "lr": 1e-2}], "the loss rose from 2 to"),
    ):
        [line] = step_line.hints(metrics, history)
        assert signs in line and "learning rate is probably far too high" in line
        assert "--temperature" not in line
    assert line.endswith("Try a tenth of --learning_rate.")


def test_a_run_with_one_sample_a_prompt_is_rl_too():
    alone = {name: value for name, value in rl().items() if name != "group_reward_std"}
    [line] = step_line.hints(alone | {"kl": 8.0}, [alone])
    assert "the KL to the reference rose from 0.01 to 8 in one step" in line
    # A policy's loss is about 0, whatever happens.
    assert step_line.hints(alone | {"policy_loss": 4e-3}, [alone | {"policy_loss": 1e-3}]) == []


def test_equal_rewards_of_a_policy_that_has_not_moved_are_no_matter_of_the_rate():
    for equal in (
        rl(group_reward_std=0.0, reward=0.1),  # a small KL
        rl(group_reward_std=0.0, reward=1.0, kl=2.0),  # the best reward
    ):
        [line] = step_line.hints(equal, [rl(kl=1.5)])
        assert "a higher --temperature" in line
    assert step_line.hints(rl(kl=3.0), [rl(kl=2.5)]) == []  # it moves, but does not jump
    assert step_line.hints({"gpt_loss": 3.0, "lr": 1e-2}, [{"gpt_loss": 2.0, "lr": 1e-2}]) == []


def test_an_update_that_rounding_undoes_is_named_once_the_rate_has_warmed_up():
    small = {"loss": 1.0, "lr": 1e-9, "update_ratio": 2e-8}
    [line] = step_line.hints(small, [{"loss": 1.0, "lr": 1e-9}])
    assert "the weights by 2e-08 of their size" in line
    assert line.endswith("Try a larger --learning_rate (1e-09 now).")
    assert step_line.hints(small, []) == []
    assert step_line.hints(small, [{"loss": 1.0, "lr": 5e-10}]) == []
    assert step_line.hints(small | {"update_ratio": 1e-6}, [{"loss": 1.0, "lr": 1e-9}]) == []
    equal = rl(group_reward_std=0.0, actor_grad_norm=0.0, actor_update_ratio=0.0)  # no gradient
    assert step_line.hints(equal, [equal]) == []


def test_truncation_mismatch_and_entropy_have_their_hints():
    start = [{"entropy": 2.0}] * 5
    metrics = {"response_clip_ratio": 0.5, "vllm_kl": 0.02, "entropy": 0.19}
    assert (
        step_line.hints({"response_clip_ratio": 0.1, "vllm_kl": 1e-4, "entropy": 2.0}, start) == []
    )
    cut, mismatch, entropy = step_line.hints(metrics, start)
    assert "50% of the responses" in cut and "--generate_max_len" in cut
    assert "mismatch KL 0.02" in mismatch
    assert "entropy fell to 0.19" in entropy


def test_banner_aligns_entries_under_their_section(capsys):
    console.print_banner({"model": {"actor": "tiny"}, "batch": {"prompts x samples": "4 x 8"}})
    assert capsys.readouterr().out == (
        "model\n  actor              tiny\nbatch\n  prompts x samples  4 x 8\n"
    )


ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, folder: Path) -> str:
    """What the code prints; it says nothing on stderr."""
    command, env = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout


CHATTER = """
import json, logging, logging.config, os, sys, warnings
from openrlhf.utils.console import notice
from openrlhf.utils.framework_logs import redirect_framework_logs
early = logging.getLogger("ray")
early.addHandler(logging.StreamHandler(sys.stdout))
path = redirect_framework_logs("run", "actor")
late = logging.getLogger("DeepSpeed")
late.addHandler(logging.StreamHandler(sys.stdout))
early.warning("early chatter")
late.error("late chatter")
logging.getLogger("vllm.engine").warning("child chatter")
config = json.load(open(os.environ["VLLM_LOGGING_CONFIG_PATH"]))
logging.config.dictConfig(config)  # as vLLM's own processes do
logging.getLogger("vllm.worker").info("from the engine core")
warnings.warn("python warning")
notice("said aloud")
"""


def test_framework_chatter_goes_to_the_role_log(tmp_path):
    assert run_python(CHATTER, tmp_path) == "said aloud\n"
    text = (tmp_path / "run/logs/actor.log").read_text()
    for said in ("early", "late", "child", "python warning", "from the engine core", "said aloud"):
        assert said in text


FOREIGN = """
from openrlhf.utils.console import notice
from openrlhf.utils.framework_logs import redirect_framework_logs
redirect_framework_logs("run", "actor")
notice("response: \\u4f60")
"""


@pytest.mark.parametrize("encoding", ["", "ascii", "latin-1"])
def test_responses_are_said_where_an_encoding_does_not_have_their_characters(
    tmp_path, monkeypatch, encoding
):
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    assert run_python(FOREIGN, tmp_path) == "response: \\u4f60\n"
    log = (tmp_path / "run/logs/actor.log").read_text(encoding="utf-8")
    assert "response: \u4f60" in log


STARTS = """
import os
from openrlhf.utils.console import notice
from openrlhf.utils.framework_logs import redirect_framework_logs
for number in range(3):
    path = redirect_framework_logs("run", "actor", capture_streams=number == 2)
    if number < 2:
        print(path.name, os.environ["VLLM_LOGGING_CONFIG_PATH"], flush=True)
    notice(f"start {number}")
os.write(1, b"native print\\n")
"""


def test_every_start_has_a_file_of_its_own_and_captured_streams_take_native_prints_along(tmp_path):
    assert run_python(STARTS, tmp_path).splitlines() == [
        "actor.log run/logs/actor.vllm.json",
        "start 0",
        "actor.attempt1.log run/logs/actor.attempt1.vllm.json",
        "start 1",
    ]
    logs = [path.read_text() for path in sorted((tmp_path / "run/logs").glob("*.log"))]
    assert [f"start {k}" in text for k, text in zip((1, 2, 0), logs, strict=True)] == [True] * 3
    assert [text.count("start") for text in logs] == [1, 2, 1]  # said and logged where captured
    assert "native print" in logs[1]


FALSE_ALARM = """
import logging, sys
from openrlhf.utils.framework_logs import quiet_frameworks
quiet_frameworks()
deepspeed = logging.getLogger("DeepSpeed")
deepspeed.addHandler(logging.StreamHandler(sys.stdout))
deepspeed.warning("Setting accelerator to CPU. If you have GPU or other accelerator, ...")
deepspeed.warning("something else")
"""


def test_a_false_alarm_of_a_library_is_not_said(tmp_path):
    assert run_python(FALSE_ALARM, tmp_path) == "something else\n"


def test_information_is_said_plainly_and_a_caution_as_a_warning(capsys):
    lines = ["8 samples of each prompt.", Caution("code of the model is run.")]
    console.say_notices(lines)
    console.say_notices(lines[:1], about="evaluation: ")
    assert capsys.readouterr() == (
        "",
        "note: 8 samples of each prompt.\nwarning: code of the model is run.\n"
        "note: evaluation: 8 samples of each prompt.\n",
    )


CLOSED_BY_A_LIBRARY = """
import logging.config, shutil
from openrlhf.utils.console import notice
from openrlhf.utils.framework_logs import redirect_framework_logs
for is_removed in (False, True):
    path = redirect_framework_logs("run", "driver")
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # closes handlers
    if is_removed:
        shutil.rmtree("run")
    notice("said aloud")
    print(path.exists() and path.read_text().split()[-2:])
"""


def test_a_log_whose_folder_is_removed_ends_nothing(tmp_path):
    assert run_python(CLOSED_BY_A_LIBRARY, tmp_path).splitlines() == [
        "said aloud",
        "['said', 'aloud']",
        "said aloud",
        "False",
    ]


SPEAKING = """
import sys
from openrlhf.utils.console import notice, say_notices, warn
from openrlhf.utils.framework_logs import redirect_framework_logs
redirect_framework_logs("run", "driver")
notice("step 1")
warn("a rank is quiet")
say_notices(["one more word"])
sys.stdin.read()
notice("step 2")
notice("step 3")
"""


def test_a_run_goes_on_though_its_console_has_a_full_disk_or_no_reader_any_more(tmp_path):
    command, env = [sys.executable, "-c", SPEAKING], os.environ | {"PYTHONPATH": str(ROOT)}
    for kind in ("full disk", "no reader"):
        with open("/dev/full", "w") as full:
            out = full if kind == "full disk" else subprocess.PIPE
            process = subprocess.Popen(
                command, cwd=tmp_path, env=env, stdin=subprocess.PIPE, stdout=out, stderr=out
            )
        if kind == "no reader":
            process.stdout.close()
            process.stderr.close()
        process.stdin.close()
        code = process.wait(timeout=120)
        assert kind == "full disk" or code == 0  # Python's own end minds a disk that is still full
    for log in ("driver.log", "driver.attempt1.log"):
        said = (tmp_path / "run/logs" / log).read_text()
        for line in ("step 1", "a rank is quiet", "one more word", "step 2", "step 3"):
            assert line in said


def test_a_program_has_its_warnings_back_after_a_run(tmp_path: Path) -> None:
    logging.captureWarnings(capture=False)  # as in a fresh process
    logger, shown = logging.getLogger("transformers"), warnings.showwarning
    before = logger.handlers, logger.propagate, type(logger)
    with put_back():
        redirect_framework_logs(tmp_path, "sft-0")
        assert warnings.showwarning is not shown
    assert (logger.handlers, logger.propagate, type(logger)) == before
    assert warnings.showwarning is shown
