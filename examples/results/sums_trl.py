"""The run of sums.sh with TRL's GRPOTrainer: same model, data, reward, samples, rate and dtype.

    python examples/results/sums_trl.py OUT STEPS SEED [MICRO_BATCH [EVERY]]

Prints a line a step: its number, the mean reward, the seconds of training and the most memory that
the process held, in GiB. The model is saved to OUT/trl/step-STEPS, and every EVERY steps before;
the clock stands still meanwhile.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from sums_reward import reward_func
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

MODEL = "models/smollm2-135m"


def reward(
    prompts: list[Any], completions: list[Any], answer: list[str], **_: object
) -> list[float]:
    """Return the rewards of sums_reward.py."""
    responses = [completion[0]["content"] for completion in completions]
    return reward_func(responses, prompts, answer, responses)["rewards"]


class Clock(TrainerCallback):
    """Prints a value of each step and the time, and may save the model."""

    def __init__(self, value: str, folder: Path | None = None, every: int = 1) -> None:
        """Save to `folder`, if there is one, every `every` steps and at the end."""
        self.value, self.folder, self.every = value, folder, every

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **more: Any) -> None:
        """Save the model, on time that does not count."""
        is_due = state.global_step % self.every == 0 or state.global_step == state.max_steps
        if self.folder and is_due:
            stopped = time.perf_counter()
            folder = self.folder / f"step-{state.global_step}"
            model.save_pretrained(folder)
            more["processing_class"].save_pretrained(folder)
            self.began += time.perf_counter() - stopped

    def on_log(self, args: Any, state: Any, control: Any, logs: dict, **_: object) -> None:
        """Print a step."""
        if self.value in logs:
            record = {"step": state.global_step, self.value: float(logs[self.value])}
            record["elapsed_s"] = round(time.perf_counter() - self.began, 1)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # from KiB
            print(json.dumps(record | {"peak_gib": round(peak, 2)}), flush=True)


def main() -> None:
    """Train and save."""
    out, num_steps, seed, *more = sys.argv[1:]
    micro_batch, every = (*map(int, more), *(32, int(num_steps))[len(more) :])
    rows = [json.loads(line) for line in Path(out, "prompts.jsonl").read_text().splitlines()]
    table = datasets.Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
            for row in rows
        ]
    )
    settings = trl.GRPOConfig(
        output_dir=f"{out}/trl",
        max_steps=int(num_steps),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=128 // micro_batch,
        num_generations=8,
        max_completion_length=16,
        temperature=1.0,
        beta=0.0,
        learning_rate=3e-5,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=0.05,
        weight_decay=0.0,
        loss_type="dapo",  # a mean over the tokens of the step, as ours
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=int(seed),
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=table,
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        callbacks=[Clock("reward", Path(out, "trl"), every)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
