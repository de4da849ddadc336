"""What a model ends with: the actor's vocabulary, the critic's value; and the numbers that are read off them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.algo.log_probs import linear_log_probs_and_entropy
from trainer.megatron.groups import tensor_parallel_group


class VocabularyHead(nn.Module):
    """The actor's output layer, without its product: hidden states go through, for
    :func:`log_probs_and_entropy` to make logits of a few of them at a time.

    Args:
        weight: [vocabulary / tp, hidden_size]; None where the embedding's is used.
        fused: log-probs come from Triton kernels.
    """

    def __init__(self, config: Any, weight: nn.Parameter | None, *, fused: bool) -> None:
        super().__init__()
        self.sequence_parallel, self.fused = config.sequence_parallel, fused
        self.register_parameter("weight", weight)

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """hidden [s, b, hidden_size], under sequence parallelism this rank's part of s -> (of the whole of s, no
        bias)."""
        if self.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return hidden, None


def log_probs_and_entropy(
    gpt: Any, hidden: Tensor, targets: Tensor, *, rows: Tensor, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Log-probs [m] of ``targets`` [m] and entropies [m] of their distributions, on the last pipeline stage.

    Args:
        gpt: an actor's GPTModel.
        hidden: [b, s, hidden_size], what it gave.
        rows: [m], the place in b * s that predicts each target.
    """
    group = tensor_parallel_group()
    return linear_log_probs_and_entropy(
        hidden.flatten(0, 1),
        output_weight(gpt),
        targets,
        rows=rows,
        temperature=temperature,
        vocab_size=vocab_size,
        group=group if group.size() > 1 else None,
        fused=gpt.output_layer.fused,
    )


def output_weight(gpt: Any) -> Tensor:
    """This rank's part of the output layer's weight, [vocabulary / tp, hidden_size]."""
    if gpt.share_embeddings_and_output_weights:
        return gpt.shared_embedding_or_output_weight()
    return gpt.output_layer.weight


class ValueHead(nn.Module):
    """One fp32 value per token; stands where a GPTModel has its output layer.

    A bf16 value has 8 significant bits, too few for returns of the size of one; so both the head's weights and its
    arithmetic are fp32, and the critic has a second, small DDP buffer of that dtype.

    Under sequence parallelism every tensor-parallel rank computes the values of the whole sequence, so that the head's
    gradient is the same on all of them and is not summed.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=torch.float32, device=torch.cuda.current_device())
        )

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """hidden [s, b, hidden_size], under sequence parallelism this rank's part of s -> (values [s, b, 1] in fp32, no
        bias)."""
        if self.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return functional.linear(hidden.float(), self.weight), None
