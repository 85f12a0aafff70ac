"""Knowledge distillation: (1 - k) cross-entropy + k divergence to a teacher, on answer tokens.

Both parts are divided by the answer tokens of the whole step. The answers are the data's, or the
student's own when it is on policy; evaluation is on the data's in either case.
The student's head computes both parts in one pass over chunks of tokens, so the logits of neither
model ever exist as a whole.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrlhf.algorithms.distillation import (
    Distillation,
    DistillationTerms,
    Head,
    chunked_distillation,
)
from openrlhf.config.supervised import KDConfig
from openrlhf.datasets.sft_dataset import SFTExample
from openrlhf.distributed.collectives import all_gather_object
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import gathered, hf_model_of
from openrlhf.engines.base import GenerationRequest, SamplingSettings
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.errors import ConfigError
from openrlhf.models.actor import Actor, ChunkedHead
from openrlhf.models.loading import load_causal_lm, load_config
from openrlhf.models.support import num_positions
from openrlhf.trainer.base_trainer import SampleSet, SupervisedRun, load_actor
from openrlhf.trainer.same_tokens import check_has_logits, check_same_tokens
from openrlhf.trainer.sft_trainer import SFTTrainer
from openrlhf.utils.metrics import Metrics, timed
from openrlhf.utils.packable import base_model_of
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tokenizer import Tokenizer, eos_token_ids


class StudentTerms(NamedTuple):
    """Sums and numbers of the N target tokens of a batch; only loss and aux_loss have gradients."""

    loss: Tensor  # () sum over targets of (1 - coef) * -logp + coef * divergence
    logprobs: Tensor  # (N,) fp32
    divergence: Tensor  # (N,) fp32
    aux_loss: Tensor | None = None  # (B,) router loss of each sequence, of a mixture of experts


def distill(
    head: ChunkedHead,
    hidden_NH: Tensor,
    targets_N: Tensor,
    teacher: Head,
    coef: float,
    method: Distillation,
) -> tuple[Tensor, ...]:
    """Return the fields of `DistillationTerms`.

    Models of one family pad their vocabularies to different widths; logits that only one of
    them has stand for no token and are left out.
    """
    num_logits = min(len(head.weight), len(teacher.weight_VH))
    terms: DistillationTerms = chunked_distillation(
        first_logits(as_head(head, hidden_NH), num_logits),
        first_logits(teacher, num_logits),
        targets_N,
        coef=coef,
        method=method,
    )
    return tuple(terms)


class Student(Actor):
    """The model that learns."""

    reads_whole_head = True

    def __init__(
        self, model: nn.Module, *, coef: float, method: Distillation, with_aux_loss: bool = False
    ) -> None:
        super().__init__(model, with_aux_loss=with_aux_loss)
        self.coef, self.method = coef, method

    def forward(self, batch: PackedBatch, teacher: Head) -> StudentTerms:
        """Return the loss on the targets of a batch, against what the teacher says there."""
        states = self.states_at(batch, batch.predict_index)
        targets_n = states.select(batch.targets)
        loss, *of_tokens = self.head(
            distill, states.hidden_nH, targets_n, teacher, self.coef, self.method
        )
        return StudentTerms(
            states.total(loss), *map(states.spread, of_tokens), aux_loss=states.aux_loss
        )


class Teacher(Actor):
    """The model that is learnt from; the student reads all of its head."""

    reads_whole_head = True

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return hidden states where a target is predicted, (N, K); of a shared row those the
        student reads on this rank.
        """
        return self.states_at(batch, batch.predict_index).hidden_nH

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        """Return what must be whole while the student reads the teacher's head."""
        return list(self.head.parameters())


def as_head(head: ChunkedHead, hidden_NH: Tensor) -> Head:
    """Return states with the head in front of which they stand."""
    return Head(hidden_NH, head.weight, head.bias, head.softcap, head.scale)


def first_logits(head: Head, num_logits: int) -> Head:
    """Return the head without the logits from `num_logits` on."""
    if len(head.weight_VH) == num_logits:
        return head
    bias_V = None if head.bias_V is None else head.bias_V[:num_logits]
    return replace(head, weight_VH=head.weight_VH[:num_logits], bias_V=bias_V)


