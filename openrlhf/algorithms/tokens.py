"""Reductions over ragged tokens, and log-probs of an LM head without ever holding all logits.

Shapes: N tokens of all samples end to end (flat), B samples, A actions of the longest sample,
H hidden, V vocabulary, C tokens of one chunk. `num_actions_B` (int64, summing to N) says where
samples end in a flat vector; a sample may be empty. Knows nothing of models: whoever calls has
already picked the tokens that count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_LOGIT_ROWS = 2048  # on a GPU
MIN_BLOCK_ELEMENTS = 1 << 20  # a block may always be this large: tiny chunks are slow
ALIGNED_ROWS = 64  # a GPU multiplies matrices of odd sizes by slower kernels
SUM_ELEMENTS = 1 << 24  # of a weight's gradient, added at a time
MAX_ABS_LOG_RATIO = 20.0  # exponentials of more are as good as 0 or infinite


def check_sum(flat_N: Tensor, num_actions_B: Tensor) -> None:
    """Raise RuntimeError unless there is one number per action token; a GPU is not waited for."""
    is_so = num_actions_B.sum() == len(flat_N)
    torch._assert_async(is_so, "the tokens of the samples do not add up to the numbers")


def action_mask(num_actions_B: Tensor) -> Tensor:
    """Return True at the actions of a right-padded block, (B, A)."""
    longest = int(num_actions_B.max()) if len(num_actions_B) else 0
    return torch.arange(longest, device=num_actions_B.device) < num_actions_B.unsqueeze(-1)


def pad_flat(flat_N: Tensor, num_actions_B: Tensor) -> Tensor:
    """Lay a flat vector out as (B, A), with zeros at the right."""
    mask_BA = action_mask(num_actions_B)
    check_sum(flat_N, num_actions_B)
    return flat_N.new_zeros(mask_BA.shape).masked_scatter(mask_BA, flat_N)


def unpad(padded_BA: Tensor, num_actions_B: Tensor) -> Tensor:
    """Return the inverse of `pad_flat`: (B, A) to (N,)."""
    rows = zip(padded_BA.unbind(0), num_actions_B.tolist(), strict=True)
    return torch.cat([padded_BA.new_zeros(0), *(row_A[:n] for row_A, n in rows)])


def segment_sum(flat_N: Tensor, num_actions_B: Tensor) -> Tensor:
    """Sum over the tokens of each sample, (B,); 0 for an empty one."""
    check_sum(flat_N, num_actions_B)
    return torch.segment_reduce(flat_N, "sum", lengths=num_actions_B, unsafe=True)


def segment_mean(flat_N: Tensor, num_actions_B: Tensor) -> Tensor:
    """Return the mean over the tokens of each sample, (B,); 0 for an empty one."""
    return segment_sum(flat_N, num_actions_B) / num_actions_B.clamp(min=1)


def all_finite(values_N: Tensor) -> bool:
    """Return True if no value is NaN or infinite. Their sum says so in one pass, without a mask of
    the values; that of finite ones may be infinite too.
    """
    return bool(values_N.sum().isfinite()) or bool(values_N.isfinite().all())


def last_action_index(num_actions_B: Tensor) -> Tensor:
    """Return the flat index of the last action of each sample that has one."""
    return num_actions_B.cumsum(0)[num_actions_B > 0] - 1


def exp_of_log_ratio(log_ratio_N: Tensor) -> Tensor:
    """Return the ratio of two probabilities, neither 0 nor infinite."""
    return log_ratio_N.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO).exp()


def max_logit_rows(device_type: str) -> int:
    """Return the most fp32 rows of size V that all blocks together take.

    On a CPU more is not faster; a GPU waits for its host with each chunk, and adds to all of the
    weight's gradient (measured on an H100, V = 151,936: 512 rows take 1.4 times as long as 2,048).
    """
    return MAX_LOGIT_ROWS // 4 if device_type == "cpu" else MAX_LOGIT_ROWS


def chunked_logprobs(  # noqa: PLR0913 - linear + log_softmax in one, with the options of LM heads
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
    shard: "VocabShard | None" = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return log-probs of the targets (N,), if asked the entropy (N,) of what they were drawn from,
    and which targets are the likeliest token, (N,) bool.

    z = cap(logit_scale * (hidden @ weight.T + bias)) / temperature with cap(x) = softcap *
    tanh(x / softcap); the product is taken in the dtype of hidden and weight, all else in fp32.
    The log-prob is z[target] - logsumexp(z), the entropy logsumexp(z) - sum(softmax(z) * z).

    Logits live for one chunk of tokens at a time and are computed anew in the backward: all
    temporaries of size V together take less than twice `max_logit_rows` x V fp32 numbers (or 4 MiB
    each, where that is more) in either direction. `chunk_tokens` can only shorten the chunk. The
    gradient of a weight in half precision adds up, where there are several chunks, in fp32.

    With a `shard`, weight and bias are this rank's rows of the head: all ranks of its group call
    with the same states and targets and get the same results and the same gradient of the states.
    """
    assert hidden_NH.dtype == weight_VH.dtype, f"{hidden_NH.dtype} hidden, {weight_VH.dtype} weight"
    assert hidden_NH.dim() == 2 and targets_N.shape == hidden_NH.shape[:1], "one target per state"
    head = _Head(temperature, softcap, logit_scale, with_entropy, chunk_tokens, shard)
    return _ChunkedLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, head)


