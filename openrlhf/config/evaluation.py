"""Config of `openrlhf eval`: what makes and scores samples, and nothing that trains."""

from collections.abc import Iterator
from typing import ClassVar

from openrlhf.config.base import option
from openrlhf.config.common import (
    DeepSpeedConfig,
    RunFolderConfig,
    SampleLoggerConfig,
    TokenChoiceConfig,
    clashes,
)
from openrlhf.config.generation import (
    EngineConfig,
    GenerationConfig,
    GenerationRunConfig,
    PromptDataConfig,
)
from openrlhf.config.local_paths import names_in
from openrlhf.config.serving import WEIGHTS


class EvaluatedDataConfig(PromptDataConfig):
    """`data.*`: where prompts and labels come from."""

    prompt_dataset: str | None = option(
        None,
        "Evaluation data: hub ids or paths, with commas between.",
        "eval_dataset",
        "prompt_data",
        "dataset",
        "dataset_name",
        needed="evaluation data",
        opens="data",
    )
    prompt_split: str = option(
        "train", "Split of it.", "eval_split", "prompt_split", "dataset_split"
    )


class EvaluatedRolloutConfig(TokenChoiceConfig, GenerationConfig):
    """`rollout.*`: how samples are made."""

    n_samples_per_prompt: int = option(
        4,
        "Samples of a prompt.",
        "eval_n_samples_per_prompt",
        "n_samples_per_prompt",
        "best_of_n",
        gt=0,
    )
    temperature: float = option(
        0.6, "Sampling temperature; 0: greedy.", "eval_temperature", "temperature", ge=0, le=2
    )


class EvaluatedFolderConfig(RunFolderConfig):
    """`ckpt.*`: where the results go."""

    output_dir: str = option(
        "./ckpt",
        "Folder of samples, metrics and report; unset: a folder in ./ckpt with the time.",
        "save_path",
        "output_dir",
        "output_path",
        opens="output",
        min_length=1,
    )


class EvaluatingVLLMConfig(EngineConfig):
    """`vllm.*`: the engines that generate."""

    num_engines: int = option(
        1,
        "Engines; 1: in this process; more: on Ray; 0: the model generates itself.",
        "vllm_num_engines",
        ge=0,
    )
    tensor_parallel_size: int = option(
        1, "GPUs of an engine.", "vllm_tensor_parallel_size", "tp_size", ge=1
    )


class EvaluateConfig(GenerationRunConfig):
    """Evaluate models on data with labels: pass@1, pass@k and the mean reward (eval)."""

    essentials: ClassVar = (
        *("models", "data.prompt_dataset", "data.input_key", "data.label_key"),
        *("data.apply_chat_template", "data.prompt_max_len", "data.max_samples"),
        *("reward.remote_url", "reward.weights", "reward.model_name_or_path"),
        *("train.agent_func_path", "rollout.n_samples_per_prompt", "pass_k"),
        *("rollout.temperature", "rollout.top_p", "rollout.max_new_tokens"),
        *("vllm.num_engines", "vllm.tensor_parallel_size", "logger.print_samples"),
        "ckpt.output_dir",
    )
    example: ClassVar = (
        "Qwen/Qwen2.5-0.5B-Instruct ./output/grpo --eval_dataset problems.jsonl "
        "--input_key question --label_key answer --apply_chat_template --remote_rm_url reward.py"
    )
    shows: ClassVar = {"ds": (*WEIGHTS, "value_head_prefix")}
    operands: ClassVar = "models"

    models: str | None = option(
        None,
        "Models or run folders, with commas between; they may stand before all flags.",
        "pretrain",
        "model_name_or_path",
        needed="model",
        opens="runs",
    )
    pass_k: tuple[int, ...] | None = option(
        None, "The k of pass@k beside 1; unset: the samples of a prompt.", min_length=1
    )
    data: EvaluatedDataConfig = EvaluatedDataConfig(input_template=None, max_samples=100_000_000)
    rollout: EvaluatedRolloutConfig = EvaluatedRolloutConfig()
    vllm: EvaluatingVLLMConfig = EvaluatingVLLMConfig()
    ckpt: EvaluatedFolderConfig = EvaluatedFolderConfig()
    ds: DeepSpeedConfig = DeepSpeedConfig(zero_stage=0)
    logger: SampleLoggerConfig = SampleLoggerConfig()

    @property
    def model_names(self) -> list[str]:
        """Return every model and run folder that is named."""
        return names_in("runs", self.models or "")

    @property
    def ks(self) -> tuple[int, ...]:
        """Return the k of pass@k, without repetitions: 1 and those asked for."""
        return tuple(dict.fromkeys((1, *(self.pass_k or (self.rollout.n_samples_per_prompt,)))))

    @property
    def is_on_ray(self) -> bool:
        """Return False if everything runs in the process of the command."""
        return self.vllm.num_engines > 1

    @property
    def policy_path(self) -> str:
        """Return the model that is evaluated, of a config that names one."""
        assert self.models is not None, "checked by the configuration"
        return self.models

    def problems(self) -> Iterator[str]:
        """Report a k that the samples of a prompt are too few for."""
        yield from super().problems()
        output = self.ckpt.output_dir
        if output.endswith(".jsonl"):
            folder = output.removesuffix(".jsonl")
            yield f"--output_path names a folder: {output}. Type --output_path {folder}."
        engines, scores = self.vllm.num_engines, bool(self.reward.model_paths)
        without_effect = self.ds.load_in_4bit and engines > 0 and not scores
        yield from clashes(("--load_in_4bit", f"--vllm_num_engines {engines}", without_effect))
        num_samples = self.rollout.n_samples_per_prompt
        for k in self.ks:
            if not 1 <= k <= num_samples:
                yield (
                    f"--pass_k {k} cannot be estimated from the {num_samples} samples of a prompt. "
                    f"Type a number from 1 to {num_samples}, or --n_samples_per_prompt {max(k, 1)}."
                )
