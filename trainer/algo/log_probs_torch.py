"""What :mod:`trainer.algo.log_probs` computes from some tokens' logits, in torch.

-p log p is computed by `torch.special.entr`, which is 0 at p = 0: logits of -inf are fine.
"""

from __future__ import annotations

import torch
from torch import Tensor


def statistics(logits: Tensor, targets: Tensor, *, size: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of softmax(logits[:, :size] / temperature), each [m]: the log of the partition function, the target's logit over
    the temperature (0 for a target outside of [0, size)), the entropy.

    Args:
        logits: [m, v].
        targets: [m].
    """
    z = logits[:, :size].to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_partition = z.logsumexp(-1)
    of_target = z.gather(-1, _within(targets, size)).squeeze(-1).where(is_within(targets, size), 0.0)
    p = z.sub_(log_partition[:, None]).exp_()
    return log_partition, of_target, torch.special.entr(p).sum(-1)


def gradient(
    logits: Tensor,
    targets: Tensor,
    log_partition: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    *,
    size: int,
    temperature: float,
    in_place: bool,
) -> Tensor:
    """The gradient of the logits [m, v], 0 beyond ``size`` and for tokens whose upstream gradients are 0.

    Args:
        log_partition, entropy: [m], of the whole vocabulary.
        grad_log_probs, grad_entropy: [m]; None: there is none.
        in_place: the logits may be overwritten.
    """
    z = logits[:, :size].to(log_partition.dtype) / temperature
    p = z.sub_(log_partition[:, None]).exp_()
    grad = torch.zeros_like(p)
    is_used = torch.zeros_like(targets[:, None], dtype=torch.bool)
    if grad_log_probs is not None:
        upstream = grad_log_probs[:, None]
        grad.addcmul_(p, upstream, value=-1)
        grad.scatter_add_(-1, _within(targets, size), upstream.where(is_within(targets, size)[:, None], 0.0))
        is_used |= upstream != 0
    if grad_entropy is not None:
        upstream = grad_entropy[:, None]
        grad += upstream * (torch.special.entr(p) - p * entropy[:, None])
        is_used |= upstream != 0
    grad_logits = logits if in_place else torch.empty_like(logits)
    grad_logits[:, :size] = torch.where(is_used, grad / temperature, 0.0)
    grad_logits[:, size:] = 0.0
    return grad_logits


def is_within(targets: Tensor, size: int) -> Tensor:
    """Where targets are in [0, size)."""
    return (targets >= 0) & (targets < size)


def _within(targets: Tensor, size: int) -> Tensor:
    return targets.clamp(0, size - 1)[:, None]
