"""Where parameters lie: their shapes, Megatron's DDP buffers and the optimizer's shards, from the config alone.

Pure arithmetic that mirrors three builders, which the tests compare it with byte by byte: ``trainer.megatron.build``
(shapes), megatron-core's ``_ParamAndGradBuffer`` (padding, buckets; 0.15 to 0.19) and ``trainer.megatron.optimizer``
(the flat state of a rank). A rank's part of the model is that of its pipeline
stage; tensor-parallel ranks have equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainer.common.multiples import ALIGNMENT_BYTES, divide_up, round_up
from trainer.config.schema import DdpConfig, ModelConfig, ParallelConfig
from trainer.models.shapes import GATE_AND_UP, QKV, ROUTER, elements, layer_matrices

ITEM_BYTES = {"bf16": 2, "fp32": 4}

WHOLE = ParallelConfig(tp=1, pp=1, vpp=1, cp=1, expert=1)  # one rank has it all

_PARAM_START_ELEMENTS = 64  # Megatron's, with the distributed optimizer
_BUCKET_END_ELEMENTS = 128


@dataclass(frozen=True)
class Parameter:
    """``size`` elements of ``dtype`` (``bf16`` or ``fp32``). ``in_expert_buffer``: of an expert, in a buffer that other
    ranks share than all else. ``is_shared``: two pipeline stages have it."""

    name: str
    size: int
    dtype: str
    in_expert_buffer: bool = False
    is_shared: bool = False

    @property
    def size_bytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]


def parameters(
    model: ModelConfig, *, vocab_size: int, value_head: bool, parallel: ParallelConfig, stage: int = 0, chunk: int = 0
) -> tuple[Parameter, ...]:
    """The parameters of one rank's GPT, in the order in which Megatron registers them.

    Args:
        vocab_size: entries of the tokenizer; a checkpoint's embedding may have more rows.
        stage, chunk: of the pipeline; chunk c of stage s comes as number c * parallel.pp + s in the model.
    """
    tp, position, chunks = parallel.tp, chunk * parallel.pp + stage, parallel.pp * parallel.vpp
    hidden, matrices = model.hidden_size, layer_matrices(model)
    vocabulary = round_up(model.embedding_rows(vocab_size), tp) // tp * hidden
    qkv_bias = sum(matrices[name][0] for name in QKV) // tp
    layer = {
        "input_layernorm.weight": hidden,
        "self_attention.linear_proj.weight": elements(model, "o_proj") // tp,
        "self_attention.linear_qkv.weight": elements(model, *QKV) // tp,
        **({"self_attention.linear_qkv.bias": qkv_bias} if model.qkv_bias else {}),
        **({f"self_attention.{name}_layernorm.weight": model.head_dim for name in "qk"} if model.qk_norm else {}),
        "pre_mlp_layernorm.weight": hidden,
        **_mlp_sizes(model, parallel=parallel),
    }
    is_first, is_last = position == 0, position == chunks - 1
    sizes = {"embedding.word_embeddings.weight": vocabulary} if is_first else {}
    layers = model.layers // chunks
    for index in range(position * layers, (position + 1) * layers):
        sizes |= {f"decoder.layers.{index}.{name}": size for name, size in layer.items()}
    if is_last:
        sizes["decoder.final_layernorm.weight"] = hidden
        if not value_head and not (model.tie_embeddings and is_first):  # a tied last stage has a copy of its own
            sizes["output_layer.weight"] = vocabulary
    has_copy = model.tie_embeddings and not value_head and chunks > 1
    found = [
        Parameter(
            name,
            size,
            model.dtype,
            in_expert_buffer=parallel.tp * parallel.expert > 1 and ".experts." in name,
            is_shared=has_copy and name.startswith(("embedding.", "output_layer.")),
        )
        for name, size in sizes.items()
    ]
    if value_head and is_last:
        found.append(Parameter("output_layer.weight", hidden, "fp32"))
    return tuple(found)


def _mlp_sizes(model: ModelConfig, *, parallel: ParallelConfig) -> dict[str, int]:
    """Of one layer's MLP, or router and experts (of the first rank; all have equally many)."""
    weights = {
        "linear_fc1.weight": elements(model, *GATE_AND_UP),
        "linear_fc2.weight": elements(model, "down_proj"),
    }
    if model.num_experts is None:
        return {f"mlp.{name}": size // parallel.tp for name, size in weights.items()}
    experts = range(model.num_experts // parallel.expert)
    return {
        "mlp.router.weight": elements(model, ROUTER),
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
                for rank in range(start // share, divide_up(end, share)):
                    pieces[rank].append(min(end, (rank + 1) * share) - max(start, rank * share))
                span = next(spans, None)
        return pieces


def default_bucket_size(ddp: DdpConfig, *, data_parallel: int) -> int | None:
    """Megatron's: None, a single bucket, unless gradients are reduced during the backward pass."""
    return max(40_000_000, 1_000_000 * data_parallel) if ddp.overlap_grad_reduce else None


def buffer_layout(
    sizes: Sequence[int],
    *,
    data_parallel: int,
    distributed_optimizer: bool,
    bucket_size: int | None,
    alone: Collection[int] = (),
) -> BufferLayout:
    """Parameters of ``sizes`` from last to first; a bucket ends once it holds ``bucket_size`` elements.

    With the distributed optimizer, parameters start at multiples of 64 elements, buckets end at multiples of 128 and of
    the number of ranks, and the parameters at the positions ``alone`` in ``sizes`` have a bucket each.
    """
    param_unit = _PARAM_START_ELEMENTS if distributed_optimizer else 1
    bucket_unit = math.lcm(data_parallel, _BUCKET_END_ELEMENTS) if distributed_optimizer else 1
    spans, buckets, position, bucket_start = [], [], 0, 0
    for index in reversed(range(len(sizes))):
        is_alone = distributed_optimizer and index in alone
        if is_alone and position > bucket_start:
            position = round_up(position, bucket_unit)
            buckets.append((bucket_start, position))
            bucket_start = position
        start = round_up(position, param_unit)
        position = start + sizes[index]
        spans.append((start, position))
        is_full = bucket_size is not None and position - bucket_start >= bucket_size
        if is_full or is_alone or index == 0:
            position = round_up(position, bucket_unit)
            buckets.append((bucket_start, position))
            bucket_start = position
    return BufferLayout(tuple(spans), tuple(buckets))


@dataclass(frozen=True)
class Buffer:
    """A DDP buffer. ``spread``: so many neighbouring ranks of a pipeline stage hold a model's parameters together, each
    others, cut alike; the next ones hold the same again."""

    dtype: str
    layout: BufferLayout
    spread: int = 1

    def shards(self, ranks: int) -> list[list[int]]:
        """As :meth:`BufferLayout.shards`, per rank of all ``ranks`` of a pipeline stage."""
        shards = self.layout.shards(ranks // self.spread)
        return [shards[rank // self.spread] for rank in range(ranks)]


def buffers_of(
    found: Sequence[Parameter], *, ddp: DdpConfig, parallel: ParallelConfig, stage_ranks: int, bucket_size: int | None
) -> tuple[Buffer, ...]:
    """One buffer per dtype for what tensor-parallel ranks hold together, and one for experts.

    Args:
        stage_ranks: of one pipeline stage, tensor times context times data parallel.
    """
    buffers = []
    for dtype, of_experts in dict.fromkeys((parameter.dtype, parameter.in_expert_buffer) for parameter in found):
        spread = parallel.expert if of_experts else parallel.tp
        same = [
            parameter for parameter in found if (parameter.dtype, parameter.in_expert_buffer) == (dtype, of_experts)
        ]
        layout = buffer_layout(
            [parameter.size for parameter in same],
            data_parallel=stage_ranks // spread,
            distributed_optimizer=ddp.use_distributed_optimizer,
            bucket_size=bucket_size,
            alone=[index for index, parameter in enumerate(same) if parameter.is_shared],
        )
        buffers.append(Buffer(dtype, layout, spread))
    return tuple(buffers)


def tag_bytes(
    found: Sequence[Parameter], buffers: Sequence[Buffer], *, table_bytes: int, stage_ranks: int | None
) -> int:
    """Host bytes of one weights tag on the rank that holds most; ``stage_ranks``: of a pipeline stage, where those that
    hold the same share it, None if none do. The rotary table (``table_bytes``) is never shared."""
    if stage_ranks is None:
        return sum(round_up(size, ALIGNMENT_BYTES) for size in (table_bytes, *(p.size_bytes for p in found)))
    held = [round_up(table_bytes, ALIGNMENT_BYTES)] * stage_ranks
    for buffer in buffers:
        for rank, pieces in enumerate(buffer.shards(stage_ranks)):
            held[rank] += sum(round_up(piece * ITEM_BYTES[buffer.dtype], ALIGNMENT_BYTES) for piece in pieces)
    return max(held)


def optimizer_elements(buffers: Sequence[Buffer], *, distributed_optimizer: bool, stage_ranks: int) -> tuple[int, int]:
    """(elements of the flat optimizer state, of its part that holds main params) on the rank of a pipeline stage that
    holds most.

    Without the distributed optimizer every rank holds everything, and an fp32 parameter is its own main param.
    """
    unit = ALIGNMENT_BYTES // ITEM_BYTES["fp32"]
    main, moments = [0] * stage_ranks, [0] * stage_ranks
    for buffer in buffers:
        whole = [end - start for start, end in buffer.layout.spans]
        ranks = buffer.shards(stage_ranks) if distributed_optimizer else [whole] * stage_ranks
        for rank, pieces in enumerate(ranks):
            aligned = sum(round_up(piece, unit) for piece in pieces)
            moments[rank] += 2 * aligned
            if distributed_optimizer or buffer.dtype != "fp32":
                main[rank] += aligned
    return max((main[rank] + moments[rank], main[rank]) for rank in range(stage_ranks))
