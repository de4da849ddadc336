"""What the actor minimises: the contract of a policy loss, and the four that are here.

The group ``policy_loss`` of the config names a class (``_target_``) and its fields; any dataclass that extends
:class:`PolicyLoss` will do, in this package or not. Gradients flow into ``log_probs`` only. In all of them r is the
ratio exp(log_probs - old_log_probs) of a token, A its advantage.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algo.masked import divide_or_zero, masked_sum, zero_padding

Stats = dict[str, Tensor]

_LARGEST_CLAMP = 80  # exp of more overflows float32


@dataclass(frozen=True)
class PolicyTokens:
    """A micro-batch of b responses, s columns.

    Attributes:
        old_log_probs: [b, s], under the weights before this step's training.
        engine_log_probs: [b, s], the engine's own, under the distribution that tokens were drawn from.
        advantages: [b, s].
        response_mask: [b, s] bool.
        truncated: [b] bool, cut off at the longest length.
        weights_step: the PPO step that trained the weights which drew the responses.
    """

    old_log_probs: Tensor
    engine_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    truncated: Tensor
    weights_step: int

    @property
    def token_counts(self) -> Tensor:
        """[b]: tokens of each response."""
        return self.response_mask.sum(1)

    def drift(self, log_probs: Tensor) -> Tensor:
        """[b, s]: log_probs - old_log_probs, zero off the mask."""
        return zero_padding(log_probs - self.old_log_probs.detach(), mask=self.response_mask)

    def clean_advantages(self) -> Tensor:
        """[b, s]: the advantages, zero off the mask."""
        return zero_padding(self.advantages.detach(), mask=self.response_mask)


class PolicyLoss(ABC):
    """Base of the policy losses: frozen dataclasses, the fields are the keys of their YAML, no defaults in Python."""

    def validate(self) -> None:
        """Check the fields before anything is launched; raises ValueError that names ``policy_loss.<field>``."""
        return

    @abstractmethod
    def compute(self, log_probs: Tensor, tokens: PolicyTokens) -> tuple[Tensor, Stats]:
        """(loss [b, s], zero off the mask; statistics).

        A statistic is the sum over the valid tokens of this call, detached; it becomes ``actor/<name>`` per token. Of
        what is called ``..._max`` it is the largest. :func:`ratio_statistics` gives those that every loss should have.
        """


def ratio_statistics(ratio: Tensor, drift: Tensor, *, low: Tensor, high: Tensor, mask: Tensor) -> Stats:
    """``ratio``, ``ratio_max``, ``ppo_kl`` (old - new log-prob, k1, before any clamp) and ``clip_fraction_low`` and
    ``clip_fraction_high``, tokens whose gradient a bound removed, of which ``low`` and ``high`` [b, s] are True."""
    named = {"clip_fraction_low": low, "clip_fraction_high": high, "ratio": ratio, "ppo_kl": -drift}
    sums = {name: masked_sum(x.detach().double(), mask=mask) for name, x in named.items()}
    return sums | {"ratio_max": zero_padding(ratio.detach(), mask=mask).amax()}


def _bounded(drift: Tensor, clamp: float) -> Tensor:
    """Log-ratios that exp can take; beyond the bound the gradient is 0."""
    return drift.clamp(-clamp, clamp)


def _check_clamp(clamp: float) -> None:
    if not 0 <= clamp <= _LARGEST_CLAMP:
        raise ValueError(f"policy_loss.log_ratio_clamp={clamp}: must be between 0 and {_LARGEST_CLAMP}")


def _check_at_least(smallest: float, **fields: float) -> None:
    for name, value in fields.items():
        if not (math.isfinite(value) and value >= smallest):
            raise ValueError(f"policy_loss.{name}={value}: must be a finite number, at least {smallest:g}")


@dataclass(frozen=True)
class _Clipping(PolicyLoss):
    """Bounds of a ratio, which each loss says the use of."""

    clip_low: float
    clip_high: float
    log_ratio_clamp: float

    def validate(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"policy_loss.clip_low={self.clip_low}: must be between 0 and 1")
        _check_at_least(0, clip_high=self.clip_high)
        _check_clamp(self.log_ratio_clamp)


@dataclass(frozen=True)
class Ppo(_Clipping):
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347 eq. 7), with two bounds as in DAPO
    (arXiv:2503.14476 section 3.1):

        loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

    Fields:
        clip_low, clip_high: both 0.2 in the paper; 0.2 and 0.28 in DAPO.
        dual_clip: c > 1 bounds the loss where A < 0 at -A c, however large r is (arXiv:1912.09729); null: no bound.
        log_ratio_clamp: bound on abs(log r), so that exp cannot overflow; beyond it the gradient is 0.
    """

    dual_clip: float | None

    def validate(self) -> None:
        super().validate()
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise ValueError(
                f"policy_loss.dual_clip={self.dual_clip}: must be greater than 1, or null for no dual clip"
            )

    def compute(self, log_probs: Tensor, tokens: PolicyTokens) -> tuple[Tensor, Stats]:
        mask, drift, advantages = tokens.response_mask, tokens.drift(log_probs), tokens.clean_advantages()
        ratio = _bounded(drift, self.log_ratio_clamp).exp()
        loss = _clipped(ratio, advantages, low=self.clip_low, high=self.clip_high)
        is_dual = torch.zeros_like(mask)
        if self.dual_clip is not None:
            is_dual = (advantages < 0) & (ratio > self.dual_clip)
            loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * self.dual_clip), loss)
        low, high = _beyond(ratio, advantages, low=self.clip_low, high=self.clip_high)
        stats = ratio_statistics(ratio, drift, low=low, high=high, mask=mask)
        stats["clip_fraction_dual"] = masked_sum(is_dual.double(), mask=mask)
        return zero_padding(loss, mask=mask), stats


