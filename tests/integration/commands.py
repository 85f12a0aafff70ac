"""The documents' RL commands, with names and sizes that fit a laptop."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from openrlhf.distributed.collectives import shut_down
from openrlhf.utils.tracker import read_metrics

# Rollout and training sizes every command shares; later flags win.
SMALL = (
    "--micro_train_batch_size 4 --train_batch_size 8 --micro_rollout_batch_size 4 "
    "--rollout_batch_size 8 --prompt_max_len 64 --generate_max_len 8"
)

PPO_HYBRID = (
    "--ref_num_nodes 1 --ref_num_gpus_per_node 1 --reward_num_nodes 1 --reward_num_gpus_per_node 1 "
    "--critic_num_nodes 1 --critic_num_gpus_per_node 1 --actor_num_nodes 1 "
    "--actor_num_gpus_per_node 1 --vllm_num_engines 1 --vllm_tensor_parallel_size 1 "
    "--colocate_all_models --vllm_gpu_memory_utilization 0.5 --save_hf_ckpt "
    "--n_samples_per_prompt 1 --max_epochs 1 --max_samples 100000 --zero_stage 3 --bf16 "
    "--actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 "
    "--input_key context_messages --apply_chat_template --normalize_reward "
    "--gradient_checkpointing --packing_samples --vllm_sync_backend nccl --enforce_eager "
    "--vllm_enable_sleep --deepspeed_enable_sleep"
)


def argv(flags: str, *, sizes: str = SMALL, **values: Path | str) -> list[str]:
    """The words of a command; values become further flags, so paths may hold spaces."""
    extra = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [*flags.split(), *sizes.split(), *extra]


def run_command(
    *words: str | Path, timeout: float = 300, env: dict[str, str] | None = None, code: int = 0
) -> str:
    """Run a command, by the Python of the tests if it begins with a flag; return what it said.
    Programs are those beside that Python before others.
    """
    python = [sys.executable] if str(words[0]).startswith("-") else []
    inherited = dict(os.environ) if env is None else env
    path = os.pathsep.join([str(Path(sys.executable).parent), inherited["PATH"]])
    result = subprocess.run(
        [*python, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env=inherited | {"PATH": path},
    )
    assert result.returncode == code, result.stdout[-4000:]
    return result.stdout


def exit_code(main: Callable[[list[str]], object], words: Sequence[str]) -> int:
    """Run a command in this process; return its exit code."""
    try:
        main([*words])
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        shut_down()
    return 0


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    """The records of training steps."""
    path = run_dir / "metrics.jsonl"
    return [r for r in read_metrics(path) if "reward" in r] if path.exists() else []
