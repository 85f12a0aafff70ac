"""The policy on its training ranks: log-probs, updates, weights to the engines, export."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from openrlhf.algorithms.kl import kl_per_token, with_reverse_kl_gradient
from openrlhf.algorithms.language_loss import sft_loss
from openrlhf.algorithms.off_policy import Correction, importance_weights
from openrlhf.algorithms.policy_loss import OWN_AGGREGATIONS, ClipRange
from openrlhf.algorithms.tokens import exp_of_log_ratio
from openrlhf.config.ppo import AdvantageConfig
from openrlhf.distributed.collectives import world_size
from openrlhf.distributed.export import check_room
from openrlhf.distributed.folders import Write
from openrlhf.distributed.weights import (
    WeightAverage,
    full_parameters,
    stored_parameters,
    total_bytes,
)
from openrlhf.engines.base import Completion, GenerationRequest, RolloutEngine
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.errors import ConfigError, NoRestartError
from openrlhf.models.actor import Actor, TokenStats
from openrlhf.models.adapters import add_lora
from openrlhf.models.loading import disable_dropout, load_causal_lm
from openrlhf.models.vision import freeze_tower
from openrlhf.trainer.ppo_utils.samples import Samples
from openrlhf.trainer.ppo_utils.update_plan import (
    UpdateResult,
    UpdateStep,
    without_zero_advantages,
)
from openrlhf.trainer.workers.model_worker import TrainedWorker
from openrlhf.trainer.workers.weight_sync import (
    HandleTransport,
    SyncFailure,
    WeightTransport,
    weight_route,
)
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.own_functions import POLICY_LOSS, find_function
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.run_folder import HOLDER_FILE, POLICY
from openrlhf.utils.tensors import NamedTensors
from openrlhf.utils.tokenizer import tokenizer_of

AVERAGE = "average.pt"  # of the weights, in a checkpoint


def correction_of(config: AdvantageConfig) -> Correction | None:
    """Return the correction for samples of another policy; None: there is none."""
    if not config.is_corrected:
        return None
    return Correction(
        *config.correction_level_and_mode,
        *config.is_correction_threshold,
        config.is_correction_gating,
        config.clamps_survivors,
    )


class PolicyModelActor(TrainedWorker):
    """One rank of the policy."""

    title, prefix = "policy", "actor"
    generator: OwnGenerate | None = None
    transport: WeightTransport | None = None
    average: WeightAverage | None = None

    def init_model(self, num_updates: int) -> int:
        """Load and shard the policy for all optimizer steps; return its parameter count."""
        config = self.config.actor
        model = load_causal_lm(self.config.policy_path, self.config)
        if config.freeze_visual_encoder:
            freeze_tower(model)
        model = add_lora(model, self.config.ds.lora)
        disable_dropout(model)
        self.actor = Actor(model, with_aux_loss=config.aux_loss_coef > 0)
        num_parameters = self.prepare(self.actor, config, num_updates)
        self.policy_loss = find_function(POLICY_LOSS, config.policy_loss_type)
        self.own_aggregation = OWN_AGGREGATIONS.get(config.policy_loss_type)
        low, high = config.eps_clip_low_high or (config.eps_clip, config.eps_clip)
        self.clip = ClipRange(low, high, config.dual_clip, config.sapo_tau)
        self.correction = correction_of(self.config.algo.advantage)
        if self.config.train.enable_ema:
            self.average = WeightAverage(self.actor.model, self.config.train.ema_beta)
        return num_parameters

    def check_room(self, path: str) -> int:
        """Return the bytes of an export; raise ConfigError where rank 0 does not see its folder, or
        the disk has no room for it at the end.
        """
        if self.rank == 0 and not Path(path, HOLDER_FILE).exists():
            raise ConfigError(
                f"--save_path {path} is not seen by {self.role} rank 0 on node {self.address}, "
                "which writes the model. Type a folder that all nodes share."
            )
        return check_room(self.actor.model, Path(path), num_copies=self.config.num_exported)

    def compute_logprobs(self, samples: Samples) -> Tensor:
        """Return log-probs (N,) of the share's sampled tokens under the current weights."""
        return self.forward_in_micro_batches(
            samples, lambda batch: self._stats(batch).logprobs, what="log-probs of the policy"
        )

    def fit(
        self, steps: Sequence[UpdateStep], columns: Sequence[str] = (), num_done: int = 0
    ) -> UpdateResult:
        actor = self.config.actor
        has_kl_loss = self.config.algo.kl.use_loss and any(step.kl_coef > 0 for step in steps)
        is_own = ":" in actor.policy_loss_type  # its loss need not be 0 where the advantage is
        # With the coefficient 0 the entropy is a metric, and one of all samples.
        has_others = actor.entropy_coef is not None or actor.aux_loss_coef > 0
        if not (has_kl_loss or has_others or is_own):
            steps = [without_zero_advantages(step) for step in steps]
        result = super().fit(steps, columns, num_done)
        if result.skip is None or not result.skip.left:
            self.weight_version += 1
        return result

    def after_step(self) -> None:
        if self.average is not None:
            self.average.update()

    def compute_loss(
        self, batch: PackedBatch, samples: Samples, step: UpdateStep, metrics: Metrics
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the policy's loss (): clipped objective, KL term, entropy bonus."""
        config = self.config
        stats = self._stats(batch, with_entropy=config.actor.entropy_coef is not None)
        old_N = samples.old_logprobs
        assert old_N is not None or step.num_steps == 1, "the old policy's log-probs are missing"
        if old_N is None or step.num_steps == 1:  # on-policy: they are the current ones, exactly
            old_N = stats.logprobs.detach()
        assert samples.advantages is not None
        terms = self.policy_loss(
            stats.logprobs,
            old_N,
            advantages_N=samples.advantages,
            num_actions_B=samples.num_actions,
            clip=self.clip,
        )
        weights_N = self._importance_weights(old_N, samples, metrics)
        loss_N = terms.loss_N * weights_N
        loss = self._aggregate(loss_N, samples, step)
        metrics.add("policy_loss", loss.double() / step.num_steps, reduction="sum")
        num_tokens = len(terms.loss_N)
        is_clipped = terms.is_clipped_N.float().mean()
        metrics.add("ppo_clip_ratio", is_clipped, weight=num_tokens)
        metrics.add("ppo_kl", -terms.log_ratio_N.mean(), weight=num_tokens)
        metrics.add("ratio_max", terms.ratio_N.max(), reduction="max")
        columns = {"new_logprobs": stats.logprobs, "log_ratio": terms.log_ratio_N}
        columns |= {"is_clipped": terms.is_clipped_N, "loss": loss_N}
        for term in self._other_terms(stats, old_N, samples, step, metrics, columns):
            loss = loss + term
        if stats.aux_loss is not None:
            aux_sum = (stats.aux_loss * batch.num_targets).sum()
            metrics.add("aux_loss", aux_sum.double() / num_tokens, weight=num_tokens)
            loss = loss + config.actor.aux_loss_coef * aux_sum / step.num_tokens
        return loss, columns

    def compute_text_loss(self, batch: PackedBatch, num_tokens: int, metrics: Metrics) -> Tensor:
        """Return --ptx_coef times the micro-batch's part of the language loss of a step's text."""
        stats: TokenStats = self.engine(batch)
        loss = sft_loss(stats.logprobs, num_tokens_global=num_tokens)
        metrics.add("ptx_loss", -stats.logprobs.mean(), weight=len(stats.logprobs))
        return self.config.actor.ptx_coef * loss

    def _importance_weights(
        self, old_N: Tensor, samples: Samples, metrics: Metrics
    ) -> Tensor | float:
        """Return the weight of every token, 1 without a correction; note how far the engine was
        from the trainer, under --async_train for each staleness too.
        """
        engine_N, num_tokens = samples.rollout_logprobs, len(old_N)
        columns = {
            "vllm_kl": kl_per_token(engine_N, old_N, estimator="k3"),
            "logprobs_diff": (old_N.float() - engine_N.float()).abs(),
        }
        for name, values_N in columns.items():
            metrics.add(name, values_N.mean(), weight=num_tokens)
        metrics.add("logprobs_diff_max", columns["logprobs_diff"].max(), reduction="max")
        columns["is_ratio"] = exp_of_log_ratio((old_N.float() - engine_N.float()).detach())
        weights_N: Tensor | float = 1.0
        if self.correction is not None:
            found = importance_weights(self.correction, old_N, engine_N, samples.num_actions)
            weights_N = found.weights_N
            columns |= {"is_ratio": found.ratio_N, "is_cut_ratio": found.is_cut_N.float()}
            metrics.add("is_cut_ratio", found.is_cut_N.float().mean(), weight=num_tokens)
            metrics.add("is_weight", found.weights_N.mean(), weight=num_tokens)
            metrics.add("is_ratio_max", found.ratio_N.max(), reduction="max")
        if self.config.train.async_enable:
            staleness_N = self.weight_version - samples.weight_versions
            for staleness in staleness_N.unique().tolist():
                for name, values_N in columns.items():
                    part = values_N[staleness_N == staleness]
                    metrics.add(f"{name}/stale_{staleness}", part.mean(), weight=len(part))
        return weights_N

    def _other_terms(
        self,
        stats: TokenStats,
        old_N: Tensor,
        samples: Samples,
        step: UpdateStep,
        metrics: Metrics,
        columns: dict[str, Tensor],
    ) -> Iterator[Tensor]:
        """Yield the KL to the reference, which joins `columns`, and the entropy bonus, where the
        run has them.
        """
        kl, ref_N = self.config.algo.kl, samples.ref_logprobs
        if kl.use_loss and ref_N is not None:
            kl_N = kl_per_token(stats.logprobs, ref_N, estimator=kl.estimator)
            if kl.unbiased_gradient:
                kl_N = with_reverse_kl_gradient(kl_N, stats.logprobs, old_N, ref_N)
            metrics.add("kl", kl_N.mean(), weight=len(kl_N))
            columns["kl"] = kl_N
            yield step.kl_coef * self._aggregate(kl_N, samples, step)
        coef = self.config.actor.entropy_coef
        if coef is not None and stats.entropy is not None:
            metrics.add("entropy", stats.entropy.mean(), weight=len(stats.entropy))
            if coef:
                yield -coef * self._aggregate(stats.entropy, samples, step)

    def _aggregate(self, values_N: Tensor, samples: Samples, step: UpdateStep) -> Tensor:
        return self.aggregated(values_N, samples, step, self.own_aggregation)

    def _stats(self, batch: PackedBatch, *, with_entropy: bool = False) -> TokenStats:
        temperature = self.config.rollout.temperature
        return self.engine(batch, temperature=temperature, with_entropy=with_entropy)

    def broadcast_to_vllm(
        self,
        engines: Sequence[RolloutEngine],
        keep_running: bool = False,
        num_engines: int | None = None,
        is_again: bool = False,
    ) -> dict[int, SyncFailure]:
        """Give these engines, of `num_engines`, the current weights and check that they hold them;
        rank 0 returns those that failed, by index.

        `keep_running`: requests that run go on under the new weights (partial rollout); without it
        they are refused. `is_again`: engines failed the last time. Raise NoRestartError if that was
        the trainer's own failure, and is again.
        """
        error_before = self.transport.own_error if self.transport is not None else None
        if is_again or self.transport is None or self.transport.engines != list(engines):
            route: type[WeightTransport] = HandleTransport
            device = torch.device("cpu")
            if self.has_own_process:  # else the engine is in this process too
                route, device = weight_route(
                    self.config,
                    self.engine.device,
                    num_engines=num_engines or len(engines),
                    num_ranks=world_size(),
                )
            self.transport = route(
                device,
                engines,
                workers_per_engine=self.config.vllm.tensor_parallel_size,
                endpoint=self.endpoint,
                wait_s=self.config.vllm.timeout_s,
                num_bytes=total_bytes(self.engine.module.parameters())
                * self.config.ds.tensor_parallel_size,
            )
        tensors = stored_parameters(self.engine.module)
        self.transport.send(tensors, self.weight_version, keep_running=keep_running)
        if (error := self.transport.own_error) and error_before:
            raise NoRestartError(str(error)) from error
        return self.transport.failed

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Sample with the policy itself (no vLLM); every rank of the group must call."""
        if self.generator is None:
            model: nn.Module = self.actor.model
            if self.engine.zero_stage == 3:
                # Each forward is a collective then, and ranks decode different numbers of tokens:
                # every rank generates with a whole copy.
                model = load_causal_lm(self.config.policy_path, self.config)
                model = model.to(self.engine.device)
            self.generator = OwnGenerate(
                model,
                weight_version=-1,
                seed=self.config.train.seed,
                tokenizer=tokenizer_of(self.config, self.config.policy_path),
                processor=self.image_processor,
            )
        if self.generator.weight_version != self.weight_version:
            self._refresh(self.generator)
        return self.generator.generate(requests)

    def _refresh(self, generator: OwnGenerate) -> None:
        """Bring a copy up to date; the policy's own module always is."""
        generator.weight_version = self.weight_version
        if generator.model is not self.actor.model:
            held = generator.model.state_dict()
            for name, tensor in full_parameters(self.engine.module):
                held[name].copy_(tensor)

    def export(self, path: str, tensors: NamedTensors | None = None) -> None:
        """Export in Hugging Face format. With --enable_ema the average is what is exported; the
        weights themselves go to a folder "policy" in it.
        """
        if self.average is None:
            self.export_policy(path)
            return
        super().export(path, self.average.tensors())
        self.export_policy(str(Path(path) / POLICY))

    def export_policy(self, path: str) -> None:
        """Export the weights that samples are made with."""
        super().export(path)

    def take_own(self, folder: Path) -> Write:
        write = super().take_own(folder)
        return write if self.average is None else self.average.take(folder / AVERAGE)

    def load_own(self, folder: Path) -> bool:
        if self.average is not None:
            self.average.load(folder / AVERAGE)
        return super().load_own(folder)
