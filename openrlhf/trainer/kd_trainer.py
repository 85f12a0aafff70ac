"""Knowledge distillation: (1 - k) cross-entropy + k divergence to a teacher, on answer tokens.

Both parts are divided by the response tokens of the whole step. The responses are the data's, or
the student's own when it is on policy; evaluation is on the data's in either case.
The student's head computes both parts in one pass over chunks of tokens, so the logits of neither
model ever exist as a whole.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.algorithms.distillation import Head, chunked_distillation
from openrlhf.config.supervised import KDConfig
from openrlhf.datasets.sft_dataset import SFTExample
from openrlhf.distributed.collectives import all_gather_object
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import hf_model_of, whole_parameters
from openrlhf.engines.base import GenerationRequest, SamplingSettings
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.errors import ConfigError
from openrlhf.models.actor import Actor, ChunkedHead
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.support import num_positions
from openrlhf.trainer.base_trainer import Inputs, add_means, check_same_tokens, load_actor
from openrlhf.trainer.sft_trainer import SFTTrainer
from openrlhf.utils.metrics import Metrics, timed
from openrlhf.utils.packing import PackedBatch, base_model_of
from openrlhf.utils.tokenizer import Tokenizer, check_stop_ids, eos_token_ids, unused_sampling


def distill(
    head: ChunkedHead,
    hidden_NH: Tensor,
    targets_N: Tensor,
    teacher: Head,
    coef: float,
    kind: str,
) -> tuple[Tensor, ...]:
    """Return the loss and columns of `chunked_distillation` over the logits that both models have.

    Models of one family pad their vocabularies to different widths; logits that only one of
    them has stand for no token and are left out.
    """
    num_logits = min(len(head.weight), len(teacher.weight_VH))
    return chunked_distillation(
        first_logits(as_head(head, hidden_NH), num_logits),
        first_logits(teacher, num_logits),
        targets_N,
        coef=coef,
        kind=kind,
    )


class Student(Actor):
    """The model that learns."""

    reads_whole_head = True

    def __init__(
        self, model: nn.Module, *, coef: float, kind: str, with_aux_loss: bool = False
    ) -> None:
        super().__init__(model, with_aux_loss=with_aux_loss)
        self.coef, self.kind = coef, kind

    def forward(self, batch: PackedBatch, teacher: Head) -> tuple[Tensor | None, ...]:
        """Return the sum over the targets of (1 - coef) * -logp + coef * divergence, both of them
        at each target, (N,) without gradient, and of a mixture of experts the router loss of each
        sequence, (B,).
        """
        states = self.states_at(batch, batch.predict_index)
        targets_n = states.select(batch.targets)
        loss, *of_tokens = self.head(
            distill, states.hidden_nH, targets_n, teacher, self.coef, self.kind
        )
        return states.total(loss), *map(states.spread, of_tokens), states.aux_loss


class Teacher(Actor):
    """The model that is learnt from; the student reads all of its head."""

    reads_whole_head = True

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return hidden states where a target is predicted, (N, K); of a shared row those the
        student reads on this rank.
        """
        return self.states_at(batch, batch.predict_index).hidden_nH


def as_head(head: ChunkedHead, hidden_NH: Tensor) -> Head:
    """Return hidden states together with the head that reads them."""
    return Head(hidden_NH, head.weight, head.bias, head.softcap, head.scale)


def first_logits(head: Head, num_logits: int) -> Head:
    """Return the head without the logits from `num_logits` on."""
    if len(head.weight_VH) == num_logits:
        return head
    bias_V = None if head.bias_V is None else head.bias_V[:num_logits]
    return replace(head, weight_VH=head.weight_VH[:num_logits], bias_V=bias_V)


def sampling_of(config: KDConfig, model_path: str, tokenizer: Tokenizer) -> SamplingSettings:
    """Return the settings that the student's answers are sampled with."""
    ends = eos_token_ids(model_path, tokenizer, trust_remote_code=config.trust_remote_code)
    return SamplingSettings(
        temperature=config.kd.temperature,
        max_new_tokens=config.kd.max_new_tokens,
        stop_token_ids=ends,
    ).stopping_at(config.kd.stop, config.kd.stop_token_ids)