class StudentAnswers:
    """A set of samples in which rows that were answered have the student's answer.

    Each answer has a seed of its own from step and row, so it is the same whatever the number of
    ranks.
    """

    def __init__(
        self,
        samples: SampleSet[SFTExample],
        engine: OwnGenerate,
        sampling: SamplingSettings,
        *,
        max_len: int,  # tokens of prompt and answer
        seed: int = 42,
    ) -> None:
        self._samples = samples
        self._engine = engine
        self._sampling = sampling
        self._max_len = max_len
        self._seed = seed
        self._answered: dict[int, SFTExample] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> SFTExample:
        return self._answered.get(index) or self._samples[index]

    @property
    def lengths(self) -> Tensor:
        """Return the tokens of every sample, (len,) int64."""
        lengths = self._samples.lengths.clone()
        for row, example in self._answered.items():
            lengths[row] = len(example.token_ids)
        return lengths

    def answer(self, rows: Sequence[int], step: int, strategy: DeepSpeedStrategy) -> None:
        """Generate answers to the prompts of rows and forget all others; all ranks call."""
        topology = strategy.topology
        own_rows = rows[topology.dp_rank :: topology.dp_size]
        requests = [self._request(row, step) for row in own_rows]
        answers = self._engine.generate(requests) if requests else []
        own = {
            row: request.prompt_token_ids + completion.token_ids
            for row, request, [completion] in zip(own_rows, requests, answers, strict=True)
        }
        self._answered = {}
        for part in all_gather_object(own):
            for row, token_ids in part.items():
                if row not in self._answered:  # ranks that share rows take those of the first
                    self._answered[row] = self._example(row, token_ids)

    def _request(self, row: int, step: int) -> GenerationRequest:
        prompt = self._prompt(row)
        room = min(self._sampling.max_new_tokens, self._max_len - len(prompt))
        draw = random.Random(f"{self._seed} {step} {row}").getrandbits(31)
        sampling = replace(self._sampling, max_new_tokens=room, seed=draw)
        return GenerationRequest(str(row), prompt, sampling)

    def _prompt(self, row: int) -> tuple[int, ...]:
        """Return what stands before the data's answer; it leaves room for one token at least."""
        sample = self._samples[row]
        return tuple(sample.token_ids[: int(sample.loss_mask.int().argmax())].tolist())

    def _example(self, row: int, token_ids: Sequence[int]) -> SFTExample:
        mask = torch.ones(len(token_ids), dtype=torch.bool)
        mask[: len(self._prompt(row))] = False
        return SFTExample(torch.tensor(token_ids), mask)


class KDTrainer(SFTTrainer):
    """The loss against a teacher on the answers of the data."""

    name = "kd"

    def __init__(self, run: SupervisedRun[KDConfig]) -> None:
        super().__init__(run)
        teacher = Teacher(load_causal_lm(teacher_path(run.config), run.config))
        self.teacher = run.strategy.prepare_eval(teacher, offload=run.config.teacher.offload)
        self.answers: StudentAnswers | None = None  # on policy: in place of the data's
        if run.config.kd.on_policy_enable:
            self.samples = self.answers = make_answers(run)

    @classmethod
    def check(cls, config: KDConfig, tokenizer: Tokenizer) -> None:
        """Raise ConfigError unless the teacher has the student's vocabulary, and answers can be
        sampled from whole weights.
        """
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

    @classmethod
    def other_models(cls, config: KDConfig) -> Sequence[str]:
        return (teacher_path(config),)

    @classmethod
    def load_model(cls, config: KDConfig, model_path: str) -> Student:
        method = Distillation(kind=config.kd.divergence)
        model = load_actor(config, model_path).model
        with_aux_loss = config.model.aux_loss_coef > 0
        return Student(model, coef=config.kd.coef, method=method, with_aux_loss=with_aux_loss)

    def train_step(self, rows: Sequence[int]) -> Metrics:
        """Sample answers if on policy, then do one optimizer step."""
        metrics = Metrics()
        if self.answers is not None:
            with timed("generation", metrics):
                self.answers.answer(rows, self.global_step, self.strategy)
            self._lengths = self.answers.lengths.tolist()
        return metrics.merge(super().train_step(rows))

    def compute_loss(
        self, batch: PackedBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """Return the sum over tokens / tokens of the step, plus the router loss of experts."""
        terms = self._terms(batch)
        num_tokens, total = len(terms.logprobs), denominators["num_tokens"]
        values = {
            "gpt_loss": -terms.logprobs.mean().item(),
            "distil_loss": terms.divergence.mean().item(),
        }
        metrics = Metrics()
        loss_sum = self.add_router_loss(terms.loss, terms.aux_loss, batch.num_targets, metrics)
        for name, value in {**values, "loss": loss_sum.item() / num_tokens}.items():
            metrics.add(name, value, weight=num_tokens)
        return loss_sum / total, metrics

    def _terms(self, batch: PackedBatch) -> StudentTerms:
        hidden_NK = self.teacher(batch)
        teacher = self.teacher.module
        with gathered(teacher.head_parameters):  # under ZeRO-3 they are whole only in its forward
            return self.engine(batch, as_head(teacher.head, hidden_NK))


def make_answers(run: SupervisedRun[Any]) -> StudentAnswers:
    """Return the data's prompts, to be answered by the model that is trained."""
    config, inputs = run.config, run.inputs
    sampling = SamplingSettings(
        temperature=config.kd.temperature,
        max_new_tokens=config.kd.max_new_tokens,
        stop_token_ids=eos_token_ids(
            inputs.model_path, inputs.tokenizer, trust_remote_code=config.trust_remote_code
        ),
    )
    return StudentAnswers(
        inputs.samples,
        OwnGenerate(base_model_of(hf_model_of(run.model))),
        sampling,
        max_len=config.data.max_len,
        seed=config.train.seed,
    )


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
    """Return the hub id or path of the teacher."""
    path = config.teacher.model_name_or_path
    assert path is not None, "KDConfig.check_teacher_is_named"
    return path
