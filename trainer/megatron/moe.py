"""Mixture-of-experts layers that compute what Mixtral and Qwen3-MoE compute in transformers.

Megatron's layer sends every token to its experts, on whichever rank they are, and back; no token is dropped. The router
in it is ours: logits, top-k and weights are those of transformers, and no split into micro-batches or ranks changes the
load-balancing loss. Experts have global names (``mlp.experts.5``) wherever they lie.

An expert lies whole on its rank: every ``parallel.expert`` ranks that follow each other in a pipeline stage, be they
tensor, context or data parallel, hold the stage's experts once (Megatron's expert tensor parallel size is 1). Between
attention layers each tensor- and context-parallel rank has its own part of every sequence, so all ranks of a stage send
other tokens.

Simplified: every layer has experts, which run one after the other; no shared experts.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, distributed, nn
from torch.nn import functional

from trainer.algo.masked import divide_or_zero
from trainer.config.schema import ModelConfig
from trainer.megatron.groups import expert_group, pipeline_group, sequence_group, tensor_parallel_group

_EXPERT = re.compile(r"(?<=\.mlp\.experts\.)\d+(?=\.)")


def transformer_settings(model: ModelConfig, *, expert_parallel: int) -> dict[str, Any]:
    """What Megatron's TransformerConfig needs to know of the experts; nothing for a dense model."""
    if model.num_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.ffn_size,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_router_pre_softmax": True,  # read by nobody but a check that refuses the other with one expert per token
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",  # the one that takes other numbers of tokens on other ranks
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": 1,
    }


def complete_layers(gpt: nn.Module, model: ModelConfig) -> None:
    """Give the layers of a new model our routers, whose weights are not drawn yet, and their experts DDP buffers of
    their own where tensor-parallel ranks send them other tokens.

    Gradients in those buffers are summed, and optimizer states shared, over all ranks of the stage that hold the same
    experts. Megatron has such buffers by itself only where experts are spread.
    """
    for layer in _moe_layers(gpt):
        layer.router = Router(model, layer.config)
        if layer.config.tensor_model_parallel_size > 1:
            for weight in layer.experts.parameters():
                weight.allreduce = False


def _moe_layers(module: nn.Module) -> Iterator[Any]:
    return (layer for layer in module.modules() if isinstance(layer, MoELayer))


def drop_routing(chunks: Iterable[Any]) -> None:
    """Forget what token dispatchers remember of the last forward pass, which would lie outside every region, and what
    routers remember for a backward pass."""
    for chunk in chunks:
        for layer in _moe_layers(chunk):
            layer.router.drop_recomputed()
            dispatcher = layer.token_dispatcher
            for name, value in vars(dispatcher).items():
                if isinstance(value, Tensor) and not name.endswith("_by_local_experts"):  # fixed orders of experts
                    setattr(dispatcher, name, None)


# ---- routing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sequences:
    """Of the micro-batch in work: is_real [s / tp, b] bool (no padding), this rank's part; weights [b]; aux_losses one
    scalar for each layer of a chunk. Packed sequences: is_real [s / tp, 1], weights [n], members [n, s / tp] fp32, one
    where a token is of a sequence."""

    is_real: Tensor
    weights: Tensor
    aux_losses: list[Tensor]
    members: Tensor | None = None


_in_work: ContextVar[_Sequences | None] = ContextVar("_in_work", default=None)


class Router(nn.Module):
    """Chooses the experts of each token, as Mixtral (arXiv:2401.04088) and Qwen3-MoE (arXiv:2505.09388) do.

    Logits are rounded to the model's dtype, as in transformers; softmax, top-k and weights are fp32.
    """

    def __init__(self, model: ModelConfig, config: Any) -> None:
        super().__init__()
        self._model = model
        self._recomputed: deque[_Sequences] = deque()  # of micro-batches whose backward pass will come here again
        shape, device = (model.num_experts, model.hidden_size), torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))  # type: ignore[arg-type]
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def set_layer_number(self, number: int) -> None:
        """Megatron tells every router its layer's number, which this one has no use for."""

    def drop_recomputed(self) -> None:
        """Expect no backward pass any more."""
        self._recomputed.clear()

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """hidden [s / tp, b, hidden_size], of this rank's part of the sequences -> (weights [s / tp * b, experts] in
        fp32, zero where an expert is not chosen; is_chosen [s / tp * b, experts] bool)."""
        probabilities = functional.linear(hidden, self.weight).float().softmax(dim=-1)
        top, experts = probabilities.topk(self._model.num_experts_per_tok, dim=-1)  # type: ignore[arg-type]
        if self._model.norm_topk_prob:
            top = top / top.sum(dim=-1, keepdim=True)
        weights = torch.zeros_like(probabilities).scatter(-1, experts, top)
        is_chosen = torch.zeros_like(probabilities, dtype=torch.bool).scatter(-1, experts, True)
        sequences = _in_work.get()
        is_again = sequences is None and torch.is_grad_enabled() and bool(self._recomputed)
        if is_again:  # the backward passes of micro-batches follow each other as their forward passes did
            sequences = self._recomputed.popleft()
        elif sequences is not None and not torch.is_grad_enabled():
            self._recomputed.append(sequences)
        if sequences is not None:
            losses = load_balancing_loss(
                probabilities, is_chosen, is_real=sequences.is_real, members=sequences.members, group=sequence_group()
            )
            aux_loss = (losses * sequences.weights).sum()
            if not is_again:
                sequences.aux_losses.append(aux_loss.detach())
            if self._model.router_aux_loss_coef:
                weights = MoEAuxLossAutoScaler.apply(weights, self._model.router_aux_loss_coef * aux_loss)
        return weights.flatten(0, 1), is_chosen.flatten(0, 1)


