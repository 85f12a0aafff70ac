"""Config of serve_rm: reward models behind HTTP.

Field path = dotted flag; the names after the help text are the flat flag and what Hugging Face
users type. The token is no field: it comes from a file or the environment, and is written nowhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Literal

from openrlhf.config.base import Base, option, switch
from openrlhf.config.checks import is_blank
from openrlhf.config.common import LoadConfig
from openrlhf.config.run import CommandConfig

MIB = 1 << 20


class ServedRewardConfig(Base):
    """`reward.*`: the models that score."""

    model_name_or_path: str | None = option(
        None,
        "Reward model: hub id or path; with commas several, whose weighted scores are added.",
        "reward_pretrain",
        "model_name_or_path",
        opens="models",
    )
    weights: tuple[float, ...] | None = option(
        None, "Weights of several reward models; unset: 1 each.", "reward_weights"
    )
    normalize_enable: bool = switch(
        "(score - mean) / std, both from the model's config.", "normalize_reward"
    )

    @property
    def model_paths(self) -> tuple[str, ...]:
        """Every model named."""
        return tuple(path.strip() for path in (self.model_name_or_path or "").split(","))

    @property
    def model_weights(self) -> tuple[float, ...]:
        """The weight of every model."""
        return self.weights or (1.0,) * len(self.model_paths)


class ServedTextConfig(Base):
    """`data.*` of serve_rm: the texts that are scored."""

    max_len: int = option(2048, "Most tokens in a text.", "max_len", "max_length", gt=0)
    overlong_texts: Literal["error", "truncate_left", "truncate_right"] = option(
        "error",
        "Texts over --max_len: refused, or cut and marked in the answer.",
        "overlong_texts",
    )
    disable_fast_tokenizer: bool = switch(
        "Use the slow tokenizer.",
        "disable_fast_tokenizer",
        unused="with transformers 5: all are fast",
    )


class ServedWeightsConfig(LoadConfig):
    """`ds.*` of serve_rm: how weights are loaded."""

    packing_samples: bool = switch(
        "Accepted for old commands: texts are packed on every device.", "packing_samples"
    )
    value_head_prefix: str = option(
        "score",
        "Attribute name of the scalar head; the model's own config wins.",
        "value_head_prefix",
        "value_prefix_head",
    )


class ServerLimitsConfig(Base):
    """`limits.*`: what the server takes from others."""

    max_body_mib: float = option(16, "Largest request, in MiB.", gt=0)
    max_queries: int = option(4096, "Most texts in a request.", gt=0)
    max_chars: int = option(1_000_000, "Most characters in a text.", gt=0)
    max_requests: int = option(512, "Most requests at a time; more are sent away (503).", gt=0)
    max_connections: int = option(1024, "Most open connections; more are sent away (503).", gt=0)
    max_tokens_per_forward: int = option(16384, "Most tokens in a forward pass.", gt=0)
    receive_timeout_s: float = option(20, "Seconds for the body of a request to arrive.", gt=0)
    stop_timeout_s: float = option(60, "Seconds to answer what is in flight when stopped.", gt=0)

    @property
    def max_body_bytes(self) -> int:
        """Largest request, in bytes."""
        return int(self.max_body_mib * MIB)


class ServeRewardConfig(CommandConfig):
    """A reward model behind HTTP (serve_rm)."""

    host: str = option(
        "127.0.0.1",
        "Address to listen on. Others than this machine's loopback need a token: "
        "--token_file, or OPENRLHF_REWARD_TOKEN in the environment.",
    )
    port: int = option(5000, "Port; 0: a free one, which is said.", ge=0, le=65535)
    token_file: str | None = option(
        None, "File with the token that clients must send.", opens="file"
    )
    batch_size: int | None = option(
        None,
        "Most texts in a forward pass; unset: as many as --limits.max_tokens_per_forward allows.",
        gt=0,
    )
    reward: ServedRewardConfig = ServedRewardConfig()
    data: ServedTextConfig = ServedTextConfig()
    ds: ServedWeightsConfig = ServedWeightsConfig()
    limits: ServerLimitsConfig = ServerLimitsConfig()

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may mean any address
            return False

    def check_models_are_named(self) -> Iterator[str]:
        """There is no default model."""
        if any(is_blank(path) for path in self.reward.model_paths):
            yield "No reward model is named. Type --reward_pretrain with a hub id or a path."

    def check_models_differ(self) -> Iterator[str]:
        """The same model twice is a slip."""
        paths = self.reward.model_paths
        for path in dict.fromkeys(paths):
            if path and paths.count(path) > 1:
                yield f"--reward_pretrain names {path} {paths.count(path)} times. Name it once."

    def check_weights_match_the_models(self) -> Iterator[str]:
        """One weight for each model."""
        weights, count = self.reward.weights, len(self.reward.model_paths)
        if weights is not None and len(weights) != count:
            yield (
                f"--reward_weights has {len(weights)} values for {count} models of "
                f"--reward_pretrain. Type {count}."
            )

    def check_host_is_named(self) -> Iterator[str]:
        """An empty host would mean every address."""
        if is_blank(self.host):
            yield "--host is empty. Type --host 127.0.0.1, or another address of this machine."
