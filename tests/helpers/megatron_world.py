"""One process as a whole Megatron world of size one on the CPU stand-in, for tests that need real models."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import patches


@contextmanager
def one_rank_world() -> Iterator[None]:
    """Patches applied, a gloo group of one rank, tp=1 and pp=1 inside; afterwards nothing of it is left."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    from trainer.megatron.build import drop_caches

    assert not patches.applied()
    flash_sdp, generator_state = torch.backends.cuda.flash_sdp_enabled(), torch.get_rng_state()
    try:
        patches.apply("cpu_platform", "ddp_buffer_backup", "fused_adamw", "cpu_saver")
        torch.backends.cuda.enable_flash_sdp(False)
        with tempfile.TemporaryDirectory() as folder:
            store = distributed.FileStore(str(Path(folder, "store")), 1)
            distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            parallel_state.initialize_model_parallel(1, 1)
            yield
    finally:
        drop_caches()
        initialize_rng_tracker(force_reset=True)
        parallel_state.destroy_model_parallel()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        torch.backends.cuda.enable_flash_sdp(flash_sdp)
        torch.set_rng_state(generator_state)
        patches.revert()


def logits_of(gpt: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The logits [b, s, vocabulary] of an actor's GPTModel, which it does not make by itself."""
    from trainer.megatron.heads import output_weight

    hidden = gpt(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), None)
    return hidden @ output_weight(gpt).T
