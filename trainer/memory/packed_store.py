"""A store that keeps fp32 numbers in fewer bytes, bits and all (``optim_keeper=packed``).

The first byte of an fp32 number, its sign and seven bits of its exponent, is far from random in main params and Adam's
moments; the other three are nearly so. The first bytes of a block go through an entropy coder, on the device, and the
others are kept as they are: about 10.3 bytes for main param and moments together instead of 12. A block that does not
get smaller is kept as it is.
"""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol

import torch

from trainer.memory.arena import HostArena
from trainer.memory.keeper import Wait

_BLOCK_ELEMENTS = 16 * 2**20  # what is coded at a time: 64 MiB
_BLOCKS_IN_FLIGHT = 2
_SMALLEST_SEGMENT_BYTES, _LARGEST_SEGMENT_BYTES = 2**14, 2**25


class Coder(Protocol):
    """A lossless coder of bytes. Used by one thread."""

    def encode(self, plane: torch.Tensor) -> torch.Tensor:
        """plane [n] uint8 -> [m] uint8 on the same device."""
        ...

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        ...


class ZlibCoder:
    """On the CPU."""

    def encode(self, plane: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(bytearray(zlib.compress(plane.numpy().data, level=1)), dtype=torch.uint8)

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(bytearray(zlib.decompress(code.numpy().data)), dtype=torch.uint8)


class AnsCoder:
    """nvCOMP's asymmetric numeral systems, on a GPU and the stream that is current when it is made. Raises ImportError
    without nvCOMP."""

    def __init__(self) -> None:
        from nvidia import nvcomp  # type: ignore[import-not-found]

        self._nvcomp: Any = nvcomp
        self._stream = torch.cuda.current_stream().cuda_stream
        self._codec = nvcomp.Codec(
            algorithm="ANS", device_id=torch.cuda.current_device(), cuda_stream=self._stream, data_type="|u1"
        )

    def encode(self, plane: torch.Tensor) -> torch.Tensor:
        return self._tensor(self._codec.encode(self._nvcomp.as_array(plane, cuda_stream=self._stream)))

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return self._tensor(self._codec.decode(self._nvcomp.as_array(code, cuda_stream=self._stream)))

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.as_tensor(array, device="cuda").view(torch.uint8)


class _InFlight:
    """Copies that were queued together: when they are done, and the tensors that must live until then."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors
        self._done = torch.cuda.Event()
        self._done.record()

    def wait(self) -> None:
        self._done.synchronize()
        self._tensors = ()


class PackedStore:
    """Keeps pieces, fp32 [n] each, in host memory: three bytes of every number in an arena, what the coder makes of the
    fourth in segments that are added as they are needed.

    Copies have a stream of their own, so that one block is on the bus while the next one is coded.

    Args:
        arena: of :meth:`uncoded_bytes`.
        coder: makes the coder, in the thread and on the stream in which it is used.
    """

    def __init__(
        self, pieces: Sequence[torch.Tensor], arena: HostArena, *, coder: Callable[[], Coder], pinned: bool
    ) -> None:
        self._starts = [0, *accumulate(3 * piece.numel() for piece in pieces)]
        self._arena, self._pinned = arena, pinned
        self._coder = functools.cache(coder)
        self._copying = torch.cuda.Stream()
        self._in_flight: deque[_InFlight] = deque()
        self._segments: list[HostArena] = []
        self._segment_bytes = max(_SMALLEST_SEGMENT_BYTES, min(_LARGEST_SEGMENT_BYTES, self._starts[-1] // 64))
        self._used_bytes = 0  # of the segments
        self._codes: dict[int, list[list[torch.Tensor]]] = {}  # piece -> of each block, the parts of its code

    @staticmethod
    def uncoded_bytes(pieces: Sequence[torch.Tensor]) -> int:
        return sum(3 * piece.numel() for piece in pieces)

    @property
    def host_bytes(self) -> int:
        return self._arena.size_bytes + sum(segment.size_bytes for segment in self._segments)

    def host_tensor(self, number: int) -> torch.Tensor | None:
        return None

    def start_write(self, number: int, piece: torch.Tensor) -> Wait:
        self._arena.wait_until_ready()
        if number == 0:
            self._used_bytes = 0  # all pieces are written anew, in this order
        self._codes[number], flights = [], []
        for start, block in self._blocks(number, piece):
            planes = block.view(torch.uint8).view(-1, 4)
            plain, first = planes[:, :3].reshape(-1), planes[:, 3].contiguous()
            code = self._coder().encode(first)
            kept = code if code.numel() < first.numel() else first
            with self._copies_after_this():
                self._plain(start, block).copy_(plain, non_blocking=True)
                self._codes[number].append(self._keep(kept))
                flights.append(self._launched(plain, kept))
        return lambda: [flight.wait() for flight in flights]

    def start_read(self, number: int, piece: torch.Tensor) -> Wait:
        flights = []
        for (start, block), parts in zip(self._blocks(number, piece), self._codes[number], strict=True):
            plain = torch.empty(3 * block.numel(), dtype=torch.uint8, device=piece.device)
            kept = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8, device=piece.device)
            with self._copies_after_this():
                plain.copy_(self._plain(start, block), non_blocking=True)
                for to, part in zip(kept.split([part.numel() for part in parts]), parts, strict=True):
                    to.copy_(part, non_blocking=True)
                copied = torch.cuda.Event()
                copied.record()
            torch.cuda.current_stream().wait_event(copied)
            planes = block.view(torch.uint8).view(-1, 4)
            planes[:, :3].copy_(plain.view(-1, 3))
            planes[:, 3].copy_(self._coder().decode(kept) if kept.numel() < block.numel() else kept)
            flights.append(self._launched(plain, kept))
        return lambda: [flight.wait() for flight in flights]

    @contextmanager
    def _copies_after_this(self) -> Iterator[None]:
        """Copies queued inside run after the work queued so far, and beside what is queued later."""
        self._copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copying):
            yield

    def _launched(self, *tensors: torch.Tensor) -> _InFlight:
        """What was just queued, of which only so much may wait for the bus: its tensors take device memory."""
        flight = _InFlight(*tensors)
        self._in_flight.append(flight)
        if len(self._in_flight) > _BLOCKS_IN_FLIGHT:
            self._in_flight.popleft().wait()
        return flight

    def _blocks(self, number: int, piece: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(offset in the arena, part of the piece)."""
        for place, block in enumerate(piece.split(_BLOCK_ELEMENTS) if piece.numel() else ()):
            yield self._starts[number] + 3 * _BLOCK_ELEMENTS * place, block

    def _plain(self, start: int, block: torch.Tensor) -> torch.Tensor:
        return self._arena.whole[start : start + 3 * block.numel()]

    def _keep(self, code: torch.Tensor) -> list[torch.Tensor]:
        """Copy a code behind what the segments hold -> where it lies, in parts."""
        parts = []
        while code.numel():
            number, start = divmod(self._used_bytes, self._segment_bytes)
            if number == len(self._segments):
                self._segments.append(HostArena(self._segment_bytes, pinned=self._pinned))
                self._segments[-1].wait_until_ready()
            size = min(code.numel(), self._segment_bytes - start)
            parts.append(self._segments[number].whole[start : start + size].copy_(code[:size], non_blocking=True))
            code, self._used_bytes = code[size:], self._used_bytes + size
        return parts
