"""Log-probs of chosen tokens and entropy of their distribution, without float32 copies of the logits, or without the
logits themselves.

With b * s = 8192 tokens and a vocabulary of 150,000, float32 logits are 4.6 GiB, and plain autograd keeps two
or three such tensors. Here forward and backward walk over a few tokens at a time; backward recomputes the
softmax from the logits and two numbers per token. Given hidden states and the weight of the output layer, the logits
too are made a few tokens at a time, forward and backward: for one more product with the weight, none are kept (the idea
of Liger's fused linear cross-entropy, arXiv:2410.10989, for losses whose gradient is not known in the forward pass).

Tensor-parallel ranks each hold the logits of a part of the vocabulary. They exchange three numbers per token and no
logits, as in Megatron-LM's vocab_parallel_cross_entropy (arXiv:1909.08053, section 3).

Simplified: no double backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trainer.algo import log_probs_torch
from trainer.algo.log_probs_torch import is_within

# Logits at a time: each of torch's float32 working tensors takes 64 MiB; fused kernels need but 512 MiB of bf16.
_CHUNK_ELEMENTS, _FUSED_CHUNK_ELEMENTS = 1 << 24, 1 << 28


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: distributed.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Of each target under softmax(logits / temperature), and the entropy in nats of that distribution.

    Args:
        logits: [b, s, v], any float dtype; column t predicts `targets[:, t]`. Contiguous ones are not copied. With a
            group of n ranks, rank r holds the entries from r * v up to (r + 1) * v of a vocabulary of n * v.
        targets: [b, s] token ids, the same on all ranks of the group.
        temperature: the one the tokens were sampled with, > 0; otherwise ratios compare two distributions.
        vocab_size: real size of the whole vocabulary; logits beyond it are padding without probability or gradient.
        group: ranks that share the vocabulary, each of which calls this and gets the same result; its gradient counts
            once, however many they are. None: the logits hold all of it.

    Returns:
        Two [b, s] float32 (float64 for float64 logits). The log-prob of a target outside the vocabulary is NaN: loud
        if it is used, harmless if it is padding. Tokens whose incoming gradient is 0 send exactly 0 back, whatever
        their logits hold.
    """
    return _of_logits(logits, targets, _How(temperature, vocab_size, group=group))


def linear_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: Tensor,
    temperature: float,
    vocab_size: int,
    group: distributed.ProcessGroup | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies under softmax(hidden @ weight.T / temperature), of some tokens alone.

    Args:
        hidden: [n, h] of all tokens.
        weight: [v, h] of the output layer; with a group, this rank's entries, and the gradient of `hidden` is this
            rank's addend.
        targets: [m] token ids.
        rows: [m] that of `hidden` which predicts each target, all different. The others get a gradient of 0.
        fused: by Triton kernels (CUDA), which need no float32 working tensors.

    Returns:
        Two [m]; for the rest see `log_probs_and_entropy`.
    """
    how = _How(temperature, vocab_size, group=group, fused=fused)
    return _TokenStatistics.apply(hidden, weight, targets, rows, how)


def _of_logits(logits: Tensor, targets: Tensor, how: _How) -> tuple[Tensor, Tensor]:
    log_probs, entropy = _TokenStatistics.apply(logits.flatten(0, 1), None, targets.flatten(), None, how)
    return log_probs.view(targets.shape), entropy.view(targets.shape)


@dataclass(frozen=True)
class _How:
    temperature: float
    vocab_size: int
    group: distributed.ProcessGroup | None
    fused: bool = False

    @property
    def kernels(self) -> Any:
        """The module whose ``statistics`` and ``gradient`` do the work."""
        if self.fused:
            from trainer.algo import log_probs_triton

            return log_probs_triton
        return log_probs_torch

    def chunks(self, tokens: int, vocabulary: int) -> Iterator[slice]:
        """Tokens whose logits exist at the same time."""
        width = max(1, (_FUSED_CHUNK_ELEMENTS if self.fused else _CHUNK_ELEMENTS) // vocabulary)
        return (slice(start, start + width) for start in range(0, tokens, width))


class _TokenStatistics(torch.autograd.Function):
    """With z = logits / temperature and p = softmax(z), for target a and entropy H = -sum p log p:

    d log p_a / dz_j = [j = a] - p_j        dH / dz_j = -p_j (log p_j + H)

    ``inputs`` are the logits [n, v] or, with a weight [v, h], hidden states [n, h]; ``rows`` picks some of them.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, targets: Tensor, rows: Tensor | None, how: _How
    ) -> Any:
        assert how.temperature > 0, how.temperature
        width = inputs.shape[-1] if weight is None else weight.shape[0]
        own_targets, own_size = _own_vocabulary(width, targets, how)
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        log_partition, log_probs, entropy = (inputs.new_zeros(targets.shape, dtype=dtype) for _ in range(3))
        if own_size == 0:
            log_partition.fill_(-torch.inf)
        for some in how.chunks(len(targets), width) if own_size else ():
            logits, _ = _logits(inputs, weight, rows, some)
            log_partition[some], log_probs[some], entropy[some] = how.kernels.statistics(
                logits, own_targets[some], size=own_size, temperature=how.temperature
            )
        if how.group is not None:
            _combine(log_partition, log_probs, entropy, how.group)
        log_probs -= log_partition
        log_probs.masked_fill_(~is_within(targets, how.vocab_size), torch.nan)
        ctx.save_for_backward(inputs, weight, rows, own_targets, log_partition, entropy)
        ctx.how, ctx.own_size = how, own_size
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        inputs, weight, rows, targets, log_partition, entropy = ctx.saved_tensors
        width = inputs.shape[-1] if weight is None else weight.shape[0]
        chunks = list(ctx.how.chunks(len(targets), width)) if ctx.own_size else []
        grad_inputs = torch.zeros_like(inputs)
        grad_weight = _WeightGradient(weight, parts=len(chunks)) if ctx.needs_input_grad[1] else None  # type: ignore
        for some in chunks:
            logits, hidden = _logits(inputs, weight, rows, some)
            grad_logits = ctx.how.kernels.gradient(
                logits,
                targets[some],
                log_partition[some],
                entropy[some],
                None if grad_log_probs is None else grad_log_probs[some],
                None if grad_entropy is None else grad_entropy[some],
                size=ctx.own_size,
                temperature=ctx.how.temperature,
                in_place=weight is not None,
            )
            own = some if rows is None else rows[some]
            grad_inputs[own] = grad_logits if weight is None else grad_logits @ weight
            if grad_weight is not None:
                grad_weight.add(grad_logits, hidden)
        return grad_inputs, None if grad_weight is None else grad_weight.total(), None, None, None


