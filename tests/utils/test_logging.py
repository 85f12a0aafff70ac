"""The console's words, the hints' thresholds, and the frameworks' chatter kept off the screen."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import rich.console

from openrlhf.config.base import Caution
from openrlhf.utils import logging as console

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
    assert console.step_line(12, 60, METRICS) == (
        "step 12/60 | reward 0.412 | len 5.2 | kl 0.0021 | clip 0.3% | grad 0.52 | tok/s 1.8k"
        " | 2.1s: gen 0.9 logp 0.3 train 0.8 sync 0.1"
    )


def test_step_line_of_supervised_training_shows_loss_and_rate():
    line = console.step_line(3, 10, {"gpt_loss": 1.25, "lr": 5e-6, "grad_norm": 2.0})
    assert line == "step 3/10 | loss 1.2500 | grad 2 | lr 5e-06"


def test_step_line_ends_with_the_time_since_the_start_and_until_the_end(monkeypatch):
    monkeypatch.setattr(console.time, "monotonic", lambda: 1200.0)
    # It went on behind step 10 and made two steps in 200 s; 48 are left.
    clock = console.RunClock(first_step=10, start_s=1000.0)
    line = console.step_line(12, 60, {"reward": 1.0}, clock)
    assert line == "step 12/60 | reward 1.000 | elapsed 3m20s | eta 1h20m"


def test_eval_line_puts_the_standard_error_behind_its_mean():
    values = {"eval/eval_math_pass1": 0.5, "eval/eval_math_pass1_stderr": 0.0123, "eval/len": 3.0}
    assert console.eval_line(20, values) == "eval at step 20 | math_pass1 0.5 ±0.012 | len 3"


def test_counts_and_times_are_short():
    counts = [console.format_count(n) for n in (950, 1832, 3_100_000, 7.24e9)]
    assert counts == ["950", "1.8k", "3.1M", "7.2B"]
    times = [console.format_seconds(s) for s in (0.4, 59.6, 200, 3600 * 2 + 300, 86400 + 4 * 3600)]
    assert times == ["0s", "1m00s", "3m20s", "2h05m", "1d04h"]


def test_healthy_metrics_give_no_hint():
    healthy = {"group_reward_std": 0.3, "response_clip_ratio": 0.1, "vllm_kl": 1e-4, "entropy": 2.0}
    assert console.hints(healthy, [healthy]) == []


def test_equal_rewards_are_hinted_once_per_spell():
    red, green = {"group_reward_std": 0.0}, {"group_reward_std": 0.2}
    assert "teaches nothing" in console.hints(red, [green])[0]
    assert console.hints(red, [green, red]) == []
    assert len(console.hints(red, [red, green])) == 1
    [line] = console.hints(red, [green], example=" One of them: {ok}.")
    assert line.endswith("more --n_samples_per_prompt. One of them: {ok}.")


def test_truncation_mismatch_and_entropy_have_their_hints():
    start = [{"entropy": 2.0}] * 5
    metrics = {"response_clip_ratio": 0.5, "vllm_kl": 0.02, "entropy": 0.19}
    cut, mismatch, entropy = console.hints(metrics, start)
    assert "50% of the responses" in cut and "--generate_max_len" in cut
    assert "mismatch KL 0.02" in mismatch
    assert "entropy fell to 0.19" in entropy


def test_banner_aligns_entries_under_their_section(capsys):
    console.print_banner({"model": {"actor": "tiny"}, "batch": {"prompts x samples": "4 x 8"}})
    assert capsys.readouterr().out == (
        "model\n  actor              tiny\nbatch\n  prompts x samples  4 x 8\n"
    )


def test_a_warning_is_said_once(capsys):
    console.warn_once("only once")
    console.warn_once("only once")
    assert capsys.readouterr().err == "warning: only once\n"


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120
    )


CHATTER = """
import json, logging, logging.config, os, sys, warnings
sys.path.insert(0, {root!r})
from openrlhf.utils.logging import notice, redirect_framework_logs
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
    root = str(Path(__file__).resolve().parents[2])
    result = run_python(CHATTER.format(root=root), tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "said aloud\n"
    assert result.stderr == ""
    text = (tmp_path / "run/logs/actor.log").read_text()
    for said in ("early", "late", "child", "python warning", "from the engine core", "said aloud"):
        assert said in text


SECOND_START = """
import logging, os, sys
sys.path.insert(0, {root!r})
from openrlhf.utils.logging import notice, redirect_framework_logs
print(redirect_framework_logs("run", "actor").name, os.environ["VLLM_LOGGING_CONFIG_PATH"])
notice("start {number}")
"""


def test_a_second_start_writes_a_second_file_and_leaves_the_first_as_it_was(tmp_path):
    root = str(Path(__file__).resolve().parents[2])
    logs = tmp_path / "run" / "logs"
    names = ["actor.log", "actor.attempt1.log", "actor.attempt2.log"]
    told = [f"{name} run/logs/{Path(name).stem}.vllm.json" for name in names]
    for number, line in enumerate(told):
        before = {path: path.read_bytes() for path in logs.glob("*")}
        result = run_python(SECOND_START.format(root=root, number=number), tmp_path)
        assert (result.stdout, result.stderr) == (f"{line}\nstart {number}\n", "")
        assert {path: path.read_bytes() for path in before} == before
    for number, name in enumerate(names):
        assert (logs / name).read_text().endswith(f"start {number}\n")
    assert sorted(path.name for path in logs.glob("*.log")) == sorted(names)


def test_captured_streams_take_native_prints_along(tmp_path):
    root = str(Path(__file__).resolve().parents[2])
    code = (
        f"import sys; sys.path.insert(0, {root!r})\n"
        "import os\n"
        "from openrlhf.utils.logging import redirect_framework_logs\n"
        "redirect_framework_logs('run', 'critic', capture_streams=True)\n"
        "os.write(1, b'native print\\n')\n"
    )
    result = run_python(code, tmp_path)
    assert (result.returncode, result.stdout) == (0, "")
    assert "native print" in (tmp_path / "run/logs/critic.log").read_text()


LATE_QUIET = """
import logging, sys
sys.path.insert(0, {root!r})
import transformers
from openrlhf.utils.logging import quiet_frameworks
quiet_frameworks()
print(transformers.utils.logging.is_progress_bar_enabled())
deepspeed = logging.getLogger("DeepSpeed")
deepspeed.addHandler(logging.StreamHandler(sys.stdout))
deepspeed.warning("Setting accelerator to CPU. If you have GPU or other accelerator, ...")
deepspeed.warning("something else")
"""


def test_frameworks_are_quiet_even_when_they_were_imported_before(tmp_path):
    root = str(Path(__file__).resolve().parents[2])
    result = run_python(LATE_QUIET.format(root=root), tmp_path)
    assert (result.returncode, result.stdout) == (0, "False\nsomething else\n"), result.stderr


def test_information_is_said_plainly_and_a_caution_as_a_yellow_warning(capsys, monkeypatch):
    lines = ["8 samples of each prompt.", Caution("code of the model is run.")]
    console.say_notices(lines)
    console.say_notices(lines[:1], about="evaluation: ")
    assert capsys.readouterr() == (
        "",
        "note: 8 samples of each prompt.\nwarning: code of the model is run.\n"
        "note: evaluation: 8 samples of each prompt.\n",
    )
    screen = io.StringIO()
    terminal = rich.console.Console(
        file=screen, force_terminal=True, color_system="standard", markup=False, highlight=False
    )
    monkeypatch.setattr(console, "make_console", lambda **_: terminal)
    console.say_notices(lines)
    assert screen.getvalue() == (
        "note: 8 samples of each prompt.\n\x1b[33mwarning: code of the model is run.\x1b[0m\n"
    )
