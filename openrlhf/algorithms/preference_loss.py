"""Preference losses: on log-probs of pairs (DPO and relatives) or single responses (KTO), and on
the rewards of pairs (reward models).

Shapes: B pairs, or B rated responses, of a micro-batch. In the formulas log pi is the sum of the
log-probs of a response, |y| its length in tokens, r = log pi - log ref, h = r_chosen - r_rejected
and s the sigmoid. A loss is one number per sample; whoever calls divides the sum by the samples of
the whole optimizer step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_EXO_SMOOTHING = 1e-3  # its target log(eps) is infinite at 0
MAX_MEAN_LOGPROB = -1e-6  # odds of a sure response would be infinite


@dataclass(frozen=True)
class PairLogps:
    """Log-probs of the responses of pairs: a row of chosen and a row of rejected ones, (2, B).

    Example: `PairLogps(tensor([[-4.0, -6.0], [-5.0, -3.0]]), tensor([[3, 4], [4, 2]]))`: the chosen
    response of the first pair has 3 tokens and the log-prob -4, the rejected one 4 tokens and -5.
    """

    sums_2B: Tensor  # over the tokens of a response
    lengths_2B: Tensor  # target tokens
    ref_sums_2B: Tensor | None = None

    @property
    def means(self) -> Tensor:
        """Return log pi / |y|, (2, B) fp32."""
        return self.per_token(self.sums_2B.float())

    @property
    def ratios(self) -> Tensor:
        """Return r = log pi - log ref, (2, B) fp32."""
        assert self.ref_sums_2B is not None and self.ref_sums_2B.shape == self.sums_2B.shape
        return self.sums_2B.float() - self.ref_sums_2B.float()

    def per_token(self, values_2B: Tensor) -> Tensor:
        """Return numbers of responses divided by their lengths (an empty one counts as 1)."""
        assert values_2B.shape == self.lengths_2B.shape, "one number per response"
        return values_2B / self.lengths_2B.clamp(min=1)


@dataclass(frozen=True)
class PreferenceOptions:
    """Numbers of the losses; each loss says in its docstring which it reads.

    Example: `PreferenceOptions(beta=0.5, label_smoothing=0.1)`: one label in ten is wrong.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0  # probability eps that a label is the wrong way round
    ipo_length_average: bool = False
    simpo_gamma: float = 0.5


Terms = tuple[Tensor, Tensor]  # losses_B, rewards of chosen and rejected before beta (2, B)


def dpo(pairs: PairLogps, options: PreferenceOptions) -> Terms:
    """Return -(1 - eps) log s(beta h) - eps log s(-beta h).

    DPO, arXiv 2305.18290; eps, the label smoothing, makes it cDPO (ericmitchell.ai/cdpo.pdf).
    """
    ratios = pairs.ratios
    logits_B, eps = options.beta * (ratios[0] - ratios[1]), options.label_smoothing
    return -(1 - eps) * F.logsigmoid(logits_B) - eps * F.logsigmoid(-logits_B), ratios


def ipo(pairs: PairLogps, options: PreferenceOptions) -> Terms:
    """Return (h - 1 / (2 beta))^2; with `ipo_length_average` each r in h is divided by |y|.

    IPO, arXiv 2310.12036.
    """
    ratios = pairs.ratios
    chosen_B, rejected_B = pairs.per_token(ratios) if options.ipo_length_average else ratios
    return (chosen_B - rejected_B - 1 / (2 * options.beta)).square(), ratios


def hinge(pairs: PairLogps, options: PreferenceOptions) -> Terms:
    """Return max(0, 1 - beta h): SLiC (arXiv 2305.10425) on ratios to a reference (RSO,
    2309.06657).
    """
    ratios = pairs.ratios
    return F.relu(1 - options.beta * (ratios[0] - ratios[1])), ratios


def robust(pairs: PairLogps, options: PreferenceOptions) -> Terms:
    """Return (-(1 - eps) log s(beta h) + eps log s(-beta h)) / (1 - 2 eps).

    Without bias when labels are flipped with probability eps < 1/2. Robust DPO, arXiv 2403.00409.
    """
    ratios = pairs.ratios
    logits_B, eps = options.beta * (ratios[0] - ratios[1]), options.label_smoothing
    losses_B = -(1 - eps) * F.logsigmoid(logits_B) + eps * F.logsigmoid(-logits_B)
    return losses_B / (1 - 2 * eps), ratios


def exo_pair(pairs: PairLogps, options: PreferenceOptions) -> Terms:
    """Return KL from (s(beta h), s(-beta h)) to (1 - eps, eps), the pair's labels; eps at least
    0.001.

    s(beta h) (log s(beta h) - log(1 - eps)) + s(-beta h) (log s(-beta h) - log eps). EXO, arXiv
    2402.00856.
    """
    ratios = pairs.ratios
    logits_B = options.beta * (ratios[0] - ratios[1])
    eps = max(options.label_smoothing, MIN_EXO_SMOOTHING)
    right_B, wrong_B = F.logsigmoid(logits_B), F.logsigmoid(-logits_B)
    right_part_B = right_B.exp() * (right_B - math.log1p(-eps))
    return right_part_B + wrong_B.exp() * (wrong_B - math.log(eps)), ratios


def apo_zero(pairs: PairLogps, options: PreferenceOptions) -> Terms:
    """Return (1 - s(beta r_chosen)) + s(beta r_rejected): raise the chosen, lower the rejected
    response.

    For chosen responses better than the model's own. APO, arXiv 2408.06266.
    """
    ratios = pairs.ratios
    return (-options.beta * ratios[0]).sigmoid() + (options.beta * ratios[1]).sigmoid(), ratios


