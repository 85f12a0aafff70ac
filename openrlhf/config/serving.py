"""Config of the commands that use a trained model: batch_inference, lora_combiner, chat.

Field path = dotted flag; the names after the help text are the flat flag and what Hugging Face
users type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator

from openrlhf.config.base import Base, expand_home, option, switch
from openrlhf.config.checks import is_blank
from openrlhf.config.common import DeepSpeedConfig, LoadConfig, PrecisionConfig
from openrlhf.config.run import CommandConfig
from openrlhf.config.supervised import AnsweredDataConfig


class ServedModelConfig(Base):
    """`model.*`: the model that is used."""

    model_name_or_path: str | None = option(
        None, "Model: hub id or path.", "pretrain", "model_name_or_path", opens="model"
    )


class SamplingConfig(Base):
    """`rollout.*`: how tokens are chosen."""

    greedy_sampling: bool = switch("Always the likeliest token.", "greedy_sampling")
    top_p: float = option(1.0, "Nucleus sampling.", "top_p", gt=0, le=1)
    temperature: float = option(1.0, "Sampling temperature; 0: greedy.", "temperature", ge=0)
    repetition_penalty: float = option(
        1.0, "Above 1: tokens that were there are less likely.", "repetition_penalty", gt=0
    )

    @property
    def is_greedy(self) -> bool:
        """Whether chance plays no part."""
        return self.greedy_sampling or self.temperature == 0


class CSFTConfig(Base):
    """`csft.*`: prompts for a model trained by conditional SFT."""

    enable: bool = switch("Append the prompt that asks for a reward.", "enable_csft")
    prompt: str = option(
        "<rm_score>: 5.00",
        "That prompt; with {input} in it, a text around the prompt instead, as --reward_template.",
        "csft_prompt",
        only_with="csft.enable",
    )


class InferenceDataConfig(AnsweredDataConfig):
    """`data.*` of batch_inference."""

    output_key: str = option("output", "Column of the answer.", "output_key")
    input_template: str | None = option(
        None,
        "Text around a plain prompt, with {} for it.",
        "input_template",
        only_with="!data.apply_chat_template",
    )
    max_samples: int = option(
        100_000_000, "Most rows of each data set and of all together.", "max_samples", gt=0
    )
    prompt_max_len: int = option(1024, "Most tokens in a prompt.", "prompt_max_len", gt=0)
    overlong_prompts: Literal["filter", "truncate_left", "error"] = option(
        "filter",
        "Prompts over --prompt_max_len: counted and left out, cut, or refused.",
        "overlong_prompts",
    )


class InferenceRolloutConfig(SamplingConfig):
    """`rollout.*` of batch_inference."""

    max_new_tokens: int = option(1024, "Most tokens in an answer.", "max_new_tokens", gt=0)
    best_of_n: int = option(1, "Answers to each prompt.", "best_of_n", gt=0)
    batch_size: int = option(2048, "Prompts in a slice of --iter.", "rollout_batch_size", gt=0)
    iter: int | None = option(
        None, "Answer one slice of the prompts, from 0; unset: all.", "iter", ge=0
    )


class InferenceVLLMConfig(Base):
    """`vllm.*` of batch_inference."""

    tensor_parallel_size: int | None = option(
        None, "GPUs of an engine; unset: all of them, or one a rank.", "tp_size", ge=1
    )
    max_num_seqs: int = option(256, "Most sequences at a time.", "max_num_seqs", gt=0)
    enable_prefix_caching: bool = switch("Cache common prefixes.", "enable_prefix_caching")
    gpu_memory_utilization: float = option(
        0.95, "Part of GPU memory an engine takes.", "vllm_gpu_memory_utilization", gt=0, le=1
    )


class InferenceRewardConfig(Base):
    """`reward.*` of batch_inference: what becomes of the scores."""

    post_processor: Literal["rs", "csft", "iter_dpo"] | None = option(
        None,
        "Keep the best answer (rs), the best and the worst (iter_dpo), or write the score into "
        "the prompt (csft). `null`: all answers with their scores.",
        "post_processor",
    )
    normalize_enable: bool = switch(
        "csft: z-scores instead of scores.",
        "normalize_reward",
        only_with="reward.post_processor=csft",
    )
    template: str | None = option(
        None,
        "csft: text with {input} and {reward}; unset: `{input} <rm_score>: {reward} `.",
        "reward_template",
        only_with="reward.post_processor=csft",
    )


class InferenceWeightsConfig(LoadConfig):
    """`ds.*` of batch_inference."""

    zero_stage: Literal[0, 1, 2, 3] = option(0, "ZeRO stage; 3 shards the weights.", "zero_stage")
    value_head_prefix: str = option(
        "score",
        "Attribute name of the scalar head; the model's own config wins.",
        "value_head_prefix",
        "value_prefix_head",
    )

    def as_deepspeed(self) -> DeepSpeedConfig:
        """The same among the settings of training, for code that serves both."""
        return DeepSpeedConfig(**self.model_dump())


class BatchInferenceConfig(CommandConfig):
    """Answer prompts or score answers, row by row (batch_inference)."""

    local_rank: int = option(-1, "Set by launchers; wins over LOCAL_RANK.")
    eval_task: Literal["generate_vllm", "generate", "rm"] | None = option(
        None, "Answer with vLLM, answer with Hugging Face, or score with a reward model."
    )
    output_path: str | None = option(None, "The .jsonl file to write.", opens="output_file")
    micro_batch_size: int = option(16, "Rows in a forward pass of one device.", gt=0)
    seed: int = option(1234, "Seed of everything random.", ge=0, lt=2**32)
    full_determinism: bool = switch("Deterministic kernels only.")
    model: ServedModelConfig = ServedModelConfig()
    data: InferenceDataConfig = InferenceDataConfig()
    rollout: InferenceRolloutConfig = InferenceRolloutConfig()
    vllm: InferenceVLLMConfig = InferenceVLLMConfig()
    reward: InferenceRewardConfig = InferenceRewardConfig()
    csft: CSFTConfig = CSFTConfig()
    ds: InferenceWeightsConfig = InferenceWeightsConfig()

    _home = field_validator("output_path")(expand_home)

    def check_what_is_needed_is_named(self) -> Iterator[str]:
        """Task, model, rows and output have no defaults."""
        if self.eval_task is None:
            yield "No task is named. Type --eval_task generate_vllm, generate or rm."
        if is_blank(self.model.model_name_or_path):
            yield "No model is named. Type --pretrain with a hub id or a path."
        if is_blank(self.data.dataset):
            yield "No data is named. Type --dataset with a hub id or a path."
        if is_blank(self.output_path):
            yield "No output is named. Type --output_path with the .jsonl file to write."

    def check_post_processor_has_rewards(self) -> Iterator[str]:
        """Answers are sorted by their scores."""
        name = self.reward.post_processor
        if name is not None and self.eval_task in ("generate_vllm", "generate"):
            yield (
                f"--post_processor {name} needs rewards, and --eval_task {self.eval_task} makes "
                "none. Leave it out, and type it with --eval_task rm on the output."
            )

    def check_vllm_quantizes_nothing(self) -> Iterator[str]:
        """The base in four bits is bitsandbytes' work in the Hugging Face model."""
        if self.ds.load_in_4bit and self.eval_task == "generate_vllm":
            yield "--load_in_4bit does not reach vLLM. Type --eval_task generate, or leave it out."

    def check_several_answers_can_differ(self) -> Iterator[str]:
        """Without chance every answer is the same."""
        count = self.rollout.best_of_n
        if count > 1 and self.rollout.is_greedy:
            cause = "--greedy_sampling" if self.rollout.greedy_sampling else "--temperature 0"
            yield f"--best_of_n {count} with {cause} gives one answer {count} times. Leave one out."

    def check_reward_template_has_its_places(self) -> Iterator[str]:
        """Prompt and reward are both written into it."""
        template = self.reward.template
        for name in ("{input}", "{reward}"):
            if template is not None and name not in template:
                yield f"--reward_template has no {name}: {template}. Write {name} into it."


