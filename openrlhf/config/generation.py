"""Config of what makes and scores samples: the sections that RL training and an
evaluation share, and `GenerationRunConfig` with their rules.

Field path = dotted flag; names after the help text are flat flags and what Hugging Face users type.
"""

import re
from collections.abc import Iterator
from typing import Literal

from openrlhf.config.base import SCHEME, Base, is_blank, is_given, option, switch
from openrlhf.config.common import (
    DeepSpeedConfig,
    RanksConfig,
    RewardModelsConfig,
    RunConfig,
    StopConfig,
    TextDataConfig,
)

# `rewards.py` or `rewards.py:name`, but not `exec:./rewards.py`.
FUNCTION = re.compile(rf"(?!{SCHEME.pattern}).+\.py(:\w+)?$")


class PlacementConfig(Base):
    """Placement of a model."""

    num_nodes: int = option(1, "Nodes of the model.", "{model}num_nodes", ge=1)
    num_gpus_per_node: int | None = option(
        None,
        "GPUs (else CPU ranks) on each node; unset: as a colocated model, else all that are left.",
        "{model}num_gpus_per_node",
        ge=1,
    )


class FrozenConfig(PlacementConfig):
    """A model that is not trained."""

    offload: bool = switch("Keep its weights in CPU memory.", "ref_reward_offload")


class RewardSourceConfig(RewardModelsConfig, FrozenConfig):
    """`reward.*`: where rewards come from."""

    remote_url: str | None = option(
        None,
        "A .py file with reward_func, or functions as file.py:name with commas between, which are "
        "added; or URLs of servers.",
        "remote_rm_url",
        opens="code",
    )
    failure: str = option(
        "fail",
        "When a reward cannot be had: fail, drop_group, retry or retry(n).",
        "reward_failure",
        pattern=r"^(fail|drop_group|retry(\(0*[1-9]\d*\))?)$",
        forms="fail, drop_group, retry or 'retry(5)'",
    )
    max_dropped: float = option(
        0.01, "Share of prompts that drop_group may drop.", "reward_max_dropped", ge=0, lt=1
    )
    timeout_s: float = option(
        300.0, "Seconds for a reward call, with all tries at servers.", "reward_timeout_s", gt=0
    )
    try_timeout_s: float = option(
        60.0, "Seconds for one try at a server.", "reward_try_timeout_s", gt=0
    )
    memory_gib: float = option(
        8.0, "Memory in GiB of a process for reward functions.", "reward_memory_gib", gt=0
    )
    num_workers: int | None = option(
        None, "Such processes; unset: one a core, 4 to 16.", "reward_num_workers", ge=1
    )

    @property
    def functions(self) -> tuple[str, ...]:
        """Return the files, or functions in them, that the reward comes from; () of none."""
        return tuple(name for name in self._named if FUNCTION.match(name))

    @property
    def kind(self) -> Literal["none", "callable", "functions", "servers"]:
        """Return the kind of source that is named; a Python program passes a callable itself."""
        if is_blank(self.remote_url):
            return "none"
        if str(self.remote_url).startswith("callable:"):
            return "callable"
        return "functions" if self.functions else "servers"

    @property
    def _named(self) -> list[str]:
        names = (name.strip() for name in (self.remote_url or "").split(","))
        return [name for name in names if name]

    def problems(self) -> Iterator[str]:
        """Report functions next to servers, and weights that do not match the models."""
        if self.functions and len(self.functions) != len(self._named):
            yield (
                f"--remote_rm_url {self.remote_url} names functions and servers. Name functions "
                "alone: one of them can ask a server."
            )
        elif self.kind in ("none", "servers"):
            yield from super().problems()


class GenerationConfig(StopConfig):
    """`rollout.*`: how samples are made."""

    micro_batch_size: int = option(
        8, "Samples in one forward pass.", "micro_rollout_batch_size", gt=0
    )
    n_samples_per_prompt: int = option(1, "Samples of a prompt.", gt=0)
    max_new_tokens: int = option(
        1024,
        "Most tokens in a response.",
        "generate_max_len",
        "max_completion_length",
        "max_new_tokens",
        gt=0,
    )
    # Below 0.01, vLLM takes 0.01.
    temperature: float = option(1.0, "Sampling temperature.", ge=0.01, le=2)
    top_p: float = option(1.0, "Nucleus sampling.", gt=0, le=1)

    @property
    def token_choice(self) -> dict[str, float]:
        """Return temperature and top_p; the trainer's log-probs are those of all tokens."""
        return {"temperature": self.temperature, "top_p": self.top_p}


class EngineConfig(Base):
    """`vllm.*`: the engines that generate."""

    num_engines: int | None = option(
        None,
        "Engines; unset: one for each rank group of the actor (ppo-local: none); 0: the actor "
        "generates itself.",
        "vllm_num_engines",
        ge=0,
    )
    tensor_parallel_size: int = option(1, "GPUs of an engine.", "vllm_tensor_parallel_size", ge=1)
    enable_prefix_caching: bool = switch("Cache common prefixes between weight updates.")
    enforce_eager: bool = switch("No CUDA graphs.")
    gpu_memory_utilization: float = option(
        0.95, "Part of GPU memory an engine takes.", "vllm_gpu_memory_utilization", gt=0, le=1
    )
    timeout_s: float = option(
        300.0, "Seconds for the next token or sign of life of an engine.", "engine_timeout_s", gt=0
    )


