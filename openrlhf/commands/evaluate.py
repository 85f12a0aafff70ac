"""`openrlhf eval`: the evaluation of an RL run by itself, for one model or several.

Samples are made and scored by what a run makes and scores them with; models come one after another.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from openrlhf.commands.rl_inputs import (
    RunInputs,
    open_reward_source,
    read_inputs,
    with_rewards,
)
from openrlhf.commands.train_rl import opener, rollout_maker_of
from openrlhf.config.base import with_value
from openrlhf.config.cli import save_resolved
from openrlhf.config.common import last_words
from openrlhf.config.evaluation import EvaluateConfig
from openrlhf.datasets.command_data import prompt_data
from openrlhf.datasets.tokenized import write_bad_rows
from openrlhf.distributed.checkpoints import find_model
from openrlhf.distributed.folders import holding
from openrlhf.errors import Gathered
from openrlhf.models.loading import check_files, load_config, say_padded
from openrlhf.models.support import check_here
from openrlhf.report.report import report_or_warn
from openrlhf.rewards.base import RewardSource
from openrlhf.rollout.evaluation import (
    Estimate,
    estimates_of,
    evaluation_metrics,
    results_table,
)
from openrlhf.rollout.rollout import SampleBatch
from openrlhf.rollout.scoring import FailurePolicy
from openrlhf.trainer.device_phases import DevicePhases
from openrlhf.trainer.ppo_inputs import say_dropped
from openrlhf.trainer.workers.critic_and_frozen import FrozenPolicyActor, RewardModelActor
from openrlhf.trainer.workers.model_worker import ModelWorker
from openrlhf.utils.console import notice
from openrlhf.utils.framework_logs import redirect_framework_logs
from openrlhf.utils.metrics import Values
from openrlhf.utils.progress import progress
from openrlhf.utils.rollout_files import images_of, rollout_row, write_rollouts
from openrlhf.utils.run_folder import BAD_ROWS_FILE, CONFIG_FILE, LOGS, METRICS_FILE, REPORT_FILE
from openrlhf.utils.samples import show_samples
from openrlhf.utils.tracker import Tracker

ALL = "all"  # the data source of all samples, where there are several


@dataclass(frozen=True)
class Evaluation:
    """The measurements of one model.

    Example: `evaluation.estimates["default"]["pass@1"].interval`
    """

    name: str  # as it was typed
    run_dir: Path  # with its metrics
    samples_path: Path | None  # parquet; None where the disk was full
    metrics: Values
    num_prompts: Mapping[str, int]  # by data source
    estimates: Mapping[str, Mapping[str, Estimate]]  # by data source and title, such as `pass@1`


def run_evaluation(
    config: EvaluateConfig, *, reward_source: RewardSource | None = None
) -> list[Evaluation]:
    """Evaluate every model that is named, print a table, and return what was measured.

    A program may bring the rewards that the config does not name a source of.
    """
    output, gathered = Path(config.ckpt.output_dir), Gathered()
    runs = evaluated_runs(config, gathered)
    gathered.raise_if_any()
    source = reward_source or open_reward_source(config, log_dir=output / LOGS)
    with closing(source) if source else nullcontext(), holding(output, "--save_path"):
        redirect_framework_logs(output, "driver")
        found = [gather_inputs(run, gathered, source) for run in runs]
        gathered.raise_if_any()
        results = [
            _evaluate(name, run, inputs)
            for name, run, inputs in zip(config.model_names, runs, found, strict=True)
            if inputs is not None  # or else problems were raised
        ]
    notice(
        results_table(
            (result.name, source, result.num_prompts[source], estimates)
            for result in results
            for source, estimates in result.estimates.items()
        )
    )
    notice(
        "in brackets: 95 % intervals of means over prompts (Wilson's for rates, errors by prompt)"
    )
    notice(f"samples and metrics: {output}")
    report_or_warn([result.run_dir for result in results], output / REPORT_FILE)
    return results


def evaluated_runs(config: EvaluateConfig, gathered: Gathered) -> list[EvaluateConfig]:
    """Return the config of every model: one has the output folder, several have folders in it.
    Note models that are not there, and a folder with records.
    """
    output, names, runs = Path(config.ckpt.output_dir), config.model_names, []
    folders = [output / word for word in last_words(names)] if len(names) > 1 else [output]
    for name, folder in zip(names, folders, strict=True):
        model = None
        with gathered:
            model = find_model(name)
        if (folder / METRICS_FILE).exists():
            gathered.problems.append(
                f"--save_path {output} holds the records of a run. Type another folder, or leave "
                "--save_path out."
            )
        if model is not None:
            run = with_value(config, "models", model)
            runs.append(with_value(run, "ckpt.output_dir", str(folder)))
    return runs


def gather_inputs(
    config: EvaluateConfig, gathered: Gathered, reward_source: RewardSource | None = None
) -> RunInputs | None:
    """Load and check the inputs of one model's evaluation, as those of training are."""
    data, has_engines = [prompt_data(config)], bool(config.vllm.num_engines)
    inputs = read_inputs(config, data, gathered, has_engines=has_engines)
    return with_rewards(config, inputs, gathered, reward_source)


