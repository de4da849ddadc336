"""A role's state goes into a checkpoint asleep and comes back whole, under the right names."""

import threading

import pytest
import torch
from transformers import AutoTokenizer

from tests.roles import (
    POLICIES,
    VOCAB_SIZE,
    fresh_saver,
    make_role,
    same_weights,
    small_config,
    train,
    weights_of,
)
from trainer.checkpoint import folder
from trainer.checkpoint.state import Checkpoints, _files
from trainer.models.build import named_tensors
from trainer.optimizer import shares, step_count
from trainer.plan import KINDS
from trainer.plan.footprint import footprint
from trainer.rules import make_task
from trainer.tokenizer import load_tokenizer

STATE = {"kl_coef": 0.1, "schedule_steps": {}, "record": {}}
OPTIMIZERS = {
    "distributed": (),
    "plain": tuple(f"roles.{role}.ddp.use_distributed_optimizer=false" for role in ("actor", "critic")),
    "fp32": ("model.dtype=fp32",),
}


pytestmark = pytest.mark.usefixtures("saver")


def tokenizer():
    config = small_config()
    return load_tokenizer(None, task=make_task(config), vocab_size=config.tokenizer.vocab_size)


def checkpoints(run, *overrides, resume_from=None):
    notes = []
    config = small_config("checkpoint.every_steps=1", *overrides)
    made = Checkpoints(config, run, resume_from=resume_from, tokenizer=tokenizer(), note=notes.append)
    return made, notes


def files(checkpoint):
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


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


SAVER_KEEPS = ("memory.actor.optim_keeper=saver", "memory.critic.optim_keeper=saver")
WAKES = {  # (role, overrides) -> kinds that saving must wake, since no host memory of ours holds them
    ("actor", ("memory=lean",)): set(),
    ("actor", ("memory=lean", "memory.tags=sharded")): set(),
    ("actor", ("memory=full", *SAVER_KEEPS)): {"optim"},
    ("actor", ("memory=rebuild",)): {"param", "rest"},
    ("actor", ("memory=rebuild", *SAVER_KEEPS)): {"param", "rest", "optim"},
    ("actor", ("model.dtype=fp32", *OPTIMIZERS["plain"])): set(),
    ("actor", ("model.dtype=fp32", *OPTIMIZERS["plain"], *SAVER_KEEPS)): {"optim"},
    ("critic", ("memory=lean",)): {"param", "rest"},
    ("critic", ("memory=rebuild",)): {"param", "rest"},
    ("critic", OPTIMIZERS["plain"]): {"rest"},
}


@pytest.mark.parametrize(("name", "overrides"), WAKES)
def test_saved_asleep_is_saved_awake_and_nothing_stays_awake(name, overrides, tmp_path):
    events = []
    role = make_role(name, *overrides, events=events)
    train(role)
    if role.backuper:
        role.copy_to_tag("ref")
    train(role)
    digest = role.weights_sha256()
    saving, notes = checkpoints(tmp_path)
    saving.save({name: role}, step=1, **STATE)
    kinds = [kind for kind in KINDS if kind != "param" or role.config.ddp.use_distributed_optimizer]
    assert all(role.is_asleep(kind) for kind in kinds)
    events.clear()
    saving.save({name: role}, step=2, **STATE)
    assert {event["kind"] for event in events if event["state"] == "awake"} == WAKES[name, overrides]
    assert all(role.is_asleep(kind) for kind in kinds)
    assert notes == []
    awake, asleep = (files(tmp_path / "checkpoints" / f"step_{step}") for step in (1, 2))
    assert asleep == awake
    assert len(awake) == (3 if role.backuper else 2)
    role.wake_up()
    assert role.weights_sha256() == digest


