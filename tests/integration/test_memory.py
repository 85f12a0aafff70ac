"""The memory of a long run does not grow with its steps."""

import json
from pathlib import Path

import pytest

from tests.integration.commands import run_command
from tests.integration.ppo_runs import GRPO, make_inputs, words

NUM_STEPS, SETTLED = 240, 60  # caches and pools fill in the first steps
MAX_KIB_A_STEP = 20.0
# A run whose private memory is noted behind every step.
DRIVER = """
import json, sys
from pathlib import Path
from openrlhf.cli import train_ppo
from openrlhf.trainer.ppo_trainer import PPOTrainer

report, sizes = PPOTrainer.report, []

def report_and_note(self, *args):
    report(self, *args)
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes.append(next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))

PPOTrainer.report = report_and_note
train_ppo.main(sys.argv[1:])
print("SIZES " + json.dumps(sizes))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_memory_of_the_driver_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    root = make_inputs(tmp_path)
    flags = f"{GRPO} --init_kl_coef 0 --num_episodes {NUM_STEPS // 3} --eval_steps 20"
    held_out = ("--eval_dataset", str(root / "prompts.jsonl"))
    said = run_command("-c", DRIVER, *words(root, tmp_path / "run", flags, *held_out), timeout=800)
    [line] = [line for line in said.splitlines() if line.startswith("SIZES ")]
    sizes = json.loads(line.removeprefix("SIZES "))
    assert len(sizes) == NUM_STEPS
    assert (sizes[-1] - sizes[SETTLED]) / (NUM_STEPS - SETTLED) < MAX_KIB_A_STEP
