"""foreach_grad_norms: the numbers of megatron-core's own fallback, bit for bit on a CPU."""

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads

import patches
from patches import foreach_grad_norms

SHAPES = ((3, 5), (1,), (0,), (64, 64), (7,))


@pytest.fixture
def gradients():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) * 10.0**power for power, shape in enumerate(SHAPES)]


@pytest.fixture(autouse=True)
def on_cpu():
    """The originals write to the device that is called cuda."""
    patches.apply("cpu_platform")
    yield
    patches.revert("cpu_platform")


def test_norm_and_scaled_gradients_are_the_fallbacks(gradients):
    none = torch.zeros(1, dtype=torch.int)
    theirs, _ = utils.local_multi_tensor_l2_norm(2048, none, [gradients], False)
    ours, by_tensor = foreach_grad_norms.l2_norm(2048, none, [gradients], False)
    assert torch.equal(ours, theirs)
    assert (ours.shape, ours.dtype, by_tensor) == (theirs.shape, theirs.dtype, None)
    scaled = [torch.empty_like(gradient) for gradient in gradients]
    utils.local_multi_tensor_scale(2048, none, [gradients, scaled], 0.3)
    elsewhere = [torch.empty_like(gradient) for gradient in gradients]
    foreach_grad_norms.scale(2048, none, [gradients, elsewhere], 0.3)
    foreach_grad_norms.scale(2048, none, [gradients, gradients], 0.3)
    for in_place, copied, expected in zip(gradients, elsewhere, scaled, strict=True):
        assert torch.equal(in_place, expected)
        assert torch.equal(copied, expected)


def test_a_gradient_that_is_not_finite_shows(gradients):
    gradients[0][0, 0] = float("nan")
    norm, _ = foreach_grad_norms.l2_norm(2048, torch.zeros(1), [gradients], False)
    assert not norm.isfinite().any()


def test_applied_megatron_takes_them_and_reverted_its_own():
    own = clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl
    patches.apply("foreach_grad_norms")
    try:
        assert clip_grads.l2_norm_impl is foreach_grad_norms.l2_norm
        assert clip_grads.multi_tensor_scale_impl is foreach_grad_norms.scale
    finally:
        patches.revert("foreach_grad_norms")
    assert (clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl) == own
