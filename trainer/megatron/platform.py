"""What a worker does once before anything else: patches, device, threads, process groups."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta

import torch

import patches
from patches import reloadable_groups
from trainer.config.schema import Config, ParallelConfig
from trainer.megatron import node_settings

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def set_up(config: Config) -> list[str]:
    """Make this process a worker of its platform. Call it before megatron is imported anywhere else.

    Returns:
        One line per applied patch, for the log.
    """
    torch.set_num_threads(config.launch.threads_per_worker)
    torch.autograd.set_detect_anomaly(config.diagnostics.detect_anomaly)
    # megatron-core warns that Transformer Engine and Apex are absent and that GPTModel gets no new features.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    is_cpu = config.platform.name == "cpu"
    needless = () if is_cpu else ("cpu_platform", "cpu_saver")
    needless += () if config.rollout.engine == "vllm" else ("vllm_memory",)
    names = [name for name in patches.NAMES if name not in needless]
    if is_cpu:
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns that there is no CUDA runtime
        # torch's flash kernel for CPUs takes 40 times longer than the plain one in bf16 backward passes.
        torch.backends.cuda.enable_flash_sdp(False)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.use_deterministic_algorithms(config.platform.deterministic)
    return patches.apply(*names)


def set_up_process_groups(config: Config) -> None:
    """Default group and Megatron's groups; ranks and addresses come from the environment that the launcher set.

    Raises:
        ValueError: several nodes have different settings.
    """
    backend = "gloo" if config.platform.name == "cpu" else "nccl"
    if config.offload.destroy_process_groups:
        backend = reloadable_groups.register(backend)
    meeting = {}
    if config.launch.nnodes > 1:  # compared before a backend could wait for the others in vain
        store, rank, world_size = next(torch.distributed.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
        node_settings.require_same(config, store)
        meeting = {"store": store, "rank": rank, "world_size": world_size}
    # Without device_id NCCL makes communicators on first use; with it, one for each of Megatron's many groups at once.
    torch.distributed.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **meeting)
    set_up_parallel_groups(config.parallel)


def set_up_parallel_groups(parallel: ParallelConfig) -> None:
    """Megatron's groups, over the default group, in place of earlier ones of another layout; each group costs threads
    that stay."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized() and parallel == ParallelConfig(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        vpp=1,  # chunks that take turns leave their mark in the groups
        cp=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
    ):
        return
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,  # an expert lies whole on its rank
        create_gloo_process_groups=False,
    )


def device_memory_bytes(config: Config) -> int | None:
    """Memory of the smallest GPU of all ranks; None on the CPU. Collective over the default group."""
    if config.platform.name == "cpu":
        return None
    from trainer.megatron.groups import least_of_all_ranks

    return least_of_all_ranks(torch.cuda.mem_get_info()[1])


def describe(config: Config) -> str:
    """One line that says what this run computes on."""
    if config.platform.name == "cpu":
        return "cpu (stand-in for CUDA)"
    return f"cuda ({torch.cuda.get_device_name()})"