def _logits(inputs: Tensor, weight: Tensor | None, rows: Tensor | None, some: slice) -> tuple[Tensor, Tensor]:
    """Logits of some tokens, and what they were made of."""
    hidden = inputs[some] if rows is None else inputs[rows[some]]
    return hidden if weight is None else functional.linear(hidden, weight), hidden


class _WeightGradient:
    """Sum over chunks of grad_logits.T @ hidden: one product is rounded once, several are summed in float32."""

    def __init__(self, weight: Tensor, *, parts: int) -> None:
        self._weight = weight
        dtype = weight.dtype if parts == 1 else torch.promote_types(weight.dtype, torch.float32)
        self._total = torch.zeros_like(weight, dtype=dtype)
        self._is_first = True

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        left, beta = grad_logits.t(), 0 if self._is_first else 1
        self._is_first = False
        if self._total.dtype == left.dtype:
            torch.addmm(self._total, left, hidden, beta=beta, out=self._total)
        elif self._total.is_cuda:  # one kernel that reads bf16 and sums in float32
            torch.ops.aten.addmm.dtype_out(self._total, left, hidden, self._total.dtype, beta=beta, out=self._total)
        else:
            self._total += left @ hidden

    def total(self) -> Tensor:
        return self._total.to(self._weight.dtype)


def _own_vocabulary(width: int, targets: Tensor, how: _How) -> tuple[Tensor, int]:
    """Targets counted from the first entry that this rank holds, and how many entries it holds, padding left out."""
    ranks, rank = (1, 0) if how.group is None else (how.group.size(), how.group.rank())
    assert 0 < how.vocab_size <= ranks * width, (how.vocab_size, ranks, width)
    return targets - rank * width, min(max(how.vocab_size - rank * width, 0), width)


def _combine(log_partition: Tensor, target_logits: Tensor, entropy: Tensor, group: distributed.ProcessGroup) -> None:
    """Turn each rank's numbers about its own entries into those of the whole vocabulary, in place.

    With w_r the probability of rank r's entries: log Z = log sum exp(log Z_r), H = sum w_r H_r - w_r log w_r.
    """
    own, largest = log_partition.clone(), log_partition.clone()
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=group)
    log_partition.sub_(largest).exp_()
    distributed.all_reduce(log_partition, group=group)
    log_partition.log_().add_(largest)
    distributed.all_reduce(target_logits, group=group)
    weight = (own - log_partition).exp()
    entropy.copy_(torch.where(weight > 0, weight * entropy + torch.special.entr(weight), 0.0))
    distributed.all_reduce(entropy, group=group)
