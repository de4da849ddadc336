"""What is checked of every tensor of a model folder before it becomes a weight: its shape, its dtype, its values."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.config.schema import ModelConfig
from trainer.models.dtypes import DTYPES
from trainer.models.shapes import layer_matrices

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_Shape = tuple[int | None, ...]  # None: any
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def check_weight(name: str, tensor: Tensor, *, model: ModelConfig) -> None:
    """Judge one tensor of a Hugging Face file.

    Args:
        name: as transformers calls it.
        tensor: on the ``meta`` device it has no values, which are not judged then; nor are they with
            ``model.check_finite=false``.

    Raises:
        ValueError: its shape is not that of its projection in ``model``, its dtype is none of numbers with a
            fraction, or ``model.dtype`` has no finite number for one of its values; names the tensor.
    """
    expected = expected_shape(name, model)
    if not _fits(tensor.shape, expected):
        shape = "(" + ", ".join("any" if size is None else str(size) for size in expected) + ")"
        how = "is transposed: it " if _fits(tensor.shape[::-1], expected) else ""
        raise ValueError(
            f"{name} {how}has the shape {tuple(tensor.shape)}, and the architecture in config.json has {shape} there"
        )
    if tensor.dtype not in FLOATING:
        allowed = ", ".join(_text(dtype) for dtype in FLOATING)
        raise ValueError(
            f"{name} has the dtype {_text(tensor.dtype)}, must be one of {allowed}: quantised weights must be saved as "
            "plain ones"
        )
    if model.check_finite and not tensor.is_meta:
        _check_finite(name, tensor, dtype=model.dtype)


def _check_finite(name: str, tensor: Tensor, *, dtype: str) -> None:
    """One pass without a copy: the smallest and largest value are finite exactly if all are. Rounding keeps order, so
    their own conversion tells what the others become."""
    extremes = torch.stack(torch.aminmax(tensor))
    if extremes.to(DTYPES[dtype]).isfinite().all():
        return
    bad = ~tensor.isfinite()
    if bad.any():
        first = tensor[bad][0].item()
        raise ValueError(
            f"{name} holds {first}: {int(bad.sum())} of its {tensor.numel()} values are not finite. Copy or download "
            "the folder again; model.check_finite=false does not look"
        )
    raise ValueError(f"{name} holds {extremes.tolist()}, which model.dtype={dtype} has no finite numbers for")


def expected_shape(name: str, model: ModelConfig) -> _Shape:
    """The shape of a tensor as Hugging Face files have it; of biases their projection's first size."""
    hidden, matrices = model.hidden_size, layer_matrices(model)
    projection, _, kind = name.rpartition(".")
    shapes: dict[str, _Shape] = {
        **dict.fromkeys(("embed_tokens", "lm_head"), (model.vocab_size, hidden)),
        "score": (1, hidden),
        **matrices,
        **{theirs: matrices[ours] for theirs, ours in _MIXTRAL.items()},
        **dict.fromkeys(("q_norm", "k_norm"), (model.head_dim,)),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), (hidden,)),
    }
    shape = shapes[projection.rpartition(".")[2]]
    return shape[:1] if kind == "bias" else shape


def _fits(shape: torch.Size, expected: _Shape) -> bool:
    return len(shape) == len(expected) and all(want in (None, size) for size, want in zip(shape, expected, strict=True))


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
