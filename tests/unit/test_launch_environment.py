"""What workers find in their environment, and what is refused before any worker starts."""

import ctypes.util
import os
import re
from pathlib import Path

import pytest
import torch
import torch_memory_saver

from trainer.command import launch_environment
from trainer.command.launch_environment import VLLM_VARIABLES, worker_environment

ALWAYS = {
    "OMP_NUM_THREADS": "3",
    "MKL_NUM_THREADS": "3",
    "OPENBLAS_NUM_THREADS": "3",
    "MPLBACKEND": "agg",
    "PYTHONHASHSEED": "0",
    **VLLM_VARIABLES,
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    kernels = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "LD_PRELOAD", *kernels):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("sleeps", [False, True])
def test_cpu_workers_see_no_gpu_and_preload_nothing(sleeps):
    before = dict(os.environ)
    environment = worker_environment(platform="cpu", sleeps=sleeps, threads_per_worker=3)
    caches = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
    assert environment == ALWAYS | caches | {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
    assert dict(os.environ) == before


def test_how_many_kernels_a_cpu_worker_keeps_is_the_users_if_said(monkeypatch):
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024")
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    assert environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "1024"
    assert environment["LRU_CACHE_CAPACITY"] == "16"


def test_cuda_without_sleep_preloads_nothing():
    assert worker_environment(platform="cuda", sleeps=False, threads_per_worker=3) == ALWAYS | {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments: True"])
def test_expandable_segments_are_refused_when_roles_sleep(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name}=.*offload=none"):
        worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    assert "LD_PRELOAD" not in worker_environment(platform="cuda", sleeps=False, threads_per_worker=1)
    monkeypatch.setenv(name, "expandable_segments:False")
    assert worker_environment(platform="cpu", sleeps=True, threads_per_worker=3)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("cuda_version", ["12.8", "13.0"])
def test_library_of_torchs_cuda_comes_first_then_its_runtime_then_the_users(monkeypatch, tmp_path, cuda_version):
    major = cuda_version[:2]
    site_packages = tmp_path / "site-packages"
    runtime = site_packages / "nvidia" / "cuda_runtime" / "lib" / f"libcudart.so.{major}"
    runtime.parent.mkdir(parents=True)
    runtime.touch()
    checked = []
    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    monkeypatch.setattr(torch, "__path__", [str(site_packages / "torch")])
    monkeypatch.setattr(launch_environment, "_check_loads", checked.append)
    monkeypatch.setenv("LD_PRELOAD", "/opt/a.so /opt/old/torch_memory_saver.so:/opt/b.so")

    environment = worker_environment(platform="cuda", sleeps=True, threads_per_worker=1)

    saver, *rest = (preload := environment["LD_PRELOAD"]).split(":")
    assert Path(saver).name == f"torch_memory_saver_hook_mode_preload_cu{major}.abi3.so"
    assert rest == [str(runtime), "/opt/a.so", "/opt/b.so"]
    assert checked == [preload]
    assert environment["TMS_INIT_ENABLE"] == environment["TMS_INIT_ENABLE_CPU_BACKUP"] == "0"


def test_variables_on_which_the_saver_would_end_the_process_are_set_for_it():
    """Every one that the installed library reads; an empty value or an unknown word would end a worker without a word
    of ours."""
    library = Path(torch_memory_saver.__path__[0]).parent / "torch_memory_saver_hook_mode_preload.abi3.so"
    read = {name.decode() for name in re.findall(rb"TMS_(?:INIT|RETAIN)\w+", library.read_bytes())}
    assert "TMS_INIT_ENABLE" in read
    assert read == set(launch_environment._SAVER_VARIABLES)


@pytest.mark.skipif(torch.version.cuda is not None, reason="the library loads where CUDA is installed")
@pytest.mark.parametrize(
    ("cuda_version", "message"),
    [
        ("12.8", r"preload_cu12.*exit code 127.*lib(cuda|cudart)\.so.*offload=none"),
        ("11.8", r"cu11.*offload=none"),
    ],
)
def test_a_library_that_cannot_load_is_refused(monkeypatch, cuda_version, message):
    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    with pytest.raises(ValueError, match=message):
        worker_environment(platform="cuda", sleeps=True, threads_per_worker=1)


def test_the_test_load_tells_a_loaded_library_from_an_ignored_one():
    name = ctypes.util.find_library("rt") or ctypes.util.find_library("util")
    assert name is not None
    launch_environment._check_loads(name)
    with pytest.raises(ValueError, match="cannot be preloaded"):
        launch_environment._check_loads("/nowhere/torch_memory_saver.so")