@dataclass(frozen=True)
class VocabShard:
    """The rows of an LM head that this rank holds; the ranks of `group` hold all of them.

    Example: `VocabShard(group, first=500)` on the second of two ranks, of a vocabulary of 1000.
    """

    group: dist.ProcessGroup
    first: int  # token of this rank's first row

    def merge(
        self, max_N: Tensor, total_N: Tensor, weighted_N: Tensor, chosen_N: Tensor
    ) -> list[Tensor]:
        """Return maximum, sums and target of each token over the rows of all ranks."""
        own_max_N = max_N.clone()
        dist.all_reduce(max_N, op=dist.ReduceOp.MAX, group=self.group)
        shift_N = own_max_N - max_N
        scale_N = shift_N.exp()
        sums_3N = torch.stack(
            [total_N * scale_N, (weighted_N + shift_N * total_N) * scale_N, chosen_N + own_max_N]
        )
        sums_3N[2].masked_fill_(chosen_N == -torch.inf, 0.0)
        dist.all_reduce(sums_3N, group=self.group)
        total_N, weighted_N, chosen_N = sums_3N
        return [max_N, total_N, weighted_N, chosen_N - max_N]


@dataclass(frozen=True)
class _Head:
    """Settings that turn raw logits into tempered ones, and the outputs wanted.

    Example: `_Head(temperature=0.7, softcap=30.0, logit_scale=1.0, ...)`: 30 tanh(raw / 30) / 0.7.
    """

    temperature: float
    softcap: float | None
    logit_scale: float
    with_entropy: bool
    chunk_tokens: int | None
    shard: VocabShard | None

    def own_targets(self, targets_N: Tensor, num_rows: int) -> tuple[Tensor, Tensor | None]:
        """Return the row of each target here, and which targets are not here; None: all are."""
        if self.shard is None:
            return targets_N, None
        rows_N = targets_N - self.shard.first
        return rows_N.clamp(0, num_rows - 1), (rows_N < 0) | (rows_N >= num_rows)

    def transform_(self, logits_CV: Tensor) -> Tensor:
        """Scale, cap and temper raw logits in place."""
        if self.softcap is not None:
            logits_CV.mul_(self.logit_scale / self.softcap).tanh_()
            return logits_CV.mul_(self.softcap / self.temperature)
        scale = self.logit_scale / self.temperature
        return logits_CV if scale == 1 else logits_CV.mul_(scale)

    def tanh_derivative(self, tempered_CV: Tensor, *, out: Tensor) -> Tensor:
        """Return 1 - tanh^2, found again from tempered logits (only with a softcap)."""
        assert self.softcap is not None
        torch.mul(tempered_CV, self.temperature / self.softcap, out=out)
        return out.square_().neg_().add_(1)


