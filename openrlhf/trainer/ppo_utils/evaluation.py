"""Evaluation of a policy: pass@k and mean reward per data source, keyed by row."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import torch

from openrlhf.algorithms.evaluation import NORMAL_95, pass_at_k, standard_error
from openrlhf.utils.logging import STDERR, Values
from openrlhf.utils.rollout import Rollout


def evaluation_metrics(rollouts: Sequence[Rollout], ks: Sequence[int]) -> dict[str, float]:
    """Return metrics of scored evaluation samples, as many of each prompt.

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
        scores_PN, rewards_PN = (
            torch.tensor([[value(r) for r in group] for group in by_row.values()]).double()
            for value in (attrgetter("task_score"), attrgetter("reward"))
        )
        names = pass_rate_names([datasource], ks)
        columns = dict(zip(names, (pass_at_k(scores_PN, k) for k in ks), strict=True))
        columns[f"eval/eval_{datasource}_reward"] = rewards_PN.double().mean(dim=1)
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


def results_table(
    results: Sequence[tuple[str, Mapping[str, int], Values]], ks: Sequence[int]
) -> str:
    """Return a table of evaluations, a line for each model and data source; each is given by the
    model's name, its prompts by data source and its metrics.

    Example:
        model   data     prompts  pass@1                reward
        run     default      100  0.512 [0.478, 0.546]  0.702 [0.655, 0.749]
    """
    rows = [["model", "data", "prompts", *(f"pass@{k}" for k in ks), "reward"]]
    for model, num_prompts, metrics in results:
        for source, count in num_prompts.items():
            names = [*pass_rate_names([source], ks), f"eval/eval_{source}_reward"]
            cells = (with_interval(metrics, name) for name in names)
            rows.append([model, source, f"{count:>7}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


def with_interval(values: Values, name: str) -> str:
    """Return a mean and its 95 % interval, which that of a single prompt lacks."""
    value, error = values[name], values.get(name + STDERR)
    if error is None:
        return f"{value:.3f}"
    reach = NORMAL_95 * error
    return f"{value:.3f} [{value - reach:.3f}, {value + reach:.3f}]"
