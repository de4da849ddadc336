"""Peaks of real passes over sequences that ranks share, beside the plan's; used by test_context_parallel."""

import os

import torch

from tests.helpers.roles import VOCAB_SIZE, fresh_saver, loss_of, make_batch, make_role, small_config
from tests.helpers.tensor_memory import TensorMemory
from trainer.megatron import platform
from trainer.plan import activations
from trainer.training import step
from trainer.training.micro_batches import Split


def peaks(payload: None) -> dict[tuple[str, str], tuple[int, int]]:
    """(role, pass) -> bytes, (measured, planned). Layers are computed again in backward passes, so that one at a time
    has the keys of all ranks; torch's attention of the CPU would keep them, and a GPU's does not."""
    ranks = int(os.environ["WORLD_SIZE"])
    model = ("model.layers=4", "model.ffn_size=320", "model.max_length=512", "model.kv_heads=2")
    config = small_config(*model, f"launch.nproc={ranks}", f"parallel.cp={ranks}", "training.recompute=full")
    platform.set_up(config)
    platform.set_up_process_groups(config)
    torch.backends.cuda.enable_flash_sdp(True)  # which keeps no scores
    batch, split, found = make_batch([508] * 4), Split(4), {}
    sizes = {"tokens": batch.tokens.numel(), "vocab_size": VOCAB_SIZE, "stage": 0}
    for name in ("actor", "critic"):
        fresh_saver()
        role = make_role(name, *model, f"launch.nproc={ranks}", f"parallel.cp={ranks}", "training.recompute=full")
        with TensorMemory() as memory:
            step.train_minibatch(role, batch, loss_of(role), split=split)
        found[name, "train"] = memory.peak_bytes, activations.training_bytes(config, name, **sizes)
        with TensorMemory() as memory:
            if name == "critic":
                step.values(role, batch, split=split)
            else:
                step.log_probs(role, batch, temperature=1.0, vocab_size=VOCAB_SIZE, split=split)
        found[name, "forward"] = memory.peak_bytes, activations.forward_bytes(config, name, **sizes)
    return found
