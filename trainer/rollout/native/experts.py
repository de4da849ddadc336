"""The experts of one layer as they lie on this rank: routed as in training, computed with what shapes allow.

Where shapes may follow the routing, each expert computes its own tokens. Where they may not (a CUDA graph, or bits that
must not depend on the batch), every expert computes every token as one batched product over the weights where they lie,
and the router's weights, zero for an expert that is not chosen, do the rest: a decoding step reads all experts anyway.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from trainer.megatron.groups import expert_group, tensor_parallel_group


class Experts:
    """A Megatron MoELayer's router and local experts. t tokens, e experts on this rank, f elements of an expert."""

    def __init__(self, layer: Any, *, dtype: torch.dtype) -> None:
        self._router, self._experts, self._dtype = layer.router, list(layer.experts.local_experts), dtype
        self._group = expert_group()
        self._first = layer.local_expert_indices[0]
        # Ranks that share every layer have the same tokens; others have their own, and gather them.
        self._gathers = spreads_over_rows(self._group)
        self._fc1 = stacked([expert.linear_fc1.weight for expert in self._experts])
        self._fc2 = stacked([expert.linear_fc2.weight for expert in self._experts])

    def __call__(self, hidden: Tensor, *, has_fixed_shapes: bool) -> Tensor:
        """hidden [t, hidden_size] -> what the chosen experts make of it, [t, hidden_size]. Where experts are spread
        over data-parallel ranks, all of these pass equally many tokens."""
        tokens = self._of_all_ranks(hidden) if self._gathers else hidden
        weights = self._router(tokens[None])[0][:, self._first : self._first + len(self._experts)]
        compute = self._on_all_tokens if has_fixed_shapes else self._on_chosen_tokens
        result = compute(tokens, weights)
        if self._group.size() > 1:
            distributed.all_reduce(result, group=self._group)
        if self._gathers:
            result = result.view(self._group.size(), *hidden.shape)[self._group.rank()]
        return result.to(self._dtype)

    def _of_all_ranks(self, hidden: Tensor) -> Tensor:
        parts = [torch.empty_like(hidden) for _ in range(self._group.size())]
        distributed.all_gather(parts, hidden, group=self._group)
        return torch.cat(parts)

    def _on_chosen_tokens(self, tokens: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        for expert, own_weights in zip(self._experts, weights.T, strict=True):
            chosen = own_weights.nonzero().squeeze(1)
            if len(chosen):
                gate, up = functional.linear(tokens[chosen], expert.linear_fc1.weight).chunk(2, dim=-1)
                inner = (functional.silu(gate) * up * own_weights[chosen, None]).to(self._dtype)
                result.index_add_(0, chosen, functional.linear(inner, expert.linear_fc2.weight).float())
        return result

    def _on_all_tokens(self, tokens: Tensor, weights: Tensor) -> Tensor:
        if self._fc1 is None or self._fc2 is None:
            return self._one_by_one(tokens, weights)
        fc1, fc2, is_reversed = self._fc1[0], self._fc2[0], self._fc1[1]
        if is_reversed:
            weights = weights.flip(1)
        gate, up = torch.bmm(tokens.expand(len(fc1), -1, -1), fc1.transpose(1, 2)).chunk(2, dim=-1)
        inner = (functional.silu(gate) * up * weights.T[..., None]).to(self._dtype)
        return torch.bmm(inner, fc2.transpose(1, 2)).sum(dim=0, dtype=torch.float32)

    def _one_by_one(self, tokens: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        for expert, own_weights in zip(self._experts, weights.T, strict=True):
            gate, up = functional.linear(tokens, expert.linear_fc1.weight).chunk(2, dim=-1)
            inner = (functional.silu(gate) * up * own_weights[:, None]).to(self._dtype)
            result += functional.linear(inner, expert.linear_fc2.weight).float()
        return result


def spreads_over_rows(group: distributed.ProcessGroup) -> bool:
    """Whether ranks of the expert-parallel ``group`` decode different rows: it is no part of a tensor-parallel one."""
    return group.size() > 1 and tensor_parallel_group().size() % group.size() != 0


def stacked(weights: Sequence[Tensor]) -> tuple[Tensor, bool] | None:
    """Equal matrices at equal distances in one buffer, as Megatron lays out experts -> ([e, rows, columns], a view in
    the order of addresses; whether that is the reverse of the order given). None where they lie otherwise."""
    addresses = [weight.data_ptr() for weight in weights]
    distances = {after - before for before, after in itertools.pairwise(addresses)}
    is_one_storage = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    if len(distances) != 1 or not is_one_storage:
        return None
    (distance,) = distances
    first = weights[0] if distance > 0 else weights[-1]
    step = abs(distance) // first.element_size()
    view = first.detach().as_strided((len(weights), *first.shape), (step, *first.stride()), first.storage_offset())
    return view, distance < 0
