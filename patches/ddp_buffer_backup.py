"""Megatron's DDP buffers in torch_memory_saver regions with or without a CPU backup.

Target: megatron.core.distributed: DistributedDataParallel.__init__ and _ParamAndGradBuffer.__init__.
Why: a model that sleeps need not keep a host copy of its gradients (they are zeroed before every use), nor of
    parameters that somebody else can restore. Each byte not copied saves host memory and sleep and wake-up time.
How: both constructors take three more keyword-only arguments: ``disable_grad_buffers_cpu_backup``,
    ``disable_param_buffers_cpu_backup``, and ``region_for``, which says where a buffer of a kind goes. DDP hands them
    on to its buffers in a copy of its ``ddp_config``. A buffer's original constructor runs unchanged under a
    TorchFunctionMode that sends its ``torch.zeros`` calls for the two buffers to the right regions; afterwards the
    buffers' pointers are compared with what was routed, so that an upstream change is an error and never a silently
    missing region.
Upstream: not proposed to Megatron-LM yet.
Remove when: megatron-core's constructors take these two arguments themselves (``python -m patches`` says UPSTREAMED).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from patches.registry import Patch, Replacement

GRAD_FLAG = "disable_grad_buffers_cpu_backup"
PARAM_FLAG = "disable_param_buffers_cpu_backup"
REGION_FOR = "region_for"
RegionFor = Callable[[str, bool], AbstractContextManager[None]]  # kind ("param" or "grad"), has a backup -> its region
_HANDED_ON = "_buffer_routing"  # the attribute of DDP's ddp_config


@dataclass(frozen=True)
class _Routing:
    """Where buffers go. Without ``region_for`` a set flag sends its buffer to the region ``param_buffer`` or
    ``grad_buffer``, and an unset flag changes nothing."""

    disable_grad_backup: bool = False
    disable_param_backup: bool = False
    region_for: RegionFor | None = None

    def disables(self, kind: str) -> bool:
        return self.disable_grad_backup if kind == "grad" else self.disable_param_backup

    def region(self, kind: str) -> AbstractContextManager[None]:
        if self.region_for is not None:
            return self.region_for(kind, not self.disables(kind))
        if not self.disables(kind):
            return nullcontext()
        try:
            from torch_memory_saver import torch_memory_saver
        except ImportError as error:
            flag = GRAD_FLAG if kind == "grad" else PARAM_FLAG
            raise ImportError(f"{flag}=True needs torch_memory_saver: pip install torch-memory-saver") from error
        return torch_memory_saver.region(tag=f"{kind}_buffer", enable_cpu_backup=False)


class _BufferRouter(TorchFunctionMode):
    """Runs the calls that make ``buffer``'s storage inside their regions.

    These are ``torch.zeros`` with one whole number, once per kind, and then, where a parameter accumulates its
    gradient in fp32 beside a bf16 buffer, ``torch.empty_like``.
    """

    def __init__(self, buffer: Any, routing: _Routing) -> None:
        super().__init__()
        self._buffer, self._routing = buffer, routing
        self._waiting: list[str] | None = None
        self.routed: dict[str, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "zeros" and args and isinstance(args[0], int):
            if self._waiting is None:
                self._waiting = _expected_kinds(self._buffer.ddp_config, self._buffer.params, self._routing)
            if self._waiting:
                kind = self._waiting.pop(0)
                with self._routing.region(kind):
                    self.routed[kind] = func(*args, **kwargs)
                return self.routed[kind]
        elif name == "empty_like":
            with self._routing.region("grad"):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _expected_kinds(ddp_config: Any, params: list[torch.nn.Parameter], routing: _Routing) -> list[str]:
    """Kinds of the buffers in the order in which the constructor makes them."""
    from megatron.core.distributed import param_and_grad_buffer as upstream

    if not ddp_config.use_distributed_optimizer:
        return ["grad"]
    # The second name came with megatron-core 0.19.
    names = [name for name in ("is_mxfp8tensor", "is_grouped_mxfp8tensor") if hasattr(upstream, name)]
    if any(getattr(upstream, name)(param) for name in names for param in params):
        # One buffer serves both kinds; dropping its copy takes the parameters with it, so their flag decides.
        return ["param" if routing.disable_param_backup else "grad"]
    return ["param", "grad"]


def _check_routing(buffer: Any, router: _BufferRouter) -> None:
    """Raise RuntimeError unless each buffer is the tensor that was routed as its kind (or the only, shared one)."""
    made = {kind: getattr(buffer, f"{kind}_data", None) for kind in ("param", "grad")}
    shared = next(iter(router.routed.values())) if len(router.routed) == 1 else None
    problems = [] if made["grad"] is not None else ["grad"]
    for kind, data in made.items():
        source = router.routed.get(kind, shared)
        if data is not None and (source is None or source.data_ptr() != data.data_ptr()):
            problems.append(kind)
    if problems:
        raise RuntimeError(
            f"_ParamAndGradBuffer.__init__ no longer makes its {' and '.join(problems)} buffer with "
            "torch.zeros(self.numel, ...): this version of megatron-core is not supported by the patch "
            "ddp_buffer_backup (run `python -m patches`)"
        )


def _with_arguments(original: Callable[..., None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``functools.wraps`` plus a signature that shows the new keyword-only arguments."""

    def decorate(wrapper: Callable[..., None]) -> Callable[..., None]:
        ours = [p for p in inspect.signature(wrapper).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
        wrapped = functools.wraps(original)(wrapper)
        signature = inspect.signature(original)
        parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = [p for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        wrapped.__signature__ = signature.replace(parameters=[*parameters, *ours, *rest])  # type: ignore[attr-defined]
        return wrapped

    return decorate


def _patched_buffer_init(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @_with_arguments(original)
    def __init__(
        self: Any,
        *args: Any,
        disable_grad_buffers_cpu_backup: bool = False,
        disable_param_buffers_cpu_backup: bool = False,
        region_for: RegionFor | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = signature.bind(self, *args, **kwargs).arguments
        inherited = getattr(arguments["ddp_config"], _HANDED_ON, _Routing())
        routing = _Routing(
            disable_grad_buffers_cpu_backup or inherited.disable_grad_backup,
            disable_param_buffers_cpu_backup or inherited.disable_param_backup,
            region_for or inherited.region_for,
        )
        if routing == _Routing():
            original(self, *args, **kwargs)
            return
        assert not arguments.get("nccl_ub", False), (
            "nccl_ub takes its buffers from NCCL's own allocator, which torch_memory_saver cannot pause: "
            f"it does not go with {GRAD_FLAG}, {PARAM_FLAG} or {REGION_FOR}"
        )
        with _BufferRouter(self, routing) as router:
            original(self, *args, **kwargs)
        _check_routing(self, router)

    return __init__


def _patched_ddp_init(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @_with_arguments(original)
    def __init__(
        self: Any,
        *args: Any,
        disable_grad_buffers_cpu_backup: bool = False,
        disable_param_buffers_cpu_backup: bool = False,
        region_for: RegionFor | None = None,
        **kwargs: Any,
    ) -> None:
        routing = _Routing(disable_grad_buffers_cpu_backup, disable_param_buffers_cpu_backup, region_for)
        if routing == _Routing():
            original(self, *args, **kwargs)
            return
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments["ddp_config"] = copy.copy(bound.arguments["ddp_config"])
        setattr(bound.arguments["ddp_config"], _HANDED_ON, routing)
        original(*bound.args, **bound.kwargs)

    return __init__


def _targets() -> tuple[type, type]:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

    return DistributedDataParallel, _ParamAndGradBuffer


def _replacements() -> list[Replacement]:
    ddp, buffer = _targets()
    return [
        (ddp, "__init__", _patched_ddp_init(ddp.__init__)),
        (buffer, "__init__", _patched_buffer_init(buffer.__init__)),
    ]


def _probe() -> tuple[str, str]:
    from patches.probe import probe_ddp_buffers

    ddp, buffer = (getattr(target.__init__, "__wrapped__", target.__init__) for target in _targets())
    upstream = [GRAD_FLAG in inspect.signature(init).parameters for init in (ddp, buffer)]
    if all(upstream):
        return "UPSTREAMED", "megatron-core has the arguments itself: delete this patch"
    if any(upstream):
        return "CHANGED", "megatron-core has the arguments in one of the two constructors only"
    return probe_ddp_buffers()


PATCH = Patch(
    name="ddp_buffer_backup",
    target="DistributedDataParallel.__init__, _ParamAndGradBuffer.__init__",
    why="DDP buffers in memory-saver regions, each with or without a CPU backup",
    replacements=_replacements,
    probe=_probe,
    after=("cpu_platform",),  # importing megatron looks for a GPU
)
