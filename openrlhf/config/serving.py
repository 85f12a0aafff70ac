"""Config of the commands that use a trained model: infer, serve-rm, merge-lora, chat.

Field path = dotted flag; the names after the help text are the flat flag and what Hugging Face
users type. The token of serve-rm is no field: it comes from a file or the environment, and is
written nowhere.
"""

import ipaddress
from collections.abc import Iterator
from typing import ClassVar, Literal

from openrlhf.config.base import Base, CommandConfig, option, switch
from openrlhf.config.common import (
    DeepSpeedConfig,
    ModelConfig,
    RewardModelsConfig,
    StopConfig,
    TokenChoiceConfig,
    clashes,
)
from openrlhf.config.supervised import ANSWERED, IMAGES, DatasetConfig

MIB = 1 << 20
# Leaves of `ds.*` of commands that do not train.
WEIGHTS = ("param_dtype", "attn_implementation", "load_in_4bit", "experts_implementation")


class SamplingConfig(TokenChoiceConfig, StopConfig):
    """`rollout.*`: how tokens are chosen."""

    top_p: float = option(1.0, "Nucleus sampling.", gt=0, le=1)
    temperature: float = option(
        1.0, "Sampling temperature; 0: greedy.", "temperature", "eval_temperature", ge=0, le=2
    )
    max_new_tokens: int = option(
        1024,
        "Most tokens in a response.",
        "max_new_tokens",
        "generate_max_len",
        "max_completion_length",
        gt=0,
    )
    best_of_n: int = option(
        1,
        "Answers to each prompt.",
        "best_of_n",
        "n_samples_per_prompt",
        "eval_n_samples_per_prompt",
        gt=0,
    )
    batch_size: int = option(2048, "Prompts in a slice of --iter.", "rollout_batch_size", gt=0)
    iter: int | None = option(None, "Answer one slice of the prompts, from 0; unset: all.", ge=0)

    @property
    def is_greedy(self) -> bool:
        """Return True if chance plays no part."""
        return self.token_choice["temperature"] == 0


class InferenceDataConfig(DatasetConfig):
    """`data.*` of infer."""

    dataset: str | None = option(
        None,
        "Rows: hub ids or paths, with commas between.",
        "dataset",
        "dataset_name",
        "eval_dataset",
        "prompt_data",
        needed="data set",
        opens="data",
    )
    dataset_split: str = option(
        "train", "Split of the rows.", "dataset_split", "eval_split", "prompt_split"
    )


class CSFTConfig(Base):
    """`csft.*`: prompts for a model trained by conditional SFT."""

    enable: bool = switch("Append the prompt that asks for a reward.", "enable_csft")
    prompt: str = option(
        "<rm_score>: 5.00", "That prompt, or with {input}, a text around it.", "csft_prompt"
    )


class InferenceVLLMConfig(Base):
    """`vllm.*` of infer."""

    tensor_parallel_size: int | None = option(
        None,
        "GPUs of an engine; unset: as many as can share its heads, or one a rank.",
        "tp_size",
        "vllm_tensor_parallel_size",
        ge=1,
    )
    max_num_seqs: int = option(256, "Most sequences at a time.", gt=0)
    enable_prefix_caching: bool = switch("Cache common prefixes.")
    gpu_memory_utilization: float = option(
        0.95, "Part of GPU memory an engine takes.", "vllm_gpu_memory_utilization", gt=0, le=1
    )


class InferenceRewardConfig(Base):
    """`reward.*` of infer: what becomes of the scores."""

    post_processor: Literal["rs", "csft", "iter_dpo"] | None = option(
        None,
        "Keep the best (rs), best and worst (iter_dpo); score into the prompt (csft); null: all.",
    )
    normalize_enable: bool = switch("csft: z-scores instead of scores.", "normalize_reward")
    template: str | None = option(None, "csft: text with {input} and {reward}.", "reward_template")


