"""The stand-in for CUDA: names that mean the GPU mean the CPU, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

import patches
from patches import cpu_platform
from patches.probe import one_rank, tiny_gpt, wrap


@pytest.fixture
def platform():
    patches.apply("cpu_platform")
    yield
    patches.revert("cpu_platform")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda", 0)], ids=str)
def test_every_way_to_name_the_gpu_gives_cpu_tensors(platform, device):
    source = torch.arange(6.0).view(2, 3)
    made = [
        torch.zeros(2, device=device, pin_memory=False),
        torch.tensor([1.0], device=device),
        torch.as_tensor([1.0], device=device),
        torch.empty_like(source, device=device),
        source.new_zeros(2, device=device),
        source.to(device),
        source.to(device, torch.bfloat16, non_blocking=True),
        source.to(device=device, dtype=torch.bfloat16),
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert [tensor.dtype for tensor in made[-2:]] == [torch.bfloat16, torch.bfloat16]
    assert made[5] is source
    assert torch.cuda.current_device() == torch.device("cpu")


def test_to_keeps_its_other_meanings(platform):
    source = torch.ones(2)
    assert source.to(torch.float64).dtype == torch.float64
    assert source.to(torch.ones(1, dtype=torch.int32)).dtype == torch.int32
    assert source.to(torch.float32, False, True) is not source
    assert source.to("meta").device.type == "meta"
    assert source.type() == "torch.cuda.FloatTensor"
    assert source.type(torch.float64).dtype == torch.float64
    assert source.cuda() is source
    assert torch.nn.Linear(2, 2).cuda().to("cuda:0").weight.device.type == "cpu"


def test_the_meta_device_context_still_works(platform):
    with torch.device("meta"):
        made = [torch.ones(2), torch.empty(3), torch.nn.Linear(2, 2).weight]
    assert {tensor.device.type for tensor in made} == {"meta"}
    assert torch.ones(2).device.type == "cpu"


def test_streams_and_events_are_in_order_and_do_nothing(platform):
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream) as entered:
        stream.wait_stream(torch.cuda.current_stream())
        assert stream.record_event(event) is event
    assert entered is stream


def test_reverting_restores_every_replaced_object():
    replaced = [(owner, name) for owner, name, _ in cpu_platform._named_replacements()]
    before = [vars(owner).get(name) for owner, name in replaced]
    patches.apply("cpu_platform")
    assert all(vars(owner)[name] is not old for (owner, name), old in zip(replaced, before, strict=True))
    patches.revert("cpu_platform")
    assert all(vars(owner).get(name) is old for (owner, name), old in zip(replaced, before, strict=True))


def test_a_rng_fork_draws_its_own_numbers_and_leaves_the_outer_ones_alone(platform):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("weights", 7)
    torch.manual_seed(1)
    outside = torch.rand(4)
    torch.manual_seed(1)
    with tracker.fork("weights"):
        first = torch.rand(2)
    assert torch.equal(torch.rand(4), outside)
    with tracker.fork("weights"):
        second = torch.rand(2)
    torch.manual_seed(7)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(2), torch.rand(2)]))
    with pytest.raises(RuntimeError, match="rng state other is not added"), tracker.fork("other"):
        pass
    with pytest.raises(ValueError, match="inside"), tracker.fork("weights"):
        raise ValueError("inside")
    assert tracker.states_["weights"].shape == torch.get_rng_state().shape


def test_a_gpt_trains_through_megatrons_ddp(platform):
    with one_rank():
        chunk = wrap(tiny_gpt())
        tokens = torch.arange(8, device="cuda").unsqueeze(0)
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=0).triu(1)
        losses = []
        for _ in range(5):
            chunk.zero_grad_buffer()
            loss = chunk(tokens, tokens, mask, labels=tokens).mean()
            loss.backward()
            losses.append(float(loss))
            with torch.no_grad():
                for param in chunk.parameters():
                    param -= 0.5 * param.main_grad
    assert losses[-1] < losses[0] - 0.5


def test_transformers_loads_identical_weights_under_the_patch(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    plain = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    patches.apply("cpu_platform")
    try:
        patched = LlamaForCausalLM.from_pretrained(tmp_path)
    finally:
        patches.revert("cpu_platform")
    assert {tensor.device.type for tensor in patched.state_dict().values()} == {"cpu"}
    assert patched.state_dict().keys() == plain.keys()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in patched.state_dict().items())


@pytest.fixture
def bf16_products(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    patches.apply("cpu_platform")
    yield
    patches.revert("cpu_platform")


def products(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    """mm, addmm, bmm, baddbmm of matrices [n, n]."""
    batches = left.expand(2, -1, -1), right.expand(2, -1, -1)
    return [
        left @ right,
        torch.addmm(bias, left, right, beta=0.5, alpha=2.0),
        torch.bmm(*batches),
        torch.baddbmm(bias, *batches, beta=0.5, alpha=2.0),
    ]


def test_bf16_products_are_fp32_products_rounded_once(bf16_products):
    matrices = [torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(3)]
    ours, exact = products(*matrices), products(*(matrix.float() for matrix in matrices))
    for product, expected in zip(ours, exact, strict=True):
        assert product.dtype == torch.bfloat16
        assert torch.equal(product, expected.bfloat16())


def test_bf16_products_work_in_the_backward_pass(bf16_products):
    linear = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
    inputs = torch.randn(3, 4, 16).bfloat16().requires_grad_()
    linear(inputs).float().square().sum().backward()
    reference = torch.nn.Linear(16, 16).requires_grad_()
    reference.load_state_dict({name: tensor.float() for name, tensor in linear.state_dict().items()})
    exact = inputs.detach().float().requires_grad_()
    reference(exact).square().sum().backward()
    for ours, theirs in ((linear.weight, reference.weight), (linear.bias, reference.bias), (inputs, exact)):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad.float(), theirs.grad, rtol=0.03, atol=0.03 * float(theirs.grad.abs().max()))


def test_reverting_takes_the_bf16_kernels_away(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    names = [f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm")]
    before = [torch._C._dispatch_dump(name) for name in names]
    patches.apply("cpu_platform")
    assert all(torch._C._dispatch_dump(name) != dump for name, dump in zip(names, before, strict=True))
    patches.revert("cpu_platform")
    assert [torch._C._dispatch_dump(name) for name in names] == before


def test_a_cpu_with_bf16_arithmetic_keeps_its_own_kernels(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    before = torch._C._dispatch_dump("aten::mm")
    patches.apply("cpu_platform")
    assert torch._C._dispatch_dump("aten::mm") == before
    patches.revert("cpu_platform")
