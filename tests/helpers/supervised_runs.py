"""Commands of every supervised method: started, stopped, typed again."""

import importlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.distributed.spawn import meet_elsewhere
from tests.helpers.rows import make_row
from tests.helpers.stopped_runs import records, stopping_behind, sums_of_states
from tests.tiny import make_model, write_jsonl

NUM_ROWS = 10  # three batches an epoch, the last one smaller: 6 steps
STOP = 2  # inside the first epoch; lines are logged at steps 3 and 6
COMMON = (
    "--max_epochs 2 --train_batch_size 4 --micro_train_batch_size 2 --learning_rate 1e-3 "
    "--logging_steps 3 --eval_split train --lr_warmup_ratio 0"
)
# A dropout draws random numbers: they too go on where they stood.
LORA = "--lora_rank 4 --lora_dropout 0.2"
SFT, PAIRS = "--input_key input --output_key output", "--prompt_key input"
PRM = "--placeholder_token # --reward_tokens + -"
CASES = {
    "sft_lora": f"sft {SFT} {LORA}",
    "sft_bf16": f"sft {SFT} --bf16",
    "rm": f"rm {PAIRS}",
    "rm_lora": f"rm {PAIRS} {LORA}",
    "dpo_precomputed": f"dpo {PAIRS} --beta 0.1 --precompute_ref_log_probs",
    "dpo_lora": f"dpo {PAIRS} --beta 0.1 {LORA}",
    "kto_lora_precomputed": f"kto {SFT} --label_key label --precompute_ref_log_probs {LORA}",
    "prm": f"prm --input_key steps --label_key labels {PRM}",
    "kd_on_policy": f"kd {SFT} --teacher_model {{root}}/teacher --kd_on_policy "
    "--kd_max_new_tokens 4",
}


def make_inputs(root: Path) -> Path:
    """Models and rows every method can read."""
    make_model(root / "model")
    make_model(root / "teacher", num_layers=1, seed=3)
    write_jsonl(root / "rows.jsonl", [make_row(i) for i in range(NUM_ROWS)])
    return root


def words(root: Path, run_dir: Path, case: str, *more: str) -> tuple[str, list[str]]:
    """The name of a case's command, and what is typed behind it."""
    name, *flags = CASES[case].format(root=root).split()
    paths = f"--pretrain {root}/model --dataset {root}/rows.jsonl --eval_dataset {root}/rows.jsonl"
    saved = ("--save_path", str(run_dir), "--ckpt_path", str(run_dir / "ckpt"))
    return name, [*paths.split(), *COMMON.split(), *flags, *saved, *more]


def start(root: Path, run_dir: Path, case: str, *more: str) -> None:
    """One start of a case's command."""
    meet_elsewhere()
    name, flags = words(root, run_dir, case, *more)
    importlib.import_module(f"openrlhf.cli.train_{name}").main(flags)


def straight_and_resumed(root: Path, folder: Path, case: str, *more: str) -> None:
    """The case without a stop, and with one."""
    # Its checkpoint is written beside the next steps, that of the other one before it stops.
    start(root, folder / "straight", case, "--save_steps", str(STOP), *more)
    saving = ("--save_steps", str(STOP), "--save_hf_ckpt", "--load_checkpoint")
    with stopping_behind(STOP):
        start(root, folder / "resumed", case, *saving, *more)
    start(root, folder / "resumed", case, *saving, *more)


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    [path] = run_dir.glob("*.safetensors")
    return load_file(path)


def check_same(folder: Path, case: str) -> None:
    """The resumed run is the straight one, and did stop."""
    straight, resumed = folder / "straight", folder / "resumed"
    assert records(straight) == records(resumed)
    steps = [record["step"] for record in records(resumed) if "lr" in record]
    assert steps == [3, 6]
    expected, found = weights_of(straight), weights_of(resumed)
    assert expected.keys() == found.keys()
    differing = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not differing
    sums = sums_of_states(straight, STOP)
    assert sums and sums == sums_of_states(resumed, STOP)
    early = weights_of(resumed / "ckpt" / f"global_step{STOP}_hf")
    assert any(not torch.equal(early[name], found[name]) for name in found)
    if case.startswith("rm"):
        assert any(name.endswith("score.weight") for name in found)
        configs = [json.loads((run / "config.json").read_text()) for run in (straight, resumed)]
        assert configs[0]["mean"] == configs[1]["mean"] and configs[0]["std"] == configs[1]["std"]
