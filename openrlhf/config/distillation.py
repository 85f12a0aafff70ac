"""Config of train_kd: a student learns the distributions of a teacher.

Field path = dotted flag; the names after the help text are the flat flag and what Hugging Face
users type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from openrlhf.config.base import Base, is_given, option, switch
from openrlhf.config.checks import is_blank
from openrlhf.config.common import CheckpointConfig, EvalConfig, LoggerConfig, logger_of
from openrlhf.config.notices import Caution
from openrlhf.config.supervised import (
    PromptedDataConfig,
    SFTModelConfig,
    SupervisedConfig,
)


class TeacherConfig(Base):
    """`teacher.*`: the model that is learnt from; it has the student's vocabulary."""

    model_name_or_path: str | None = option(
        None,
        "Teacher model: hub id or path.",
        "teacher_model",
        "teacher_model_name_or_path",
        opens="model",
    )
    offload: bool = switch("Keep its weights in CPU memory.", "teacher_offload")


class KDLossConfig(Base):
    """`kd.*`: what is learnt from the teacher, and on whose answers."""

    coef: float = option(
        0.4,
        "Weight of distillation; the rest is the language-model loss. Unset with --kd_on_policy: "
        "1.",
        "kd_coef",
        ge=0,
        le=1,
    )
    divergence: Literal["forward", "reverse", "jsd"] = option(
        "forward",
        "KL(teacher, student), KL(student, teacher), or Jensen-Shannon.",
        "kd_divergence",
    )
    on_policy_enable: bool = switch(
        "The student answers the prompts, and the teacher scores its answers.", "kd_on_policy"
    )
    max_new_tokens: int = option(
        512,
        "Most tokens in an answer of the student; unset: at most half of --max_len.",
        "kd_max_new_tokens",
        gt=0,
        only_with="kd.on_policy_enable",
    )
    temperature: float = option(
        1.0,
        "Temperature at which the student answers.",
        "temperature",
        gt=0,
        only_with="kd.on_policy_enable",
    )


class KDConfig(SupervisedConfig):
    """Knowledge distillation (train_kd)."""

    model: SFTModelConfig = SFTModelConfig()
    teacher: TeacherConfig = TeacherConfig()
    kd: KDLossConfig = KDLossConfig()
    data: PromptedDataConfig = PromptedDataConfig(output_key="output")
    eval: EvalConfig = EvalConfig(split="test")
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_kd")
    logger: LoggerConfig = logger_of("openrlhf_train_sft", "sft")

    def derived(self) -> Iterator[tuple[str, object]]:
        """Defaults that follow: no language-model loss on own answers, room for the prompt."""
        yield from super().derived()
        if not self.kd.on_policy_enable:
            return
        if not is_given(self, "kd.coef"):
            yield "kd.coef", 1.0
        if not is_given(self, "kd.max_new_tokens"):
            room = max(1, self.data.max_len // 2)
            yield "kd.max_new_tokens", min(self.kd.max_new_tokens, room)

    def check_teacher_is_named(self) -> Iterator[str]:
        """There is no default teacher."""
        if is_blank(self.teacher.model_name_or_path):
            yield "No teacher is named. Type --teacher_model with a hub id or a path."

    def check_pretrain_mode_is_plain_text(self) -> Iterator[str]:
        """Text as it is has no conversations, and no prompts to answer."""
        unfit = {
            "apply_chat_template": self.data.apply_chat_template,
            "kd_on_policy": self.kd.on_policy_enable,
        }
        for name, is_set in unfit.items():
            if self.model.pretrain_mode_enable and is_set:
                yield f"--pretrain_mode is set together with --{name}. Leave one of them out."

    def check_answers_leave_room_for_prompts(self) -> Iterator[str]:
        """Prompt and answer share the row."""
        answer, total = self.kd.max_new_tokens, self.data.max_len
        if self.kd.on_policy_enable and answer >= total:
            yield (
                f"--kd_max_new_tokens {answer} leaves no room for a prompt in --max_len {total}. "
                f"Type --kd_max_new_tokens {max(1, total // 2)} or --max_len {2 * answer}."
            )

    def note_answers_of_the_student(self) -> Iterator[str]:
        """The rest of the loss would learn them as if they were data."""
        if self.kd.on_policy_enable and self.kd.coef < 1:
            yield Caution(
                f"--kd_coef {self.kd.coef} with --kd_on_policy: the rest of the loss learns the "
                "student's own answers. Type --kd_coef 1."
            )
