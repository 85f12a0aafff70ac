"""Knowledge distillation: (1 - k) cross-entropy + k divergence to a teacher, on answer tokens.

Both parts are divided by the answer tokens of the whole step. The answers are the data's, or the
student's own when it is on policy; evaluation is on the data's in either case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import Unpack

from openrlhf.algorithms.distillation import Distillation
from openrlhf.config.distillation import KDConfig
from openrlhf.datasets.command_data import kd_format
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import EvalEngine, TrainEngine
from openrlhf.distributed.weights import gathered
from openrlhf.engines.base import SamplingSettings
from openrlhf.engines.hf_engine import HFEngine
from openrlhf.errors import ConfigError
from openrlhf.models.actor import unwrap_peft
from openrlhf.models.distillation import Student, StudentTerms, Teacher, as_head
from openrlhf.models.loading import load_causal_lm, load_config
from openrlhf.models.sizes import num_positions
from openrlhf.trainer.base_trainer import LoopParts
from openrlhf.trainer.kd_sampling import AnswerSettings, StudentAnswers
from openrlhf.trainer.same_tokens import check_has_logits, check_same_tokens
from openrlhf.trainer.sft_trainer import SFTTrainer
from openrlhf.trainer.supervised_run import (
    Progress,
    Recipe,
    SupervisedRun,
    hf_part,
    load_actor,
    load_options,
    run_supervised,
)
from openrlhf.utils.metrics import Metrics, timed
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tokenizer import Tokenizer, eos_token_ids

if TYPE_CHECKING:
    from datasets import Dataset


class KDTrainer(SFTTrainer):
    """The loss against a teacher on the answers of the data."""

    def __init__(
        self,
        strategy: DeepSpeedStrategy,
        engine: TrainEngine,
        *,
        teacher: EvalEngine,
        aux_loss_coef: float = 0.0,
        **loop: Unpack[LoopParts],
    ) -> None:
        super().__init__(strategy, engine, aux_loss_coef=aux_loss_coef, **loop)
        self.teacher = teacher

    def compute_loss(
        self, batch: PackedBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """Sum over tokens / tokens of the step, plus the router loss of experts."""
        terms = self._terms(batch)
        num_tokens, total = len(terms.logprobs), denominators["num_tokens"]
        values = {
            "gpt_loss": -terms.logprobs.mean().item(),
            "distil_loss": terms.divergence.mean().item(),
        }
        loss_sum, coef = terms.loss, self.aux_loss_coef
        if coef and terms.aux_loss is not None:
            aux_sum = (terms.aux_loss * batch.num_targets).sum()
            values["aux_loss"] = aux_sum.item() / num_tokens
            loss_sum = loss_sum + coef * aux_sum
        metrics = Metrics()
        for name, value in {**values, "loss": loss_sum.item() / num_tokens}.items():
            metrics.add(name, value, weight=num_tokens)
        return loss_sum / total, metrics

    def _terms(self, batch: PackedBatch) -> StudentTerms:
        hidden_NK = self.teacher(batch)
        teacher = self.teacher.module
        with gathered(teacher.head_parameters):  # under ZeRO-3 they are whole only in its forward
            return self.engine(batch, as_head(teacher.head, hidden_NK))


class OnPolicyKDTrainer(KDTrainer):
    """The same loss on answers that the student gives before every step."""

    def __init__(self, answers: StudentAnswers, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.samples = self.answers = answers

    def train_step(self, rows: Sequence[int]) -> Metrics:
        """Sample answers, then one optimizer step on them."""
        metrics = Metrics()
        with timed("generation", metrics):
            self.answers.answer(rows, self.global_step, self.strategy)
        self._lengths = self.answers.lengths.tolist()
        return metrics.merge(super().train_step(rows))


class KDRecipe(Recipe[KDConfig]):
    """train_kd."""

    name = "kd"

    def check(self, config: KDConfig, tokenizer: Tokenizer) -> None:
        """The teacher has the student's vocabulary; answers are sampled from whole weights."""
        remote = config.trust_remote_code
        check_same_tokens(tokenizer, teacher_path(config), "--teacher_model", remote_code=remote)
        own_path = config.model.model_name_or_path or ""
        check_has_logits(tokenizer, own_path, "--pretrain", remote_code=remote)
        if config.kd.on_policy_enable and config.ds.zero_stage == 3:
            raise ConfigError(
                "--kd_on_policy samples from whole weights: --zero_stage 3. Type --zero_stage 2."
            )
        if config.kd.on_policy_enable:
            check_room(config, (own_path, teacher_path(config)))

    def other_models(self, config: KDConfig) -> Sequence[str]:
        """The teacher."""
        return (teacher_path(config),)

    def make_samples(
        self,
        config: KDConfig,
        rows: Dataset,
        tokenizer: Tokenizer,
        progress: Progress | None,
    ) -> SFTDataset:
        """Dialogues, prompts with answers, or plain text."""
        return SFTDataset(rows, tokenizer, kd_format(config), progress=progress)

    def load_model(self, config: KDConfig, model_path: str) -> Student:
        """The causal language model that learns."""
        method = Distillation(kind=config.kd.divergence)
        model = load_actor(config, model_path).model
        with_aux_loss = config.model.aux_loss_coef > 0
        return Student(model, coef=config.kd.coef, method=method, with_aux_loss=with_aux_loss)

    def make_trainer(self, run: SupervisedRun[KDConfig]) -> KDTrainer:
        """The loss, and the frozen teacher."""
        config = run.config
        model = load_causal_lm(teacher_path(config), **load_options(config))
        parts = {
            "teacher": run.strategy.prepare_eval(Teacher(model), offload=config.teacher.offload),
            "aux_loss_coef": config.model.aux_loss_coef,
            **run.loop,
        }
        if not config.kd.on_policy_enable:
            return KDTrainer(run.strategy, run.engine, **parts)
        return OnPolicyKDTrainer(make_answers(run), run.strategy, run.engine, **parts)


def run_kd(config: KDConfig) -> None:
    """Train as `config` says and leave the model in `config.ckpt.output_dir`."""
    run_supervised(KDRecipe(), config)


def make_answers(run: SupervisedRun[KDConfig]) -> StudentAnswers:
    """The data's prompts, to be answered by the model that is trained."""
    config, inputs = run.config, run.inputs
    sampling = SamplingSettings(
        temperature=config.kd.temperature,
        max_new_tokens=config.kd.max_new_tokens,
        stop_token_ids=eos_token_ids(
            inputs.model_path, inputs.tokenizer, trust_remote_code=config.trust_remote_code
        ),
    )
    settings = AnswerSettings(sampling, max_len=config.data.max_len, seed=config.train.seed)
    return StudentAnswers(inputs.samples, HFEngine(unwrap_peft(hf_part(run.model))), settings)


def check_room(config: KDConfig, paths: Sequence[str]) -> None:
    """Raise ConfigError unless every model has positions for the longest sampled answer."""
    for path in paths:
        limit = num_positions(load_config(path, trust_remote_code=config.trust_remote_code))
        if limit is not None and config.data.max_len > limit:
            raise ConfigError(
                f"--kd_on_policy samples up to --max_len {config.data.max_len} tokens, and {path} "
                f"has {limit} positions. Type --max_len {limit}."
            )


def teacher_path(config: KDConfig) -> str:
    """Hub id or path of the teacher."""
    path = config.teacher.model_name_or_path
    assert path is not None, "KDConfig.check_teacher_is_named"
    return path
