"""Evaluation of a policy: pass@k and mean reward per data source, keyed by row."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from openrlhf.algorithms.evaluation import (
    normal_interval,
    pass_at_k,
    standard_error,
    wilson_interval,
)
from openrlhf.utils.metrics import STDERR, Values
from openrlhf.utils.rollout import Rollout


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, with its 95 % interval where there are several: 0.512 [0.478, 0.546].

    Example: `Estimate(0.512, (0.478, 0.546))`
    """

    mean: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        known = "" if self.interval is None else " [{:.3f}, {:.3f}]".format(*self.interval)
        return f"{self.mean:.3f}{known}"


def evaluation_metrics(rollouts: Sequence[Rollout], ks: Sequence[int]) -> dict[str, float]:
    """Return metrics of scored evaluation samples; of a prompt with fewer than k, its best.

    Per data source: pass@k of the scores for each of `ks`, and the mean reward, each with the
    standard error of that mean over prompts where there are several; response length in tokens and
    the share of truncated responses over all.
    """
    groups: dict[str, dict[int, list[Rollout]]] = defaultdict(lambda: defaultdict(list))
    # Parts of an agent's episode share its score.
    named = {(r.datasource, r.episode_id or k): r for k, r in enumerate(rollouts)}
    episodes = list(named.values())
    for rollout in episodes:
        groups[rollout.datasource][rollout.row_id].append(rollout)
    metrics: dict[str, float] = {}
    for datasource, by_row in groups.items():
        scores, rewards = (
            [torch.tensor([[value(r) for r in group]]).double() for group in by_row.values()]
            for value in (attrgetter("task_score"), attrgetter("reward"))
        )
        columns = {
            name: torch.cat([pass_at_k(one_1N, min(k, one_1N.size(1))) for one_1N in scores])
            for name, k in zip(pass_rate_names([datasource], ks), ks, strict=True)
        }
        reward = torch.cat([rewards_1N.mean(dim=1) for rewards_1N in rewards])
        columns[f"eval/eval_{datasource}_reward"] = reward
        for name, values_P in columns.items():
            metrics[name] = values_P.mean().item()
            error = standard_error(values_P)
            metrics |= {} if error is None else {name + STDERR: error}
    count = max(len(episodes), 1)
    metrics["eval/response_length"] = sum(r.num_actions for r in rollouts) / count
    metrics["eval/truncated_rate"] = sum(r.is_truncated for r in episodes) / count
    return metrics


def pass_rate_names(datasources: Iterable[str], ks: Sequence[int]) -> list[str]:
    """Return the names of the pass rates of data sources: pass@k of each for each of `ks`."""
    return [f"eval/eval_{name}_pass{k}" for name in datasources for k in ks]


def estimates_of(
    values: Values, rollouts: Sequence[Rollout], datasource: str, ks: Sequence[int]
) -> dict[str, Estimate]:
    """Return the estimates of a data source by title: `pass@k` for each of `ks`, and `reward`.
    `values` are the metrics of these samples. Those of 0 and 1 alone are rates.
    """
    own = [rollout for rollout in rollouts if rollout.datasource == datasource]
    num_prompts = len({rollout.row_id for rollout in own})
    is_rate = all(rollout.task_score in (0, 1) for rollout in own)
    kinds = dict.fromkeys(pass_rate_names([datasource], ks), is_rate)
    kinds[f"eval/eval_{datasource}_reward"] = all(rollout.reward in (0, 1) for rollout in own)
    estimates = []
    for name, is_bounded in kinds.items():
        mean, error = values[name], values.get(name + STDERR)
        interval = None
        if error is not None and is_bounded:
            interval = wilson_interval(mean, error, num_prompts)
        elif error is not None:
            interval = normal_interval(mean, error)
        estimates.append(Estimate(mean, interval))
    return dict(zip([*(f"pass@{k}" for k in ks), "reward"], estimates, strict=True))


def results_table(results: Iterable[tuple[str, str, int, Mapping[str, Estimate]]]) -> str:
    """Return a table of evaluations, a line for each model and data source; each is given by the
    model's name, the data source, the number of its prompts and its estimates.

    Example:
        model   data     prompts  pass@1                reward
        run     default      100  0.512 [0.478, 0.546]  0.702 [0.655, 0.749]
    """
    rows, head = [], ["model", "data", "prompts"]
    for model, source, count, estimates in results:
        rows.append([model, source, f"{count:>7}", *map(str, estimates.values())])
        head[3:] = estimates
    rows.insert(0, head)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)
