"""A role's state goes into a checkpoint asleep and comes back whole, under the right names."""

import hashlib
import os
import pickle
import threading
from pathlib import Path

import psutil
import pytest
import torch
from torch import distributed
from transformers import AutoTokenizer

from tests.helpers.checkpoints import files, whole_tensors
from tests.helpers.composing import footprint_of
from tests.helpers.roles import (
    POLICIES,
    VOCAB_SIZE,
    fresh_saver,
    make_role,
    same_weights,
    small_config,
    train,
    weights_of,
)
from trainer.checkpoint import folder, storage
from trainer.checkpoint.state import Checkpoints, _states
from trainer.config.pieces import make_task
from trainer.megatron.build import named_tensors
from trainer.megatron.optimizer import shares
from trainer.memory.ledger import sample_memory
from trainer.plan import KINDS
from trainer.tasks.tokenizer import load_tokenizer

MIB = 2**20
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
    made = Checkpoints(config, run, resume_from=resume_from, tokenizer=tokenizer(), questions="", note=notes.append)
    return made, notes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["actor", "critic"])
def test_a_share_is_named_after_the_parameter_it_belongs_to(name, optimizer):
    """The critic's fp32 value head beside bf16 parameters too."""
    role = make_role(name, *OPTIMIZERS[optimizer])
    train(role)
    params = dict(named_tensors(role.model.chunks))
    found = {share.name: share for share in shares(role.model.optimizer, params)}
    assert found.keys() == {key for key, tensor in params.items() if isinstance(tensor, torch.nn.Parameter)}
    for key, share in found.items():
        assert share.start == 0
        assert torch.equal(share.tensors["main"].view(params[key].shape).to(params[key].dtype), params[key]), key
    assert role.model.step_count() == 1


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


def test_a_reference_that_was_saved_is_left_where_nothing_reads_it(tmp_path):
    role = make_role("actor")
    role.copy_to_tag("ref")
    train(role)
    role.backup()
    digest = role.weights_sha256()
    checkpoints(tmp_path)[0].save({"actor": role}, step=1, **STATE)
    fresh_saver()
    another = make_role("actor", "algo.kl.coef=0", seed=2)
    made, _ = checkpoints(tmp_path, "algo.kl.coef=0", resume_from=tmp_path / "checkpoints/step_1")
    made.restore({"actor": another})
    assert another.further_tags == []
    another.wake_up()
    assert another.weights_sha256() == digest


@pytest.mark.parametrize("mode", ["false", "true"])
def test_checksums_are_those_of_the_files_and_find_64_changed_bytes(mode, tmp_path):
    role = make_role("critic", "memory=rebuild")
    saving, notes = checkpoints(tmp_path, f"checkpoint.async_save={mode}")
    saving.save({"critic": role}, step=1, **STATE)
    saving.finish()
    assert notes == []
    checkpoint = tmp_path / "checkpoints/step_1"
    found = folder.read(checkpoint, checksums=True).files
    others = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert found.keys() == {str(path.relative_to(checkpoint)) for path in others}
    for path in others:
        saved = found[str(path.relative_to(checkpoint))]
        assert saved.sha256 == hashlib.sha256(path.read_bytes()).hexdigest(), path
    for name in ("critic/__0_0.distcp", "critic/.metadata", "tokenizer/tokenizer.json"):
        content = bytearray((checkpoint / name).read_bytes())
        middle = len(content) // 2
        whole = bytes(content)
        content[middle : middle + 64] = bytes(byte ^ 1 for byte in content[middle : middle + 64])
        (checkpoint / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"step_1 cannot be used: {name} was changed or damaged"):
            folder.read(checkpoint, checksums=True)
        (checkpoint / name).write_bytes(whole)
    folder.read(checkpoint, checksums=True)


def test_without_checksums_none_is_saved_and_the_tensors_are_the_same(tmp_path):
    role = make_role("critic", "memory=rebuild")
    for run, wanted in (("with", "true"), ("without", "false")):
        saving, _ = checkpoints(tmp_path / run, f"checkpoint.checksums={wanted}")
        saving.save({"critic": role}, step=1, **STATE)
    one, other = (tmp_path / run / "checkpoints/step_1" for run in ("with", "without"))
    assert files(one) == files(other)
    assert {saved.sha256 for saved in folder.read(other, checksums=True).files.values()} == {None}


