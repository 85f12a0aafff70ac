"""The example scripts, and tiny models for them."""

from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "scripts"
LOOPS = {
    "train_rejection_sampling_llama.sh": ["generate_vllm", "rm", "openrlhf.cli.train_sft"] * 2,
    "train_iterative_dpo_llama.sh": ["generate_vllm", "rm", "openrlhf.cli.train_dpo"] * 2,
    "train_conditional_llama.sh": ["rm", "openrlhf.cli.train_sft", *["generate_vllm", "rm"] * 2],
}
SLURM = {"train_llama_slurm.sh", "train_ppo_llama_ray_slurm.sh"}
TRAINING_SCRIPTS = sorted(
    {path.name for path in SCRIPTS.glob("train_*.sh") if not path.is_symlink()} - {*LOOPS, *SLURM}
)
TINY_RL = (
    "--rollout_batch_size 4 --micro_rollout_batch_size 4 --train_batch_size 4 "
    "--micro_train_batch_size 4 --prompt_max_len 32 --generate_max_len 8 --save_steps -1 "
    "--enforce_eager"
)
SPREAD_REWARD = """
def reward_func(queries, prompts, labels):
    return [0.1 + sum(map(ord, query)) % 8 / 10 for query in queries]
"""


def chat(number: int, answer: int) -> list[dict[str, str]]:
    question = {"role": "user", "content": f"{number}+1=?"}
    return [question, {"role": "assistant", "content": str(answer)}]
