"""The AdamW that stands in for Transformer Engine's: torch's numbers in FusedAdam's shape of state."""

from __future__ import annotations

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer

import patches
from patches.fused_adamw import FusedShapeAdamW
from patches.probe import adam, one_rank, wrap

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def two_copies() -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((5, 3), (7,), (1,))]
    first, second = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    return first, second


def test_ten_steps_equal_torch_adamw_bit_for_bit():
    ours, theirs = two_copies()
    optimizers = (FusedShapeAdamW(ours, **SETTINGS), torch.optim.AdamW(theirs, **SETTINGS, fused=True))
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = other.grad = torch.randn(mine.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizers[0].state[mine][name], optimizers[1].state[other][name])


def test_the_state_is_two_moments_per_parameter_and_one_step_per_group():
    params, _ = two_copies()
    optimizer = FusedShapeAdamW(params, **SETTINGS)
    for param in params[:2]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2
    assert params[2] not in optimizer.state  # it had no gradient
    for param in params[:2]:
        assert {name: value.shape for name, value in optimizer.state[param].items()} == {
            "exp_avg": param.shape,
            "exp_avg_sq": param.shape,
        }
        # beta2 0.95, gradient 1: 0.05, then 0.05 * 0.95 + 0.05.
        assert torch.allclose(optimizer.state[param]["exp_avg_sq"], torch.full_like(param, 0.0975))


def test_a_saved_state_continues_like_the_unbroken_run():
    straight, resumed = two_copies()
    first, second = FusedShapeAdamW(straight, **SETTINGS), FusedShapeAdamW(resumed, **SETTINGS)
    for optimizer, params in ((first, straight), (second, resumed)):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    third = FusedShapeAdamW(resumed, **SETTINGS)
    third.load_state_dict(second.state_dict())
    first.step()
    third.step()
    assert third.param_groups[0]["step"] == 2
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


@pytest.mark.parametrize(
    ("setting", "name"), [({"adam_w_mode": False}, "adam_w_mode"), ({"capturable": True}, "capturable")]
)
def test_what_it_cannot_do_is_refused(setting, name):
    with pytest.raises(ValueError, match=name):
        FusedShapeAdamW([torch.nn.Parameter(torch.ones(1))], **setting)


@pytest.fixture
def ranks():
    patches.apply("cpu_platform", "ddp_buffer_backup", "fused_adamw", "cpu_saver")
    with one_rank():
        yield
    patches.revert()


def train(chunk, optimizer, *, sleeps: bool, steps: int = 4):
    """Steps on fixed data -> weights. Between steps, optionally, all regions sleep and the gradients are lost."""
    from torch_memory_saver import torch_memory_saver

    data = torch.linspace(-1, 1, 32).view(4, 8)
    for _ in range(steps):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        chunk(data.to(chunk.module.weight.dtype)).float().square().sum().backward()
        chunk.finish_grad_sync()
        updated, _, _ = optimizer.step()
        assert updated
        if sleeps:
            torch_memory_saver.pause()
            torch_memory_saver.resume()
    return chunk.module.weight.detach().clone()


def test_training_with_megatrons_distributed_optimizer_survives_sleeping_between_steps(ranks):
    from torch_memory_saver import torch_memory_saver

    def region_for(kind, backup):
        return torch_memory_saver.region(tag=f"actor{sleeps}/{kind}", enable_cpu_backup=backup)

    weights = []
    for sleeps in (False, True):
        torch.manual_seed(3)
        linear = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        start = linear.weight.detach().clone()
        chunk = wrap(linear, disable_grad_buffers_cpu_backup=True, region_for=region_for)
        with torch_memory_saver.region(tag=f"actor{sleeps}/optim", enable_cpu_backup=True):
            optimizer = adam(chunk, bf16=True, params_dtype=torch.bfloat16)
            for inner in optimizer.chained_optimizers:
                for group in inner.optimizer.param_groups:
                    for main_param in group["params"]:
                        inner.optimizer.initialize_state(main_param)
        weights.append(train(chunk, optimizer, sleeps=sleeps))
        assert not torch.equal(weights[-1], start)
    assert torch.equal(*weights)


def test_applying_replaces_both_modules_names_and_reverting_restores_them():
    names = [
        (megatron_optimizer, "USING_PYTORCH_OPTIMIZER"),
        (megatron_optimizer, "Adam"),
        (distrib_optimizer, "Adam"),
        (distrib_optimizer, "HAVE_APEX_OR_TE"),
        (distrib_optimizer, "USING_TE_OPTIMIZER"),
    ]
    before = [getattr(module, name) for module, name in names]
    patches.apply("fused_adamw")
    assert [getattr(module, name) for module, name in names] == [False, FusedShapeAdamW, FusedShapeAdamW, True, True]
    patches.revert("fused_adamw")
    assert [getattr(module, name) for module, name in names] == before
