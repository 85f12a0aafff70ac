"""Config of train_prm: a model that judges each step of a solution.

Field path = dotted flag; the names after the help text are the flat flag and what Hugging Face
users type. Whether labels are tokens or numbers is known to the data alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from openrlhf.config.base import option
from openrlhf.config.common import (
    AdamConfig,
    CheckpointConfig,
    EvalConfig,
    LoggerConfig,
    TrainConfig,
    logger_of,
)
from openrlhf.config.supervised import (
    ModelConfig,
    SupervisedConfig,
    SupervisedDataConfig,
)


class PRMModelConfig(ModelConfig):
    """`model.*` of train_prm."""

    placeholder_token: str | None = option(
        None, "The one token at which a step ends.", "placeholder_token"
    )
    reward_tokens: tuple[str, ...] | None = option(
        None,
        "Tokens a label may be, the good one first; labels that are numbers need exactly two. "
        "Unset: any token.",
        "reward_tokens",
    )


class PRMDataConfig(SupervisedDataConfig):
    """`data.*` of train_prm."""

    input_key: str = option("input", "Column of the text with its step ends.", "input_key")
    label_key: str = option("label", "Column of the labels, one for each step end.", "label_key")


class PRMConfig(SupervisedConfig):
    """Process reward model (train_prm)."""

    adam: AdamConfig = AdamConfig(lr=1e-6)
    model: PRMModelConfig = PRMModelConfig()
    data: PRMDataConfig = PRMDataConfig()
    train: TrainConfig = TrainConfig(micro_batch_size=1)
    eval: EvalConfig = EvalConfig(split="test")
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_prm")
    logger: LoggerConfig = logger_of("openrlhf_train_prm", "prm")

    def check_step_end_is_named(self) -> Iterator[str]:
        """Nothing else in a text says where a step ends."""
        if not self.model.placeholder_token:
            yield "No step end is named. Type --placeholder_token with a token of the tokenizer."

    def check_reward_tokens_can_differ(self) -> Iterator[str]:
        """Among one token there is nothing to choose, and a token written twice is a slip."""
        tokens = self.model.reward_tokens
        if tokens is None:
            return
        if len(tokens) < 2:
            yield (
                f"--reward_tokens needs at least two tokens: {' '.join(tokens)}. Type two, the "
                "good one first, or leave it out."
            )
        for token, count in Counter(tokens).items():
            if count > 1:
                yield f"--reward_tokens has {token} {count} times. Type each token once."

    def check_text_is_taken_as_it_is(self) -> Iterator[str]:
        """The step ends stand in the text already, so no template is put around it."""
        if self.data.apply_chat_template:
            yield (
                "--apply_chat_template is set, and train_prm takes --input_key as it is. Leave "
                "it out and write the template into the data."
            )
