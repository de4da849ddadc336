"""The environment variables that workers must have before their interpreter starts. Decides, sets nothing.

torch_memory_saver hooks cudaMalloc through LD_PRELOAD: its library is preloaded exactly when
:func:`trainer.memory.saver.make_saver` will call it on CUDA. CUDA is never initialised here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from trainer.command import hashes

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")  # torch's and oneDNN's, 1024 each
_CACHED_KERNELS = "16"  # lengths that differ need new ones all the time, and every one takes host memory
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# What vLLM alone reads (rollout=vllm): it works in the training process, with the model runner whose logits processors
# see whole batches, on the threads that there are, says nothing but errors, and reports to nobody.
VLLM_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

# torch_memory_saver reads these when it is loaded, and ends the process on a value that it does not know.
_SAVER_VARIABLES = {
    **dict.fromkeys(("TMS_INIT_ENABLE", "TMS_INIT_ENABLE_CPU_BACKUP", "TMS_INIT_ENABLE_DISK_BACKUP"), "0"),
    "TMS_INIT_CPU_BACKUP_BACKEND": "pinned",
    "TMS_RETAIN_CPU_BACKUP": "0",  # memory.retain_cpu_backup is set in the worker
}

# Exits 1 when the dynamic linker ignored the library. A missing dependency makes the linker itself exit 127.
_TEST_LOAD = "import sys; sys.exit(sys.argv[1] not in open('/proc/self/maps').read())"


def worker_environment(*, platform: str, sleeps: bool, threads_per_worker: int) -> dict[str, str]:
    """What to set for every worker; ``sleeps`` is true when some role gives its GPU memory back.

    Raises ValueError when roles sleep and the user's allocator settings or installation rule that out.
    """
    assert platform in ("cpu", "cuda"), platform
    if sleeps:
        _refuse_expandable_segments()
    environment = {name: str(threads_per_worker) for name in _THREAD_VARIABLES}
    environment["MPLBACKEND"] = "agg"  # figures go to files, and an unknown backend of the user's would prevent them
    environment |= {hashes.VARIABLE: hashes.HASH_SEED, **VLLM_VARIABLES}
    if platform == "cpu":
        # Threads that wait must not spin: on a busy machine that is most of the time.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
        environment |= {name: os.environ.get(name, _CACHED_KERNELS) for name in _KERNEL_CACHES}
    else:
        # Megatron overlaps communication by the order of kernel launches. Elastic asks in the launching
        # process whether CUDA is available, and must not initialise it there.
        environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        # Makes cuBLAS deterministic, and its workspaces 32 MiB; they stay allocated while models sleep.
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if platform == "cuda" and sleeps:
        environment |= {"LD_PRELOAD": _preload(), **_SAVER_VARIABLES}
    return environment


def _refuse_expandable_segments() -> None:
    """Expandable segments map memory behind cudaMalloc's back, so that nothing would be given back."""
    for name in _ALLOCATOR_VARIABLES:
        value = os.environ.get(name, "")
        if "expandable_segments:true" in value.replace(" ", "").lower():
            raise ValueError(
                f"{name}={value!r}: roles that sleep cannot use expandable segments, whose memory "
                f"torch_memory_saver does not see. Take expandable_segments:True out of {name}, or run with "
                "offload=none."
            )


def _preload() -> str:
    """LD_PRELOAD: the saver's library, the CUDA runtime that came with torch, what the user had; test-loaded.

    A CUDA runtime installed by pip is on no search path of the dynamic linker. Listed after the saver's
    library it satisfies that library's dependency, and the saver's cudaMalloc still comes first.
    """
    from torch_memory_saver.utils import get_binary_path_from_package

    try:
        saver = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    except RuntimeError as error:
        raise ValueError(f"{error} Or run with offload=none, which needs no torch_memory_saver.") from error
    major = (torch.version.cuda or "").partition(".")[0]
    runtimes = Path(torch.__path__[0]).parent.glob(f"nvidia/*/lib/libcudart.so.{major}")
    users = [path for path in re.split(r"[:\s]+", os.environ.get("LD_PRELOAD", "")) if path]
    others = [path for path in users if "torch_memory_saver" not in path]  # it accepts exactly one of its own
    preload = ":".join([saver, *map(str, runtimes), *others])
    _check_loads(preload)
    return preload


def _check_loads(preload: str) -> None:
    """Load the libraries into a throwaway process, where the first must really be.

    A preload whose dependency is missing would end every worker with exit code 127, without a word of ours.
    """
    command = [sys.executable, "-I", "-S", "-c", _TEST_LOAD, Path(preload.split(":")[0]).name]
    environment = os.environ | _SAVER_VARIABLES | {"LD_PRELOAD": preload}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise ValueError(
            f"LD_PRELOAD={preload}, which sleeping roles need, does not load (exit code {done.returncode}): "
            f"{done.stderr.strip()}. Let the dynamic linker find libcuda and libcudart (LD_LIBRARY_PATH), "
            "or run with offload=none."
        )
