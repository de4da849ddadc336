"""Which part of the whole model a rank holds: names and shapes that do not depend on the parallel layout.

A tensor has the same name on every rank: layers carry their number in the whole model, and the copy of tied output
weights on the last pipeline stage is called what it is, the embedding. :class:`Sharding` says how tensor-parallel
ranks share it; :func:`whole_tensors` streams the whole model to every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, distributed

from trainer.common.multiples import divide_up
from trainer.megatron import moe
from trainer.megatron.groups import from_stage, pipeline_group, pipeline_rank, tensor_parallel_group

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


class Chunk(Protocol):
    """A part of a model: Megatron's ``DistributedDataParallel`` around a GPTModel, or what stands in its place.

    Attributes:
        buffers, expert_parallel_buffers: Megatron's, in which parameters and gradients lie.
    """

    module: GPTModel
    buffers: Sequence[Any]
    expert_parallel_buffers: Sequence[Any]

    def __call__(self, *arguments: Any, **options: Any) -> Any: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...
    def zero_grad_buffer(self) -> None: ...
    def start_param_sync(self, *, force_sync: bool) -> None: ...
    def enable_forward_pre_hook(self) -> None: ...
    def disable_forward_pre_hook(self, *, param_sync: bool) -> None: ...


@dataclass(frozen=True)
class Sharding:
    """How tensor-parallel ranks share one tensor.

    Attributes:
        dim: the dimension that is cut; None: every rank holds the whole.
        length: of that dimension in the whole tensor, vocabulary padding left out.
        blocks: a rank holds its part of each of so many blocks (2: gate and up projection in one tensor).
        is_copy: another pipeline stage holds the same tensor (tied output weights).
    """

    dim: int | None = None
    length: int = 0
    blocks: int = 1
    is_copy: bool = False

    def _share(self, ranks: int) -> int:
        """Length of a rank's part of one block, padding included."""
        return divide_up(self.length, self.blocks * ranks)

    def part(self, whole: Tensor, *, rank: int, ranks: int) -> Tensor:
        """The part of rank ``rank``, a view where possible; rows beyond the whole tensor's are zero."""
        if self.dim is None or ranks == 1:
            return whole
        block_length, share, pieces = self.length // self.blocks, self._share(ranks), []
        for block in whole.split(block_length, dim=self.dim):
            start = min(rank * share, block_length)
            piece = block.narrow(self.dim, start, min(share, block_length - start))
            if piece.shape[self.dim] < share:
                shape = list(piece.shape)
                shape[self.dim] = share - piece.shape[self.dim]
                piece = torch.cat([piece, piece.new_zeros(shape)], dim=self.dim)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def join(self, parts: list[Tensor]) -> Tensor:
        """The whole of all ranks' parts, in the order of ranks: the inverse of :meth:`part`."""
        if self.dim is None or len(parts) == 1:
            return parts[0]
        blocks = zip(*(part.chunk(self.blocks, dim=self.dim) for part in parts), strict=True)
        whole = torch.cat([piece for block in blocks for piece in block], dim=self.dim)
        return whole.narrow(self.dim, 0, self.length)

    def in_whole(self, first: int, length: int, *, rank: int, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Where indices [first, first + length) along ``dim`` of a rank's part lie in the whole, padding left out.

        Yields:
            (index in the whole, index in the part, how many follow each other in both), at most one for each block.
        """
        if ranks == 1:
            yield first, first, length
            return
        block_length, share = self.length // self.blocks, self._share(ranks)
        real = min(share, max(0, block_length - rank * share))
        for block in range(self.blocks):
            begin, end = max(first, block * share), min(first + length, block * share + real)
            if begin < end:
                yield block * block_length + rank * share + begin - block * share, begin, end - begin

    def whole_shape(self, part_shape: torch.Size) -> tuple[int, ...]:
        return tuple(self.length if index == self.dim else size for index, size in enumerate(part_shape))


@dataclass(frozen=True)
class Share:
    """What this rank holds of its part of one tensor: elements [start, start + n) of the flattened part.

    Attributes:
        tensors: kind (``main``, ``exp_avg``, a weights tag, ...) -> [n], each a view of what is meant.
    """

    name: str
    start: int
    tensors: Mapping[str, Tensor]


def own_cut() -> tuple[int, int]:
    """(this rank's number, how many there are) among the ranks that share a tensor that is cut."""
    group = tensor_parallel_group()
    return group.rank(), group.size()


def declare_shardings(gpt: Any, *, vocab_size: int) -> None:
    """Give every tensor of a fresh GPTModel its :class:`Sharding`, which :func:`sharding_of` reads.

    Args:
        vocab_size: entries of the vocabulary, without the padding that lets ranks share it.
    """
    ranks = tensor_parallel_group().size()
    for name, tensor in _tensors_of(gpt):
        tensor.sharding = Sharding()  # type: ignore[attr-defined]
        # Megatron's mark, which shared parameters have, and all experts though each lies whole on its rank.
        if getattr(tensor, "tensor_model_parallel", False) and not moe.is_expert(name):
            dim: int = tensor.partition_dim  # type: ignore[attr-defined]
            is_vocabulary = name in (EMBEDDING, OUTPUT)
            tensor.sharding = Sharding(  # type: ignore[attr-defined]
                dim=dim,
                length=vocab_size if is_vocabulary else tensor.shape[dim] * ranks,
                blocks=2 if ".linear_fc1." in name else 1,
                is_copy=is_vocabulary and getattr(tensor, "shared", False),
            )


def sharding_of(tensor: Tensor) -> Sharding:
    """How the ranks share a tensor of :func:`named_tensors`."""
    return tensor.sharding  # type: ignore[attr-defined]


def ddp_buffers(chunks: Sequence[Chunk]) -> list[Any]:
    """Megatron's buffers, dense and of experts."""
    return [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def named_tensors(chunks: Sequence[Chunk]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor a model reads in a forward pass: parameters, buffers, and tensors kept as plain attributes.

    Megatron keeps rotary tables as plain attributes, which ``state_dict`` does not see. Names are those in the whole
    model, of layers and experts, so that no two chunks or ranks use one for different tensors. Tied and shared tensors
    come once.
    """
    seen: set[int] = set()
    for chunk in chunks:
        for name, tensor in _tensors_of(chunk.module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def _tensors_of(gpt: Any) -> Iterator[tuple[str, Tensor]]:
    first_layer = gpt.decoder.layers[0].layer_number - 1
    is_tied_copy = gpt.share_embeddings_and_output_weights and not gpt.pre_process
    for module_name, module in moe.globally_named_modules(gpt):
        for attributes in (module._parameters, module._buffers, vars(module)):
            for attribute, tensor in attributes.items():
                if isinstance(tensor, Tensor):
                    name = re.sub(
                        r"(?<=^decoder\.layers\.)\d+",
                        lambda number: str(first_layer + int(number[0])),
                        f"{module_name}.{attribute}",
                    )
                    yield EMBEDDING if is_tied_copy and name == OUTPUT else name, tensor


def whole_tensors(chunks: Sequence[Chunk]) -> Iterator[tuple[str, Tensor]]:
    """The whole model's tensors in the order of its layers, on every rank, one at a time. Collective over the ranks
    that hold the model together: all of them must read to the end.

    Where no ranks share the model these are the very tensors of :func:`named_tensors`.
    """
    return moe.with_all_experts(_of_all_stages(chunks), num_experts=chunks[0].module.config.num_moe_experts)


@torch.no_grad()
def _of_all_stages(chunks: Sequence[Chunk]) -> Iterator[tuple[str, Tensor]]:
    """The same, with this rank's experts only."""
    stages, seen = pipeline_group().size(), set()
    for chunk in chunks:
        own = [(name, tensor) for name, tensor in named_tensors([chunk]) if not sharding_of(tensor).is_copy]
        for stage in range(stages):
            described = from_stage(stage, [(n, sharding_of(t).whole_shape(t.shape), t.dtype) for n, t in own])
            for index, (name, shape, dtype) in enumerate(described):
                if name in seen:
                    continue
                seen.add(name)
                if stage == pipeline_rank():
                    whole = _gathered(own[index][1])
                else:
                    whole = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
                if stages > 1:
                    whole = whole.contiguous()
                    distributed.broadcast(whole, group=pipeline_group(), group_src=stage)
                yield name, whole


def _gathered(tensor: Tensor) -> Tensor:
    """The whole tensor of this pipeline stage. Collective over the tensor-parallel ranks."""
    group, sharding = tensor_parallel_group(), sharding_of(tensor)
    if group.size() == 1 or sharding.dim is None:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    distributed.all_gather(parts, tensor.detach().contiguous(), group=group)
    return sharding.join(parts)


@dataclass(frozen=True)
class OwnParts(Mapping[str, Tensor]):
    """This rank's parts of whole tensors, cut when they are asked for; names that the rank lacks are left out.

    Attributes:
        whole: the whole model's tensors, or some of them.
        own: this rank's tensors, which say how they are shared.
    """

    whole: Mapping[str, Tensor]
    own: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        rank, ranks = own_cut()
        return sharding_of(self.own[name]).part(self.whole[name], rank=rank, ranks=ranks)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.own if name in self.whole)

    def __len__(self) -> int:
        return sum(1 for _ in self)