class BatchInferenceConfig(CommandConfig):
    """Generate responses or score them, row by row (openrlhf infer)."""

    shows: ClassVar = {
        "ds": (*WEIGHTS, "value_head_prefix", "zero_stage"),
        "model": ("model_name_or_path",),
        "data": (*ANSWERED, *IMAGES, "prompt_max_len", "overlong_prompts"),
    }

    local_rank: int = option(-1, "Set by launchers; wins over LOCAL_RANK.")
    eval_task: Literal["generate_vllm", "generate", "rm"] | None = option(
        None, "Answer with vLLM or Hugging Face, or score with a reward model.", needed="task"
    )
    output_path: str | None = option(
        None, ".jsonl to write.", "output_path", "save_path", needed="output", opens="output_file"
    )
    micro_batch_size: int = option(16, "Rows in a forward pass of one device.", gt=0)
    seed: int = option(1234, "Seed of everything random.", ge=0, lt=2**32)
    full_determinism: bool = switch("Deterministic kernels only.")
    model: ModelConfig = ModelConfig()
    data: InferenceDataConfig = InferenceDataConfig(
        input_template=None, output_key="output", max_samples=100_000_000
    )
    rollout: SamplingConfig = SamplingConfig()
    vllm: InferenceVLLMConfig = InferenceVLLMConfig()
    reward: InferenceRewardConfig = InferenceRewardConfig()
    csft: CSFTConfig = CSFTConfig()
    ds: DeepSpeedConfig = DeepSpeedConfig(zero_stage=0)

    def problems(self) -> Iterator[str]:
        """Report settings that the task does not have, and responses or templates without a use."""
        yield from super().problems()
        task, count = f"--eval_task {self.eval_task}", self.rollout.best_of_n
        answers = self.eval_task in ("generate_vllm", "generate")
        in_vllm = self.eval_task == "generate_vllm"
        post_processor = self.reward.post_processor
        yield from clashes(
            (f"--post_processor {post_processor}", task, answers and post_processor is not None),
            ("--load_in_4bit", task, self.ds.load_in_4bit and in_vllm),
            (f"--best_of_n {count}", "greedy sampling", count > 1 and self.rollout.is_greedy),
        )
        for name in ("{input}", "{reward}"):
            if self.reward.template is not None and name not in self.reward.template:
                yield f"--reward_template has no {name}. Write {name} into it."


class LoraCombinerConfig(CommandConfig):
    """Merge an adapter into its base model (openrlhf merge-lora)."""

    shows: ClassVar = {"ds": ("param_dtype",)}

    model_path: str | None = option(None, "Base model.", needed="base model", opens="model")
    lora_path: str | None = option(None, "Folder of the adapter.", needed="adapter", opens="folder")
    output_path: str | None = option(
        None, "Folder of the merged model.", needed="output", opens="output"
    )
    is_rm: bool = switch("The model is a reward model.")
    ds: DeepSpeedConfig = DeepSpeedConfig()

    def problems(self) -> Iterator[str]:
        """Report an output path that equals an input path."""
        yield from super().problems()
        for name, path in (("model_path", self.model_path), ("lora_path", self.lora_path)):
            if path and self.output_path and path.rstrip("/") == self.output_path.rstrip("/"):
                yield f"--output_path is --{name}: {path}. Type another folder."


class ChatConfig(CommandConfig):
    """Talk to a model in the terminal (openrlhf chat)."""

    shows: ClassVar = {
        "model": ("model_name_or_path",),
        "data": (
            *("apply_chat_template", "tokenizer_chat_template", "chat_template_kwargs"),
            *("input_template", "max_len", "ta_prompt", "image_min_pixels", "image_max_pixels"),
        ),
        "rollout": (
            *("greedy_sampling", "top_p", "temperature", "top_k", "min_p", "repetition_penalty"),
            *("stop", "stop_token_ids"),
        ),
        "ds": WEIGHTS,
    }

    image: str | None = option(
        None, "Images of the first line: files, with commas between; /image FILE adds others."
    )
    model: ModelConfig = ModelConfig()
    data: DatasetConfig = DatasetConfig(max_len=4096)
    rollout: SamplingConfig = SamplingConfig(top_p=0.9, temperature=0.2, repetition_penalty=1.2)
    csft: CSFTConfig = CSFTConfig()
    ds: DeepSpeedConfig = DeepSpeedConfig()


class ServedRewardConfig(RewardModelsConfig):
    """`reward.*`: the models that score."""

    model_name_or_path: str | None = option(
        None,
        "Reward model: hub id or path; with commas several, whose weighted scores are added.",
        "reward_pretrain",
        "model_name_or_path",
        needed="reward model",
        opens="models",
    )


