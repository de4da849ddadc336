"""Megatron's DDP buffers in torch_memory_saver regions with or without a CPU backup.

Target: megatron.core.distributed: DistributedDataParallel.__init__ and _ParamAndGradBuffer.__init__.
Why: a model that sleeps need not keep a host copy of its gradients (they are zeroed before every use), nor of
    parameters that somebody else can restore. Each byte not copied saves host memory and sleep and wake-up time.
How: both constructors take two more keyword-only arguments, ``disable_grad_buffers_cpu_backup`` and
    ``disable_param_buffers_cpu_backup``. The original constructor runs unchanged under a TorchFunctionMode that sends
    its ``torch.zeros`` calls for the two buffers to the right regions; afterwards the buffers' pointers are compared
    with what was routed, so that an upstream change is an error and never a silently missing region.
Upstream: not proposed to Megatron-LM yet.
Remove when: megatron-core's constructors take these two arguments themselves (``python -m patches`` says UPSTREAMED).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from patches.registry import Patch, Replacement

GRAD_FLAG = "disable_grad_buffers_cpu_backup"
PARAM_FLAG = "disable_param_buffers_cpu_backup"


@dataclass(frozen=True)
class _Flags:
    disable_grad_backup: bool = False
    disable_param_backup: bool = False

    def disabled(self, kind: str) -> bool:
        return self.disable_grad_backup if kind == "grad" else self.disable_param_backup


# Set by DistributedDataParallel.__init__ for the buffers that it creates: its own code does not hand our arguments on.
_inherited_flags: ContextVar[_Flags | None] = ContextVar("_inherited_flags", default=None)
_owner: ContextVar[str | None] = ContextVar("_owner", default=None)


@contextmanager
def buffer_owner(role: str) -> Iterator[None]:
    """Declare whose DDP buffers are built inside: each goes to the region ``<role>/param`` or ``<role>/grad``.

    Without an owner a set flag sends its buffer to the region ``param_buffer`` or ``grad_buffer``, and an unset flag
    changes nothing.
    """
    token = _owner.set(role)
    try:
        yield
    finally:
        _owner.reset(token)


def _region(kind: str, flags: _Flags) -> AbstractContextManager[None]:
    owner, disabled = _owner.get(), flags.disabled(kind)
    if owner is None and not disabled:
        return nullcontext()
    try:
        from torch_memory_saver import torch_memory_saver
    except ImportError as error:
        flag = GRAD_FLAG if kind == "grad" else PARAM_FLAG
        user = f"{flag}=True" if disabled else f"buffer_owner({owner!r}) with {flag}=False"
        raise ImportError(f"{user} needs torch_memory_saver: pip install torch-memory-saver") from error
    tag = f"{kind}_buffer" if owner is None else f"{owner}/{kind}"
    return torch_memory_saver.region(tag=tag, enable_cpu_backup=not disabled)


class _BufferRouter(TorchFunctionMode):
    """Runs the calls that make ``buffer``'s storage inside their regions.

    These are ``torch.zeros`` with one whole number, once per kind, and then, where a parameter accumulates its
    gradient in fp32 beside a bf16 buffer, ``torch.empty_like``.
    """

    def __init__(self, buffer: Any, flags: _Flags) -> None:
        super().__init__()
        self._buffer, self._flags = buffer, flags
        self._waiting: list[str] | None = None
        self.routed: dict[str, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "zeros" and args and isinstance(args[0], int):
            if self._waiting is None:
                self._waiting = _expected_kinds(self._buffer.ddp_config, self._buffer.params, self._flags)
            if self._waiting:
                kind = self._waiting.pop(0)
                with _region(kind, self._flags):
                    self.routed[kind] = func(*args, **kwargs)
                return self.routed[kind]
        elif name == "empty_like":
            with _region("grad", self._flags):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _expected_kinds(ddp_config: Any, params: list[torch.nn.Parameter], flags: _Flags) -> list[str]:
    """Kinds of the buffers in the order in which the constructor makes them."""
    from megatron.core.distributed import param_and_grad_buffer as upstream

    if not ddp_config.use_distributed_optimizer:
        return ["grad"]
    # The second name came with megatron-core 0.19.
    names = [name for name in ("is_mxfp8tensor", "is_grouped_mxfp8tensor") if hasattr(upstream, name)]
    if any(getattr(upstream, name)(param) for name in names for param in params):
        # One buffer serves both kinds; dropping its copy takes the parameters with it, so their flag decides.
        return ["param" if flags.disable_param_backup else "grad"]
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


def _with_flags(original: Callable[..., None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``functools.wraps`` plus a signature that shows the two new keyword-only arguments."""

    def decorate(wrapper: Callable[..., None]) -> Callable[..., None]:
        wrapped = functools.wraps(original)(wrapper)
        signature = inspect.signature(original)
        parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = [p for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        new = [
            inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
            for flag in (GRAD_FLAG, PARAM_FLAG)
        ]
        wrapped.__signature__ = signature.replace(parameters=[*parameters, *new, *rest])  # type: ignore[attr-defined]
        return wrapped

    return decorate


def _patched_buffer_init(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @_with_flags(original)
    def __init__(
        self: Any,
        *args: Any,
        disable_grad_buffers_cpu_backup: bool = False,
        disable_param_buffers_cpu_backup: bool = False,
        **kwargs: Any,
    ) -> None:
        inherited = _inherited_flags.get() or _Flags()
        flags = _Flags(
            disable_grad_buffers_cpu_backup or inherited.disable_grad_backup,
            disable_param_buffers_cpu_backup or inherited.disable_param_backup,
        )
        if _owner.get() is None and flags == _Flags():
            original(self, *args, **kwargs)
            return
        arguments = signature.bind(self, *args, **kwargs).arguments
        assert not arguments.get("nccl_ub", False), (
            "nccl_ub takes its buffers from NCCL's own allocator, which torch_memory_saver cannot pause: "
            f"it does not go with {GRAD_FLAG}, {PARAM_FLAG} or a buffer owner"
        )
        with _BufferRouter(self, flags) as router:
            original(self, *args, **kwargs)
        _check_routing(self, router)

    return __init__


def _patched_ddp_init(original: Callable[..., None]) -> Callable[..., None]:
    @_with_flags(original)
    def __init__(
        self: Any,
        *args: Any,
        disable_grad_buffers_cpu_backup: bool = False,
        disable_param_buffers_cpu_backup: bool = False,
        **kwargs: Any,
    ) -> None:
        token = _inherited_flags.set(_Flags(disable_grad_buffers_cpu_backup, disable_param_buffers_cpu_backup))
        try:
            original(self, *args, **kwargs)
        finally:
            _inherited_flags.reset(token)

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
)