@pytest.mark.parametrize("overrides", [(), ("memory=rebuild",), ("offload=none",)], ids=["lean", "rebuild", "none"])
def test_the_run_goes_on_while_a_copy_of_what_was_is_written(overrides, tmp_path, monkeypatch):
    """The disk takes nothing until the next steps, and the sleep that overwrites the arena, are over."""
    role = make_role("actor", *overrides)
    train(role)
    role.copy_to_tag("ref")
    train(role)
    checkpoints(tmp_path / "sync")[0].save({"actor": role}, step=1, **STATE)
    may_write, begin = threading.Event(), folder.begin

    def late(*arguments):
        assert may_write.wait(60)
        return begin(*arguments)

    monkeypatch.setattr(folder, "begin", late)
    saving, notes = checkpoints(tmp_path / "async", "checkpoint.async_save=true")
    saving.save({"actor": role}, step=1, **STATE)

    def later_steps():
        with role.awake():
            train(role, steps=2)
            role.copy_to_tag("ref")
        assert not (tmp_path / "async").exists()
        may_write.set()
        raise KeyError("a later step")

    with pytest.raises(KeyError, match="a later step"), saving.finishing():
        later_steps()
    expected = files(tmp_path / "sync/checkpoints/step_1")
    assert files(tmp_path / "async/checkpoints/step_1") == expected
    saving.save({"actor": role}, step=2, **STATE)
    saving.save({"actor": role}, step=3, **STATE)  # waits for the one before
    assert folder.latest(tmp_path / "async") == tmp_path / "async/checkpoints/step_2"
    saving.finish()
    assert folder.read(tmp_path / "async/checkpoints/step_3").step == 3
    assert files(tmp_path / "async/checkpoints/step_3") != expected
    assert notes == []


@pytest.mark.parametrize(
    "overrides", [(), OPTIMIZERS["fp32"], OPTIMIZERS["plain"], ("model.dtype=fp32", *OPTIMIZERS["plain"])]
)
def test_the_plan_foresees_the_host_memory_of_the_copy(overrides):
    roles = {name: make_role(name, *overrides) for name in ("actor", "critic")}
    roles["actor"].copy_to_tag("ref")
    copied = [file for of_role in _files(roles) for file in of_role]
    measured = sum(tensor.nbytes for file in copied for tensor in file.tensors.values())
    config = small_config("checkpoint.every_steps=1", "checkpoint.async_save=true", *overrides)
    predicted = footprint(config, vocab_size=VOCAB_SIZE).node_checkpoint_bytes
    assert measured <= predicted < 1.01 * measured  # the state's alignment


def test_a_refusal_in_the_background_is_said_at_the_next_save_or_at_the_end(tmp_path, monkeypatch):
    role = make_role("critic", "memory=rebuild")
    saving, notes = checkpoints(tmp_path, "checkpoint.async_save=true")
    saving.save({"critic": role}, step=1, **STATE)
    saving.finish()

    def full(*paths):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        for step in (2, 3):
            saving.save({"critic": role}, step=step, **STATE)
            assert len(notes) == step - 2
        saving.finish()
    for step, note in zip((2, 3), notes, strict=True):
        assert note.startswith(
            f"no checkpoint of step {step}: rank 0: [Errno 28] No space left on device. The run goes"
        )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_1"]
    saving.save({"critic": role}, step=4, **STATE)
    saving.finish()
    assert folder.latest(tmp_path) == tmp_path / "checkpoints/step_4"
    assert len(notes) == 2


def test_an_error_of_ours_in_the_background_ends_the_run_at_the_next_save(tmp_path, monkeypatch):
    role = make_role("critic", "memory=rebuild")
    saving, notes = checkpoints(tmp_path, "checkpoint.async_save=true")
    monkeypatch.setattr(folder, "commit", lambda *arguments, **keywords: 1 // 0)
    saving.save({"critic": role}, step=1, **STATE)
    with pytest.raises(ZeroDivisionError):
        saving.save({"critic": role}, step=2, **STATE)
    assert notes == []


@pytest.mark.parametrize("mode", ["false", "true"])
def test_the_tokenizer_is_saved_with_it(mode, tmp_path):
    role = make_role("critic", "memory=rebuild")
    saving, _ = checkpoints(tmp_path, f"checkpoint.async_save={mode}")
    saving.save({"critic": role}, step=1, **STATE)
    saving.finish()
    checkpoint = tmp_path / "checkpoints/step_1"
    saved, own = AutoTokenizer.from_pretrained(checkpoint / "tokenizer"), tokenizer()
    text = "three plus 14 = <eos> é"
    assert saved(text).input_ids == own(text).input_ids
    assert (saved.eos_token_id, saved.pad_token_id, len(saved)) == (own.eos_token_id, own.pad_token_id, len(own))
    (checkpoint / "tokenizer/tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer/tokenizer.json has 2 bytes instead of \d+"):
        folder.read(checkpoint)