@dataclass(frozen=True)
class _Block:
    """Memory for the logits of one chunk of tokens.

    Example: the last chunk of 2500 tokens in chunks of 1024, with a vocabulary of 1000: `rows`
    slice(2048, 2500), `logits_CV` (452, 1000).
    """

    rows: slice  # of the N tokens
    logits_CV: Tensor  # fp32
    raw_CV: Tensor  # in the head's dtype; the same memory as logits_CV when that is fp32 too
    spares_CV: list[Tensor]  # fp32

    def compute_logits(self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
        """Return raw logits of the chunk in fp32, (C, V)."""
        torch.mm(hidden_NH[self.rows], weight_VH.t(), out=self.raw_CV)
        if bias_V is not None:
            self.raw_CV.add_(bias_V)
        is_cast = self.raw_CV is not self.logits_CV
        return self.logits_CV.copy_(self.raw_CV) if is_cast else self.logits_CV


def _chunk_length(hidden_NH: Tensor, weight_VH: Tensor, head: _Head, *, num_spares: int) -> int:
    """Return the tokens of a chunk; 0 without any."""
    is_cast = weight_VH.dtype != compute_dtype(weight_VH)
    num_bytes = 4 * (1 + num_spares) + (weight_VH.element_size() if is_cast else 0)
    rows = 4 * max_logit_rows(hidden_NH.device.type) // num_bytes
    rows -= rows % ALIGNED_ROWS
    most = max(1, rows, MIN_BLOCK_ELEMENTS // len(weight_VH))
    return min(len(hidden_NH), most, head.chunk_tokens or most)


def _blocks(
    hidden_NH: Tensor, weight_VH: Tensor, head: _Head, *, num_spares: int
) -> Iterator[_Block]:
    """Walk over the tokens in chunks, handing out the same memory again and again."""
    num_tokens, vocab_size, dtype = len(hidden_NH), len(weight_VH), compute_dtype(weight_VH)
    is_cast = weight_VH.dtype != dtype
    chunk = _chunk_length(hidden_NH, weight_VH, head, num_spares=num_spares)
    buffers = [hidden_NH.new_empty(chunk, vocab_size, dtype=dtype) for _ in range(1 + num_spares)]
    raw_CV = hidden_NH.new_empty(chunk, vocab_size) if is_cast else buffers[0]
    for start in range(0, num_tokens, max(chunk, 1)):
        length = min(chunk, num_tokens - start)
        logits_CV, *spares_CV = [buffer[:length] for buffer in buffers]
        raw = raw_CV[:length] if is_cast else logits_CV
        yield _Block(slice(start, start + length), logits_CV, raw, spares_CV)


def zeros_to_sum(tensor: Tensor, *, num_chunks: int) -> Tensor:
    """Return zeros in which the gradient of several chunks adds up, and is rounded once."""
    return torch.zeros_like(tensor, dtype=compute_dtype(tensor) if num_chunks > 1 else None)


def add_product_(total_VH: Tensor, left_CV: Tensor, right_CH: Tensor) -> None:
    """Add left.T @ right, taken in their type; some rows at a time where the total has another."""
    if total_VH.dtype == left_CV.dtype:
        total_VH.addmm_(left_CV.t(), right_CH)
        return
    num_rows = max(1, SUM_ELEMENTS // total_VH.shape[1])
    for first in range(0, len(total_VH), num_rows):
        rows = slice(first, first + num_rows)
        total_VH[rows].add_(left_CV[:, rows].t() @ right_CH)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type that sums over logits are taken in: fp32, or fp64 where they are."""
    return torch.promote_types(tensor.dtype, torch.float32)


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps its inputs and one or two numbers per token for the backward, nothing of size V."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        head: _Head,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        rows_N, is_elsewhere_N = head.own_targets(targets_N, len(weight_VH))
        max_N = hidden_NH.new_empty(len(hidden_NH), dtype=compute_dtype(hidden_NH))
        total_N, chosen_N = torch.empty_like(max_N), torch.empty_like(max_N)
        weighted_N = torch.zeros_like(max_N)
        for block in _blocks(hidden_NH, weight_VH, head, num_spares=int(head.with_entropy)):
            logits_CV = head.transform_(block.compute_logits(hidden_NH, weight_VH, bias_V))
            max_N[block.rows] = max_C = logits_CV.amax(-1)
            logits_CV.sub_(max_C.unsqueeze(-1))
            chosen_C = logits_CV.gather(-1, rows_N[block.rows].unsqueeze(-1)).squeeze(-1)
            chosen_N[block.rows] = chosen_C
            # The entropy needs the logits again, so their exponentials go to a block of their own.
            exps_CV = block.spares_CV[0] if head.with_entropy else logits_CV
            torch.exp(logits_CV, out=exps_CV)
            total_N[block.rows] = exps_CV.sum(-1)
            if head.with_entropy:
                weighted_N[block.rows] = exps_CV.mul_(logits_CV).sum(-1)
        if head.shard is not None and is_elsewhere_N is not None:
            chosen_N.masked_fill_(is_elsewhere_N, -torch.inf)
            max_N, total_N, weighted_N, chosen_N = head.shard.merge(
                max_N, total_N, weighted_N, chosen_N
            )
        log_total_N = total_N.log()
        logprobs_N, logsumexp_N = chosen_N - log_total_N, max_N + log_total_N
        entropy_N = log_total_N - weighted_N / total_N if head.with_entropy else None
        is_top_N = chosen_N == 0  # no logit is above the target's
        ctx.mark_non_differentiable(is_top_N)
        ctx.head = head
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, logsumexp_N, entropy_N)
        return logprobs_N, entropy_N, is_top_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, logsumexp_N, entropy_N = ctx.saved_tensors
        head: _Head = ctx.head
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(logsumexp_N)
        rows_N, is_elsewhere_N = head.own_targets(targets_N, len(weight_VH))
        grad_chosen_N = grad_logprobs_N
        if is_elsewhere_N is not None:
            grad_chosen_N = grad_logprobs_N.masked_fill(is_elsewhere_N, 0.0)
        token = _PerToken(
            rows_N, grad_chosen_N, logsumexp_N, grad_logprobs_N, entropy_N, grad_entropy_N
        )
        num_spares = int(grad_entropy_N is not None) + int(head.softcap is not None)
        chunk = _chunk_length(hidden_NH, weight_VH, head, num_spares=num_spares)
        inputs, num_chunks = (hidden_NH, weight_VH, bias_V), -(-len(hidden_NH) // max(chunk, 1))
        grads = [
            zeros_to_sum(tensor, num_chunks=num_chunks if tensor is not hidden_NH else 1)
            if is_wanted
            else None
            for tensor, is_wanted in zip(inputs, ctx.needs_input_grad[:3], strict=True)
        ]
        for block in _blocks(hidden_NH, weight_VH, head, num_spares=num_spares):
            logits_CV = head.transform_(block.compute_logits(hidden_NH, weight_VH, bias_V))
            grad_CV = _grad_of_raw_logits(logits_CV, head, token.at(block.rows), block.spares_CV)
            grad_hidden_NH, grad_weight_VH, grad_bias_V = grads
            if grad_bias_V is not None:
                grad_bias_V.add_(grad_CV.sum(0))
            if block.raw_CV is not grad_CV:
                grad_CV = block.raw_CV.copy_(grad_CV)
            if grad_hidden_NH is not None:
                torch.mm(grad_CV, weight_VH, out=grad_hidden_NH[block.rows])
            if grad_weight_VH is not None:
                add_product_(grad_weight_VH, grad_CV, hidden_NH[block.rows])
        if head.shard is not None and grads[0] is not None:
            dist.all_reduce(grads[0], group=head.shard.group)
        return *as_types_of(inputs, grads), None, None


def as_types_of(
    inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> Iterator[Tensor | None]:
    """Yield gradients in the types of what they are of."""
    for tensor, grad in zip(inputs, grads, strict=True):
        yield grad if tensor is None or grad is None else grad.to(tensor.dtype)


class _PerToken(NamedTuple):
    """Tensors of each token for the backward pass; no grad_entropy if no gradient reaches it.

    Example: of two tokens, the second has its target in another rank's shard: `grad_logprobs_N`
    [-0.5, -0.5], `grad_chosen_N` [-0.5, 0.0].
    """

    targets_N: Tensor
    grad_chosen_N: Tensor  # of the log-prob by way of the target's own logit
    logsumexp_N: Tensor
    grad_logprobs_N: Tensor
    entropy_N: Tensor | None
    grad_entropy_N: Tensor | None

    def at(self, rows: slice) -> "_PerToken":
        """Return the same for some of the tokens, each (C, 1)."""
        return _PerToken(
            *(x[rows].unsqueeze(-1) for x in self[:4]),
            *(None if x is None else x[rows].unsqueeze(-1) for x in self[4:]),
        )


def _grad_of_raw_logits(
    logits_CV: Tensor, head: _Head, token: _PerToken, spares_CV: list[Tensor]
) -> Tensor:
    """Turn tempered logits z in place into the gradient with respect to the raw ones, (C, V).

    d logp / dz_j = [j is target] - p_j;  d entropy / dz_j = -p_j (log p_j + entropy).
    """
    slope = head.logit_scale / head.temperature
    slope_CV = None
    if head.softcap is not None:
        slope_CV = head.tanh_derivative(logits_CV, out=spares_CV[-1]).mul_(slope)
    log_p_CV = logits_CV.sub_(token.logsumexp_N)
    pull = -token.grad_logprobs_N
    if token.grad_entropy_N is not None and token.entropy_N is not None:
        pull_CV = torch.add(log_p_CV, token.entropy_N, out=spares_CV[0])
        pull = pull_CV.mul_(-token.grad_entropy_N).sub_(token.grad_logprobs_N)
    grad_CV = log_p_CV.exp_().mul_(pull)
    grad_CV.scatter_add_(-1, token.targets_N, token.grad_chosen_N)
    if slope_CV is not None:
        return grad_CV.mul_(slope_CV)
    return grad_CV if slope == 1 else grad_CV.mul_(slope)
