"""TensorBackuper: tags of host copies, usable on plain torch tensors in a process without any platform."""

import gc
import time

import psutil
import pytest
import torch

import patches
from trainer.memory.arena import HostArena, HostArenas
from trainer.roles.backuper import TensorBackuper

MIB = 1 << 20


def weights(value, *, hidden=256):
    """Shapes of a small transformer: matrices, norms, a table, an fp32 head."""
    shapes = {
        "embed": (320, hidden),
        "norm": (hidden,),
        "fc": (2 * 352, hidden),
        "inv_freq": (16,),
        "head": (1, hidden),
    }
    return {
        name: torch.full(shape, value, dtype=torch.float32 if name in ("inv_freq", "head") else torch.bfloat16)
        for name, shape in shapes.items()
    }


def backuper_of(tensors):
    return TensorBackuper.create(source_getter=lambda: tensors.items(), single_tag=None)


def values_of(tensors):
    return {value for tensor in tensors.values() for value in tensor.flatten().tolist()}


@pytest.mark.parametrize("single_tag", ["actor", "", False])
def test_a_single_tag_is_refused(single_tag):
    with pytest.raises(ValueError, match="single_tag must be None"):
        TensorBackuper.create(source_getter=list, single_tag=single_tag)


def test_actor_ref_actor_is_bit_equal_in_place():
    assert not patches.applied()
    own = {name: torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in weights(0.0).items()}
    expected, addresses = {n: t.clone() for n, t in own.items()}, [t.data_ptr() for t in own.values()]
    backuper = backuper_of(own)
    assert backuper.backup_tags == ()
    backuper.backup("actor")
    for tensor in own.values():
        tensor.fill_(3.0)
    backuper.backup("ref")
    assert backuper.backup_tags == ("actor", "ref")
    for tensor in own.values():
        tensor.fill_(torch.nan)
    backuper.restore("ref")
    assert values_of(own) == {3.0}
    backuper.restore("actor")
    assert all(torch.equal(own[name], expected[name]) for name in own)
    assert all(torch.equal(backuper.get("actor")[name], expected[name]) for name in own)
    assert [t.data_ptr() for t in own.values()] == addresses


def test_restoring_parameters_needs_no_gradient_and_keeps_them_leaves():
    parameter = torch.nn.Parameter(torch.ones(3))
    backuper = backuper_of({"p": parameter})
    backuper.backup("actor")
    with torch.no_grad():
        parameter.zero_()
    backuper.restore("actor")
    assert parameter.tolist() == [1.0, 1.0, 1.0]
    assert parameter.is_leaf
    assert not backuper.get("actor")["p"].requires_grad


def test_unknown_tags_are_named_beside_the_known_ones():
    backuper = backuper_of(weights(1.0))
    calls = (
        backuper.restore,
        backuper.get,
        lambda tag: backuper.copy(src_tag=tag, dst_tag="ref"),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"'old_actor'.*backed-up tags: none"):
            call("old_actor")
    backuper.backup("actor")
    for call in calls:
        with pytest.raises(ValueError, match=r"'old_actor'.*backed-up tags: actor"):
            call("old_actor")
    assert backuper.backup_tags == ("actor",)


def test_copy_makes_the_destination_and_then_is_independent():
    own = weights(1.0)
    backuper = backuper_of(own)
    backuper.backup("actor")
    backuper.copy(src_tag="actor", dst_tag="ref")
    own["fc"].fill_(2.0)
    backuper.backup("actor")
    assert values_of(backuper.get("ref")) == {1.0}
    pointers = [tensor.data_ptr() for tensor in backuper.get("ref").values()]
    backuper.copy(src_tag="actor", dst_tag="ref")
    assert values_of(backuper.get("ref")) == {1.0, 2.0}
    assert [tensor.data_ptr() for tensor in backuper.get("ref").values()] == pointers


