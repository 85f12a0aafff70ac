"""`openrlhf infer`: respond to prompts or score responses, row by row, into one file of JSON lines.

Every task takes the same steps: read and check, share the rows among the ranks, keep what is done
in `<output>.parts/`, and write all rows in input order at once. Every prompt has seeds of its own,
so its responses depend neither on the ranks nor on what was done before a restart. Rows hold the
prompt as the model read it, so that later commands score and learn it so; a message list stays one.
"""

import base64
import contextlib
import hashlib
import json
import math
import os
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from openrlhf.config.base import Caution
from openrlhf.config.serving import BatchInferenceConfig, InferenceRewardConfig, SamplingConfig
from openrlhf.datasets.chat import (
    RENDERED,
    to_messages,
    wish_template,
    wrap_input,
)
from openrlhf.datasets.command_data import inference_data
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.datasets.template_fields import REASONING
from openrlhf.datasets.tokenized import IMAGE_COLUMNS, write_bad_rows
from openrlhf.distributed import collectives
from openrlhf.distributed.folders import MODEL_FILES
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.topology import Topology
from openrlhf.engines.base import SamplingSettings
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.engines.vllm_cpu import check_head_size
from openrlhf.engines.vllm_engine import VLLMEngine, check_vllm_is_installed
from openrlhf.errors import ConfigError, Gathered, RewardError
from openrlhf.models.loading import (
    check_engine_reads_pictures,
    check_files,
    check_shapes,
    check_value_model,
    image_processor_of,
    load_causal_lm,
    load_config,
    load_sequence_model,
    resolve_dtype,
)
from openrlhf.models.support import (
    check_engine_split,
    check_here,
    most_workers,
    num_positions,
)
from openrlhf.models.value_head import RewardModel
from openrlhf.rollout.engine_pool import BatchedEngine, EnginePool, SamplingEngine
from openrlhf.rollout.rollout import RolloutMaker
from openrlhf.rollout.scoring import FailurePolicy, GroupScorer
from openrlhf.utils.adapter_folder import refuse_adapter
from openrlhf.utils.console import notice, say_notices, warn_once
from openrlhf.utils.framework_logs import VLLM_LOGGING, redirect_framework_logs
from openrlhf.utils.gpus import check_gpus
from openrlhf.utils.images import ImageProcessor
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.progress import hide_bars, progress
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.run_folder import BAD_ROWS_FILE, LOGS
from openrlhf.utils.tokenizer import (
    check_stop_ids,
    eos_token_ids,
    tokenizer_of,
    unused_sampling,
)

Row = dict[str, Any]
# Settings that change neither the rows nor their order.
FREE_SETTINGS = {"output_path", "local_rank", "micro_batch_size", "vllm", "reward"}
BATCHES_IN_CHUNK = 4  # forward batches between two writes
OF_THE_PROMPT = ("tools", "chat_template_kwargs")  # beside the input: they change what is asked
OF_ONE_ANSWER = ("input", "output", "reward", "finish_reason")  # columns that a pair has twice
REWARD_TEMPLATE = "{input} <rm_score>: {reward} "


def run_batch_inference(config: BatchInferenceConfig) -> None:
    """Do the task and leave its rows at `config.output_path`.

    A killed run that is started again with the same settings and data goes on where it stopped.
    """
    assert config.output_path is not None, "an output is needed"
    topology = Topology.from_env(local_rank=config.local_rank)
    output = Path(config.output_path)
    check_gpus()
    if not topology.is_main:
        hide_bars()  # one rank draws for all
    task = BatchTask(config)
    parts = Path(f"{output}.parts") / task.key  # on a disk that all ranks share
    redirect_framework_logs(parts.parent, f"batch_inference-{topology.rank}")
    strategy = DeepSpeedStrategy(
        config.ds,
        seed=config.seed,
        full_determinism=config.full_determinism,
        local_rank=config.local_rank,
    )
    strategy.setup()
    left: list[int] = []
    if topology.is_main:
        say_notices(task.samples.notices)
        write_bad_rows(Path(f"{output}.{BAD_ROWS_FILE}"), task.samples)
        if config.eval_task != "rm":
            say_notices(unused_sampling(task.model_path, config.rollout.token_choice))
            say_notices(task.unwritten())
        left = unfinished_items(task, parts)
    # The files of a model may be of another time on another node.
    left, parts = collectives.broadcast_object((left, parts))
    if left:
        mine = topology.shard(left)
        results = scored if config.eval_task == "rm" else generated
        with (
            progress("finished rows", len(mine)) as advance,
            (parts / f"rank{topology.rank}.jsonl").open("a") as file,
        ):
            for item, rows in results(task, mine, strategy):
                file.write("\n" + json.dumps([item, rows]))  # a torn line before it stays apart
                file.flush()
                advance(1)
    collectives.barrier()
    if topology.is_main:
        write_output(task, parts, output)
    collectives.shut_down()


