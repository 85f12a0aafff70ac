"""The updates of an RL step: which models it trains, and what one model does with its samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.update_plan import (
    UpdateResult,
    mix_texts,
    plan_updates,
    update_shares,
)
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.workers.model_worker import TrainedWorker


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step's updates that are neither samples nor weights.

    Example: `StepInputs(global_step=3, kl_coef=0.01, num_texts=0, updates=[2, 2, 2])`
    """

    global_step: int
    kl_coef: float
    num_texts: int  # rows of pre-training text that were mixed in before
    updates: Sequence[int]  # optimizer steps of every step of the run


# Columns that the losses of each model read, besides the sequences.
LOSS_COLUMNS = {
    "actor": ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages"),
    "critic": ("values", "returns"),
}


def trained_roles(config: PPOConfig, global_step: int) -> list[str]:
    """Return the models that a step updates, in order: not the policy while the critic warms up."""
    if not config.has_critic:
        return ["actor"]
    return ["critic", "actor"] if global_step > config.critic.freezing_steps else ["critic"]


def start_update(
    config: PPOConfig,
    group: WorkerGroup,
    experience: Experience,
    step_inputs: StepInputs,
    *,
    role: str,
    texts: SFTDataset | None,
    columns: Sequence[str],
    num_done: int = 0,
) -> Callable[[], list[UpdateResult]]:
    """Begin the optimizer steps of a rollout batch after the first `num_done`; return the function
    that waits for the notes of every share, with these columns of the loss. `texts` are mixed in.
    """
    train = config.train
    plan = plan_updates(
        experience,
        group.num_shares,
        train_batch_size=train.batch_size,
        max_epochs=train.max_epochs,
        seed=train.seed + step_inputs.global_step,
        kl_coef=step_inputs.kl_coef,
    )
    if texts is not None:
        plan = mix_texts(plan, texts, num_seen=step_inputs.num_texts, seed=train.seed)
    read = (*LOSS_COLUMNS[role], *(["weight_versions"] if train.async_enable else []))
    shares = update_shares(experience.with_columns(read), plan[num_done:])
    return group.start(TrainedWorker.fit, ((share, columns, num_done) for share in shares))
