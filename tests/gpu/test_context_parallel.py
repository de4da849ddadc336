"""Two GPUs that share every sequence, through NCCL and flash attention: the numbers of one."""

import pytest
import torch

from tests.helpers.composing import SMALL, config_of
from tests.helpers.invariance_worker import run_matrix
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

# Untrained weights and responses that do not depend on their batch: both runs train on the same ones.
ONE_STEP = ("algo.warmup_steps=0", "algo.num_steps=1", "rollout.batch_invariant=true", "rollout.max_new_tokens=40")
CASES = {
    "padded": (),
    "packed": ("training.packing=true", "algo.micro_batch_tokens=256", "training.recompute=full"),
    "fp32": ("model.dtype=fp32",),
}
COMPARED = ("critic/loss", "critic/grad_norm", "actor/loss", "actor/grad_norm", "entropy", "value_mean", "reward")


def step_of(case, log_dir, *, nproc):
    small = (override for override in SMALL if not override.startswith("platform"))
    layout = (f"launch.nproc={nproc}", f"parallel.cp={nproc}", "platform=cuda")
    config = config_of(*small, *ONE_STEP, *CASES[case], *layout)
    environment = worker_environment(platform="cuda", sleeps=True, threads_per_worker=4)
    payload, log_dir = ({case: config}, None), log_dir / f"{nproc}"
    return launch(run_matrix, payload, nproc=nproc, log_dir=log_dir, environment=environment)[case]["metrics"][-1]


@pytest.mark.parametrize("case", CASES)
def test_two_gpus_compute_what_one_computes(case, tmp_path):
    alone, shared = (step_of(case, tmp_path, nproc=nproc) for nproc in (1, 2))
    assert alone["actor/grad_norm"] > 0
    tolerance = {"rel": 1e-3, "abs": 1e-5} if case == "fp32" else {"rel": 3e-2, "abs": 3e-3}
    for key in COMPARED:
        assert shared[key] == pytest.approx(alone[key], **tolerance), key
