"""What is done about a policy that draws otherwise than it trains.

The engine gives its tokens other probabilities mu than training does, pi: other kernels, other rounding, top-p, or
older weights. A correction weighs each token's policy loss by importance weights made of w = pi / mu, once per step.
The group ``mismatch`` names a class (``_target_``) and its fields; any dataclass that extends :class:`Correction` will
do.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algo.masked import divide_or_zero, zero_padding

LEVELS = ("token", "sequence", "geometric")
OUTSIDE = ("truncate", "mask")
_LARGEST_LOG = 20.0  # exp of it is no infinity


class Correction(ABC):
    """Base of the corrections: frozen dataclasses, the fields are the keys of their YAML, no defaults in Python."""

    def validate(self) -> None:
        """Check the fields before anything is launched; raises ValueError that names ``mismatch.<field>``."""
        return

    @abstractmethod
    def weights(self, log_ratio: Tensor, *, response_mask: Tensor) -> Tensor | None:
        """log_ratio [n, s], log pi - log mu, anything off the mask -> weights [n, s] >= 0, zero off the mask; None: all
        tokens weigh the same."""


@dataclass(frozen=True)
class Uncorrected(Correction):
    """Tokens are trained on as if training had drawn them."""

    def weights(self, log_ratio: Tensor, *, response_mask: Tensor) -> None:
        return None


@dataclass(frozen=True)
class ImportanceWeights(Correction):
    """Importance weights within bounds.

    Fields:
        level: ``token``: each token's own w. ``sequence``: the product over a response, the same for all its tokens.
            ``geometric``: the geometric mean over a response.
        lower, upper: bounds of w.
        outside: what becomes of a w that is not within them. ``truncate``: the bound, as in truncated importance
            sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
            ``mask``: 0, as in IcePop for tokens (Ling Team 2025, arXiv:2510.18855) and in masked importance sampling
            for sequences (Liu et al. 2025, "When speed kills stability").
        weigh: false: what lies within the bounds weighs 1. With ``outside=mask`` that is rejection.
        reject_below: a response with a token whose w is less is left out, whatever its other tokens are; null: none is.
    """

    level: str
    lower: float
    upper: float
    outside: str
    weigh: bool
    reject_below: float | None

    def validate(self) -> None:
        for name, allowed in (("level", LEVELS), ("outside", OUTSIDE)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"mismatch.{name}={getattr(self, name)}: must be one of {', '.join(allowed)}")
        if not 0 <= self.lower <= 1 <= self.upper < math.inf:
            raise ValueError(
                f"mismatch.lower={self.lower} and mismatch.upper={self.upper}: 1, the weight where both agree, must "
                "lie between them, and none may be negative. Use mismatch.lower=0 mismatch.upper=2"
            )
        if not self.weigh and self.outside == "truncate":
            raise ValueError(
                "mismatch.weigh=false with mismatch.outside=truncate: all weights would be 1. Use "
                "mismatch.outside=mask, or mismatch=none"
            )
        if self.reject_below is not None and not 0 <= self.reject_below < 1:
            raise ValueError(f"mismatch.reject_below={self.reject_below}: must be null, or at least 0 and less than 1")

    @torch.no_grad()
    def weights(self, log_ratio: Tensor, *, response_mask: Tensor) -> Tensor:
        kept = zero_padding(log_ratio, mask=response_mask)
        total, count = kept.sum(1, keepdim=True), response_mask.sum(1, keepdim=True)
        log_weight = {"token": kept, "sequence": total, "geometric": divide_or_zero(total, count)}[self.level]
        ratio = log_weight.clamp(-_LARGEST_LOG, _LARGEST_LOG).exp().expand_as(kept)
        is_within = (ratio >= self.lower) & (ratio <= self.upper)
        inside = ratio.clamp(self.lower, self.upper) if self.weigh else torch.ones_like(ratio)
        found = inside if self.outside == "truncate" else inside.where(is_within, 0.0)
        if self.reject_below is not None:
            is_bad = (response_mask & (kept.exp() < self.reject_below)).any(1, keepdim=True)
            found = found.masked_fill(is_bad, 0.0)
        return zero_padding(found, mask=response_mask)
