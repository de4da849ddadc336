"""Process groups whose communicators can be destroyed and made again behind the same handle.

Target: two more backends, ``reloadable_gloo`` and ``reloadable_nccl``, in torch.distributed's registry of third-party
    backends; ``torch.distributed.batch_isend_irecv``.
Why: an NCCL communicator keeps 390 to 560 MiB of GPU memory until its group is destroyed, also while every model
    sleeps. megatron-core holds handles of its groups in buckets, optimizers and modules, so groups cannot simply be
    destroyed and made anew.
How: a group of these backends is a :class:`ReloadableGroup`, which torch registers as it does any other and which
    forwards each collective to a group within. Inside :func:`destroyed` there is no group within. The coalescing of
    ``batch_isend_irecv`` looks for torch's own class, so it is given the group within.
Upstream: the idea is slime's (``reload_process_groups``). torch 2.13 has ``Backend.suspend()`` for recent NCCL.
Remove when: every supported torch and NCCL can suspend a communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup, distributed_c10d

from patches.registry import Patch, Replacement

_groups: list[ReloadableGroup] = []  # of this process, in the order of creation: the default group first


class ReloadableGroup(ProcessGroup):
    """A handle that torch made through ``init_process_group`` or ``new_group``; use it as any other group.

    Its default group serves CPU tensors with gloo (barriers, object collectives) and so needs no NCCL communicator,
    unless someone gives it CUDA tensors. Any use while it is destroyed raises RuntimeError.
    """

    def __init__(self, kind: str, options: Any, backend_options: Any) -> None:
        """``kind`` is "gloo" or "nccl", ``options`` torch's ``_DistributedBackendOptions``."""
        # Of torch's constructors the one for subclasses; its type stub lists only the other.
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        is_default = not options.global_ranks_in_group
        self._kinds = {"cpu": "gloo"} if kind == "gloo" else {"cuda": "nccl"} | ({"cpu": "gloo"} if is_default else {})
        self._options, self._backend_options = options, backend_options
        self.generation = 0
        self._inner: ProcessGroup | None = None
        self.rebuild()
        _groups.append(self)

    @property
    def is_destroyed(self) -> bool:
        return self._inner is None

    @property
    def inner(self) -> ProcessGroup:
        """The group that does the work. Raises RuntimeError while it is destroyed."""
        if self._inner is None:
            raise RuntimeError(
                f"process group {self._options.group_id} is destroyed while everything sleeps, so it can do no "
                "collective now: move it out of the rollout, or use offload.destroy_process_groups=false"
            )
        return self._inner

    def destroy(self) -> None:
        """Give back the communicators; nothing may be in flight on any rank."""
        if self._inner is not None:
            self._inner.shutdown()
            self._inner = None

    def rebuild(self) -> None:
        """Make the group within again. Collective for gloo; NCCL makes its communicators on first use."""
        assert self._inner is None
        options, self.generation = self._options, self.generation + 1
        # A key of an earlier generation would be a dead peer's address.
        store = distributed.PrefixStore(f"generation_{self.generation}", options.store)
        inner = ProcessGroup(store, options.group_rank, options.group_size)
        for device, kind in self._kinds.items():
            backend = _make_backend(kind, distributed.PrefixStore(device, store), options, self._backend_options)
            inner._register_backend(torch.device(device), getattr(ProcessGroup.BackendType, kind.upper()), backend)
        inner._set_default_backend(getattr(ProcessGroup.BackendType, next(iter(self._kinds.values())).upper()))
        inner._set_group_name(options.group_id)
        self._inner = inner

    # ---- what torch asks of a group, beside the collectives -----------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._kinds]

    @property
    def group_name(self) -> str:
        return self._options.group_id

    group_desc = group_name  # torch's own property asks the backends, which the handle has not

    def getBackendName(self) -> str:
        return f"reloadable({', '.join(self._kinds.values())})"

    def shutdown(self) -> None:
        """``destroy_process_group`` calls this: the handle is of no use any more."""
        self.destroy()
        if self in _groups:
            _groups.remove(self)

    abort = shutdown


