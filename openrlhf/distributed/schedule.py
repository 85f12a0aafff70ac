"""Learning rate over the updates of a run: every Hugging Face schedule by name, never past its end.

Horizon and warm-up are counted in optimizer updates. Update k (from 0) uses the schedule's value at
k; after the last update the rate stands at the schedule's end value and stays there.
"""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from openrlhf.config.common import OptimizerConfig
from openrlhf.distributed import collectives
from openrlhf.errors import ConfigError
from openrlhf.utils.logging import warn

# Counts from 1, so its last value is that of the last update, not the one behind it.
EARLY_SCHEDULERS = frozenset({"cosine_warmup_with_min_lr"})
METRIC_SCHEDULERS = frozenset({"reduce_lr_on_plateau", "greedy"})  # they watch the loss
WSD_DECAY_RATIO = 0.2  # part of the run that warmup_stable_decay spends in its decay


def scheduler_kwargs(optim: OptimizerConfig, num_updates: int) -> dict[str, float]:
    """What the named schedule wants to know beyond horizon and warm-up."""
    ratio = optim.min_lr_ratio
    return {
        "cosine_with_min_lr": {"min_lr_rate": ratio},
        "cosine_warmup_with_min_lr": {"min_lr_rate": ratio},
        "polynomial": {"lr_end": ratio * optim.adam.lr},
        "reduce_lr_on_plateau": {"min_lr": ratio * optim.adam.lr},
        "greedy": {"min_lr": ratio * optim.adam.lr, "max_lr": optim.adam.lr},
        "warmup_stable_decay": {
            "min_lr_ratio": ratio,
            "num_decay_steps": max(1, int(WSD_DECAY_RATIO * num_updates)),
        },
    }.get(optim.lr_scheduler, {})


class LearningRate:
    """The schedule of one optimizer over `num_updates` updates."""

    def __init__(self, optimizer: Optimizer, optim: OptimizerConfig, *, num_updates: int) -> None:
        # PEFT and bitsandbytes come along: seconds, which frozen models need not wait for.
        from transformers import SchedulerType, get_scheduler  # noqa: PLC0415

        names = [kind.value for kind in SchedulerType]
        if optim.lr_scheduler not in names:
            raise ConfigError(
                f"--lr_scheduler {optim.lr_scheduler} is not a schedule. "
                f"Choose one of: {', '.join(names)}."
            )
        self._last_step = num_updates - (optim.lr_scheduler in EARLY_SCHEDULERS)
        self.num_done = 0
        self.needs_loss = optim.lr_scheduler in METRIC_SCHEDULERS
        self._optimizer = optimizer
        # Rounded down: a run of a few updates must not spend its first one at a rate of 0.
        self._scheduler = get_scheduler(
            optim.lr_scheduler,
            optimizer,
            num_warmup_steps=int(optim.lr_warmup_ratio * num_updates),
            num_training_steps=num_updates,
            scheduler_specific_kwargs=scheduler_kwargs(optim, num_updates),
        )

    @property
    def value(self) -> float:
        """The rate the next update uses (of the first parameter group)."""
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self, loss: float | None = None) -> None:
        """Note one update; past the end the rate stays."""
        self.num_done += 1
        if self.num_done > self._last_step:
            return
        if self.needs_loss:
            self._scheduler.step(loss)
        else:
            self._scheduler.step()

    def state_dict(self) -> dict[str, object]:
        """Position and inner state, plain numbers."""
        return {"num_done": self.num_done, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take up where `state_dict` was taken, at the peak rate of then; another one is said.

        The shape and the length are this schedule's own.
        """
        own = getattr(self._scheduler, "base_lrs", None)
        saved = state["scheduler"].get("base_lrs", own)
        if saved != own and collectives.is_main():
            warn(
                f"the checkpoint's learning rate goes on: its peak is {saved[0]:g}, and "
                f"{own[0]:g} of this command has no effect. Start anew to change it."
            )
        self.num_done = state["num_done"]
        self._scheduler.load_state_dict(state["scheduler"])
        if isinstance(self._scheduler, LambdaLR):  # its rate was that of a run of another length
            at = self._scheduler.last_epoch = min(self.num_done, self._last_step)
            pairs = zip(self._scheduler.base_lrs, self._scheduler.lr_lambdas, strict=True)
            self._scheduler._last_lr = [base_lr * factor(at) for base_lr, factor in pairs]
        for group, lr in zip(
            self._optimizer.param_groups, self._scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = lr
