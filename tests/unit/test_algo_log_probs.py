import gc
import math
import os
import subprocess
import sys
import weakref
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.algo import log_probs as module
from trainer.algo.log_probs import (
    linear_log_probs_and_entropy,
    log_probs_and_entropy,
)


def random_case(*, dtype=torch.float64, vocabulary=7, vocab_size=5):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    return logits, torch.randint(vocab_size, (2, 6), generator=generator)


def plain(logits, targets, *, temperature, vocab_size):
    """The formulas as torch has them, with full-size intermediates."""
    log_p = (logits[..., :vocab_size].to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(
        -1
    )
    return log_p.gather(-1, targets[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def test_by_hand():
    # weights 1 : 3 : 4 of 8; the fourth column is vocabulary padding
    logits = torch.tensor([[[1.0, 3.0, 4.0, 1e30]]]).log()
    log_prob, entropy = log_probs_and_entropy(logits, torch.tensor([[1]]), temperature=1.0, vocab_size=3)
    assert log_prob.item() == pytest.approx(math.log(3 / 8))
    assert entropy.item() == pytest.approx(1 / 8 * math.log(8) + 3 / 8 * math.log(8 / 3) + 1 / 2 * math.log(2))


def test_temperature_by_hand():
    # temperature 1/2 squares the weights: 1 : 9 : 16 of 26
    logits = torch.tensor([[[1.0, 3.0, 4.0]]]).log()
    log_prob, _ = log_probs_and_entropy(logits, torch.tensor([[2]]), temperature=0.5, vocab_size=3)
    assert log_prob.item() == pytest.approx(math.log(16 / 26))


@pytest.mark.parametrize("chunk_elements", [1, 2 * 7 * 4, 1 << 24])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_values_and_gradients_equal_plain_autograd(monkeypatch, chunk_elements, is_transposed):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk_elements)
    logits, targets = random_case()
    if is_transposed:  # the [s, b, v] layout of Megatron
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    results = []
    for function in (log_probs_and_entropy, plain):
        leaf = logits.clone().requires_grad_()
        log_probs, entropy = function(leaf, targets, temperature=0.7, vocab_size=5)
        (log_probs * torch.arange(6.0) + entropy.square()).sum().backward()
        results.append((log_probs, entropy, leaf.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(results[0][2][..., 5:], torch.zeros(2, 6, 2, dtype=torch.float64))


def test_gradcheck():
    logits, targets = random_case()
    logits.requires_grad_()
    options = {"temperature": 1.3, "vocab_size": 5}
    assert torch.autograd.gradcheck(lambda x: log_probs_and_entropy(x, targets, **options), logits)


def test_bfloat16_logits_are_computed_in_float32():
    logits, targets = random_case(dtype=torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(leaf, targets, temperature=1.0, vocab_size=5)
    (log_probs.sum() + entropy.sum()).backward()
    reference = logits.float().requires_grad_()
    reference_log_probs, reference_entropy = plain(reference, targets, temperature=1.0, vocab_size=5)
    (reference_log_probs.sum() + reference_entropy.sum()).backward()
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs, reference_log_probs)
    torch.testing.assert_close(entropy, reference_entropy)
    assert torch.equal(leaf.grad, reference.grad.bfloat16())  # one rounding, at the end


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e6])
def test_garbage_in_padding_logits_and_targets_does_not_reach_gradients(garbage):
    logits, targets = random_case(dtype=torch.float32)
    mask = torch.arange(6)[None] < torch.tensor([4, 2])[:, None]
    gradients = []
    for padding, target in ((0.0, 0), (garbage, -100), (garbage, 1 << 40)):
        leaf = torch.where(mask[..., None], logits, padding).requires_grad_()
        log_probs, entropy = log_probs_and_entropy(
            leaf, torch.where(mask, targets, target), temperature=1.0, vocab_size=5
        )
        torch.where(mask, log_probs + 0.1 * entropy, 0.0).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    assert not gradients[0][~mask].any()


@pytest.mark.parametrize("target", [-100, 5])
def test_target_outside_the_vocabulary_is_nan(target):
    logits, _ = random_case()
    result, _ = log_probs_and_entropy(logits, torch.full((2, 6), target), temperature=1.0, vocab_size=5)
    assert result.isnan().all()


def test_forbidden_tokens_at_minus_infinity():
    logits = torch.tensor([[[0.0, -math.inf, 0.0]]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([[0]]), temperature=1.0, vocab_size=3)
    (log_probs.sum() + entropy.sum()).backward()
    assert entropy.item() == pytest.approx(math.log(2))
    torch.testing.assert_close(logits.grad, torch.tensor([[[0.5, 0.0, -0.5]]]))


def test_graph_keeps_the_logits_and_a_few_numbers_per_token():
    logits, targets = random_case(dtype=torch.bfloat16, vocabulary=1024)
    logits.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        log_probs_and_entropy(logits, targets, temperature=1.0, vocab_size=1000)
    large = [x for x in kept if x.numel() > targets.numel()]
    assert [x.data_ptr() for x in large] == [logits.data_ptr()]
    assert len(kept) <= 4


def test_forward_only_keeps_no_logits_alive():
    logits, targets = random_case()
    logits.requires_grad_()
    with torch.no_grad():
        results = log_probs_and_entropy(logits, targets, temperature=1.0, vocab_size=5)
    reference = weakref.ref(logits)
    del logits
    gc.collect()
    assert reference() is None
    assert all(x.isfinite().all() for x in results)


# ---- without logits --------------------------------------------------------------------------------------------------


def linear_case(*, dtype=torch.float64, tokens=9, vocabulary=7, width=4):
    """Hidden states and a weight that require gradients, some of the rows in disorder, and their targets."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((tokens, width), (vocabulary, width))
    )
    rows = torch.randperm(tokens, generator=generator)[: tokens - 3]
    return hidden, weight, rows, torch.randint(5, rows.shape, generator=generator)


def gradients(log_probs, entropy, *leaves):
    """Of something in which every token weighs another amount."""
    weights = torch.arange(len(log_probs), dtype=log_probs.dtype)
    return torch.autograd.grad((log_probs * weights + entropy.square()).sum(), leaves)


@pytest.mark.parametrize("chunk_elements", [1, 2 * 7, 1 << 24])
def test_numbers_from_hidden_states_are_those_from_logits(monkeypatch, chunk_elements):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk_elements)
    hidden, weight, rows, targets = linear_case()
    found = linear_log_probs_and_entropy(hidden, weight, targets, rows=rows, temperature=0.7, vocab_size=5)
    expected = plain(hidden[rows] @ weight.T, targets, temperature=0.7, vocab_size=5)
    for ours, theirs in zip(
        (*found, *gradients(*found, hidden, weight)), (*expected, *gradients(*expected, hidden, weight)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    unused = [row for row in range(len(hidden)) if row not in rows.tolist()]
    assert not gradients(
        *linear_log_probs_and_entropy(hidden, weight, targets, rows=rows, temperature=0.7, vocab_size=5), hidden
    )[0][unused].any()


def test_gradcheck_from_hidden_states():
    hidden, weight, rows, targets = linear_case(tokens=6)
    options = {"rows": rows, "temperature": 1.3, "vocab_size": 5}
    assert torch.autograd.gradcheck(
        lambda h, w: linear_log_probs_and_entropy(h, w, targets, **options), (hidden, weight)
    )


def test_a_frozen_weight_or_frozen_hidden_states_need_no_gradient():
    hidden, weight, rows, targets = linear_case()
    options = {"rows": rows, "temperature": 1.0, "vocab_size": 5}
    both = gradients(*linear_log_probs_and_entropy(hidden, weight, targets, **options), hidden, weight)
    (of_hidden,) = gradients(*linear_log_probs_and_entropy(hidden, weight.detach(), targets, **options), hidden)
    (of_weight,) = gradients(*linear_log_probs_and_entropy(hidden.detach(), weight, targets, **options), weight)
    assert torch.equal(of_hidden, both[0])
    assert torch.equal(of_weight, both[1])


def test_the_weights_gradient_is_summed_in_float32_and_rounded_once(monkeypatch):
    """256 chunks add 3/4 each; from 128 on, bf16 holds whole numbers only."""
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 4)
    hidden = torch.ones(256, 1, dtype=torch.bfloat16)
    weight = torch.zeros(4, 1, dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = linear_log_probs_and_entropy(
        hidden, weight, torch.zeros(256, dtype=torch.long), rows=torch.arange(256), temperature=1.0, vocab_size=4
    )
    log_probs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [192.0, -64.0, -64.0, -64.0]  # 256 times 3/4 and -1/4


def test_no_tensor_has_a_number_for_every_token_and_entry(monkeypatch):
    """Whatever forward and backward make is as large as a chunk, the weight or the hidden states at most."""
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1000)
    hidden, weight, rows, targets = linear_case(dtype=torch.bfloat16, tokens=103, vocabulary=100)
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            largest.extend(x.numel() for x in (made if isinstance(made, tuple) else [made]) if torch.is_tensor(x))
            return made

    with Watch():
        found = linear_log_probs_and_entropy(hidden, weight, targets, rows=rows, temperature=1.0, vocab_size=90)
        gradients(*found, hidden, weight)
    assert max(largest) == 1000


_TRITON = """
import math, torch
from trainer.algo import log_probs_torch, log_probs_triton

log_probs_triton._BLOCK = 8
generator = torch.Generator().manual_seed(0)
normal = lambda *shape: torch.randn(*shape, generator=generator)
for dtype in (torch.float32, torch.bfloat16):
    for size in (20, 17, 3):
        logits = (3 * normal(6, 20)).to(dtype)
        logits[2, 5], logits[3, 1 : size - 1] = -math.inf, -math.inf
        targets = torch.tensor([0, size - 1, 1, 2, 25, -3])
        for temperature in (1.0, 0.7):
            settings = {"size": size, "temperature": temperature}
            expected, found = (
                kernels.statistics(logits, targets, **settings)
                for kernels in (log_probs_torch, log_probs_triton)
            )
            torch.testing.assert_close(found, expected)
            for given in ((True, True), (True, False), (False, True)):
                upstream = [torch.cat([normal(5), torch.zeros(1)]) if is_given else None for is_given in given]
                inputs = (targets, expected[0], expected[2], *upstream)
                theirs = log_probs_torch.gradient(logits.clone(), *inputs, in_place=False, **settings)
                for in_place in (True, False):
                    ours = log_probs_triton.gradient(logits.clone(), *inputs, in_place=in_place, **settings)
                    torch.testing.assert_close(ours, theirs)
                assert not ours[:, size:].any() and not ours[5].any()
            inputs = (targets, expected[0], expected[2], torch.full((6,), math.nan), None)
            broken = log_probs_triton.gradient(logits.clone(), *inputs, in_place=True, **settings)
            assert broken[:, :size].isnan().all()
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, whose interpreter runs kernels on the CPU")
def test_the_fused_kernels_compute_what_torch_does():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", _TRITON], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
