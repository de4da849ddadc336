"""Megatron's optimizer and learning-rate schedule for one role, its state in a few flat tensors.

megatron-core makes main params and moments as many small tensors. torch_memory_saver copies whole allocator segments,
dead blocks included, so right after the build all of them move into exact-size tensors. Each of those is a region: one
by one they can leave the device while those of another role come.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from trainer.common.multiples import ALIGNMENT_BYTES, round_up
from trainer.config.roles import TrainedRole
from trainer.megatron.param_shards import gather_params
from trainer.megatron.sharding import Chunk, Share
from trainer.models.dtypes import DTYPES

_ALIGNMENT_ELEMENTS = ALIGNMENT_BYTES // torch.float32.itemsize
_STATE_KEYS = ("exp_avg", "exp_avg_sq")


def build_optimizer(
    chunks: Sequence[Chunk],
    role: TrainedRole,
    *,
    region: Callable[[int], AbstractContextManager[None]],
    piece_bytes: int,
) -> tuple[Any, OptimizerState]:
    """Megatron's optimizer over ``chunks`` and its whole state in flat tensors.

    Args:
        region: gives the context in which the flat tensor of a number is allocated.
        piece_bytes: at most so large are they, unless a single parameter's share is larger.
    """
    optimizer = megatron_optimizer(chunks, role)
    return optimizer, _rehome(optimizer, chunks, region, piece_bytes=piece_bytes)


def megatron_optimizer(chunks: Sequence[Chunk], role: TrainedRole) -> Any:
    """Megatron's optimizer over ``chunks`` as Megatron makes it, its state not in one place."""
    settings = role.optimizer
    return get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.lr * settings.min_lr_ratio,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=role.model.dtype == "bf16",
            params_dtype=DTYPES[role.model.dtype],
            use_distributed_optimizer=role.ddp.use_distributed_optimizer,
            overlap_param_gather=role.ddp.overlap_param_gather,
        ),
        list(chunks),  # type: ignore[arg-type]
        use_gloo_process_groups=False,
    )


def build_scheduler(optimizer: Any, role: TrainedRole, *, total_steps: int) -> OptimizerParamScheduler:
    """Megatron's schedule over ``total_steps`` optimizer steps: n steps of warm-up at 1/(n+1), ..., n/(n+1) of the
    learning rate, then constant, linear or cosine decay, or a decay in the last steps only (WSD, arXiv:2404.06395
    section 4)."""
    settings = role.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr / (settings.lr_warmup_steps + 1),  # zero would waste the first rollout
        max_lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        lr_warmup_steps=settings.lr_warmup_steps,
        lr_decay_steps=max(total_steps, settings.lr_warmup_steps + 1),
        lr_decay_style="WSD" if settings.lr_schedule == "wsd" else settings.lr_schedule,
        wsd_decay_steps=settings.lr_wsd_decay_steps,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def rise_and_fall(number: int, *, total: int) -> float:
    """Share of the highest learning rate in supervised step ``number`` (from 1) of ``total``: it rises in the first
    tenth of the steps and falls linearly to 1 / total in the last one."""
    return min(1.0, number / math.ceil(total / 10)) * (total + 1 - number) / total


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The Megatron optimizers that hold state (dense, expert); stubs without parameters left out."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if inner.optimizer is not None]


