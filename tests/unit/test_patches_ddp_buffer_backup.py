"""DDP buffers land in the regions that flags and owner say, in every way in which Megatron makes buffers."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    param_and_grad_buffer,
)
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

import patches
from patches import ddp_buffer_backup
from patches.ddp_buffer_backup import GRAD_FLAG, PARAM_FLAG, REGION_FOR
from patches.probe import one_rank, wrap


def regions_of(role: str) -> dict[str, Any]:
    """The argument with which every buffer goes to a region of ``role``."""

    def region_for(kind: str, backup: bool) -> Any:
        from torch_memory_saver import torch_memory_saver

        return torch_memory_saver.region(tag=f"{role}/{kind}", enable_cpu_backup=backup)

    return {REGION_FOR: region_for}


GRAD, PARAM, BOTH = {GRAD_FLAG: True}, {PARAM_FLAG: True}, {GRAD_FLAG: True, PARAM_FLAG: True}


@pytest.fixture(scope="module", autouse=True)
def _groups():
    patches.apply("cpu_platform")
    with one_rank():
        yield
    patches.revert("cpu_platform")


@pytest.fixture
def saver():
    """The CPU memory saver in force, with the DDP patch; both are taken back after the test."""
    patches.apply("cpu_saver", "ddp_buffer_backup")
    from torch_memory_saver import torch_memory_saver

    yield torch_memory_saver._impl
    patches.revert("ddp_buffer_backup", "cpu_saver")


def regions(saver: Any, chunk: Any) -> list[dict[str, tuple[str, bool] | None]]:
    """Per buffer, dense ones first: kind -> (tag, has a backup), None for ordinary memory."""
    return [
        {
            kind: saver.region_of(data)
            for kind in ("param", "grad")
            if (data := getattr(buffer, f"{kind}_data")) is not None
        }
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    ]


@pytest.mark.parametrize("target", [DistributedDataParallel, _ParamAndGradBuffer])
def test_both_constructors_show_the_keyword_only_arguments_that_change_nothing(saver, target):
    parameters = inspect.signature(target.__init__).parameters
    for name, default in ((GRAD_FLAG, False), (PARAM_FLAG, False), (REGION_FOR, None)):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is default
    originals = inspect.signature(target.__init__.__wrapped__).parameters
    assert list(parameters) == [*originals, GRAD_FLAG, PARAM_FLAG, REGION_FOR]


def test_applying_twice_wraps_once_and_reverting_restores_the_same_functions():
    targets = (DistributedDataParallel, _ParamAndGradBuffer)
    originals = [target.__init__ for target in targets]
    patches.apply("ddp_buffer_backup")
    once = [target.__init__ for target in targets]
    patches.apply("ddp_buffer_backup")
    assert [target.__init__ for target in targets] == once
    assert [init.__wrapped__ for init in once] == originals
    patches.revert("ddp_buffer_backup")
    assert [target.__init__ for target in targets] == originals
    assert not patches.get("ddp_buffer_backup").applied


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {"param": None, "grad": None}),
        (GRAD, {"param": None, "grad": ("grad_buffer", False)}),
        (PARAM, {"param": ("param_buffer", False), "grad": None}),
        (BOTH, {"param": ("param_buffer", False), "grad": ("grad_buffer", False)}),
    ],
)
def test_standing_alone_a_set_flag_moves_that_buffer_only(saver, flags, expected):
    assert regions(saver, wrap(torch.nn.Linear(4, 4), **flags)) == [expected]
    entered = {place[0] for place in expected.values() if place is not None}
    assert set(saver._regions) == entered  # no other region was ever entered


@pytest.mark.parametrize("flags", [{}, GRAD, PARAM, BOTH])
def test_with_regions_every_buffer_moves_and_the_flags_decide_its_backup(saver, flags):
    chunk = wrap(torch.nn.Linear(4, 4), **flags, **regions_of("critic"))
    assert regions(saver, chunk) == [
        {"param": ("critic/param", PARAM_FLAG not in flags), "grad": ("critic/grad", GRAD_FLAG not in flags)}
    ]
    assert regions(saver, wrap(torch.nn.Linear(4, 4))) == [{"param": None, "grad": None}]


def test_without_the_distributed_optimizer_there_is_only_a_gradient_buffer(saver):
    owned = wrap(torch.nn.Linear(4, 4), use_distributed_optimizer=False, **BOTH, **regions_of("actor"))
    alone = wrap(torch.nn.Linear(4, 4), use_distributed_optimizer=False, **BOTH)
    assert regions(saver, owned) == [{"grad": ("actor/grad", False)}]
    assert regions(saver, alone) == [{"grad": ("grad_buffer", False)}]
    assert set(saver._regions) == {"actor/grad", "grad_buffer"}


def test_an_fp32_head_in_a_bf16_model_makes_two_buffers_of_each_kind_all_covered(saver):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 1))
    chunk = wrap(model, **GRAD, **regions_of("critic"))
    assert {buffer.param_dtype for buffer in chunk.buffers} == {torch.bfloat16, torch.float32}
    assert regions(saver, chunk) == [{"param": ("critic/param", True), "grad": ("critic/grad", False)}] * 2


def test_expert_parallel_buffers_are_covered(saver):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for param in model[1].parameters():
        param.allreduce = False
    chunk = wrap(model, **BOTH)
    assert (len(chunk.buffers), len(chunk.expert_parallel_buffers)) == (1, 1)
    assert regions(saver, chunk) == [{"param": ("param_buffer", False), "grad": ("grad_buffer", False)}] * 2


def test_gradients_accumulated_in_fp32_beside_the_buffer_are_covered(saver):
    pattern = "param_name_patterns_for_fp32_local_accumulation"
    if not hasattr(DistributedDataParallelConfig(), pattern):
        pytest.skip("this megatron-core has no such gradients")
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, **{pattern: ("all",)})
    config = wrap(torch.nn.Linear(1, 1)).config
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    DistributedDataParallel(config, settings, model, **GRAD, **regions_of("actor"))
    assert model.weight.main_grad.dtype == torch.float32
    assert saver.region_of(model.weight.main_grad) == ("actor/grad", False)


@pytest.mark.parametrize(
    ("flags", "kind", "backup"),
    [({}, "grad", True), (GRAD, "grad", False), (PARAM, "param", False), (BOTH, "param", False)],
)
def test_mxfp8_parameters_share_one_buffer_and_their_flag_decides_if_set(saver, monkeypatch, flags, kind, backup):
    monkeypatch.setattr(param_and_grad_buffer, "is_mxfp8tensor", lambda param: param.ndim == 2)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    parsed = ddp_buffer_backup._Routing(GRAD_FLAG in flags, PARAM_FLAG in flags)
    linear = torch.nn.Linear(4, 4)
    assert ddp_buffer_backup._expected_kinds(settings, list(linear.parameters()), parsed) == [kind]
    assert ddp_buffer_backup._expected_kinds(settings, [linear.bias], parsed) == ["param", "grad"]
    chunk = wrap(linear, **flags, **regions_of("actor"))
    assert regions(saver, chunk) == [{"param": (f"actor/{kind}", backup), "grad": (f"actor/{kind}", backup)}]


def direct_buffer(*, nccl_ub: bool = False, **flags: Any) -> Any:
    """A _ParamAndGradBuffer made without DistributedDataParallel, on any supported megatron-core."""
    params = [torch.nn.Parameter(torch.ones(4))]
    arguments = {
        "ddp_config": DistributedDataParallelConfig(use_distributed_optimizer=True),
        "param_dtype": torch.float32,
        "grad_dtype": torch.float32,
        "params": params,
        "params_with_names": [(param, "weight") for param in params],
        "data_parallel_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "bucket_size": None,
        "param_to_name": dict.fromkeys(params, "weight"),
        "gradient_scaling_factor": 1.0,
        "param_indices": [0],
        "nccl_ub": nccl_ub,
        "pg_collection": SimpleNamespace(
            tp=parallel_state.get_tensor_model_parallel_group(),
            dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        ),
    }
    known = inspect.signature(_ParamAndGradBuffer.__init__).parameters
    return _ParamAndGradBuffer(**{name: value for name, value in arguments.items() if name in known}, **flags)


def test_flags_given_to_the_buffer_itself_count(saver):
    buffer = direct_buffer(**GRAD)
    assert saver.region_of(buffer.grad_data) == ("grad_buffer", False)
    assert saver.region_of(buffer.param_data) is None


@pytest.mark.parametrize("flags", [GRAD, PARAM])
def test_nccl_user_buffers_with_a_flag_are_refused(saver, flags):
    with pytest.raises(AssertionError, match="nccl_ub"):
        direct_buffer(nccl_ub=True, **flags)


def test_nccl_user_buffers_with_regions_are_refused(saver):
    with pytest.raises(AssertionError, match=r"nccl_ub.*region_for"):
        direct_buffer(nccl_ub=True, **regions_of("actor"))


@pytest.mark.parametrize(("flags", "flag"), [(GRAD, GRAD_FLAG), (PARAM, PARAM_FLAG)])
def test_a_missing_torch_memory_saver_is_an_error_that_names_the_flag_and_the_package(saver, monkeypatch, flags, flag):
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    with pytest.raises(ImportError, match=f"{flag}.*pip install torch-memory-saver"):
        wrap(torch.nn.Linear(4, 4), **flags)
    assert wrap(torch.nn.Linear(4, 4)).buffers[0].grad_data.eq(0).all()


@pytest.mark.parametrize("changed", ["param", "grad", "order"])
def test_an_upstream_constructor_that_allocates_differently_is_an_error(monkeypatch, changed):
    def other_init(self: Any, ddp_config: Any, params: Any) -> None:
        self.ddp_config, self.params, self.numel = ddp_config, params, 8
        first, second = (torch.empty(8) if changed == name else torch.zeros(8) for name in ("param", "grad"))
        self.param_data, self.grad_data = (second, first) if changed == "order" else (first, second)

    monkeypatch.setattr(_ParamAndGradBuffer, "__init__", other_init)
    patches.apply("cpu_saver", "ddp_buffer_backup")
    try:
        expected = "param and grad" if changed == "order" else "param.*torch.zeros" if changed == "param" else "grad"
        with pytest.raises(RuntimeError, match=f"no longer makes its {expected}"):
            _ParamAndGradBuffer(DistributedDataParallelConfig(use_distributed_optimizer=True), [], **BOTH)
    finally:
        patches.revert("ddp_buffer_backup", "cpu_saver")


def test_nothing_is_left_behind_in_the_settings_nor_by_a_constructor_that_raises(saver):
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    before = dict(vars(settings))
    config = wrap(torch.nn.Linear(1, 1)).config
    DistributedDataParallel(config, settings, torch.nn.Linear(4, 4), **BOTH)
    assert vars(settings) == before
    saver._regions.clear()
    with pytest.raises(AttributeError):
        DistributedDataParallel(None, None, None, **BOTH)
    chunk = wrap(torch.nn.Linear(4, 4))
    assert regions(saver, chunk) == [{"param": None, "grad": None}]
    assert not saver._regions


def test_the_probe_says_upstreamed_or_changed_where_megatron_has_the_arguments(monkeypatch):
    class With:
        def __init__(self, *, disable_grad_buffers_cpu_backup=False, disable_param_buffers_cpu_backup=False): ...

    class Without:
        def __init__(self): ...

    patch = patches.get("ddp_buffer_backup")
    monkeypatch.setattr(ddp_buffer_backup, "_targets", lambda: (With, With))
    assert patch.probe()[0] == "UPSTREAMED"
    monkeypatch.setattr(ddp_buffer_backup, "_targets", lambda: (With, Without))
    assert patch.probe()[0] == "CHANGED"
