"""`openrlhf replay`: the trainer's step again from what a run kept of it (ppo_dumps.py), with the
code of the run, in this process; what its loss was made of, token by token.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.commands.train_rl import forwards_of, init_models, worker_classes
from openrlhf.config.base import with_value
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.serving import ReplayConfig
from openrlhf.datasets.command_data import PRETRAIN, ppo_data
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.distributed.folders import read_json
from openrlhf.errors import ConfigError, Gathered, NumericsError
from openrlhf.trainer.device_phases import DevicePhases
from openrlhf.trainer.local_cluster import local_cluster
from openrlhf.trainer.ppo_dumps import SAMPLES_FILE, STEP_FILE
from openrlhf.trainer.ppo_updates import StepInputs, start_update, trained_roles
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import make_experience, reward_kl
from openrlhf.trainer.ppo_utils.update_plan import (
    UpdateResult,
    num_updates_per_rollout,
    seen_column,
)
from openrlhf.trainer.ppo_utils.worker_group import Forward, WorkerGroup
from openrlhf.trainer.workers.model_worker import TrainedWorker
from openrlhf.utils.console import notice, warn
from openrlhf.utils.framework_logs import redirect_framework_logs
from openrlhf.utils.images import read_picture
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.run_folder import CONFIG_FILE, DUMPS, IMAGES
from openrlhf.utils.samples import printable
from openrlhf.utils.snapshots import with_snapshots
from openrlhf.utils.tokenizer import TokenTexts, tokenizer_of

TABLE = "tokens.parquet"  # in the folder of the step
MAX_LINES = 20  # of tokens on the console
# What a loss is made of.
COLUMNS = {
    "critic": ["new_values", "value_loss"],
    "actor": ["new_logprobs", "log_ratio", "is_clipped", "loss"],
}
SHOWN = ("reward", "advantages", "log_ratio", "is_clipped", "kl", "loss")


@dataclass(frozen=True)
class DumpedStep:
    """A kept step, as it is read from its folder.

    Example: the third update of the actor failed: `num_done` {"actor": 2}, `metrics` {}, `error`
    "the gradient norm is nan".
    """

    folder: Path
    step_inputs: StepInputs
    num_done: Mapping[str, int]  # updates of each model that are in its weights already
    metrics: Mapping[str, float]  # of the run's updates; empty if they failed
    error: str | None  # how they failed
    rollouts: list[Rollout]
    computed: Mapping[str, Tensor] | None  # by models before the updates; None: they failed


def run_replay(config: ReplayConfig) -> None:
    """Repeat a step of a run, compare it with the run's, and show its tokens."""
    run_dir = Path(config.run or "").expanduser()
    run = one_process(run_dir)
    kept = read_step(run_dir, config.step)
    redirect_framework_logs(run_dir, "replay")
    classes = {
        role: kind
        for role, kind in worker_classes(run).items()
        if role in COLUMNS or (role == "ref" and kept.computed is None)
    }
    with local_cluster(run, classes, run_dir=str(run_dir), resume_step=0) as cluster:
        phases = DevicePhases([], engines_sleep=False, training_sleeps=False)
        init_models(run, cluster.groups, kept.step_inputs.updates, phases)
        take_up(cluster.groups, kept.folder)
        experience, results, failure = step_again(run, cluster.groups, kept)
    compare(kept, results, failure)
    show_tokens(run, kept, experience, results)


def read_step(run_dir: Path, step: int) -> DumpedStep:
    """Read a step that was kept; raise ConfigError that names those that were."""
    folders = {
        int(path.parent.name.rpartition("_")[2]): path.parent
        for path in sorted((run_dir / DUMPS).glob(f"step_*/{STEP_FILE}"))
    }
    if step not in folders:
        found = ", ".join(map(str, folders)) or "none"
        raise ConfigError(
            f"step {step} of {run_dir} was not kept: kept are {found}. Type --step with one of "
            f"those, or train with --dump {step}."
        )
    told = read_json(folders[step] / STEP_FILE)
    saved = torch.load(folders[step] / SAMPLES_FILE, weights_only=True)
    read = cache(lambda sha256: read_picture(folders[step] / IMAGES / f"{sha256}.png"))
    for own in saved["samples"]:
        own["images"] = tuple(map(read, own.get("images", ())))
    return DumpedStep(
        folders[step],
        StepInputs(**told["facts"]),
        told["num_done"],
        told["metrics"],
        told["error"],
        [Rollout(**own) for own in saved["samples"]],
        saved["computed"],
    )


