"""Megatron's forward(-backward) schedule over micro-batches, of one stage or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from trainer.megatron.groups import context_parallel_group
from trainer.megatron.sharding import Chunk


class Input(Protocol):
    """What a model is called with for a micro-batch: ``tokens`` and ``positions`` [b, t], and keyword ``options``."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


def run_passes(
    chunks: Sequence[Chunk],
    inputs: Sequence[Input],
    on_output: Callable[..., Any],
    *,
    forward_only: bool,
    around: Callable[[int], AbstractContextManager[Any]] = nullcontext,
    before_reducing: Callable[[], None] | None = None,
) -> list[Any]:
    """What ``on_output`` reports of each micro-batch, in order, on the last pipeline stage; elsewhere nothing.

    Args:
        inputs: of equal shapes, where pipeline stages pass them on.
        on_output: called with a micro-batch's number, the GPTModel whose output it is, the output, and Megatron's
            keyword ``non_loss_data`` in forward-only passes; otherwise gives (summed loss, its count, a dict).
        around: number of a micro-batch -> the context in which its forward pass happens.
        before_reducing: called after all passes of a training step, before gradients are reduced over ranks.
    """

    def forward_step(iterator: Iterator[int], model: Chunk) -> tuple[Tensor, Callable[..., Any]]:
        number = next(iterator)
        given = inputs[number]
        with around(number):
            output = model(given.tokens, given.positions, None, **given.options)
        return output, partial(on_output, number, chunks[-1].module)

    iterators = [iter(range(len(inputs))) for _ in chunks]
    rows, own_length = inputs[0].tokens.shape
    with nullcontext() if before_reducing is None else _before_finalizing(chunks, before_reducing):
        reported = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(chunks),  # type: ignore[arg-type]
            num_microbatches=len(inputs),
            seq_length=own_length * context_parallel_group().size(),
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    for chunk in chunks:
        chunk.module.set_input_tensor(None)  # type: ignore[arg-type]  # the stage before gave it
    return reported


@contextmanager
def _before_finalizing(chunks: Sequence[Chunk], action: Callable[[], None]) -> Iterator[None]:
    """Inside, Megatron's schedule does ``action`` before it finalizes gradients."""
    config = chunks[0].module.config
    finalize = config.finalize_model_grads_func
    assert finalize is not None

    def after_action(*arguments: Any, **options: Any) -> Any:
        action()
        return finalize(*arguments, **options)

    config.finalize_model_grads_func = after_action
    try:
        yield
    finally:
        config.finalize_model_grads_func = finalize