class BatchTask:
    """Items to work on, each by itself; made before a model is loaded."""

    def __init__(self, config: BatchInferenceConfig) -> None:
        """Read and check everything that is small; raise ConfigError with all problems found."""
        path = config.model.model_name_or_path
        assert path is not None, "a model is needed"
        self.config, self.model_path = config, path
        self.image_processor: ImageProcessor | None = None
        gathered, model_config, tokenizer = Gathered(), None, None
        with gathered:
            model_config = load_config(path, trust_remote_code=config.trust_remote_code)
            check_model(config, path, model_config)
            self.image_processor = image_processor_of(config, path, model_config)
        with gathered:
            tokenizer = tokenizer_of(config, path)
        data_set = inference_data(config)
        rows = data_set.read(gathered)
        if rows is not None and tokenizer is not None:
            self.rows, self.tokenizer, self.form = rows, tokenizer, data_set.form
            schema = rows.features.arrow_schema
            binary = [field.name for field in schema if "binary" in str(field.type)]
            self.readable = rows.remove_columns(binary)
            self.stored = rows.select_columns(binary).with_format("arrow")
            with gathered:
                self._tokenise()
        gathered.raise_if_any()
        if config.eval_task != "rm":
            assert model_config is not None, "or else problems were raised"
            self.model_config = model_config
            self.max_model_len = max_model_len(
                self.samples, config.rollout, num_positions(model_config)
            )

    def _tokenise(self) -> None:
        """Make a sample for each item, with a bar; raise DataError."""
        form, csft = self.form, self.config.csft
        self.samples: Any
        if self.config.eval_task == "rm":
            self.samples = SFTDataset(self.rows, self.tokenizer, form)
            return
        if csft.enable:
            form = replace(form, around=wish_template(csft.prompt))
        self.samples = PromptDataset(self.rows, self.tokenizer, form, self.image_processor)

    @property
    def items(self) -> range:
        """Return the indices of the items, in the order of their rows in the output."""
        rollout = self.config.rollout
        if rollout.iter is None or self.config.eval_task == "rm":
            return range(len(self.samples))
        return slice_of(len(self.samples), rollout.batch_size, rollout.iter)

    def columns_of(self, item: int) -> Row:
        """Return the columns of an item's row, images as the bytes they are stored in; those whose
        turns stand in its prompt as `given_<name>`.
        """
        row_id = self.samples.row_ids[item]
        stored = self.stored[row_id].to_pylist()[0] if self.stored.column_names else {}
        joined = self.samples.turn_columns(self.samples.read(self.rows[row_id]))
        columns = {**self.readable[row_id], **stored}
        return {f"given_{name}" if name in joined else name: columns[name] for name in columns}

    @property
    def key(self) -> str:
        """Return a hash of the settings, the model and the data that the rows depend on."""
        settings = self.config.model_dump(mode="json", exclude=FREE_SETTINGS)
        parts = [settings, files_of_model(self.model_path), self.samples.fingerprint]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def unwritten(self) -> Iterator[Caution]:
        """Yield lines about prompts that the model read otherwise than the rows will be read."""
        samples: PromptDataset = self.samples
        is_text = isinstance(samples.asked(0), str)
        if samples.num_truncated and not (is_text and samples.says_cut):
            yield Caution(
                f"{samples.num_truncated} prompts were cut, and are written whole: what is scored "
                "or trained on is not what was answered. Type a larger --prompt_max_len, or leave "
                "these rows out."
            )
        if is_text and samples.num_spelled_as_text:
            yield Caution(
                f"{samples.num_spelled_as_text} prompts spell control tokens, which the model read "
                "as text. Written as text, they are control tokens to what is scored or trained "
                "on: write these prompts as message lists, or leave them out."
            )

    def longest_first(self, items: Sequence[int], size: int) -> list[list[int]]:
        """Cut items into batches of like length."""
        ordered = sorted(items, key=lambda index: -int(self.samples.lengths[index]))
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]

    def generated_rows(self, item: int, group: Sequence[Rollout]) -> list[Row]:
        """Return the rows of a prompt, one for each of its samples."""
        asked = asked_columns(self.samples.asked(item))
        if pictures := self.samples.images(item):
            asked["images"] = [base64.b64encode(each.data).decode() for each in pictures]
        return [
            {**asked, "output": sample.plain_response, "finish_reason": sample.finish_reason}
            for sample in group
        ]

    def scored_row(self, item: int, reward: float) -> Row:
        """Return the row of a scored response."""
        row_id = self.samples.row_ids[item]
        if not math.isfinite(reward):
            raise RewardError(f"the reward model scored row {row_id + 1} with {reward}")
        row, column = self.rows[row_id], self.samples.output_column
        if column is None:  # the dialogue ends with the response
            dialogue = to_messages(self.samples.read(row)[self.samples.input_column])
            said = {key for key in (*REASONING, "tool_calls") if dialogue[-1].get(key)}
            if said:
                names = " and ".join(map(repr, sorted(said)))
                warn_once(f"{names} of answers are scored, and not written: `output` is their text")
        answer = row[column] if column else dialogue[-1]["content"]
        return {**asked_columns(self.samples.asked(row)), "output": answer, "reward": reward}


