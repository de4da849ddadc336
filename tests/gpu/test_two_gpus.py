"""Two GPUs that share a model, its experts, its sequences or its prompts compute what one computes."""

import pytest
import torch

from tests.helpers.composing import SMALL, config_of
from tests.helpers.invariance_worker import run_matrix
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

# Untrained weights and responses that do not depend on their batch: both runs train on the same ones.
ONE_STEP = ("algo.warmup_steps=0", "algo.num_steps=1", "rollout.batch_invariant=true", "rollout.max_new_tokens=40")
MODELS = {
    "bf16": (),
    "fp32": ("model.dtype=fp32",),
    "packed": ("training.packing=true", "algo.micro_batch_tokens=256", "training.recompute=full"),
    "experts": ("model=tiny_moe", "model.dtype=fp32"),
}
LAYOUTS = {
    "cp": ("parallel.cp=2", ("bf16", "fp32", "packed")),
    "tp": ("parallel.tp=2", ("fp32", "packed")),
    "pp": ("parallel.pp=2", ("fp32",)),
    "dp": ("parallel.tp=1", ("fp32", "packed")),
    "expert": ("parallel.expert=2", ("experts",)),
}
COMPARED = ("critic/loss", "critic/grad_norm", "actor/loss", "actor/grad_norm", "entropy", "value_mean", "reward")


def step_of(model, log_dir, *layout, nproc):
    """The record of one step; the engine draws on the layout's ranks too, through captured graphs."""
    small = (override for override in SMALL if not override.startswith("platform"))
    config = config_of(*small, *ONE_STEP, *MODELS[model], *layout, f"launch.nproc={nproc}", "platform=cuda")
    environment = worker_environment(platform="cuda", sleeps=True, threads_per_worker=4)
    payload = ({model: config}, None)
    return launch(run_matrix, payload, nproc=nproc, log_dir=log_dir, environment=environment)[model]["metrics"][-1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """model -> the record of one GPU, made when first asked for."""
    found = {}

    def of_model(model):
        if model not in found:
            found[model] = step_of(model, tmp_path_factory.mktemp(model), nproc=1)
        return found[model]

    return of_model


@pytest.mark.parametrize(("layout", "model"), [(name, one) for name, (_, models) in LAYOUTS.items() for one in models])
def test_two_gpus_compute_what_one_computes(layout, model, alone, tmp_path):
    shared, single = step_of(model, tmp_path, LAYOUTS[layout][0], nproc=2), alone(model)
    assert single["actor/grad_norm"] > 0
    assert shared["response_tokens"] == single["response_tokens"]
    exact = MODELS[model] and "model.dtype=fp32" in MODELS[model]
    tolerance = {"rel": 1e-3, "abs": 1e-5} if exact else {"rel": 3e-2, "abs": 3e-3}
    for key in COMPARED:
        assert shared[key] == pytest.approx(single[key], **tolerance), key