def one_process(run_dir: Path) -> PPOConfig:
    """Return the config of a run, changed so that its models fit into this process."""
    path = run_dir / CONFIG_FILE
    if not path.is_file() or "rollout:" not in path.read_text().splitlines():
        raise ConfigError(
            f"{run_dir} is no run of openrlhf ppo or ppo-local: replay repeats their steps only. "
            "Type the --save_path of such a run."
        )
    config = with_snapshots(parse_config(PPOConfig, ["--config", str(path)]).config, is_shown=True)
    if (size := config.ds.tensor_parallel_size) > 1:
        raise ConfigError(
            f"{run_dir} was trained with --ds_tensor_parallel_size {size}: its weights were kept "
            "in slices, and a replay is one process. Train the step with size 1 to replay it."
        )
    changed = {"vllm.num_engines": 0, "ds.ring_attn_size": 1, "ds.use_universal_ckpt": True}
    for name, value in changed.items():
        config = with_value(config, name, value)
    return config


def take_up(groups: Mapping[str, WorkerGroup], folder: Path) -> None:
    """Put the models where they were before the step, and say what may make numbers differ."""
    for role in groups.keys() & COLUMNS.keys():
        own = read_json(folder / f"{role}_rank0.json")
        torch.set_num_threads(own["num_threads"])
        groups[role].call(TrainedWorker.load_states, str(folder.absolute()))
        if (count := own["world_size"]) > 1:
            warn(f"{role}: {count} ranks trained it, one replays it: sums may differ in last bits.")


def step_again(
    config: PPOConfig, groups: Mapping[str, WorkerGroup], kept: DumpedStep
) -> tuple[Experience, dict[str, list[UpdateResult]], str | None]:
    """Make experience and updates as the trainer does; return what became of the updates of each
    model, and how they failed.
    """
    step_inputs, results, why = kept.step_inputs, {}, None
    forwards: dict[str, Forward] = forwards_of(config, groups, max(step_inputs.updates))
    if kept.computed is not None:
        forwards = {name: partial(_saved, column) for name, column in kept.computed.items()}
    experience, _ = make_experience(config, forwards, kept.rollouts, step_inputs.kl_coef)
    train = config.train
    num_updates = num_updates_per_rollout(
        experience.num_episodes, train.batch_size, train.max_epochs
    )
    for role in trained_roles(config, step_inputs.global_step):
        if (num_done := kept.num_done.get(role, 0)) == num_updates:
            continue
        columns = [*COLUMNS[role]]
        if role == "actor" and config.algo.kl.use_loss and experience.ref_logprobs is not None:
            columns.append("kl")
        try:
            wait = start_update(
                config,
                groups[role],
                experience,
                step_inputs,
                role=role,
                texts=pretraining_texts(config) if role == "actor" else None,
                columns=columns,
                num_done=num_done,
            )
            results[role] = wait()
            if (skip := results[role][0].skip) is not None:
                why = why or skip.why
                if skip.left:
                    return experience, results, why
        except NumericsError as error:
            results[role] = [groups[role].worker.notes.result()]
            return experience, results, str(error)
    return experience, results, why


def _saved(column: Tensor, experience: Experience) -> Any:
    return lambda: column


def pretraining_texts(config: PPOConfig) -> SFTDataset | None:
    """Read the text that is mixed into updates again, if there is any."""
    gathered, texts = Gathered(), None
    for data_set in ppo_data(config):
        if data_set.about == PRETRAIN and (rows := data_set.read(gathered)) is not None:
            texts = data_set.tokenise(gathered, rows, tokenizer_of(config, config.policy_path))
    gathered.raise_if_any()
    return texts