def check_model(config: BatchInferenceConfig, path: str, model_config: PretrainedConfig) -> None:
    """Raise ConfigError for a model that cannot do the task here."""
    if config.eval_task != "rm":
        check_stop_ids(config.rollout.stop_token_ids, model_config.get_text_config().vocab_size)
    if config.eval_task == "generate_vllm":
        instead = "--eval_task generate, which does without it"
        check_vllm_is_installed(instead=instead)
        refuse_adapter(path, "--pretrain")
        check_head_size(model_config, path, instead=instead)
        check_engine_reads_pictures(model_config, path, instead=instead)
        return
    check_here(config.ds, trains=False)
    if config.eval_task == "rm":
        check_value_model(model_config, path)


def max_model_len(prompts: PromptDataset, rollout: SamplingConfig, limit: int | None) -> int:
    """Return the most tokens of a prompt and its response; raise ConfigError above `limit`."""
    longest = int(prompts.lengths.max())
    total = longest + rollout.max_new_tokens
    if limit is not None and total > limit:
        raise ConfigError(
            f"The longest prompt has {longest} tokens; with --max_new_tokens "
            f"{rollout.max_new_tokens} that is more than the {limit} positions of the model. "
            "Type a smaller --max_new_tokens or --prompt_max_len."
        )
    return total


