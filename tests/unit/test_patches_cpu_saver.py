"""The CPU memory saver: pause and resume lose, keep and poison exactly what torch_memory_saver would."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch
from torch_memory_saver import torch_memory_saver

import patches

MIB = 1 << 20
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


@pytest.fixture
def saver():
    patches.apply("cpu_saver")
    yield torch_memory_saver
    patches.revert("cpu_saver")


def keep():
    return torch_memory_saver.region(tag="keep", enable_cpu_backup=True)


def drop():
    return torch_memory_saver.region(tag="drop", enable_cpu_backup=False)


def rss_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("elements", [1, 8, 1000, MIB])  # 4 bytes to 4 MiB: packed pages and mmaps of their own
def test_a_backup_comes_back_exactly_and_the_rest_as_nan(saver, elements):
    outside = torch.randn(elements)
    with keep():
        kept = outside.clone()
    with drop():
        dropped = outside.clone()
    saver.pause()
    assert not kept.any()
    assert not dropped.any()  # the kernel took the pages: nothing is left to read
    saver.resume()
    assert torch.equal(kept, outside)
    assert dropped.isnan().all()
    dropped.copy_(outside)
    saver.pause("drop")
    saver.resume("drop")
    assert torch.equal(kept, outside)
    assert dropped.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_fills_every_dtype_with_0xff_bytes(saver, dtype):
    with drop():
        tensor = torch.zeros(7, dtype=dtype)
    saver.pause("drop")
    saver.resume("drop")
    assert tensor.view(torch.uint8).eq(0xFF).all()
    if dtype.is_floating_point:
        assert tensor.float().isnan().all()
    elif dtype.is_signed and not dtype.is_complex:
        assert tensor.eq(-1).all()


def test_without_poison_released_memory_comes_back_zeroed(saver):
    saver._impl.poison = False
    with drop():
        tensor = torch.ones(100)
    saver.pause("drop")
    saver.resume("drop")
    assert tensor.eq(0).all()


def test_a_32_byte_table_is_covered_and_64_byte_aligned(saver):
    with drop():
        tables = [torch.arange(8, dtype=torch.float32) for _ in range(3)]
    assert [saver._impl.region_of(table) for table in tables] == [("drop", False)] * 3
    assert all(table.data_ptr() % 64 == 0 for table in tables)
    saver.pause("drop")
    saver.resume("drop")
    assert all(table.isnan().all() for table in tables)


def test_resident_memory_falls_by_released_minus_backed_up_bytes(saver):
    with drop():
        dropped = torch.ones(40 * MIB)  # 160 MiB
    with keep():
        kept = torch.ones(16 * MIB)  # 64 MiB, whose copy costs as much as it releases
    assert saver._impl.resident_bytes("drop") == 160 * MIB
    assert saver._impl.resident_bytes("keep", backup=True) == 64 * MIB
    assert saver._impl.resident_bytes("keep", backup=False) == 0
    awake_bytes = rss_bytes()
    saver.pause()
    assert awake_bytes - rss_bytes() == pytest.approx(160 * MIB, rel=0.05)
    saver.resume()
    assert rss_bytes() == pytest.approx(awake_bytes, abs=8 * MIB)
    assert kept.eq(1).all()
    before_bytes = rss_bytes()  # the comparison above left its temporary in the allocator
    del dropped
    assert before_bytes - rss_bytes() == pytest.approx(160 * MIB, rel=0.05)
    assert saver._impl.resident_bytes("drop") == 0


def test_pausing_twice_resuming_what_is_awake_and_allocating_asleep_are_errors(saver):
    with drop():
        tensor = torch.ones(4)
    with pytest.raises(RuntimeError, match="drop is awake already"):
        saver.resume("drop")
    saver.pause("drop")
    with pytest.raises(RuntimeError, match="drop is asleep already"):
        saver.pause("drop")
    for backup in (False, True):
        with pytest.raises(RuntimeError, match="drop is asleep"), saver.region(tag="drop", enable_cpu_backup=backup):
            pass
    saver.resume("drop")
    assert tensor.isnan().all()


def test_pausing_everything_while_one_tag_sleeps_changes_nothing(saver):
    with keep():
        kept = torch.ones(4)
    with drop():
        dropped = torch.ones(4)
    saver.pause("drop")
    with pytest.raises(RuntimeError, match="drop is asleep already"):
        saver.pause()
    assert kept.eq(1).all()
    with pytest.raises(RuntimeError, match="keep is awake already"):
        saver.resume()
    saver.resume("drop")
    assert dropped.isnan().all()


def test_views_and_in_place_operations_stay_where_their_storage_is(saver):
    outside = torch.zeros(6)
    with drop():
        view = outside.view(2, 3)[1]
        outside.add_(1)
        torch.add(outside, 1, out=outside)
        inside = torch.ones(6)
        alias = inside.t().detach()
        inside.mul_(2)
    assert view.data_ptr() == outside.data_ptr() + 12
    assert outside.eq(2).all()
    assert saver._impl.region_of(outside) is None
    assert alias.data_ptr() == inside.data_ptr()
    assert alias.eq(2).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.tensor(3.0),
        lambda: torch.arange(4),
        lambda: torch.ones(3, 4).t().contiguous(),
        lambda: torch.nn.Linear(3, 3).weight,
        lambda: torch.ones(3).unbind()[0].clone(),
    ],
)
def test_every_way_to_make_a_tensor_lands_in_the_region(saver, make):
    expected_shape, expected_stride = make().shape, make().stride()
    with drop():
        tensor = make()
    assert saver._impl.region_of(tensor) == ("drop", False)
    assert (tensor.shape, tensor.stride()) == (expected_shape, expected_stride)


def test_of_nested_regions_the_innermost_gets_the_memory_and_the_outer_one_nothing(saver):
    with drop():
        outer_bytes = saver._impl.resident_bytes("drop")
        with keep():
            inner = torch.ones(300_000)
        assert saver._impl.resident_bytes("drop") == outer_bytes
        after = torch.ones(3)
    assert saver._impl.region_of(inner) == ("keep", True)
    assert saver._impl.region_of(after) == ("drop", False)
    assert saver._impl.region_of(torch.ones(3)) is None


def test_autograd_works_inside_a_region(saver):
    with drop():
        weight = torch.nn.Parameter(torch.full((3,), 2.0))
        (weight * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.eq(4).all()
    assert saver._impl.region_of(weight.grad) == ("drop", False)


@pytest.mark.parametrize("before", [True, False])
def test_the_hook_mode_that_importing_a_megatron_gpt_sets_does_not_matter(before):
    if before:
        torch_memory_saver.hook_mode = "torch"
    patches.apply("cpu_saver")
    try:
        import megatron.core.models.gpt  # noqa: F401  (sets the mode on first import)

        torch_memory_saver.hook_mode = "torch"
        with drop():
            tensor = torch.ones(4)
        torch_memory_saver.pause("drop")
        torch_memory_saver.resume("drop")
        assert tensor.isnan().all()
    finally:
        patches.revert("cpu_saver")
    assert torch_memory_saver._impl is None