def compare(
    kept: DumpedStep, results: Mapping[str, list[UpdateResult]], failure: str | None
) -> None:
    """Print the numbers of the updates, and whether they are those of the run."""
    metrics = Metrics()
    for part in itertools.chain(*results.values()):
        metrics.merge(part.metrics)
    # What a process takes is its own. The state of Adam is kept where a step has several updates.
    values = {k: v for k, v in metrics.values().items() if not k.startswith("memory/")}
    if max(kept.step_inputs.updates) == 1:
        values = {k: v for k, v in values.items() if not k.endswith("_update_ratio")}
    before = kept.metrics
    different = [name for name, value in values.items() if before.get(name) != value]
    lines = [f"step {kept.step_inputs.global_step} again: {len(kept.rollouts)} samples"]
    for name, value in values.items():
        run = f"  run: {before[name]:.17g}" if name in different and name in before else ""
        lines.append(f"  {name:<20} {value:.17g}{run}")
    if kept.error or failure:
        lines.append(f"the run failed: {kept.error}\nthe replay: {failure or 'did not fail'}")
    elif not before:
        lines.append("the run ended within this step")
    elif different:
        lines.append(f"{len(different)} of {len(values)} numbers differ from the run's")
    else:
        lines.append(f"all {len(values)} numbers are those of the run to the last bit")
    notice("\n".join(lines))


def show_tokens(
    config: PPOConfig,
    kept: DumpedStep,
    experience: Experience,
    results: Mapping[str, list[UpdateResult]],
) -> None:
    """Write a table with a row for each sampled token; print those that weigh most in the loss, or
    spoil it.
    """
    import pyarrow.parquet  # noqa: PLC0415 - heavy

    experience = experience.laid_out()
    columns = token_columns(config, experience, results)
    mask_T = experience.action_mask
    assert mask_T is not None and experience.token_ids is not None
    texts = TokenTexts(tokenizer_of(config, config.policy_path))(
        experience.token_ids[mask_T].tolist()
    )
    owners = torch.arange(len(experience)).repeat_interleave(experience.num_actions).tolist()
    names = [kept.rollouts[owner].sample_id for owner in owners]
    positions = torch.cat([torch.arange(1, n + 1) for n in experience.seq_lengths.tolist()])[mask_T]
    about = {"sample_id": names, "position": positions.numpy(), "token": texts}
    table = pyarrow.table(about | {name: column.numpy() for name, column in columns.items()})
    pyarrow.parquet.write_table(table, kept.folder / TABLE)
    weight_N = columns.get("loss", columns["advantages"]).abs().nan_to_num(nan=math.inf)
    seen = {index for part in results.get("actor", ()) for index in part.sample_indices}
    weight_N[[owner not in seen for owner in owners]] = -1.0
    shown = [name for name in SHOWN if name in columns]
    lines = [f"{'sample':<16} {'position':>8} {'token':<14}" + "".join(f"{n:>12}" for n in shown)]
    for k in weight_N.argsort(descending=True)[:MAX_LINES].tolist():
        cells = "".join(f"{columns[name][k].item():>12.4g}" for name in shown)
        token = printable(texts[k]).replace("\n", "\\n")[:14]
        lines.append(f"{names[k]:<16} {positions[k].item():>8} {token:<14}{cells}")
    lines.append(f"all {len(names)} tokens: {kept.folder / TABLE}")
    notice("\n".join(lines))


def token_columns(
    config: PPOConfig, experience: Experience, results: Mapping[str, list[UpdateResult]]
) -> dict[str, Tensor]:
    """Return the columns of every sampled token, (N,) each: NaN in the columns of a loss where it
    did not see the sample.
    """
    owned = experience.rewards.repeat_interleave(experience.num_actions)
    columns = {
        "reward": owned,
        "rollout_logprobs": experience.rollout_logprobs,
        "old_logprobs": experience.old_logprobs,
        "ref_logprobs": experience.ref_logprobs,
        "values": experience.values,
        "kl": reward_kl(config, experience),
        "advantages": experience.advantages,
        "returns": experience.returns,
    }
    for parts in results.values():
        for name in dict.fromkeys(name for part in parts for name in part.columns):
            columns[name] = seen_column(parts, name, experience.num_actions)
    return {name: column for name, column in columns.items() if column is not None}
