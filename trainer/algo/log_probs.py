"""Log-probs of chosen tokens and entropy of their distribution, without float32 copies of the logits.

With b * s = 8192 tokens and a vocabulary of 150,000, float32 logits are 4.6 GiB, and plain autograd keeps two
or three such tensors. Here forward and backward walk over a few columns at a time; backward recomputes the
softmax from the logits themselves and two numbers per token.

Simplified: the logits hold the whole vocabulary (gather them over tensor-parallel ranks first); no double
backward.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of one float32 working tensor: 64 MiB.
_CHUNK_ELEMENTS = 1 << 24


def log_probs_from_logits(logits: Tensor, targets: Tensor, *, temperature: float, vocab_size: int) -> Tensor:
    """Log-probability of each target under softmax(logits / temperature).

    Args:
        logits: [b, s, v], v >= vocab_size, any float dtype and strides; column t predicts `targets[:, t]`.
        targets: [b, s] token ids.
        temperature: the one the tokens were sampled with, > 0; otherwise ratios compare two distributions.
        vocab_size: real size of the vocabulary; logits beyond it are padding without probability or gradient.

    Returns:
        [b, s] float32 (float64 for float64 logits). A target outside the vocabulary gives NaN: loud if it is
        used, harmless if it is padding. Tokens whose incoming gradient is 0 send exactly 0 back, whatever
        their logits hold.
    """
    return _TokenStatistics.apply(logits, targets, temperature, vocab_size, False)[0]


def entropy_from_logits(logits: Tensor, *, temperature: float, vocab_size: int) -> Tensor:
    """Entropy [b, s] in nats of softmax(logits / temperature); see `log_probs_from_logits`."""
    targets = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
    return _TokenStatistics.apply(logits, targets, temperature, vocab_size, True)[1]


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, *, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Both of the above in one pass over the logits (and one gradient tensor instead of two)."""
    return _TokenStatistics.apply(logits, targets, temperature, vocab_size, True)


class _TokenStatistics(torch.autograd.Function):
    """With z = logits / temperature and p = softmax(z), for target a and entropy H = -sum p log p:

    d log p_a / dz_j = [j = a] - p_j        dH / dz_j = -p_j (log p_j + H)

    -p log p is computed by `torch.special.entr`, which is 0 at p = 0: logits of -inf are fine.
    """

    @staticmethod
    def forward(ctx, logits, targets, temperature, vocab_size, with_entropy):
        assert temperature > 0, temperature
        assert 0 < vocab_size <= logits.shape[-1], (vocab_size, logits.shape)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_probs, log_partition, entropy = (
            torch.zeros(targets.shape, dtype=dtype, device=logits.device) for _ in range(3)
        )
        for columns in _column_chunks(logits):
            z = logits[:, columns, :vocab_size].to(dtype) / temperature
            log_partition[:, columns] = z.logsumexp(-1)
            log_probs[:, columns] = z.gather(-1, _within(targets[:, columns], vocab_size)).squeeze(-1)
            if with_entropy:
                p = z.sub_(log_partition[:, columns, None]).exp_()
                entropy[:, columns] = torch.special.entr(p).sum(-1)
        log_probs -= log_partition
        log_probs.masked_fill_((targets < 0) | (targets >= vocab_size), torch.nan)
        ctx.save_for_backward(logits, targets, log_partition, entropy)
        ctx.temperature, ctx.vocab_size = temperature, vocab_size
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        logits, targets, log_partition, entropy = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        for columns in _column_chunks(logits):
            z = logits[:, columns, : ctx.vocab_size].to(log_partition.dtype) / ctx.temperature
            p = z.sub_(log_partition[:, columns, None]).exp_()
            grad = torch.zeros_like(p)
            is_used = torch.zeros_like(targets[:, columns, None], dtype=torch.bool)
            if grad_log_probs is not None:
                upstream = grad_log_probs[:, columns, None]
                grad.addcmul_(p, upstream, value=-1)
                grad.scatter_add_(-1, _within(targets[:, columns], ctx.vocab_size), upstream)
                is_used |= upstream != 0
            if grad_entropy is not None:
                upstream = grad_entropy[:, columns, None]
                grad += upstream * (torch.special.entr(p) - p * entropy[:, columns, None])
                is_used |= upstream != 0
            grad_logits[:, columns, : ctx.vocab_size] = torch.where(is_used, grad / ctx.temperature, 0.0)
        return grad_logits, None, None, None, None


def _column_chunks(logits: Tensor) -> Iterator[slice]:
    """Slices along s of about `_CHUNK_ELEMENTS`; flattening b and s first would copy transposed logits."""
    rows, columns, vocabulary = logits.shape
    width = max(1, _CHUNK_ELEMENTS // max(1, rows * vocabulary))
    return (slice(start, start + width) for start in range(0, columns, width))


def _within(targets: Tensor, vocab_size: int) -> Tensor:
    return targets.clamp(0, vocab_size - 1)[..., None]
