"""Where parameters lie: their shapes, Megatron's DDP buffers and the optimizer's shards, from the config alone.

Pure arithmetic that mirrors three builders, which the tests compare it with byte by byte: ``trainer.models.build``
(shapes), megatron-core's ``_ParamAndGradBuffer`` (padding, buckets; 0.15 to 0.19) and ``trainer.optimizer`` (the flat
state of a rank). Simplified: one tensor- and pipeline-parallel rank holds the whole model; :func:`parameters` is the
place where a share of it would be taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config import DdpConfig, ModelConfig, ParallelConfig

ITEM_BYTES = {"bf16": 2, "fp32": 4}
ALIGNMENT_BYTES = 64  # of every tensor in an arena and every view in the flat optimizer state

_PARAM_START_ELEMENTS = 64  # Megatron's, with the distributed optimizer
_BUCKET_END_ELEMENTS = 128


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Parameter:
    """``size`` elements of ``dtype`` (``bf16`` or ``fp32``); ``is_spread``: other ranks have other experts instead."""

    name: str
    size: int
    dtype: str
    is_spread: bool = False

    @property
    def size_bytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]


def parameters(
    model: ModelConfig, *, vocab_size: int, value_head: bool, parallel: ParallelConfig
) -> tuple[Parameter, ...]:
    """The parameters of one rank's GPT, in the order in which Megatron registers them.

    ``vocab_size``: entries of the tokenizer; a checkpoint's embedding may have more rows.
    """
    assert parallel.tp == parallel.pp == 1, "shares of a rank are not counted yet"
    hidden = model.hidden_size
    head_dim, vocab_size = model.head_dim, model.embedding_rows(vocab_size)
    qkv = (model.heads + 2 * model.kv_heads) * head_dim
    layer = {
        "input_layernorm.weight": hidden,
        "self_attention.linear_proj.weight": hidden * model.heads * head_dim,
        "self_attention.linear_qkv.weight": qkv * hidden,
        **({"self_attention.linear_qkv.bias": qkv} if model.qkv_bias else {}),
        **({f"self_attention.{name}_layernorm.weight": head_dim for name in "qk"} if model.qk_norm else {}),
        "pre_mlp_layernorm.weight": hidden,
        **_mlp_sizes(model, expert_parallel=parallel.expert),
    }
    sizes = {"embedding.word_embeddings.weight": vocab_size * hidden}
    for index in range(model.layers):
        sizes |= {f"decoder.layers.{index}.{name}": size for name, size in layer.items()}
    sizes["decoder.final_layernorm.weight"] = hidden
    if not (value_head or model.tie_embeddings):
        sizes["output_layer.weight"] = vocab_size * hidden
    spread = parallel.expert > 1
    found = [Parameter(name, size, model.dtype, spread and ".experts." in name) for name, size in sizes.items()]
    if value_head:
        found.append(Parameter("output_layer.weight", hidden, "fp32"))
    return tuple(found)


def _mlp_sizes(model: ModelConfig, *, expert_parallel: int) -> dict[str, int]:
    """Of one layer's MLP, or router and experts (of the first rank; all have equally many)."""
    weights = {"linear_fc1.weight": 2 * model.ffn_size * model.hidden_size}
    weights["linear_fc2.weight"] = model.hidden_size * model.ffn_size
    if model.num_experts is None:
        return {f"mlp.{name}": size for name, size in weights.items()}
    experts = range(model.num_experts // expert_parallel)
    return {
        "mlp.router.weight": model.num_experts * model.hidden_size,
        **{f"mlp.experts.{index}.{name}": size for index in experts for name, size in weights.items()},
    }


def rotary_table_bytes(model: ModelConfig) -> int:
    """The fp32 inverse frequencies, the one tensor of a GPT that is no parameter."""
    return model.head_dim // 2 * ITEM_BYTES["fp32"]


@dataclass(frozen=True)
class BufferLayout:
    """One DDP buffer, in elements: its parameters' (start, end) and its buckets' (start, end)."""

    spans: tuple[tuple[int, int], ...]
    buckets: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return self.buckets[-1][1]

    def shards(self, data_parallel: int) -> list[list[int]]:
        """Per data-parallel rank, the sizes of the pieces of parameters that it optimizes."""
        pieces: list[list[int]] = [[] for _ in range(data_parallel)]
        spans = iter(self.spans)
        span = next(spans, None)
        for bucket_start, bucket_end in self.buckets:
            share = (bucket_end - bucket_start) // data_parallel
            while span is not None and span[0] < bucket_end:
                start, end = (position - bucket_start for position in span)
                for rank in range(start // share, -(-end // share)):
                    pieces[rank].append(min(end, (rank + 1) * share) - max(start, rank * share))
                span = next(spans, None)
        return pieces


def default_bucket_size(ddp: DdpConfig, *, data_parallel: int) -> int | None:
    """Megatron's: None, a single bucket, unless gradients are reduced during the backward pass."""
    return max(40_000_000, 1_000_000 * data_parallel) if ddp.overlap_grad_reduce else None


def buffer_layout(
    sizes: Sequence[int], *, data_parallel: int, distributed_optimizer: bool, bucket_size: int | None
) -> BufferLayout:
    """Parameters of ``sizes`` from last to first; a bucket ends once it holds ``bucket_size`` elements.

    With the distributed optimizer, parameters start at multiples of 64 elements and buckets end at multiples of 128
    and of the number of ranks.
    """
    param_unit = _PARAM_START_ELEMENTS if distributed_optimizer else 1
    bucket_unit = math.lcm(data_parallel, _BUCKET_END_ELEMENTS) if distributed_optimizer else 1
    spans, buckets, position, bucket_start = [], [], 0, 0
    for index, size in enumerate(reversed(sizes)):
        start = round_up(position, param_unit)
        position = start + size
        spans.append((start, position))
        is_full = bucket_size is not None and position - bucket_start >= bucket_size
        if is_full or index == len(sizes) - 1:
            position = round_up(position, bucket_unit)
            buckets.append((bucket_start, position))
            bucket_start = position
    return BufferLayout(tuple(spans), tuple(buckets))


@dataclass(frozen=True)
class Buffer:
    """A DDP buffer. ``expert_parallel``: so many neighbouring data-parallel ranks have other experts in it, cut alike;
    1: all data-parallel ranks have the same."""

    dtype: str
    layout: BufferLayout
    expert_parallel: int = 1

    def shards(self, data_parallel: int) -> list[list[int]]:
        """As :meth:`BufferLayout.shards`, per rank of all ``data_parallel`` ones."""
        shards = self.layout.shards(data_parallel // self.expert_parallel)
        return [shards[rank // self.expert_parallel] for rank in range(data_parallel)]


def buffers_of(
    found: Sequence[Parameter], *, ddp: DdpConfig, data_parallel: int, expert_parallel: int, bucket_size: int | None
) -> tuple[Buffer, ...]:
    """One buffer per dtype for what all ranks hold, and one for their experts, where each rank has its own."""
    buffers = []
    for dtype, is_spread in dict.fromkeys((parameter.dtype, parameter.is_spread) for parameter in found):
        spread = expert_parallel if is_spread else 1
        layout = buffer_layout(
            [parameter.size for parameter in found if (parameter.dtype, parameter.is_spread) == (dtype, is_spread)],
            data_parallel=data_parallel // spread,
            distributed_optimizer=ddp.use_distributed_optimizer,
            bucket_size=bucket_size,
        )
        buffers.append(Buffer(dtype, layout, spread))
    return tuple(buffers)


def tag_bytes(
    found: Sequence[Parameter], buffers: Sequence[Buffer], *, table_bytes: int, data_parallel: int | None
) -> int:
    """Host bytes of one weights tag on the rank that holds most; ``data_parallel``: ranks that share it, None if none
    do. The rotary table (``table_bytes``) is never shared."""
    if data_parallel is None:
        return sum(round_up(size, ALIGNMENT_BYTES) for size in (table_bytes, *(p.size_bytes for p in found)))
    held = [round_up(table_bytes, ALIGNMENT_BYTES)] * data_parallel
    for buffer in buffers:
        for rank, pieces in enumerate(buffer.shards(data_parallel)):
            held[rank] += sum(round_up(piece * ITEM_BYTES[buffer.dtype], ALIGNMENT_BYTES) for piece in pieces)
    return max(held)


def optimizer_elements(
    buffers: Sequence[Buffer], *, distributed_optimizer: bool, data_parallel: int
) -> tuple[int, int]:
    """(elements of the flat optimizer state, of its part that holds main params) on the data-parallel rank that holds
    most.

    Without the distributed optimizer every rank holds everything, and an fp32 parameter is its own main param.
    """
    unit = ALIGNMENT_BYTES // ITEM_BYTES["fp32"]
    main, moments = [0] * data_parallel, [0] * data_parallel
    for buffer in buffers:
        whole = [end - start for start, end in buffer.layout.spans]
        ranks = buffer.shards(data_parallel) if distributed_optimizer else [whole] * data_parallel
        for rank, pieces in enumerate(ranks):
            aligned = sum(round_up(piece, unit) for piece in pieces)
            moments[rank] += 2 * aligned
            if distributed_optimizer or buffer.dtype != "fp32":
                main[rank] += aligned
    return max((main[rank] + moments[rank], main[rank]) for rank in range(data_parallel))
