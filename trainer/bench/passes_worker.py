"""The worker's side of :mod:`trainer.bench.passes`."""

from __future__ import annotations

import dataclasses
import faulthandler
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.schema import Config, ModelConfig
from trainer.megatron import platform
from trainer.models.dtypes import DTYPES
from trainer.models.flops import TRAINING_PASSES, forward_flops, peak_flops_per_second

_VOCABULARY = 32768


@dataclass(frozen=True)
class PassesJob:
    """What the parent hands to the worker of one case. ``shapes``: rows x columns of the batches."""

    config: Config
    case: str
    shapes: tuple[str, ...]
    repeats: int
    timeout_seconds: int


def parse_shape(shape: str) -> tuple[int, int]:
    """(rows, columns) of "64x256"."""
    rows, _, columns = shape.partition("x")
    if not (rows.isdigit() and columns.isdigit() and int(rows) * int(columns) > 0):
        raise ValueError(f"bench.shapes: {shape} must be rows x columns, such as 64x256")
    return int(rows), int(columns)


def run_passes(job: PassesJob) -> dict[str, Any]:
    """Shape -> seconds of a forward pass and of a forward and backward pass, MFU of the latter, GiB at the peak."""
    faulthandler.dump_traceback_later(job.timeout_seconds, exit=True)
    platform.set_up(job.config)
    platform.set_up_process_groups(job.config)
    from trainer.bench.measure import versions

    shapes = {shape: parse_shape(shape) for shape in job.shapes}
    longest = max(columns for _, columns in shapes.values())
    model = dataclasses.replace(job.config.roles["critic"].model, max_length=longest)
    build = {"plain": _transformers, "plain_liger": _transformers_with_liger}.get(job.case, _ours)
    body = build(model, job.config)
    found = {shape: _measured(body, model, job, *size) for shape, size in shapes.items()}
    return {"platform": platform.describe(job.config), "versions": versions(), "shapes": found}


def _ours(model: ModelConfig, config: Config) -> nn.Module:
    from trainer.megatron.build import build_chunks

    (gpt,) = build_chunks(
        model,
        vocab_size=_VOCABULARY,
        parallel=config.parallel,
        seed=config.seed,
        value_head=True,
        recompute=config.training.recompute,
    )
    nn.init.normal_(gpt.output_layer.weight)  # type: ignore  (zeros give gradients of zero, multiplied faster)
    return _OnTokens(gpt)


class _OnTokens(nn.Module):
    """A GPTModel as a function of tokens alone."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [b, s] -> values [b, s, 1]."""
        return self.gpt(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), None)


def _transformers_with_liger(model: ModelConfig, config: Config) -> nn.Module:
    from trainer.bench.plain_loop import use_liger

    values = _transformers(model, config)
    use_liger(values.body)
    return values


def _transformers(model: ModelConfig, config: Config) -> Any:
    from transformers import AutoModel

    from trainer.bench.plain_loop import ValueModel
    from trainer.models.hf_bridge import hf_config

    architecture = hf_config(
        model, vocab_size=_VOCABULARY, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    )
    torch.manual_seed(config.seed)
    with torch.device(torch.cuda.current_device()):
        body = AutoModel.from_config(architecture, attn_implementation="sdpa", dtype=DTYPES[model.dtype])
    values = ValueModel(body.train(), model.hidden_size)
    nn.init.normal_(values.head.weight)
    return values


def _measured(body: nn.Module, model: ModelConfig, job: PassesJob, rows: int, columns: int) -> dict[str, float | None]:
    is_gpu, device = job.config.platform.name == "cuda", torch.cuda.current_device()
    generator = torch.Generator(device).manual_seed(job.config.seed)
    tokens = torch.randint(_VOCABULARY, (rows, columns), generator=generator, device=device)

    def both() -> None:
        body(tokens).square().mean().backward()
        body.zero_grad()

    def alone() -> None:
        with torch.no_grad():
            body(tokens)

    def seconds(work: Callable[[], None]) -> float:
        for _ in range(2):
            work()
        _wait(is_gpu)
        start = time.perf_counter()
        for _ in range(job.repeats):
            work()
        _wait(is_gpu)
        return (time.perf_counter() - start) / job.repeats

    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = {"forward_seconds": seconds(alone), "both_seconds": seconds(both)}
    size = {"tokens": rows * columns, "square_tokens": rows * columns**2, "predicted": 0}
    flops = TRAINING_PASSES * forward_flops(model, vocab_size=_VOCABULARY, value_head=True, **size)
    name = torch.cuda.get_device_name() if is_gpu else None
    peak = peak_flops_per_second(job.config.platform, device_name=name)
    return {
        **times,
        "mfu": None if peak is None else flops / times["both_seconds"] / peak,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_gpu else None,
    }


def _wait(is_gpu: bool) -> None:
    if is_gpu:
        torch.cuda.synchronize()
