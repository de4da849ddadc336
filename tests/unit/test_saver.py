"""Which saver a run gets: torch_memory_saver's own code up to its library, which needs the CUDA driver."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch_memory_saver

import patches
from tests.helpers.composing import config_of
from tests.helpers.saver_library import library_replaced
from trainer.command import attempts, launch_environment
from trainer.command.nodes import Nodes
from trainer.memory.cuda_regions import room_message
from trainer.memory.regions import RoleRegions
from trainer.memory.saver import MemorySaver, make_saver
from trainer.plan import make_plan
from trainer.worker import Job

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("policy", ["full", "no_grads", "lean", "rebuild"])
@pytest.mark.parametrize("offload", ["train", "none"])
@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_workers_call_torch_memory_saver_on_cuda_exactly_when_its_library_is_preloaded(
    platform, offload, policy, monkeypatch, tmp_path
):
    config = config_of(f"platform={platform}", f"offload={offload}", f"memory={policy}")
    monkeypatch.setattr(launch_environment, "_preload", lambda: "the library")
    monkeypatch.setattr(attempts, "launch", lambda *_, environment, **__: environment)
    environment = attempts._launch(Job(config, tmp_path, resume_from=None), nodes=Nodes(), stop_file=None)
    with library_replaced() as hook_modes:
        if platform == "cpu":
            patches.apply("cpu_saver")
        try:
            saver = make_saver(config)
        finally:
            patches.revert("cpu_saver")
    assert isinstance(saver, MemorySaver) == saver.sleeps == (offload == "train")
    assert hook_modes == (["preload"] if (platform, offload) == ("cuda", "train") else [])
    assert ("LD_PRELOAD" in environment) == bool(hook_modes)


@pytest.mark.parametrize("first", ["import megatron.core.models.gpt", "pass"], ids=["model_first", "saver_first"])
def test_the_library_is_preloaded_whether_megatrons_gpt_is_imported_before_or_after(first):
    """In an interpreter of its own, since the import sets another mode only once."""
    program = (
        "import gc, sys\n"
        "gc.disable()\n"  # imports take less time
        "from tests.helpers.saver_library import library_replaced\n"
        "from trainer.memory.saver import MemorySaver\n"
        "with library_replaced() as hook_modes:\n"
        "    assert 'megatron' not in sys.modules\n"
        f"    {first}\n"
        "    MemorySaver(platform='cuda', poison=False, retain_cpu_backup=True, cpu_backup_backend='pinned')\n"
        "    from megatron.core.models.gpt import GPTModel\n"
        "    print(hook_modes, GPTModel.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "['preload'] GPTModel\n", done.stderr


@pytest.mark.parametrize("kind", ["param", "grad"])
def test_ddps_buffers_have_the_backend_of_the_config(kind):
    """``memory.cpu_backup_backend`` reaches the saver's region of every buffer that has a backup."""
    entered = []
    with library_replaced():
        saver = MemorySaver(platform="cuda", poison=False, retain_cpu_backup=True, cpu_backup_backend="mmap")
        with mock.patch.object(torch_memory_saver.torch_memory_saver, "region", lambda **how: entered.append(how)):
            regions = RoleRegions(
                "critic", plan=make_plan(config_of("memory=full")), saver=saver, observer=entered.append
            )
            regions.of_ddp_buffer(kind, True)
            regions.of_ddp_buffer(kind, False)
    tag = f"critic/{kind}"
    assert entered == [
        {"tag": tag, "enable_cpu_backup": True, "cpu_backup_backend": "mmap"},
        {"tag": tag, "enable_cpu_backup": False, "cpu_backup_backend": None},
    ]


def test_memory_that_is_missing_is_told_with_who_holds_it():
    gib = 2**30
    message = room_message(["critic/param"], needed=2 * gib, free=gib, total=80 * gib, own=30 * gib)
    assert message.startswith(
        "waking critic/param needs 2.00 GiB of GPU memory and 1.00 of 80.00 GiB are free: 1.00 GiB"
    )
    assert "This rank's tensors hold 30.00 GiB, CUDA and other processes 49.00 (nvidia-smi names them)" in message
    assert all(override in message for override in ("launch.gpu_memory_gib", "offload=auto", "algo.micro_batch_size"))
