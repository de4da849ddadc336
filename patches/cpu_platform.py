"""A stand-in for CUDA so that megatron-core runs on a machine without a GPU.

Target: the parts of torch.cuda and the tensor factory functions that megatron-core calls, the RNG helpers of
    megatron.core.tensor_parallel.random, a helper of its token dispatcher, and the CPU kernels of bf16 matrix products.
Why: megatron-core names CUDA in its DDP buffers, schedules, optimizer and RNG tracker, though nothing in them needs it.
How: ``torch.cuda.current_device()`` answers the CPU device; ``device="cuda"`` means the CPU in factory functions and
    ``Tensor.to``; ``Tensor.cuda`` is the identity; ``Tensor.type()`` answers ``torch.cuda.*``; CUDA RNG calls use the
    CPU generator; streams and events do nothing. The factory functions are wrapped, since a TorchFunctionMode is not
    active in backward passes. Where the CPU has no bf16 arithmetic, bf16 matrix products run in fp32 with one
    rounding at the end, since its own bf16 kernels are about ten times slower.
Upstream: megatron-core supports GPUs only.
Remove when: megatron-core runs on CPU tensors unpatched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from patches.registry import Patch, Replacement, missing_names

_CPU = torch.device("cpu")
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "tensor", "zeros"),
)
_LIKE_FACTORIES = ("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like")
_NEW_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def _means_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


def _device_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return wrapper


def _to_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _means_cuda(args[0]):  # a device comes first or by name
            args = (_CPU, *args[1:])
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original(self, *args, **kwargs)

    return to


def _type_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return type_


class _NoStream:
    """Stands for a CUDA stream or event: everything on the CPU is in order already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = _ignore

    def record_event(self, event: _NoStream | None = None) -> _NoStream:
        return event or _NoStream()


def _cuda_replacements() -> list[Replacement]:
    cuda = torch.cuda

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    return [
        (cuda, "current_device", lambda: _CPU),
        (cuda, "set_device", lambda device: None),
        (cuda, "synchronize", lambda device=None: None),
        (cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
        (cuda, "set_rng_state", set_rng_state),
        (cuda, "manual_seed", torch.manual_seed),
        (cuda, "Stream", _NoStream),
        (cuda, "Event", _NoStream),
        (cuda, "stream", lambda stream: stream or _NoStream()),
        (cuda, "current_stream", lambda device=None: _NoStream()),
        (cuda, "default_stream", lambda device=None: _NoStream()),
        (torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
        (torch.Tensor, "pin_memory", lambda self, *args, **kwargs: self),
        (torch.Tensor, "record_stream", lambda self, stream: None),
        (torch.Tensor, "to", _to_on_cpu(torch.Tensor.to)),
        (torch.Tensor, "type", _type_as_cuda(torch.Tensor.type)),
    ]


def _factory_replacements() -> list[Replacement]:
    # torch caches the list of device constructors on first use; made after the wrapping it would hold our wrappers,
    # and `with torch.device("meta")` (transformers' from_pretrained) would silently stop working.
    from torch.utils._device import _device_constructors

    _device_constructors()
    replacements: list[Replacement] = []
    for owner, names in ((torch, _FACTORIES + _LIKE_FACTORIES), (torch.Tensor, _NEW_FACTORIES)):
        replacements += [(owner, name, _device_on_cpu(getattr(owner, name))) for name in names]
    return replacements


def _megatron_replacements() -> list[Replacement]:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    @contextmanager
    def fork(self: Any, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        if name not in self.states_:
            raise RuntimeError(f"rng state {name} is not added")
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return [
        (moe_utils, "maybe_move_tensor_to_cpu", move_to_cpu),
        (token_dispatcher, "maybe_move_tensor_to_cpu", move_to_cpu),
        (random, "_get_cuda_rng_state", get_state),
        (random, "_set_cuda_rng_state", set_state),
        (random.CudaRNGStatesTracker, "fork", fork),
    ]


_bf16_products: torch.library.Library | None = None  # held while the patch is applied


def _bf16_product_replacements() -> list[Replacement]:
    """Kernels of mm, bmm, addmm and baddbmm for CPUs without bf16 arithmetic; in effect as long as they are held."""
    if torch.cpu._is_avx512_bf16_supported():
        return []
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        library.impl(name, _in_fp32(getattr(torch.ops.aten, name).out), "CPU")
    return [(sys.modules[__name__], "_bf16_products", library)]


def _in_fp32(out_overload: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    # The .out overloads keep their own kernels, so calling them does not come back here.
    def kernel(*tensors: torch.Tensor, **scalars: Any) -> torch.Tensor:
        dtype = tensors[0].dtype
        operands = [tensor.float() if dtype == torch.bfloat16 else tensor for tensor in tensors]
        result = torch.empty(0, dtype=operands[0].dtype)
        out_overload(*operands, **scalars, out=result)
        return result.to(dtype)

    return kernel


def _named_replacements() -> list[Replacement]:
    return [*_cuda_replacements(), *_factory_replacements(), *_megatron_replacements()]


def _replacements() -> list[Replacement]:
    return [*_named_replacements(), *_bf16_product_replacements()]


def _probe() -> tuple[str, str]:
    from patches.probe import probe_gpt

    missing = missing_names(_named_replacements())
    return ("CHANGED", f"there is no {', '.join(missing)}") if missing else probe_gpt()


PATCH = Patch(
    name="cpu_platform",
    target="torch.cuda, tensor factories, megatron.core.tensor_parallel.random, bf16 matrix products on CPU",
    why="a stand-in for CUDA on machines without a GPU",
    replacements=_replacements,
    probe=_probe,
)
