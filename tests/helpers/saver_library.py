"""torch_memory_saver without its library, which needs the CUDA driver."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch_memory_saver
from torch_memory_saver import entrypoint

from trainer.memory import cuda_regions


@contextmanager
def library_replaced() -> Iterator[list[str]]:
    """A new torch_memory_saver inside, without its library -> the hook modes in which that would have been loaded."""
    hook_modes: list[str] = []

    def load(hook_mode: str = "preload") -> mock.Mock:
        hook_modes.append(hook_mode)
        return mock.Mock()

    with (
        mock.patch.object(entrypoint, "_TorchMemorySaverImpl", load),
        mock.patch.object(cuda_regions, "CudaRegions"),
        mock.patch.object(torch_memory_saver, "torch_memory_saver", entrypoint.TorchMemorySaver()),
    ):
        yield hook_modes
