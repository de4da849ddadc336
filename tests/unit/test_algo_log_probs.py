import gc
import math
import weakref

import pytest
import torch

from trainer.algo import log_probs as module
from trainer.algo.log_probs import entropy_from_logits, log_probs_and_entropy, log_probs_from_logits


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
    log_prob = log_probs_from_logits(logits, torch.tensor([[1]]), temperature=1.0, vocab_size=3)
    entropy = entropy_from_logits(logits, temperature=1.0, vocab_size=3)
    assert log_prob.item() == pytest.approx(math.log(3 / 8))
    assert entropy.item() == pytest.approx(1 / 8 * math.log(8) + 3 / 8 * math.log(8 / 3) + 1 / 2 * math.log(2))


def test_temperature_by_hand():
    # temperature 1/2 squares the weights: 1 : 9 : 16 of 26
    logits = torch.tensor([[[1.0, 3.0, 4.0]]]).log()
    log_prob = log_probs_from_logits(logits, torch.tensor([[2]]), temperature=0.5, vocab_size=3)
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
    assert torch.autograd.gradcheck(lambda x: log_probs_from_logits(x, targets, **options), logits)
    assert torch.autograd.gradcheck(lambda x: entropy_from_logits(x, **options), logits)


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
    result = log_probs_from_logits(logits, torch.full((2, 6), target), temperature=1.0, vocab_size=5)
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
