"""Evaluation during RL: pass@n and pass@1 per data source, keyed by row."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from openrlhf.utils.logging import STDERR
from openrlhf.utils.rollout import Rollout


def evaluation_metrics(rollouts: Sequence[Rollout], num_samples: int) -> dict[str, float]:
    """Return metrics of scored evaluation samples.

    Per data source: pass@n = mean over prompts of the best score, pass@1 = mean over prompts of the
    mean score, each with the standard error of that mean where there are several prompts; response
    length in tokens and the share of truncated responses over all.
    """
    scores: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    # Parts of an agent's episode share its score.
    episodes = list({r.episode_id or k: r for k, r in enumerate(rollouts)}.values())
    for rollout in episodes:
        scores[rollout.datasource][rollout.row_id].append(rollout.task_score)
    metrics: dict[str, float] = {}
    for datasource, by_row in scores.items():
        best = [max(values) for values in by_row.values()]
        mean = [sum(values) / len(values) for values in by_row.values()]
        pass_n, pass_1 = pass_rate_names([datasource], num_samples)
        for name, values in {pass_n: best, pass_1: mean}.items():
            metrics[name] = statistics.fmean(values)
            if len(values) > 1:
                metrics[name + STDERR] = statistics.stdev(values) / math.sqrt(len(values))
    count = max(len(episodes), 1)
    metrics["eval/response_length"] = sum(r.num_actions for r in rollouts) / count
    metrics["eval/truncated_rate"] = sum(r.is_truncated for r in episodes) / count
    return metrics


def pass_rate_names(datasources: Iterable[str], num_samples: int) -> list[str]:
    """Return the names of the pass rates of data sources: pass@n and pass@1 of each."""
    return [f"eval/eval_{name}_pass{n}" for name in datasources for n in (num_samples, 1)]
