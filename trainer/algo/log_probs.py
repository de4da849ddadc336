"""Log-probs of chosen tokens and entropy of their distribution, without float32 copies of the logits.

With b * s = 8192 tokens and a vocabulary of 150,000, float32 logits are 4.6 GiB, and plain autograd keeps two
or three such tensors. Here forward and backward walk over a few columns at a time; backward recomputes the
softmax from the logits themselves and two numbers per token.

Tensor-parallel ranks each hold the logits of a part of the vocabulary. They exchange three numbers per token and no
logits, as in Megatron-LM's vocab_parallel_cross_entropy (arXiv:1909.08053, section 3).

Simplified: no double backward.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

# Elements of one float32 working tensor: 64 MiB.
_CHUNK_ELEMENTS = 1 << 24


def log_probs_from_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: distributed.ProcessGroup | None = None,
) -> Tensor:
    """Log-probability of each target under softmax(logits / temperature).

    Args:
        logits: [b, s, v], any float dtype and strides; column t predicts `targets[:, t]`. With a group of n ranks,
            rank r holds the entries from r * v up to (r + 1) * v of a vocabulary of n * v.
        targets: [b, s] token ids, the same on all ranks of the group.
        temperature: the one the tokens were sampled with, > 0; otherwise ratios compare two distributions.
        vocab_size: real size of the whole vocabulary; logits beyond it are padding without probability or gradient.
        group: ranks that share the vocabulary, each of which calls this and gets the same result; its gradient counts
            once, however many they are. None: the logits hold all of it.

    Returns:
        [b, s] float32 (float64 for float64 logits). A target outside the vocabulary gives NaN: loud if it is
        used, harmless if it is padding. Tokens whose incoming gradient is 0 send exactly 0 back, whatever
        their logits hold.
    """
    return _TokenStatistics.apply(logits, targets, temperature, vocab_size, False, group)[0]


def entropy_from_logits(
    logits: Tensor, *, temperature: float, vocab_size: int, group: distributed.ProcessGroup | None = None
) -> Tensor:
    """Entropy [b, s] in nats of softmax(logits / temperature); see `log_probs_from_logits`."""
    targets = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
    return _TokenStatistics.apply(logits, targets, temperature, vocab_size, True, group)[1]


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: distributed.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Both of the above in one pass over the logits (and one gradient tensor instead of two)."""
    return _TokenStatistics.apply(logits, targets, temperature, vocab_size, True, group)


class _TokenStatistics(torch.autograd.Function):
    """With z = logits / temperature and p = softmax(z), for target a and entropy H = -sum p log p:

    d log p_a / dz_j = [j = a] - p_j        dH / dz_j = -p_j (log p_j + H)

    -p log p is computed by `torch.special.entr`, which is 0 at p = 0: logits of -inf are fine.
    """

    @staticmethod
    def forward(ctx, logits, targets, temperature, vocab_size, with_entropy, group):
        assert temperature > 0, temperature
        own_targets, own_size = _own_vocabulary(logits, targets, vocab_size, group)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_probs, log_partition, entropy = (
            torch.zeros(targets.shape, dtype=dtype, device=logits.device) for _ in range(3)
        )
        if own_size == 0:
            log_partition.fill_(-torch.inf)
        for columns in _column_chunks(logits) if own_size else ():
            z = logits[:, columns, :own_size].to(dtype) / temperature
            log_partition[:, columns] = z.logsumexp(-1)
            target_logits = z.gather(-1, _within(own_targets[:, columns], own_size)).squeeze(-1)
            log_probs[:, columns] = target_logits.where(_is_within(own_targets[:, columns], own_size), 0.0)
            if with_entropy:
                p = z.sub_(log_partition[:, columns, None]).exp_()
                entropy[:, columns] = torch.special.entr(p).sum(-1)
        if group is not None:
            _combine(log_partition, log_probs, entropy if with_entropy else None, group)
        log_probs -= log_partition
        log_probs.masked_fill_(~_is_within(targets, vocab_size), torch.nan)
        ctx.save_for_backward(logits, own_targets, log_partition, entropy)
        ctx.temperature, ctx.own_size = temperature, own_size
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        logits, targets, log_partition, entropy = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        for columns in _column_chunks(logits) if ctx.own_size else ():
            z = logits[:, columns, : ctx.own_size].to(log_partition.dtype) / ctx.temperature
            p = z.sub_(log_partition[:, columns, None]).exp_()
            grad = torch.zeros_like(p)
            is_used = torch.zeros_like(targets[:, columns, None], dtype=torch.bool)
            if grad_log_probs is not None:
                upstream = grad_log_probs[:, columns, None]
                grad.addcmul_(p, upstream, value=-1)
                of_target = upstream.where(_is_within(targets[:, columns, None], ctx.own_size), 0.0)
                grad.scatter_add_(-1, _within(targets[:, columns], ctx.own_size), of_target)
                is_used |= upstream != 0
            if grad_entropy is not None:
                upstream = grad_entropy[:, columns, None]
                grad += upstream * (torch.special.entr(p) - p * entropy[:, columns, None])
                is_used |= upstream != 0
            grad_logits[:, columns, : ctx.own_size] = torch.where(is_used, grad / ctx.temperature, 0.0)
        return grad_logits, None, None, None, None, None


def _own_vocabulary(
    logits: Tensor, targets: Tensor, vocab_size: int, group: distributed.ProcessGroup | None
) -> tuple[Tensor, int]:
    """Targets counted from the first entry that this rank holds, and how many entries it holds, padding left out."""
    width = logits.shape[-1]
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    assert 0 < vocab_size <= ranks * width, (vocab_size, ranks, logits.shape)
    return targets - rank * width, min(max(vocab_size - rank * width, 0), width)


def _combine(
    log_partition: Tensor, target_logits: Tensor, entropy: Tensor | None, group: distributed.ProcessGroup
) -> None:
    """Turn each rank's numbers about its own entries into those of the whole vocabulary, in place.

    With w_r the probability of rank r's entries: log Z = log sum exp(log Z_r), H = sum w_r H_r - w_r log w_r.
    """
    own, largest = log_partition.clone(), log_partition.clone()
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=group)
    log_partition.sub_(largest).exp_()
    distributed.all_reduce(log_partition, group=group)
    log_partition.log_().add_(largest)
    distributed.all_reduce(target_logits, group=group)
    if entropy is not None:
        weight = (own - log_partition).exp()
        entropy.copy_(torch.where(weight > 0, weight * entropy + torch.special.entr(weight), 0.0))
        distributed.all_reduce(entropy, group=group)


def _column_chunks(logits: Tensor) -> Iterator[slice]:
    """Slices along s of about `_CHUNK_ELEMENTS`; flattening b and s first would copy transposed logits."""
    rows, columns, vocabulary = logits.shape
    width = max(1, _CHUNK_ELEMENTS // max(1, rows * vocabulary))
    return (slice(start, start + width) for start in range(0, columns, width))


def _is_within(targets: Tensor, vocab_size: int) -> Tensor:
    return (targets >= 0) & (targets < vocab_size)


def _within(targets: Tensor, vocab_size: int) -> Tensor:
    return targets.clamp(0, vocab_size - 1)[..., None]