class LoraCombinerConfig(CommandConfig):
    """Merge an adapter into its base model (lora_combiner)."""

    model_path: str | None = option(None, "Base model: hub id or path.", opens="model")
    lora_path: str | None = option(None, "Folder of the adapter.", opens="folder")
    output_path: str | None = option(None, "Folder to write the merged model to.", opens="output")
    is_rm: bool = switch("The model is a reward model.")
    ds: PrecisionConfig = PrecisionConfig()

    _home = field_validator("output_path")(expand_home)

    def check_models_are_named(self) -> Iterator[str]:
        """Base, adapter and output have no defaults."""
        if is_blank(self.model_path):
            yield "No base model is named. Type --model_path with a hub id or a path."
        if is_blank(self.lora_path):
            yield "No adapter is named. Type --lora_path with its folder."
        if is_blank(self.output_path):
            yield "No output is named. Type --output_path with the folder to write."

    def check_output_is_another_folder(self) -> Iterator[str]:
        """The merged model does not overwrite what it is made of."""
        for name, path in (("model_path", self.model_path), ("lora_path", self.lora_path)):
            if path and self.output_path and path.rstrip("/") == self.output_path.rstrip("/"):
                yield f"--output_path is --{name}: {path}. Type another folder."


class ChatDataConfig(Base):
    """`data.*` of interactive_chat."""

    max_len: int = option(4096, "Most tokens in a conversation.", "max_len", "max_length", gt=0)
    input_template: str | None = option(
        "User: {}\nAssistant: ",
        "Text around a line without a chat template.",
        "input_template",
        only_with="!data.apply_chat_template",
    )
    apply_chat_template: bool = switch("Use the tokenizer's chat template.", "apply_chat_template")
    tokenizer_chat_template: str | None = option(
        None, "A chat template to use instead.", "tokenizer_chat_template", opens="template"
    )
    disable_fast_tokenizer: bool = switch(
        "Use the slow tokenizer.",
        "disable_fast_tokenizer",
        unused="with transformers 5: all are fast",
    )
    ta_prompt: str | None = option(
        None, "File whose text stands before the conversation.", "ta_prompt", opens="file"
    )


class ChatConfig(CommandConfig):
    """Talk to a model in the terminal (interactive_chat)."""

    model: ServedModelConfig = ServedModelConfig()
    data: ChatDataConfig = ChatDataConfig()
    rollout: SamplingConfig = SamplingConfig(top_p=0.9, temperature=0.2, repetition_penalty=1.2)
    csft: CSFTConfig = CSFTConfig()
    ds: LoadConfig = LoadConfig()

    def check_model_is_named(self) -> Iterator[str]:
        """There is no default model."""
        if is_blank(self.model.model_name_or_path):
            yield "No model is named. Type --pretrain with a hub id or a path."
