"""A role's state goes into a checkpoint asleep and comes back whole, under the right names."""

import pytest
import torch

from tests.roles import (
    POLICIES,
    fresh_saver,
    make_role,
    one_thread_world,
    same_weights,
    small_config,
    train,
    weights_of,
)
from trainer.checkpoint.state import Checkpoints
from trainer.models.build import named_tensors
from trainer.optimizer import shares, step_count

STATE = {"kl_coef": 0.1, "schedule_steps": {}, "record": {}}
OPTIMIZERS = {
    "distributed": (),
    "plain": tuple(f"roles.{role}.ddp.use_distributed_optimizer=false" for role in ("actor", "critic")),
    "fp32": ("model.dtype=fp32",),
}


@pytest.fixture(scope="module", autouse=True)
def world():
    with one_thread_world():
        yield


@pytest.fixture(autouse=True)
def saver(world):
    fresh_saver()


def checkpoints(run, *, resume_from=None):
    notes = []
    config = small_config("checkpoint.every_steps=1")
    return Checkpoints(config, run, resume_from=resume_from, note=notes.append), notes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["actor", "critic"])
def test_a_share_is_named_after_the_parameter_it_belongs_to(name, optimizer):
    """The critic's fp32 value head beside bf16 parameters too."""
    role = make_role(name, *OPTIMIZERS[optimizer])
    train(role)
    params = dict(named_tensors(role.chunks))
    found = {share.name: share for share in shares(role.optimizer, params)}
    assert found.keys() == {key for key, tensor in params.items() if isinstance(tensor, torch.nn.Parameter)}
    for key, share in found.items():
        assert share.start == 0
        assert torch.equal(share.tensors["main"].view(params[key].shape).to(params[key].dtype), params[key]), key
    assert step_count(role.optimizer) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sleeping_actor_is_saved_as_its_last_step_left_it(policy, tmp_path):
    role = make_role("actor", f"memory={policy}")
    train(role)
    role.copy_to_tag("ref")
    reference = weights_of(role)
    train(role, steps=2)
    role.backup()
    weights, digest = weights_of(role), role.weights_sha256()
    role.sleep()
    saving, notes = checkpoints(tmp_path)
    saving.save({"actor": role}, step=3, **STATE)
    assert notes == []
    assert role.is_asleep("optim")
    assert role.is_asleep("param")

    fresh_saver()
    another = make_role("actor", "offload=none", seed=2)
    manifest = checkpoints(tmp_path, resume_from=tmp_path / "checkpoints/step_3")[0].restore({"actor": another})
    assert manifest is not None
    assert manifest.step == 3
    another.wake_up()
    assert another.weights_sha256() == digest
    assert same_weights(weights_of(another), weights)
    another.switch_to("ref")
    assert same_weights(weights_of(another), reference)
    assert not same_weights(reference, weights)


def test_a_disk_that_refuses_leaves_the_checkpoint_before_and_says_so(tmp_path, monkeypatch):
    role = make_role("critic", "memory=rebuild")
    saving, notes = checkpoints(tmp_path)
    saving.save({"critic": role}, step=1, **STATE)

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    saving.save({"critic": role}, step=2, **STATE)
    (note,) = notes
    assert note.startswith("no checkpoint of step 2: rank 0: [Errno 28] No space left on device. The run goes on")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_1"]
    assert role.is_asleep("param")
