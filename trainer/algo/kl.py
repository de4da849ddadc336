"""KL(actor || reference) estimated from log-probs of tokens that the actor sampled; its adaptive coefficient.

Which estimator where: as a *reward* use k1; it is unbiased, and summed over a response it estimates the KL of
whole responses. As a *loss* use k2 or k3: on fresh samples the expected gradient of k2 is that of the
per-token KL, and of k3 that of KL(reference || actor), which has the same minimum. The expected gradient of
k1 is zero: as a loss it is noise (arXiv:2506.09477). The straight-through forms k1+ and k3+ have the value of
k1 or k3 and the gradient of k2: an unbiased estimate of the KL to look at, and its own gradient.
"""

import math

import torch
from torch import Tensor

from trainer.algo.masked import zero_padding

KL_ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


def kl_estimate(
    log_probs: Tensor, *, ref_log_probs: Tensor, response_mask: Tensor, estimator: str, clamp: float | None
) -> Tensor:
    """KL to the reference per token, after J. Schulman, "Approximating KL divergence" (2020).

        d = log_probs - ref_log_probs        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

    Args:
        log_probs: [b, s] of the actor; gradients flow into it, and only into it.
        ref_log_probs: [b, s].
        response_mask: [b, s] bool.
        estimator: one of ``KL_ESTIMATORS``. "k1+" and "k3+": straight-through, see above.
        clamp: bound on |d|, applied before the formula so that exp cannot overflow; beyond it the gradient is
            0. So with clamp c, k3 is at most exp(c) - 1 - c (22,015 at c = 10), and tokens that are further than
            c from the reference are not pulled back any more. (verl clamps d at 20 and k3 itself at 10, so its
            gradient vanishes from d = -2.61 on.) None: no bound.

    Returns:
        [b, s], zero off the mask; exactly 0 where both log-probs are equal.

    Raises:
        ValueError: unknown estimator.
    """
    log_ratio = zero_padding(log_probs - ref_log_probs.detach(), mask=response_mask)
    if clamp is not None:
        log_ratio = log_ratio.clamp(-clamp, clamp)
    if estimator not in KL_ESTIMATORS:
        raise ValueError(
            f"unknown KL estimator {estimator!r}; allowed: {', '.join(KL_ESTIMATORS)}; override algo.kl.estimator=..."
        )
    k2 = 0.5 * log_ratio.square()
    if estimator == "k2":
        return k2
    value = log_ratio if estimator.startswith("k1") else torch.expm1(-log_ratio) + log_ratio
    return value.detach() + (k2 - k2.detach()) if estimator.endswith("+") else value


def next_kl_coef(coef: float, *, observed: float, target: float, horizon: float, batch_size: int) -> float:
    """One update of the adaptive KL coefficient (arXiv:1909.08593 section 2.2).

        error = clip((observed - target) / target, -0.2, 0.2)
        coef <- coef * (1 + error * batch_size / horizon)

    Args:
        observed: mean KL per response token of the last batch, in the unit of `target` (the paper's is a
            response's sum). Not finite: the coefficient stays.
        target: the KL to hold, > 0.
        horizon: number of responses over which the coefficient may grow or shrink by about 20 % (the paper's
            K_beta is batch_size / horizon), >= batch_size.
        batch_size: responses of the last batch.
    """
    if not math.isfinite(observed):
        return coef
    error = min(max((observed - target) / target, -0.2), 0.2)
    return coef * (1.0 + error * batch_size / horizon)