class AgentsConfig(RanksConfig):
    """`train.*`: randomness, ranks and agents."""

    max_restarts: int = option(
        3, "Times in an hour that lost processes of a role are started again.", ge=0
    )
    node_wait_s: float = option(
        300.0, "Seconds to wait for a node in place of one that is gone.", ge=0
    )
    restart_timeout_s: float = option(
        1800.0,
        "Seconds for a rank to start; in place of a lost process, for a model to load too.",
        gt=0,
    )
    async_num_tasks: int = option(128, "Agents of an engine.", env="OPENRLHF_ASYNC_NUM_TASKS", gt=0)
    agent_func_path: str | None = option(
        None, "A .py file with AgentExecutor, or file.py:name of an environment.", opens="code"
    )
    agent_timeout_s: float = option(3600.0, "Seconds for an agent's whole episode.", gt=0)


class PromptDataConfig(TextDataConfig):
    """`data.*`: where prompts come from."""

    prompt_dataset: str | None = option(
        None,
        "Prompts: hub ids or paths, with commas between.",
        "prompt_data",
        "dataset_name",
        needed="prompt data",
        opens="data",
    )
    prompt_probs: str | None = option(
        None, "Mixing probabilities, with commas; unset: one after the other.", "prompt_data_probs"
    )
    prompt_split: str = option("train", "Split of the prompts.")
    max_len: int | None = option(
        None, "Most tokens of prompt + response; unset: both limits.", gt=0
    )
    label_key: str | None = option(None, "Column handed to the reward function.")


class GenerationRunConfig(RunConfig):
    """Top of every command's tree whose samples are scored. What only training has is off."""

    reward: RewardSourceConfig = RewardSourceConfig()
    rollout: GenerationConfig = GenerationConfig()
    vllm: EngineConfig = EngineConfig()
    train: AgentsConfig = AgentsConfig()
    data: PromptDataConfig = PromptDataConfig(input_template=None, max_samples=100_000_000)
    ds: DeepSpeedConfig = DeepSpeedConfig()

    @property
    def policy_path(self) -> str:
        """Return the model that generates."""
        raise NotImplementedError

    @property
    def critic_source(self) -> str | None:
        """Return the model that a critic starts from; None without a critic."""
        return None

    @property
    def named_models(self) -> list[str]:
        """Return the paths of policy, critic and reward models, each once."""
        paths = (self.policy_path, self.critic_source, *self.reward.model_paths)
        return list(dict.fromkeys(filter(None, paths)))

    @property
    def reward_roles(self) -> dict[str, str]:
        """Return role and path of each local reward model: "reward", or "reward1" and on of
        several.
        """
        paths = self.reward.model_paths
        if len(paths) == 1:
            return {"reward": paths[0]}
        return {f"reward{k}": path for k, path in enumerate(paths, start=1)}

    @property
    def placed(self) -> dict[str, PlacementConfig]:
        """Return the section of every model that has ranks, by role."""
        return dict.fromkeys(self.reward_roles, self.reward)

    def colocated_groups(self) -> Iterator[tuple[str, ...]]:
        """Yield the sections of models that share GPUs; the first of them sets the shape."""
        yield from ()

    @property
    def colocates_all(self) -> bool:
        """Return True if all models and engines share the GPUs."""
        return False

    @property
    def mixes_versions(self) -> bool:
        """Return True if weights may change under a running sample."""
        return False

    @property
    def engines_share_devices(self) -> bool:
        """Return True if models and engines take turns on the same devices."""
        return False

    @property
    def total_len(self) -> int:
        """Return the most tokens of prompt and response together."""
        return self.data.max_len or self.data.prompt_max_len + self.rollout.max_new_tokens

    @property
    def scoring_budget(self) -> int | None:
        """Return the tokens of a forward pass; None: passes are counted in samples."""
        return None

    def derived(self) -> Iterator[tuple[str, object]]:
        """Fill in room for the prompt."""
        yield from super().derived()
        if self.data.max_len is not None:
            yield from self._shares_of_total_length(self.data.max_len)

    def _shares_of_total_length(self, total: int) -> Iterator[tuple[str, object]]:
        has_prompt = is_given(self, "data.prompt_max_len")
        if not is_given(self, "rollout.max_new_tokens"):
            room = total - self.data.prompt_max_len if has_prompt else total // 2
            yield "rollout.max_new_tokens", max(1, min(self.rollout.max_new_tokens, room))
        if not has_prompt:
            yield "data.prompt_max_len", max(1, total - self.rollout.max_new_tokens)

    def problems(self) -> Iterator[str]:
        """Report problems of rewards and lengths."""
        yield from super().problems()
        yield from self._reward_problems()
        total, wanted = self.data.max_len, self.data.prompt_max_len + self.rollout.max_new_tokens
        if total is not None and total < wanted:
            yield (
                f"--max_len {total} is less than --prompt_max_len {self.data.prompt_max_len} + "
                f"--generate_max_len {self.rollout.max_new_tokens}. Type --max_len {wanted}."
            )

    def _reward_problems(self) -> Iterator[str]:
        sources = {
            "--reward_pretrain": self.reward.model_name_or_path,
            "--remote_rm_url": self.reward.remote_url,
            "--agent_func_path": self.train.agent_func_path,
        }
        named = [f"{flag} {source}" for flag, source in sources.items() if not is_blank(source)]
        if not named:
            yield (
                "There is no reward. Type --reward_pretrain with a model, "
                "--remote_rm_url with a .py file or a URL, or --agent_func_path."
            )
        if len(named) > 1:
            yield (
                f"{' and '.join(named)} both give rewards. Leave one out (--critic_pretrain names "
                "the model that a critic starts from)."
            )
        yield from self.reward.problems()