def generated(
    task: BatchTask, mine: Sequence[int], strategy: DeepSpeedStrategy
) -> Iterator[tuple[int, list[Row]]]:
    """Load the model and yield this rank's prompts with their rows; every rank has an engine."""
    config = task.config
    if config.eval_task == "generate_vllm":
        engine = vllm_engine(task)  # also without items: ranks start their engines together
        try:
            yield from drained(task, [mine], engine)
        finally:
            engine.shutdown()
    elif mine:
        model = load_causal_lm(task.model_path, config)
        num_rows = config.micro_batch_size
        own = OwnGenerate(
            model.to(strategy.device).eval(),
            max_num_rows=num_rows,
            tokenizer=task.tokenizer,
            processor=task.image_processor,
        )
        num_prompts = max(num_rows * BATCHES_IN_CHUNK // config.rollout.best_of_n, 1)
        yield from drained(task, task.longest_first(mine, num_prompts), BatchedEngine(own.generate))


def drained(
    task: BatchTask, rounds: Sequence[Sequence[int]], engine: SamplingEngine
) -> Iterator[tuple[int, list[Row]]]:
    """Yield the items of each round, as they are finished, with their rows."""
    pool = EnginePool(
        [engine], task.tokenizer, vocab_size=task.model_config.get_text_config().vocab_size
    )
    maker = RolloutMaker(pool, GroupScorer(None, FailurePolicy(step_size=1)))
    stream, run = maker.open_stream(sampling_of(task)), maker.loop.run

    async def submit(items: Sequence[int]) -> None:
        stream.submit([((0, item), task.samples[item]) for item in items], tag="row")

    try:
        for items in rounds:
            run(submit(items))
            while stream.num_running:
                group = run(stream.next())
                yield group.key[1], task.generated_rows(group.key[1], group.rollouts)
    finally:
        run(stream.__aexit__())
        maker.close()


def sampling_of(task: BatchTask) -> SamplingSettings:
    """Return the sampling settings of every prompt."""
    config, rollout = task.config, task.config.rollout
    return SamplingSettings(
        num_samples=rollout.best_of_n,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=eos_token_ids(
            task.model_path, task.tokenizer, trust_remote_code=config.trust_remote_code
        ),
        seed=config.seed,
        **rollout.token_choice,  # type: ignore[arg-type]
    ).stopping_at(rollout.stop, rollout.stop_token_ids)


def vllm_engine(task: BatchTask) -> VLLMEngine:
    """Start the engine of this rank."""
    config, num_gpus = task.config, torch.cuda.device_count()
    num_workers = config.vllm.tensor_parallel_size or most_workers(task.model_config, num_gpus)
    check_engine_split(task.model_config, task.model_path, num_workers, "tp_size")
    # Each node may have files of its own.
    if Topology.from_env(local_rank=config.local_rank).local_rank == 0:
        check_shapes(task.model_config, task.model_path, config)
        check_files(task.model_config, task.model_path, config)
    collectives.barrier()
    return VLLMEngine(
        {
            "model": task.model_path,
            "dtype": resolve_dtype(config.ds.param_dtype, task.model_config),
            "max_model_len": task.max_model_len,
            "tensor_parallel_size": num_workers,
            "gpu_memory_utilization": config.vllm.gpu_memory_utilization,
            "enable_prefix_caching": config.vllm.enable_prefix_caching,
            "max_num_seqs": config.vllm.max_num_seqs,
            "seed": config.seed,
            "trust_remote_code": config.trust_remote_code,
        },
        task.image_processor,
    )


def scored(
    task: BatchTask, mine: Sequence[int], strategy: DeepSpeedStrategy
) -> Iterator[tuple[int, list[Row]]]:
    """Load the reward model and yield this rank's responses with their scores, read at the last of
    the tokens that openrlhf rm would have seen.
    """
    hf_model = load_sequence_model(task.model_path, task.config, allow_fresh_head=False)
    engine = strategy.prepare_eval(RewardModel(hf_model))
    batches = task.longest_first(mine, task.config.micro_batch_size)
    num_forwards = max(collectives.all_gather_object(len(batches)))
    # Under ZeRO-3 every forward takes all ranks: one that is done scores the first item again.
    for batch in [*batches, *[[]] * (num_forwards - len(batches))]:
        examples = [task.samples[item] for item in batch or [0]]
        packed = PackedBatch.from_sequences(
            [example.token_ids for example in examples], [example.loss_mask for example in examples]
        )
        scores = engine(packed.to(engine.device)).scores
        assert isinstance(scores, Tensor), "RewardModel.forward"
        for item, reward in zip(batch, scores.tolist()):  # noqa: B905 - an idle rank has no items
            yield item, [task.scored_row(item, reward)]


def unfinished_items(task: BatchTask, parts: Path) -> list[int]:
    """Return the items without rows in `parts`; throw away what other settings or data gave."""
    others = {*parts.parent.iterdir()} - {parts, parts.parent / LOGS}
    if parts.exists():
        notice(f"going on with what is done in {parts.parent}")
    elif others:
        notice(f"{parts.parent} belongs to other settings or data: starting anew")
    for other in others:
        shutil.rmtree(other)
    parts.mkdir(parents=True, exist_ok=True)
    done = read_parts(parts)
    return [item for item in task.items if item not in done]


def read_parts(parts: Path) -> dict[int, list[Row]]:
    """Return the rows of every finished item; a line that a killed process left torn is none."""
    found: dict[int, list[Row]] = {}
    for path in sorted(parts.glob("rank*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.update([json.loads(line)])
    return found


def write_output(task: BatchTask, parts: Path, output: Path) -> None:
    """Put the rows in input order, through the post-processor, into the file; then clean up."""
    found = read_parts(parts)
    rows = [with_columns(task.columns_of(item), row) for item in task.items for row in found[item]]
    kept = post_process(rows, task.config.reward)
    temporary = output.with_name(f".{output.name}.tmp")  # the file is there whole or not at all
    with temporary.open("w", encoding="utf-8") as file:
        for row in kept:
            text = json.dumps(without_nan(row), ensure_ascii=False, default=as_text)
            file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, output)
    if rewards := [row["reward"] for row in rows if "reward" in row]:
        mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
        notice(f"{len(rewards)} rewards: mean {mean:.3f}, standard deviation {spread:.3f}")
    notice(f"{len(kept)} rows written to {output}")
    shutil.rmtree(parts.parent)
    os.environ.pop(VLLM_LOGGING, None)  # its file was there, too


def with_columns(columns: Row, row: Row) -> Row:
    """Return a row with all columns of its data; a value that it replaces stays as `given_<name>`.

    Example: {"id": 1, "output": "4"} with {"output": "5"} is
    {"id": 1, "output": "5", "given_output": "4"}.
    """
    replaced = {name for name in columns.keys() & row.keys() if columns[name] != row[name]}
    return {**columns, **row, **{f"given_{name}": columns[name] for name in sorted(replaced)}}


def without_nan(value: Any) -> Any:
    """Return a value of a row with None in place of numbers that JSON does not know."""
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(value: object) -> str:
    """Return the text of a value that JSON does not know: bytes in base64, dates as they print."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def post_process(rows: Sequence[Row], reward: InferenceRewardConfig) -> Sequence[Row]:
    """Return the rows to write."""
    if reward.post_processor == "rs":
        return best_answers(rows)
    if reward.post_processor == "iter_dpo":
        pairs, num_equal = preference_pairs(rows)
        if num_equal:
            notice(
                f"{num_equal} prompts were left out: their best and worst answers score the same"
            )
        return pairs
    if reward.post_processor == "csft":
        return rewards_in_prompts(rows, reward.template, normalize=reward.normalize_enable)
    return rows


def best_answers(rows: Sequence[Row]) -> list[Row]:
    """Return the answer with the highest reward of each prompt, the first of equals.

    Example: rewards 1, 3, 3 of one prompt leave the second row.
    """
    return [max(group, key=_reward) for group in by_input(rows)]


def preference_pairs(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """Return the best and worst answer of each prompt, and how many prompts had equal rewards.

    Rows {prompt, chosen, chosen_reward, rejected, rejected_reward} and the other columns of the
    best; a side that met its limit of tokens has its finish reason beside it.
    """
    pairs: list[Row] = []
    num_equal = 0
    for group in by_input(rows):
        best, worst = max(group, key=_reward), min(group, key=_reward)
        if _reward(best) == _reward(worst):
            num_equal += 1
            continue
        others = {name: value for name, value in best.items() if name not in OF_ONE_ANSWER}
        pair = {
            "prompt": best["input"],
            "chosen": best["output"],
            "chosen_reward": _reward(best),
            "rejected": worst["output"],
            "rejected_reward": _reward(worst),
        }
        for side, row in (("chosen", best), ("rejected", worst)):
            if row.get("finish_reason") == "length":
                pair[f"{side}_finish_reason"] = "length"
        pairs.append(with_columns(others, pair))
    return pairs, num_equal


def rewards_in_prompts(
    rows: Sequence[Row], template: str | None = None, *, normalize: bool = False
) -> list[Row]:
    """Write each reward, or its z-score, into the prompt with two decimals (conditional SFT).

    Example: input "2+2=" with reward 1 becomes "2+2= <rm_score>: 1.00 ".
    """
    rewards = [_reward(row) for row in rows]
    if normalize:
        mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
        rewards = [(reward - mean) / (spread or 1.0) for reward in rewards]
    form = template or REWARD_TEMPLATE
    return [
        {**row, "input": wrap_input(row["input"], form.replace("{reward}", f"{value:.2f}"))}
        for row, value in zip(rows, rewards, strict=True)
    ]


def by_input(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each prompt, text or messages with images, in the order of their first
    rows.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        asked = [row.get(name) for name in ("input", *OF_THE_PROMPT, *IMAGE_COLUMNS)]
        groups.setdefault(json.dumps(asked, sort_keys=True, default=as_text), []).append(row)
    return list(groups.values())


def _reward(row: Row) -> float:
    return float(row["reward"])


def asked_columns(asked: Any) -> Row:
    """Return the columns of a prompt: a message list, or text as the model read it."""
    return {"input": asked, RENDERED: isinstance(asked, str)}


def slice_of(num_prompts: int, size: int, iteration: int) -> range:
    """Return slice number `iteration` of the prompts; after the last, which may be short, the first
    again.

    Example: of 5 prompts in slices of 2, iterations 0, 1, 2 and 3 are 0-1, 2-3, 4 and 0-1.
    """
    num_slices = -(-num_prompts // size)
    start = iteration % num_slices * size
    return range(start, min(start + size, num_prompts))


def files_of_model(model_path: str) -> list[list[object]]:
    """Return name, size and time of the files of a local model, which a loop may train anew;
    without what else its folder holds, such as the report of its run.
    """
    folder = Path(model_path).expanduser()
    patterns = {*MODEL_FILES, "*.bin"} - {"README.md"}
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
