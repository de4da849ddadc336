"""Small models that show whether a patch does its work with the installed versions.

Each probe runs in a process of its own, which may patch, open process groups and fail without a trace in the caller.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

import patches

_TIMEOUT_SECONDS = 300
_LEARNING_RATE = 0.125


def probe_ddp_buffers() -> tuple[str, str]:
    """Whether every DDP buffer survives a sleep or not, exactly as the two flags say."""
    return _in_child(_ddp_buffer_problems)


def probe_gpt() -> tuple[str, str]:
    """Whether a GPTModel goes forward and backward under DDP on the CPU."""
    return _in_child(_gpt_problems)


def probe_optimizer_step() -> tuple[str, str]:
    """Whether Megatron's distributed optimizer makes AdamW's first step with a state made before it."""
    return _in_child(_optimizer_problems)


def _in_child(find_problems: Callable[[], list[str]]) -> tuple[str, str]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_seclude) as pool:
        try:
            problems = pool.submit(find_problems).result(_TIMEOUT_SECONDS)
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
    return ("CHANGED", "; ".join(problems)) if problems else ("OK", "applies and holds on a probe model")


def _seclude() -> None:
    """Neither heard nor reachable: gloo listens on the loopback interface, which is a host's first. Imports are as fast
    as in workers, without searches for garbage and without torch's compiler."""
    gc.disable()
    patches.apply("eager_fusions")
    os.environ["GLOO_SOCKET_IFNAME"] = socket.if_indextoname(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


@contextmanager
def one_rank() -> Iterator[None]:
    """Megatron's process groups over gloo with this process as the only rank."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def transformer_config() -> Any:
    """The smallest TransformerConfig that works: one layer of width 8."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
    )


def wrap(module: torch.nn.Module, *, use_distributed_optimizer: bool = True, **arguments: Any) -> Any:
    """``module`` under Megatron's DistributedDataParallel, which gets ``arguments`` besides."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=use_distributed_optimizer
    )
    return DistributedDataParallel(transformer_config(), settings, module, **arguments)


def tiny_gpt() -> Any:
    """megatron-core's GPTModel with one layer and a vocabulary of 16."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    return GPTModel(transformer_config(), get_gpt_layer_local_spec(), vocab_size=16, max_sequence_length=8)


def adam(chunk: Any, **settings: Any) -> Any:
    """Megatron's distributed optimizer over ``chunk``, without weight decay or clipping."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=_LEARNING_RATE, weight_decay=0.0, clip_grad=0.0, use_distributed_optimizer=True, **settings
    )
    return get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False)


def _probe_region(kind: str, backup: bool) -> AbstractContextManager[None]:
    from torch_memory_saver import torch_memory_saver

    return torch_memory_saver.region(tag=f"probe/{kind}", enable_cpu_backup=backup)


def _ddp_buffer_problems() -> list[str]:
    from torch_memory_saver import torch_memory_saver

    from patches.ddp_buffer_backup import GRAD_FLAG, PARAM_FLAG, REGION_FOR

    patches.apply("cpu_platform", "cpu_saver", "ddp_buffer_backup")
    problems = []
    with one_rank():
        for distributed, drop_grad, drop_param in itertools.product((False, True), repeat=3):
            chunk = wrap(
                torch.nn.Linear(4, 4),
                use_distributed_optimizer=distributed,
                **{GRAD_FLAG: drop_grad, PARAM_FLAG: drop_param, REGION_FOR: _probe_region},
            )
            torch_memory_saver.pause()
            torch_memory_saver.resume()
            for buffer, (kind, dropped) in itertools.product(
                chunk.buffers, (("grad", drop_grad), ("param", drop_param and distributed))
            ):
                data = getattr(buffer, f"{kind}_data")
                if data is not None and bool(data.isnan().all()) != dropped:
                    problems.append(f"{kind} buffer, {distributed=}: expected {dropped=}")
    return problems


def _gpt_problems() -> list[str]:
    patches.apply("cpu_platform")
    with one_rank():
        chunk = wrap(tiny_gpt())
        tokens = torch.arange(8, device="cuda").unsqueeze(0)
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=torch.cuda.current_device()).triu(1)
        chunk(tokens, tokens, mask, labels=tokens).sum().backward()
        grads = torch.cat([buffer.grad_data for buffer in chunk.buffers])
    return [] if grads.isfinite().all() and grads.any() else ["the gradients of a GPTModel are zero or not finite"]


def _optimizer_problems() -> list[str]:
    patches.apply("cpu_platform", "fused_adamw")
    with one_rank():
        chunk = wrap(torch.nn.Linear(4, 4, bias=False))
        (param,) = chunk.parameters()
        before = param.detach().clone()
        optimizer = adam(chunk)
        (inner,) = (inner.optimizer for inner in optimizer.chained_optimizers)
        for group in inner.param_groups:
            for main_param in group["params"]:
                inner.initialize_state(main_param)
        param.main_grad.fill_(2.0)
        optimizer.step()
        moved = before - param.detach()
    # The first step of Adam has the length of the learning rate, whatever the gradient.
    return [] if torch.allclose(moved, torch.full_like(moved, _LEARNING_RATE)) else [f"a first step moved by {moved}"]