class ServerLimitsConfig(Base):
    """`limits.*`: what the server takes from others."""

    max_body_mib: float = option(16, "Largest request, in MiB.", flat=False, gt=0)
    max_queries: int = option(4096, "Most texts in a request.", flat=False, gt=0)
    max_chars: int = option(1_000_000, "Most characters in a text.", flat=False, gt=0)
    max_requests: int = option(512, "Most requests at a time; else 503.", flat=False, gt=0)
    max_connections: int = option(1024, "Most open connections; else 503.", flat=False, gt=0)
    max_connections_per_address: int = option(
        256, "Most open connections of one address; others are hung up on.", flat=False, gt=0
    )
    max_tokens_per_forward: int = option(16384, "Most tokens in a forward pass.", flat=False, gt=0)
    receive_timeout_s: float = option(
        20, "Seconds for headers to arrive, and for a body.", flat=False, gt=0
    )
    stop_timeout_s: float = option(60, "Seconds to respond to the last requests.", flat=False, gt=0)

    @property
    def max_body_bytes(self) -> int:
        """Return the largest request in bytes."""
        return int(self.max_body_mib * MIB)


class ServeRewardConfig(CommandConfig):
    """A reward model behind HTTP (openrlhf serve-rm)."""

    shows: ClassVar = {
        "data": ("max_len", "overlong_texts"),
        "ds": (*WEIGHTS, "value_head_prefix", "packing_samples"),
    }

    host: str = option(
        "127.0.0.1", "Address; another than loopback needs --token_file or OPENRLHF_REWARD_TOKEN."
    )
    port: int = option(5000, "Port; 0: a free one, which is said.", ge=0, le=65535)
    token_file: str | None = option(None, "File with the token of clients.", opens="file")
    batch_size: int | None = option(None, "Most texts in a forward pass; unset: by tokens.", gt=0)
    reward: ServedRewardConfig = ServedRewardConfig()
    data: DatasetConfig = DatasetConfig()
    ds: DeepSpeedConfig = DeepSpeedConfig()
    limits: ServerLimitsConfig = ServerLimitsConfig()

    def problems(self) -> Iterator[str]:
        """Report weights that do not match the models."""
        yield from super().problems()
        yield from self.reward.problems()


def is_loopback(host: str) -> bool:
    """Return True if a host is this very machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may mean any address
        return False


class PushConfig(CommandConfig):
    """A trained model to the Hugging Face hub (push MODEL --push_to_hub org/name)."""

    operands: ClassVar = "model"

    model: str | None = option(
        None,
        "Folder of a model or of a run; it may stand before all flags.",
        needed="model",
        opens="folder",
    )
    push_to_hub: str | None = option(
        None,
        "Repository to write: org/name; a new one is private.",
        "push_to_hub",
        "hub_model_id",
        needed="repository",
    )


class DoctorConfig(CommandConfig):
    """Find faults of this machine, and of its Ray cluster, that would end a run (doctor)."""

    folders: tuple[str, ...] = option(
        (".",),
        "Folders of runs, models and data, which every node must see; with commas between.",
        "folders",
    )


class ReplayConfig(CommandConfig):
    """A step of an RL run again (replay)."""

    operands: ClassVar = "run"

    run: str | None = option(
        None, "Folder of the run; it may stand before all flags.", needed="run", opens="folder"
    )
    step: int = option(1, "Step that was kept: by --dump, or because it failed.", ge=1)


class ReportConfig(CommandConfig):
    """Curves, hints, samples and settings of runs as one HTML page (report RUN [RUN...])."""

    operands: ClassVar = "runs"

    runs: tuple[str, ...] = option((), "Folders of the runs; they may stand before all flags.")
    output_path: str | None = option(
        None,
        "HTML file to write, with its picture beside it; unset: report.html in the folder of the "
        "run, or here for several.",
        "output",
        opens="output_file",
    )
    serve: bool = switch("Show the page at an address of this machine, with all samples.")
    port: int = option(8008, "Port of --serve; 0: a free one, which is said.", ge=0, le=65535)

    def problems(self) -> Iterator[str]:
        """Report a missing setting, and a file that is not written."""
        yield from super().problems()
        if not self.runs:
            yield "No run is named. Type openrlhf report RUN, a folder named by --save_path."
        yield from clashes(("--output", "--serve", self.serve and self.output_path is not None))