def _optimized_params(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            for param in group["params"]:
                yield inner.optimizer, param


@dataclass(frozen=True)
class OptimizerState:
    """A role's main params and moments in a few flat tensors, which sleep one by one.

    Attributes:
        pieces: [n] fp32 each.
        main_pieces: so many of them, the first ones, hold main params and nothing else.
        main_params: (main param, its piece, its first element in there).
    """

    pieces: tuple[torch.Tensor, ...]
    main_pieces: int
    main_params: tuple[tuple[torch.Tensor, int, int], ...]

    def zero_moments(self) -> None:
        """Set Adam's moments to those of a new optimizer."""
        for piece in self.pieces[self.main_pieces :]:
            piece.zero_()

    def share_in(self, pieces: Sequence[torch.Tensor], share: Share, *, weights: Mapping[str, torch.Tensor]) -> Share:
        """``share`` with its tensors taken from ``pieces``, those of the state or copies of them; a parameter that is
        its own main param, and so not in the state, from ``weights``."""
        numbers = {piece.untyped_storage().data_ptr(): number for number, piece in enumerate(self.pieces)}

        def found(tensor: torch.Tensor) -> torch.Tensor:
            number = numbers.get(tensor.untyped_storage().data_ptr())
            if number is None:
                return weights[share.name].detach().view(-1)
            start = tensor.storage_offset() - self.pieces[number].storage_offset()
            return pieces[number][start : start + tensor.numel()]

        return replace(share, tensors={kind: found(tensor) for kind, tensor in share.tensors.items()})

    @contextmanager
    def main_params_from(self, pieces: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let main params read from ``pieces``, copies of the first ones on the device, while the state sleeps."""
        own = [param.data for param, _, _ in self.main_params]
        try:
            for param, number, start in self.main_params:
                param.data = pieces[number][start : start + param.numel()].view(param.shape)
            yield
        finally:
            for (param, _, _), data in zip(self.main_params, own, strict=True):
                param.data = data


def _rehome(
    optimizer: Any, chunks: Sequence[Chunk], region: Callable[[int], AbstractContextManager[None]], *, piece_bytes: int
) -> OptimizerState:
    """Move main params and moments into the flat tensors of the state; every view starts 64-byte aligned.

    An fp32 parameter's main param is a view of its parameter buffer in Megatron; here it becomes a copy in the state,
    so that parameters of every dtype can be rebuilt from main params. Without the distributed optimizer such a
    parameter is its own main param and stays where it is.
    """
    model_params = {id(param) for chunk in chunks for param in chunk.parameters()}
    optimized = list(_optimized_params(optimizer))
    main_params = [param for _, param in optimized if id(param) not in model_params]
    moments = [(inner.state[param], param, key) for key in _STATE_KEYS for inner, param in optimized]
    main_sizes, main_places = _packed(main_params, piece_bytes=piece_bytes)
    moment_sizes, moment_places = _packed([param for _, param, _ in moments], piece_bytes=piece_bytes)
    pieces = []
    for number, size in enumerate((*main_sizes, *(moment_sizes or [0]))):
        with region(number):
            pieces.append(torch.zeros(size, dtype=torch.float32, device=torch.cuda.current_device()))

    def view_at(number: int, start: int, param: torch.Tensor) -> torch.Tensor:
        return pieces[number][start : start + param.numel()].view(param.shape)

    for param, place in zip(main_params, main_places, strict=True):
        view_at(*place, param).copy_(param.data)
        param.data = view_at(*place, param)
    for (state, param, key), (number, start) in zip(moments, moment_places, strict=True):
        state[key] = view_at(len(main_sizes) + number, start, param)
    found = ((param, *place) for param, place in zip(main_params, main_places, strict=True))
    return OptimizerState(tuple(pieces), len(main_sizes), tuple(found))


def _packed(params: Sequence[torch.Tensor], *, piece_bytes: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Places for fp32 tensors of the sizes of ``params``: (elements of each piece, (piece, first element) of each
    tensor). A piece ends before it would exceed ``piece_bytes``; a larger tensor has one of its own."""
    sizes: list[int] = []
    places = []
    for param in params:
        size = _aligned(param)
        if not sizes or (sizes[-1] + size) * torch.float32.itemsize > piece_bytes:
            sizes.append(0)
        places.append((len(sizes) - 1, sizes[-1]))
        sizes[-1] += size
    return sizes, places


def _aligned(param: torch.Tensor) -> int:
    return round_up(param.numel(), _ALIGNMENT_ELEMENTS)


def copy_main_to_model_params(optimizer: Any, chunks: Sequence[Chunk]) -> None:
    """Rebuild the parameter buffers from the fp32 main params: cast this rank's shard, all-gather the rest.

    Bit-identical to what the last step left, which did the same two things. Collective over the data-parallel group.
    """
    for inner in inner_optimizers(optimizer):
        inner._copy_main_params_to_model_params()
    gather_params(chunks)


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of every group, outside of any schedule."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def step(optimizer: Any) -> tuple[bool, float]:
    """Clip, step, and gather parameters: Megatron's own step, but a gradient norm that is not finite skips it.

    Returns:
        (whether the weights were updated, gradient norm before clipping).
    """
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if not math.isfinite(grad_norm):
        return False, grad_norm
    for inner in inner_optimizers(optimizer):
        if inner.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(inner.get_parameters(), inner.config.clip_grad, grad_norm)
    return bool(optimizer.step_with_ready_grads()), grad_norm


def learning_rate(optimizer: Any) -> float:
    """The learning rate of the next step."""
    return float(optimizer.param_groups[0]["lr"])


def shares(optimizer: Any, params: Mapping[str, torch.Tensor]) -> Iterator[Share]:
    """The shares of all optimized ones among ``params`` (name -> model tensor): ``main`` (the fp32 main param),
    ``exp_avg`` and ``exp_avg_sq``, views of the state itself.

    The distributed optimizer's own ``model_param_group_index_map`` is of no use here: it names the wrong main param
    where fp32 and bf16 parameters share a group, as in a critic with a value head in fp32.
    """
    names = {id(param): name for name, param in params.items()}
    for inner in inner_optimizers(optimizer):
        for param, main, start in _mains_of(inner):
            state = inner.optimizer.state[main]
            tensors = {"main": main.detach(), **{key: state[key] for key in _STATE_KEYS}}
            yield Share(names[id(param)], start, {kind: tensor.view(-1) for kind, tensor in tensors.items()})


def _mains_of(inner: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """(model param, main param, first element of it that the main param covers)."""
    if hasattr(inner, "gbuf_ranges"):  # the distributed optimizer
        for models, mains in (
            (inner.model_float16_groups, inner.shard_fp32_from_float16_groups),
            (inner.model_fp32_groups, inner.shard_fp32_groups),
        ):
            for param, main in zip(itertools.chain(*models), itertools.chain(*mains), strict=True):
                covered = inner._get_model_param_range_map(param)["param"]
                assert covered.size == main.numel(), (covered, main.shape)
                yield param, main, covered.start
    elif hasattr(inner, "float16_groups"):
        for models, mains in (
            (inner.float16_groups, inner.fp32_from_float16_groups),
            (inner.fp32_from_fp32_groups, inner.fp32_from_fp32_groups),
        ):
            for param, main in zip(itertools.chain(*models), itertools.chain(*mains), strict=True):
                yield param, main, 0
    else:  # fp32 parameters are their own main params
        for group in inner.optimizer.param_groups:
            for param in group["params"]:
                yield param, param, 0


def step_count(optimizer: Any) -> int:
    """Adam's step count, which all groups with parameters share."""
    return max(int(group.get("step", 0)) for group in optimizer.param_groups)


def set_step_count(optimizer: Any, count: int) -> None:
    """Set Adam's step count of every group."""
    for group in optimizer.param_groups:
        group["step"] = count