def test_a_disk_that_refuses_leaves_the_checkpoint_before_and_says_so(tmp_path, monkeypatch):
    role = make_role("critic", "memory=rebuild")
    saving, notes = checkpoints(tmp_path)
    saving.save({"critic": role}, step=1, **STATE)

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    saving.save({"critic": role}, step=2, **STATE)
    (note,) = notes
    assert note.startswith("no checkpoint of step 2: rank 0: cannot write ")
    assert "No space left on device. The run goes on" in note
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_1"]
    assert role.is_asleep("param")


def test_what_the_model_and_the_checkpoint_do_not_share_is_named(tmp_path):
    role = make_role("critic", "memory=rebuild")
    checkpoints(tmp_path)[0].save({"critic": role}, step=1, **STATE)
    (_, state), *_ = _states({"critic": role})
    directory, group = tmp_path / "checkpoints/step_1/critic", distributed.group.WORLD
    head = "main/output_layer.weight"
    with pytest.raises(ValueError, match=r"the checkpoint has no ref/other, ref/some$"):
        storage.load(state | {"ref/some": state[head], "ref/other": state[head]}, directory, group=group)
    narrower = storage.Pieces(torch.Size([1, 8]), {torch.Size([0, 0]): torch.zeros(1, 8)})
    with pytest.raises(ValueError, match=r"main/output_layer.weight is \(1, \d+\) in the checkpoint and \(1, 8\) here"):
        storage.load({head: narrower}, directory, group=group)


class _Command:
    def __reduce__(self):
        return os.mkdir, ("made_by_a_pickle",)


def test_a_description_of_tensors_can_do_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Command()))
    with pytest.raises(pickle.UnpicklingError, match=r"a description of tensors has no use for posix.mkdir"):
        storage.load({}, tmp_path, group=distributed.group.WORLD)
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]


@pytest.mark.parametrize("policy", ["lean", "rebuild"])
def test_a_save_takes_the_host_memory_that_wakes_up_and_no_more(policy, tmp_path):
    """At its peak: what host memory holds is written from there; a critic's weights, 2 B per parameter, wake up. To
    rebuild them, main params, 4 B, are copied to the device for a moment."""
    role = make_role("critic", f"memory={policy}", "model.hidden_size=512", "model.ffn_size=2048", "model.heads=8")
    train(role)
    role.sleep()
    saving, notes = checkpoints(tmp_path)
    saving.save({"critic": role}, step=1, **STATE)  # imports and the tokenizer's files are behind it then
    sample_memory()  # gives free blocks back, so that the peak cannot hide in them
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # peak := now
    saving.save({"critic": role}, step=2, **STATE)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    growth, count = int(status["VmHWM"].split()[0]) * 1024 - before, role.model.parameter_count()
    assert notes == []
    expected = (2 + 4 if policy == "rebuild" else 2) * count
    assert 14 * count > 60 * MIB
    assert expected - MIB < growth < expected + 6 * MIB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool])
def test_a_part_of_host_memory_is_written_without_a_copy(dtype):
    """DCP's writer copies what is part of a larger storage, and keeps all copies until its file is written."""
    whole = torch.arange(24).to(dtype)
    alone = storage._alone(whole[4:16].view(3, 4))
    assert alone.data_ptr() == whole[4:].data_ptr()
    assert alone.untyped_storage().nbytes() == alone.nbytes
    assert alone.dtype == dtype
    assert torch.equal(alone, whole[4:16].view(3, 4))


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
    if role._weights.backuper:
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
    kinds_saved = {key.split("/")[1] for key in whole_tensors(tmp_path / "checkpoints" / "step_2")}
    assert kinds_saved == {"weights", "main", "exp_avg", "exp_avg_sq"} | ({"ref"} if role._weights.backuper else set())
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
    copied = [storage.copy_of_own(state, group=distributed.group.WORLD) for _, state in _states(roles)]
    held = [tensor for state in copied for pieces in state.values() for tensor in pieces.held.values()]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in held)
    measured = sum(tensor.nbytes for tensor in held)
    config = small_config("checkpoint.every_steps=1", "checkpoint.async_save=true", *overrides)
    predicted = footprint_of(config, vocab_size=VOCAB_SIZE).node_checkpoint_bytes
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
        assert note.startswith(f"no checkpoint of step {step}: rank 0: cannot write ")
        assert "No space left on device. The run goes" in note
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