class KDTrainer(SFTTrainer):
    """The loss against a teacher on the responses of the data."""

    name = "kd"
    reads_pictures = False
    judged_by = ("loss", "gpt_loss", "distil_loss")

    def __init__(self, config: KDConfig, inputs: Inputs, strategy: DeepSpeedStrategy) -> None:
        super().__init__(config, inputs, strategy)
        teacher = Teacher(load_causal_lm(teacher_path(config), config))
        self.teacher = strategy.prepare_eval(teacher, offload=config.teacher.offload)
        limits = [num_positions(hf_model_of(model).config) for model in (self.model, teacher)]
        self.max_len = min(filter(None, [config.data.max_len, *limits]))  # of own responses
        student = base_model_of(hf_model_of(self.model))
        self.generator = OwnGenerate(student, tokenizer=inputs.tokenizer)
        self.sampling = sampling_of(config, inputs.model_path, inputs.tokenizer)

    @classmethod
    def check(cls, config: KDConfig, tokenizer: Tokenizer) -> None:
        """Raise ConfigError unless the teacher has the student's vocabulary, and responses can be
        sampled from whole weights.
        """
        remote = config.trust_remote_code
        check_same_tokens(tokenizer, teacher_path(config), "--teacher_model", remote_code=remote)
        check_stop_ids(config.kd.stop_token_ids, len(tokenizer))
        if config.kd.on_policy_enable and config.ds.zero_stage == 3:
            raise ConfigError(
                "--kd_on_policy samples from whole weights: --zero_stage 3. Type --zero_stage 2."
            )

    @classmethod
    def notices(cls, config: KDConfig) -> list[str]:
        path, chosen = config.model.model_name_or_path, {"temperature": config.kd.temperature}
        return unused_sampling(path, chosen) if path and config.num_sampled else []

    @classmethod
    def other_models(cls, config: KDConfig) -> dict[str, bool]:
        return {teacher_path(config): config.teacher.offload}

    @classmethod
    def row_format(cls, config: Any) -> dict[str, Any]:
        return {"pretrain_mode": config.model.pretrain_mode_enable}

    @classmethod
    def load_model(cls, config: KDConfig, model_path: str) -> Student:
        model, kd = load_actor(config, model_path).model, config.kd
        with_aux_loss = config.model.aux_loss_coef > 0
        return Student(model, coef=kd.coef, kind=kd.divergence, with_aux_loss=with_aux_loss)

    def train_step(self, rows: Sequence[int]) -> Metrics:
        """Sample responses if on policy, then do one optimizer step."""
        metrics = Metrics()
        if self.config.num_sampled:
            with timed("generation", metrics):
                self.samples = self.answers(rows)
            self._costs = self._lengths = {
                row: len(own.token_ids) for row, own in self.samples.items()
            }
        return metrics.merge(super().train_step(rows))

    def answers(self, rows: Sequence[int]) -> dict[int, SFTExample]:
        """Return the prompts of rows with the student's answers, the same on every rank; all call.

        An answer's seed follows from step and row, so that ranks may be any number.
        """
        topology = self.strategy.topology
        own_rows = rows[topology.dp_rank :: topology.dp_size]
        requests = [self._request(row) for row in own_rows]
        answers = self.generator.generate(requests) if requests else []
        own = {
            row: (len(request.prompt_token_ids), request.prompt_token_ids + completion.token_ids)
            for row, request, [completion] in zip(own_rows, requests, answers, strict=True)
        }
        found: dict[int, SFTExample] = {}
        for part in all_gather_object(own):
            for row, (prompt_length, token_ids) in part.items():
                mask = torch.arange(len(token_ids)) >= prompt_length
                # Ranks that share rows take those of the first.
                found.setdefault(row, SFTExample(torch.tensor(token_ids), mask))
        return found

    def _request(self, row: int) -> GenerationRequest:
        """Ask for an answer to a prompt; one that fills the context loses its first token to it."""
        prompt = self.inputs.samples[row].prompt_token_ids[1 - self.max_len :]
        room = min(self.sampling.max_new_tokens, self.max_len - len(prompt))
        seed = random.Random(f"{self.config.train.seed} {self.global_step} {row}").getrandbits(31)
        sampling = replace(self.sampling, max_new_tokens=room, seed=seed)
        return GenerationRequest(str(row), prompt, sampling)

    def compute_loss(
        self, batch: PackedBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """Return the sum over tokens / tokens of the step, plus the router loss of experts."""
        hidden_NK = self.teacher(batch)
        teacher = self.teacher.module
        # Under ZeRO-3 the teacher's head is whole in its own forward only.
        with whole_parameters(list(teacher.head.parameters())):
            loss, logprobs_N, divergence_N, aux_loss_B = self.engine(
                batch, as_head(teacher.head, hidden_NK)
            )
        num_tokens, metrics = len(logprobs_N), Metrics()
        add_means(metrics, {"gpt_loss": -logprobs_N, "distil_loss": divergence_N})
        loss_sum = self.add_router_loss(loss, aux_loss_B, batch.num_targets, metrics)
        metrics.add("loss", loss_sum.double() / num_tokens, weight=num_tokens)
        return loss_sum / denominators["num_tokens"], metrics


def teacher_path(config: KDConfig) -> str:
    """Return the hub id or path of the teacher."""
    path = config.teacher.model_name_or_path
    assert path is not None, "KDConfig.check_teacher_is_named"
    return path