def test_a_second_backup_takes_no_memory_and_the_first_takes_the_exact_size():
    own = weights(1.0, hidden=12_000)  # 24.5 MB
    size_bytes = sum(tensor.nbytes for tensor in own.values())
    backuper = backuper_of(own)
    process = psutil.Process()
    gc.collect()
    rss_bytes = [process.memory_info().rss]
    for value in (1.0, 2.0, 3.0):
        own["fc"].fill_(value)
        backuper.backup("actor")
        gc.collect()
        rss_bytes.append(process.memory_info().rss)
        if value == 1.0:
            pointers = [tensor.data_ptr() for tensor in backuper.get("actor").values()]
    assert [tensor.data_ptr() for tensor in backuper.get("actor").values()] == pointers
    assert set(backuper.get("actor")["fc"].flatten().tolist()) == {3.0}
    assert rss_bytes[1] - rss_bytes[0] == pytest.approx(size_bytes, abs=MIB)
    assert rss_bytes[3] - rss_bytes[1] < MIB / 2


@pytest.mark.parametrize("hidden", [64, 1536, 2000])
def test_host_bytes_are_within_two_percent_of_the_weights(hidden):
    """Page-locked tensors rounded up to powers of two would take 1.35 times as much at 1536."""
    own = weights(1.0, hidden=hidden)
    backuper = backuper_of(own)
    backuper.backup("actor")
    size_bytes = sum(tensor.nbytes for tensor in own.values())
    assert size_bytes <= backuper.host_bytes < 1.02 * size_bytes
    backuper.copy(src_tag="actor", dst_tag="ref")
    assert backuper.host_bytes < 2 * 1.02 * size_bytes
    assert backuper.backup_tags == ("actor", "ref")


CHANGES = {
    "one_less": lambda own: own.pop("norm"),
    "one_more": lambda own: own.update(extra=torch.ones(1)),
    "renamed": lambda own: own.update(norm_2=own.pop("norm")),
    "another_shape": lambda own: own.update(norm=torch.ones(1, dtype=torch.bfloat16)),
    "another_dtype": lambda own: own.update(norm=own["norm"].float()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_is_refused_and_the_backup_kept(change):
    own = weights(1.0)
    backuper = backuper_of(own)
    backuper.backup("actor")
    CHANGES[change](own)
    for tensor in own.values():
        tensor.fill_(2.0)
    for call in (backuper.backup, backuper.restore):
        with pytest.raises(ValueError, match=r"not those backed up under 'actor'.*(norm|extra)"):
            call("actor")
    assert values_of(backuper.get("actor")) == {1.0}
    assert values_of(own) == {2.0}


def test_two_tensors_of_one_name_are_refused():
    """As the chunks of a virtual pipeline would have without the chunk's number."""
    backuper = TensorBackuper.create(source_getter=lambda: [("weight", torch.ones(1)), ("weight", torch.zeros(1))])
    with pytest.raises(ValueError, match="weight"):
        backuper.backup("actor")
    assert backuper.backup_tags == ()


def test_a_new_tag_is_written_only_once_its_arena_is_ready(monkeypatch):
    """Page-locking touches, and so zeroes, the arena in the background; a copy into it must not come first."""

    def touch_late(arena: HostArena, device: int) -> None:
        time.sleep(0.2)
        arena._flat.zero_()

    monkeypatch.setattr(HostArena, "_pin", touch_late)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    weights = {"w": torch.arange(1.0, 5.0)}
    backuper = TensorBackuper.create(source_getter=lambda: weights.items(), arenas=HostArenas(pinned=True))
    backuper.backup("actor")
    backuper.copy(src_tag="actor", dst_tag="ref")
    time.sleep(0.4)
    assert backuper.get("actor")["w"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert backuper.get("ref")["w"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_tag_moves_between_host_and_device_memory_with_its_bits_and_is_counted_where_it_lies(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    own = weights(1.0)
    backuper = backuper_of(own)
    backuper.backup("actor")
    backuper.copy(src_tag="actor", dst_tag="ref")
    own["fc"].fill_(2.0)
    size_bytes = backuper.bytes_of("ref")
    backuper.place({"ref"})
    assert (backuper.bytes_of("ref"), backuper.bytes_of("actor")) == (0, size_bytes)
    assert backuper.host_bytes == size_bytes
    copied = backuper.copies.to_device
    backuper.restore("ref")
    assert own["fc"].unique().tolist() == [1.0]
    assert backuper.copies.to_device == copied  # nothing crossed the bus
    own["fc"].fill_(3.0)
    backuper.place({"actor"})
    assert (backuper.bytes_of("ref"), backuper.bytes_of("actor")) == (size_bytes, 0)
    backuper.restore("ref")
    assert own["fc"].unique().tolist() == [1.0]
    assert backuper.copies.to_device == copied + size_bytes