def load_balancing_loss(
    probabilities: Tensor,
    is_chosen: Tensor,
    *,
    is_real: Tensor,
    group: distributed.ProcessGroup,
    members: Tensor | None = None,
) -> Tensor:
    """The load-balancing loss of each sequence by itself, [b], or [n] of packed ones; 1 if all experts get the same.

    ``experts * sum over experts of (fraction of the choices that fell on it) * (its mean probability)``: Switch
    Transformer's equation 4 (arXiv:2101.03961), taken over one sequence as in DeepSeek-V3's equation 17
    (arXiv:2412.19437). A loss over all tokens of a micro-batch would depend on how a batch is split.

    Args:
        probabilities: [s / ranks, b, experts], of the router's softmax.
        is_chosen: [s / ranks, b, experts] bool.
        is_real: [s / ranks, b] bool, False for padding, which does not count.
        group: ranks that have a part of each sequence. All get the whole sequence's loss, and the gradients of their
            own probabilities.
        members: [n, s / ranks] fp32, of n sequences packed in one row (b = 1): one where a token is of a sequence.
    """
    experts, real = probabilities.shape[-1], is_real[..., None].float()
    if members is None:
        own = torch.cat([(is_chosen * real).sum(0), (probabilities * real).sum(0), real.sum(0)], dim=-1)
    else:
        own = members @ torch.cat([is_chosen.float(), probabilities, real], dim=-1).squeeze(1)
    chosen, mass, tokens = reduce_from_tensor_model_parallel_region(own, group=group).split([experts, experts, 1], -1)
    return experts * divide_or_zero((chosen * mass).sum(-1), chosen.sum(-1) * tokens.squeeze(-1))


class LoadBalance:
    """The load-balancing losses of one optimizer step: added to its gradients, and summed to be reported.

    It is a per-token loss that has a sequence's load-balancing loss at every response token, summed over the layers: so
    it is normalised as every other loss is, whatever the aggregation.

    Args:
        layers: of the whole model.
    """

    def __init__(self, *, layers: int) -> None:
        self._layers = layers
        self._total: Tensor | None = None

    @contextmanager
    def watch(self, response_mask: Tensor, *, weights: Tensor, sequence_of: Tensor | None = None) -> Iterator[None]:
        """A forward pass of one chunk over a micro-batch happens inside.

        Args:
            response_mask: [b, s-1], as in :mod:`trainer.training.step`; what comes after the last response token of a
                sequence is padding.
            weights: [b], what a loss of one per response token comes to, by sequence.
            sequence_of: [t], of the tokens of packed sequences their sequences' numbers, b for padding.
        """
        sequences = _padded(response_mask, weights) if sequence_of is None else _packed(sequence_of, weights)
        token = _in_work.set(sequences)
        try:
            yield
        finally:
            _in_work.reset(token)
        if sequences.aux_losses:
            of_layers = torch.stack(sequences.aux_losses).double().sum() / self._layers
            self._total = of_layers if self._total is None else self._total + of_layers

    def sums(self) -> dict[str, Tensor]:
        """``aux_loss_sum``, to be divided by the loss's count: the mean over layers and sequences, without the
        coefficient. Nothing for a dense model. Collective over the pipeline group."""
        if self._total is None:
            return {}
        total = self._total.clone()
        if pipeline_group().size() > 1:
            distributed.all_reduce(total, group=pipeline_group())
        return {"aux_loss_sum": total}


def _padded(response_mask: Tensor, weights: Tensor) -> _Sequences:
    until_last = response_mask.flip(1).cummax(1).values.flip(1)
    is_real, group = torch.cat([until_last[:, :1], until_last], dim=1).T, tensor_parallel_group()
    columns = functional.pad(is_real, (0, 0, 0, -len(is_real) % group.size())).chunk(group.size())
    return _Sequences(columns[group.rank()], weights, [])


def _packed(sequence_of: Tensor, weights: Tensor) -> _Sequences:
    group = tensor_parallel_group()
    own = sequence_of.chunk(group.size())[group.rank()]
    members = own == torch.arange(len(weights), device=own.device)[:, None]
    return _Sequences((own < len(weights))[:, None], weights, [], members.float())


# ---- names, and experts on other ranks ------------------------------------------------------------------------------


def globally_named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``module.named_modules()``, experts named by their number in the whole model instead of that on the rank."""
    first_expert = 0
    for name, child in module.named_modules():
        if isinstance(child, MoELayer):
            first_expert = child.local_expert_indices[0]
        yield global_name(name, first_expert=first_expert), child


def global_name(module_name: str, *, first_expert: int) -> str:
    """The module's name with the expert's number in the whole model, where Megatron has the one on the rank."""
    return re.sub(
        r"\.experts\.local_experts\.(\d+)", lambda match: f".experts.{first_expert + int(match[1])}", module_name
    )


def is_expert(name: str) -> bool:
    """Whether a tensor of that global name belongs to one expert (and not to all ranks)."""
    return _EXPERT.search(name) is not None


def with_all_experts(named: Iterable[tuple[str, Tensor]], *, num_experts: int | None) -> Iterator[tuple[str, Tensor]]:
    """The (name, tensor) pairs of a rank, and those of the experts on other ranks, each gathered when its turn comes.

    Collective over the expert-parallel group: every rank runs through all pairs.
    """
    group = expert_group()
    for name, tensor in named:
        found = _EXPERT.search(name)
        if found is None or group.size() == 1:
            yield name, tensor
            continue
        assert num_experts is not None
        per_rank = num_experts // group.size()
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        distributed.all_gather(parts, tensor.detach().contiguous(), group=group)
        for rank, part in enumerate(parts):
            yield _EXPERT.sub(str(rank * per_rank + int(found[0]) % per_rank), name), part