def apo_down(pairs: PairLogps, options: PreferenceOptions) -> Terms:
    """Return s(beta r_chosen) + (1 - s(beta h)): lower both responses, the rejected one more.

    For chosen responses worse than the model's own. APO, arXiv 2408.06266.
    """
    ratios = pairs.ratios
    gap_B = ratios[0] - ratios[1]
    return (options.beta * ratios[0]).sigmoid() + (-options.beta * gap_B).sigmoid(), ratios


def simpo(pairs: PairLogps, options: PreferenceOptions) -> Terms:
    """Return -log s(beta log pi_chosen / |y| - beta log pi_rejected / |y| - gamma).

    Rewards are beta log pi / |y|, gamma is `simpo_gamma`. SimPO, arXiv 2405.14734.
    """
    means = pairs.means
    return -F.logsigmoid(options.beta * (means[0] - means[1]) - options.simpo_gamma), means


def cpo(pairs: PairLogps, options: PreferenceOptions) -> Terms:
    """Return -log s(beta (log pi_chosen - log pi_rejected)) - log pi_chosen / |y|.

    Rewards are beta log pi. The likelihood term is taken per token, so that a long response does
    not drown the preference. CPO, arXiv 2401.08417.
    """
    sums = pairs.sums_2B.float()
    return -F.logsigmoid(options.beta * (sums[0] - sums[1])) - pairs.means[0], sums


def orpo(pairs: PairLogps, options: PreferenceOptions) -> Terms:
    """Return -log P_chosen - beta log s(log odds_chosen - log odds_rejected), odds = P / (1 - P).

    log P = log pi / |y|, beta the paper's lambda. Rewards are beta log odds. ORPO, arXiv
    2403.07691.
    """
    means = pairs.means
    odds = _log_odds(means)
    return -means[0] - options.beta * F.logsigmoid(odds[0] - odds[1]), odds


def _log_odds(logprobs: Tensor) -> Tensor:
    """Return log(p / (1 - p)) from log p."""
    logprobs = logprobs.clamp(max=MAX_MEAN_LOGPROB)
    return logprobs - torch.log(-torch.expm1(logprobs))


PreferenceLoss: TypeAlias = Callable[[PairLogps, PreferenceOptions], Terms]
PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    "sigmoid": dpo,
    "ipo": ipo,
    "hinge": hinge,
    "robust": robust,
    "exo_pair": exo_pair,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "simpo": simpo,
    "cpo": cpo,
    "orpo": orpo,
}


def preference_loss(
    loss: PreferenceLoss, pairs: PairLogps, options: PreferenceOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, rewards of the chosen and rewards of the rejected, (B,) fp32; rewards are
    beta r where the loss compares with a reference, without gradient.
    """
    losses_B, rewards = loss(pairs, options)
    chosen_B, rejected_B = (options.beta * reward_B.detach() for reward_B in rewards)
    return losses_B, chosen_B, rejected_B


def kto_kl_sum(policy_B: Tensor, ref_B: Tensor) -> Tensor:
    """Return this rank's part of the reference point: the sum of r over mismatched pairs, (),
    detached.

    A mismatched pair is a prompt with the response to the next prompt of the global batch. The
    parts, and the numbers of pairs, are added over micro-batches and ranks.
    """
    assert policy_B.shape == ref_B.shape, "log-probs of the same responses are needed"
    return (policy_B.detach().float() - ref_B.detach().float()).sum()


def kto_reference_point(kl_sum: Tensor, num_pairs: int | float | Tensor) -> Tensor:
    """Return z = max(0, sum of r / pairs), (): how far the policy is from the reference as it
    stands.
    """
    return (kl_sum.detach() / num_pairs).clamp(min=0)


def kto_losses(
    policy_B: Tensor,
    ref_B: Tensor,
    *,
    is_desirable_B: Tensor,
    reference_point: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> tuple[Tensor, Tensor]:
    """Return losses and rewards beta r, (B,) fp32 each; only the losses carry a gradient.

    weight (1 - s(beta (r - z))) where desirable, else weight (1 - s(beta (z - r))), with z the
    `reference_point` of the global batch. KTO, arXiv 2402.01306.
    """
    assert policy_B.shape == ref_B.shape == is_desirable_B.shape, "one number per response"
    ratio_B = policy_B.float() - ref_B.float()
    beyond_B = beta * (ratio_B - reference_point)
    losses_B = torch.where(
        is_desirable_B.bool(),
        desirable_weight * (-beyond_B).sigmoid(),
        undesirable_weight * beyond_B.sigmoid(),
    )
    return losses_B, beta * ratio_B.detach()


def pairwise_losses(
    chosen_B: Tensor, rejected_B: Tensor, *, kind: str = "sigmoid", margin_B: Tensor | None = None
) -> Tensor:
    """Return the Bradley-Terry loss of r_chosen - r_rejected - margin, (B,) fp32 (InstructGPT,
    arXiv 2203.02155).

    "sigmoid" is -log s(gap); "logexp", log(1 + exp(-gap)), is the same function by another name.
    `margin_B` says by how much the chosen response is better (Llama 2, arXiv 2307.09288).
    """
    assert chosen_B.shape == rejected_B.shape, "each chosen reward needs its rejected one"
    gap_B = chosen_B.float() - rejected_B.float()
    if margin_B is not None:
        assert margin_B.shape == gap_B.shape, "one margin per pair is needed"
        gap_B = gap_B - margin_B.float()
    return -F.logsigmoid(gap_B) if kind == "sigmoid" else F.softplus(-gap_B)