# What needs no communicator, or concerns the handle and not the group within.
_OF_THE_HANDLE = {"rank", "size", "name", "boxed", "unbox", "get_group_store", "_id", *vars(ReloadableGroup)}
_OF_THE_HANDLE |= {"_get_backend_name", "_backend_id", "_register_backend", "_set_default_backend"}
_OF_THE_HANDLE |= {"_set_group_name", "_set_group_desc", "_has_hooks", "BackendType"}


def _forwarder(name: str) -> Callable[..., Any]:
    def method(self: ReloadableGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return method


for _name, _value in vars(ProcessGroup).items():  # which collectives there are depends on torch's version
    if callable(_value) and not _name.startswith("__") and _name not in _OF_THE_HANDLE:
        setattr(ReloadableGroup, _name, _forwarder(_name))


def _make_backend(kind: str, store: Any, options: Any, backend_options: Any) -> Any:
    rank, size = options.group_rank, options.group_size
    if kind == "gloo":
        return distributed.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
    nccl = distributed.ProcessGroupNCCL
    nccl_options = nccl.Options() if backend_options is None else backend_options
    nccl_options._timeout = options.timeout
    nccl_options.global_ranks_in_group = options.global_ranks_in_group
    nccl_options.group_name = options.group_id
    return nccl(store, rank, size, nccl_options)


def register(kind: str) -> str:
    """Make reloadable groups of ``kind`` ("gloo" or "nccl") known to torch.

    Returns:
        The backend's name for ``init_process_group``; ``new_group`` takes the default group's unless told otherwise.
    """
    name = f"reloadable_{kind}"
    if name not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(
            name,
            lambda options, backend_options: ReloadableGroup(kind, options, backend_options),
            extended_api=True,
            devices=["cpu", "cuda"],
        )
    return name


def groups() -> tuple[ReloadableGroup, ...]:
    """The reloadable groups of this process, in order of creation; none with torch's ordinary backends."""
    return tuple(_groups)


@contextmanager
def destroyed() -> Iterator[None]:
    """Inside, no reloadable group has communicators; afterwards all have them again. Collective over all ranks.

    If the body raises they stay destroyed: making them again would wait for ranks that still work.
    """
    handles = groups()
    if handles:
        torch.cuda.synchronize()
        _wait_for_all_ranks(handles[0])
    for group in reversed(handles):
        group.destroy()
    yield
    for group in handles:
        group.rebuild()


def _wait_for_all_ranks(default_group: ReloadableGroup) -> None:
    """Until every rank has finished its collectives; through the store, since no group is left to say so."""
    options, name = default_group._options, f"leaving_generation_{default_group.generation}"
    if options.store.add(name, 1) == options.group_size:
        options.store.set(f"{name}/all", "")
    options.store.wait([f"{name}/all"], options.timeout)


def _batch_isend_irecv(original: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def batch_isend_irecv(p2p_op_list: list[distributed.P2POp]) -> Any:
        for operation in p2p_op_list:
            if isinstance(operation.group, ReloadableGroup):
                operation.group = operation.group.inner
        return original(p2p_op_list)

    return batch_isend_irecv


def _replacements() -> list[Replacement]:
    new = _batch_isend_irecv(distributed.batch_isend_irecv)
    return [(distributed, "batch_isend_irecv", new), (distributed_c10d, "batch_isend_irecv", new)]


def _probe() -> tuple[str, str]:
    missing = [name for name in ("_register_backend", "_set_default_backend") if not hasattr(ProcessGroup, name)]
    return ("CHANGED", f"ProcessGroup no longer has {', '.join(missing)}") if missing else ("OK", "applies")


PATCH = Patch(
    name="reloadable_groups",
    target="backends of torch.distributed, torch.distributed.batch_isend_irecv",
    why="communicators are destroyed while everything sleeps",
    replacements=_replacements,
    probe=_probe,
)