@dataclass(frozen=True)
class Gspo(_Clipping):
    """Group Sequence Policy Optimization (Zheng et al. 2025, arXiv:2507.18071): PPO's clipping of a ratio that all
    tokens of a response share, the geometric mean of theirs,

        s = exp(mean over the response of log r)        loss = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))

    In the token form of section 4.3: the value of s, and of its gradient each token's own part. With
    ``algo.loss_aggregation=sequence_mean`` and one advantage per response the gradient is that of eq. 5.

    Fields:
        clip_low, clip_high: 3e-4 and 4e-4 in the paper, whose responses have thousands of tokens; short ones need more.
        log_ratio_clamp: bound on abs(log s).
    """

    def compute(self, log_probs: Tensor, tokens: PolicyTokens) -> tuple[Tensor, Stats]:
        mask, drift, advantages = tokens.response_mask, tokens.drift(log_probs), tokens.clean_advantages()
        shared = divide_or_zero(drift.sum(1), tokens.token_counts)[:, None].detach()
        own_part = zero_padding(log_probs - log_probs.detach(), mask=mask)  # zero, with the gradient of log_probs
        ratio = _bounded(shared + own_part, self.log_ratio_clamp).exp()
        loss = _clipped(ratio, advantages, low=self.clip_low, high=self.clip_high)
        low, high = _beyond(ratio, advantages, low=self.clip_low, high=self.clip_high)
        return zero_padding(loss, mask=mask), ratio_statistics(ratio, drift, low=low, high=high, mask=mask)


@dataclass(frozen=True)
class Cispo(_Clipping):
    """Clipped importance sampling (MiniMax-M1, arXiv:2506.13585 eqs. 4 and 5): REINFORCE whose weight is clipped, so
    that no token loses its gradient,

        loss = -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A log_probs

    Fields:
        clip_low, clip_high: the paper has no lower bound (clip_low=1) and tunes the upper one.
        log_ratio_clamp: bound on abs(log r).

    Its clip fractions count weights that were changed.
    """

    def compute(self, log_probs: Tensor, tokens: PolicyTokens) -> tuple[Tensor, Stats]:
        mask, drift, advantages = tokens.response_mask, tokens.drift(log_probs), tokens.clean_advantages()
        ratio = _bounded(drift, self.log_ratio_clamp).exp().detach()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -weight * advantages * zero_padding(log_probs, mask=mask)
        low, high = ratio < 1 - self.clip_low, ratio > 1 + self.clip_high
        return loss, ratio_statistics(ratio, drift, low=low, high=high, mask=mask)


@dataclass(frozen=True)
class Sapo(PolicyLoss):
    """Soft Adaptive Policy Optimization (Gao et al. 2025, arXiv:2511.20347): a smooth gate instead of clipping,

        loss = -A 4 / tau sigmoid(tau (r - 1)),        tau = tau_positive where A > 0, else tau_negative

    whose gradient is PPO's at r = 1 and fades on both sides.

    Fields:
        tau_positive, tau_negative: 1 and 1.05 in the paper.
        log_ratio_clamp: bound on abs(log r).

    Nothing is clipped: its clip fractions are 0.
    """

    tau_positive: float
    tau_negative: float
    log_ratio_clamp: float

    def validate(self) -> None:
        _check_at_least(1e-3, tau_positive=self.tau_positive, tau_negative=self.tau_negative)
        _check_clamp(self.log_ratio_clamp)

    def compute(self, log_probs: Tensor, tokens: PolicyTokens) -> tuple[Tensor, Stats]:
        mask, drift, advantages = tokens.response_mask, tokens.drift(log_probs), tokens.clean_advantages()
        ratio = _bounded(drift, self.log_ratio_clamp).exp()
        tau = torch.where(advantages > 0, self.tau_positive, self.tau_negative)
        loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
        nothing = torch.zeros_like(mask)
        return zero_padding(loss, mask=mask), ratio_statistics(ratio, drift, low=nothing, high=nothing, mask=mask)


def _clipped(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def _beyond(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Where the lower bound removes the gradient, and where the upper one does."""
    return (advantages < 0) & (ratio < 1 - low), (advantages > 0) & (ratio > 1 + high)
