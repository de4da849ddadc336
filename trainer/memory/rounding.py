"""Adam's moments in bf16 while they sleep (``memory.optim_format=bf16``): 8 bytes per parameter with the main param
instead of 12, at the price of bits.

Rounding is stochastic: a number between two bf16 neighbours becomes either, the nearer one more often, so that many
rounded steps add up to the exact ones on average (Gupta et al., "Deep Learning with Limited Numerical Precision",
ICML 2015).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trainer.memory.keeper import Store, Wait

_DROPPED_BITS = 16


def round_stochastically(numbers: torch.Tensor, *, seed: int) -> torch.Tensor:
    """fp32 [n], finite -> bf16 [n]. The same seed gives the same draws."""
    generator = torch.Generator(numbers.device).manual_seed(seed)
    bits = numbers.view(torch.int32)
    noise = torch.empty_like(bits).random_(0, 1 << _DROPPED_BITS, generator=generator)
    return (bits + noise).bitwise_and_(-1 << _DROPPED_BITS).view(torch.float32).to(torch.bfloat16)


def stored_like(pieces: Sequence[torch.Tensor], *, main_pieces: int) -> list[torch.Tensor]:
    """Tensors without memory, of the shapes and dtypes in which :class:`RoundedMoments` hands on ``pieces``."""
    dtypes = [torch.float32 if number < main_pieces else torch.bfloat16 for number in range(len(pieces))]
    return [torch.empty(p.shape, dtype=d, device="meta") for p, d in zip(pieces, dtypes, strict=True)]


class RoundedMoments:
    """A store that hands another one the pieces with moments in bf16.

    Args:
        main_pieces: so many pieces, the first ones, stay fp32.
        seed_of: number of a piece -> seed of its rounding at this moment.
    """

    def __init__(self, store: Store, *, main_pieces: int, seed_of: Callable[[int], int]) -> None:
        self._store, self._main_pieces, self._seed_of = store, main_pieces, seed_of

    @property
    def host_bytes(self) -> int:
        return self._store.host_bytes

    def host_tensor(self, number: int) -> torch.Tensor | None:
        return None

    def start_write(self, number: int, piece: torch.Tensor) -> Wait:
        if number < self._main_pieces:
            return self._store.start_write(number, piece)
        rounded = [round_stochastically(piece, seed=self._seed_of(number))]
        wait = self._store.start_write(number, rounded[0])

        def finish() -> None:
            wait()
            rounded.clear()  # it takes device memory

        return finish

    def start_read(self, number: int, piece: torch.Tensor) -> Wait:
        if number < self._main_pieces:
            return self._store.start_read(number, piece)
        rounded = torch.empty_like(piece, dtype=torch.bfloat16)
        self._store.start_read(number, rounded)()
        piece.copy_(rounded)
        done = torch.cuda.Event()
        done.record()
        return done.synchronize