def worker_classes(config: EvaluateConfig) -> dict[str, type]:
    """Return the class of the ranks of every role; an engine that generates needs none."""
    policy = {} if config.vllm.num_engines else {"actor": FrozenPolicyActor}
    return policy | dict.fromkeys(config.reward_roles, RewardModelActor)


def _evaluate(name: str, config: EvaluateConfig, inputs: RunInputs) -> Evaluation:
    """Evaluate one model; write its samples and metrics."""
    num_samples = inputs.sampling.num_samples
    inputs.run_dir.mkdir(parents=True, exist_ok=True)
    notice(f"evaluating {name}: {len(inputs.prompts)} prompts x {num_samples} samples")
    policy = FailurePolicy.of(config.reward, len(inputs.prompts))
    samples = _samples(config, inputs, policy)
    failed = samples.failed
    policy.check_dropped(list(failed.values()), of="the evaluation")
    say_dropped(failed, inputs.prompts)
    rollouts = samples.rollouts
    file = write_rollouts(
        inputs.run_dir,
        0,
        [rollout_row(rollout, inputs.image_processor) for rollout in rollouts],
        num_kept=1,
        kind="eval_step",
        token_texts=inputs.token_texts,
        images=images_of(rollouts),
    )
    show_samples(name, rollouts, config.logger.print_samples, file=file)
    if any(rollout.task_score not in (0, 1) for rollout in rollouts):
        notice(f"{name}: scores are not only 0 and 1: pass@k is the mean of the best of k of them")
    sources = {rollout.datasource for rollout in rollouts}
    if len(sources) > 1 and ALL not in sources:
        rollouts = [*rollouts, *(replace(rollout, datasource=ALL) for rollout in rollouts)]
    metrics = samples.metrics.values() | evaluation_metrics(rollouts, config.ks)
    save_resolved(config, inputs.run_dir / CONFIG_FILE)
    write_bad_rows(inputs.run_dir / BAD_ROWS_FILE, inputs.prompts)
    Tracker(inputs.run_dir).log(0, metrics)
    prompts = dict.fromkeys((rollout.datasource, rollout.row_id) for rollout in rollouts)
    counts = Counter(source for source, _ in prompts)
    estimates = {source: estimates_of(metrics, rollouts, source, config.ks) for source in counts}
    return Evaluation(name, inputs.run_dir, file, metrics, counts, estimates)


def _samples(config: EvaluateConfig, inputs: RunInputs, policy: FailurePolicy) -> SampleBatch:
    """Start the model, and what scores its samples, and return them."""
    if not config.is_on_ray:
        check_here(config.ds, trains=False)
    say_padded(config, config.named_models)
    if config.vllm.num_engines:
        path = config.policy_path
        model_config = load_config(path, trust_remote_code=config.trust_remote_code)
        check_files(model_config, path, config)
    rewards, run_dir = config.reward_roles, str(inputs.run_dir.resolve())
    open_cluster = opener(on_ray=config.is_on_ray)
    with open_cluster(config, worker_classes(config), run_dir=run_dir, resume_step=0) as cluster:
        for role, group in cluster.groups.items():
            with progress(f"loading {role}"):
                group.model_args = tuple(path for other, path in rewards.items() if other == role)
                group.call(ModelWorker.init_model, *group.model_args)
        phases = DevicePhases((), engines_sleep=False, training_sleeps=False)
        with closing(rollout_maker_of(config, inputs, cluster, phases, policy)) as maker:
            prompts = list(inputs.prompts)
            sampling = replace(inputs.sampling, seed=config.train.seed)
            return maker.generate_samples(prompts, sampling, tag="eval0")
