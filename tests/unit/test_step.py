"""Optimizer steps and forward passes: no split, no padding, no broken gradient changes what real tokens get."""

from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers.invariance_worker import run_one
from tests.helpers.megatron_world import logits_of
from tests.helpers.roles import (
    VOCAB_SIZE,
    credited,
    ddp_buffers,
    fresh_saver,
    loss_of,
    make_batch,
    make_role,
    normal,
    same_weights,
    small_config,
    train,
    weights_of,
)
from trainer import loop, worker
from trainer.data.batch import Sequences
from trainer.measure import metrics
from trainer.measure.phases import Phases
from trainer.roles.role import FORWARD
from trainer.tasks import Reply
from trainer.training import step
from trainer.training.micro_batches import Split
from trainer.training.model_input import ModelInput

FP32 = ("model.dtype=fp32", "optimizer.clip_grad=0")


pytestmark = pytest.mark.usefixtures("saver")


def log_probs(role, batch, *, micro_batch_size=2):
    return step.log_probs(role, batch, temperature=1.0, vocab_size=VOCAB_SIZE, split=Split(micro_batch_size))[0]


def gradients(role, batch, *overrides, split):
    """(reported sums, gradients per buffer) of one step that leaves the weights alone."""
    for group in role.model.optimizer.param_groups:
        group["lr"] = 0.0
    sums = step.train_minibatch(role, batch, loss_of(role, *overrides), split=split)
    return sums, [buffer.grad_data.clone() for buffer in ddp_buffers(role)]


# ---- means ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "fixed_length"])
def test_no_split_into_micro_batches_changes_a_gradient(name, mode):
    """Lengths as uneven as 1 and 200; the reference is plain autograd through the mean."""
    role = make_role(name, *FP32, "model.max_length=256")
    batch = make_batch([1, 3, 50, 200])
    overrides = (f"algo.loss_aggregation={mode}", f"algo.critic_loss_aggregation={mode}")
    with role.training():
        given, loss = ModelInput.padded(batch, multiple=1), loss_of(role, *overrides)
        output = role.model.chunks[0](given.tokens, given.positions, None)
        numerator, count, _ = loss.compute(batch, *loss.read(role.model.chunks[0].module, given, output))
        assert count == {"token_mean": 254}.get(mode, 4)
        (numerator / count).backward()
        expected = [buffer.grad_data.clone() for buffer in ddp_buffers(role)]
    by_length = [Split(1, budget) for budget in (8, 128, 512, 10_000)]
    for split in [*map(Split, (1, 2, 4)), *by_length]:
        sums, actual = gradients(role, batch, *overrides, split=split)
        assert sums["loss_sum"] == pytest.approx(numerator.item(), rel=1e-5)
        assert sums["grad_norm"] == pytest.approx(torch.cat(expected).norm().item(), rel=1e-4)
        for left, right in zip(actual, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6 * right.abs().max().item())


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_forward_passes_by_length_return_every_row_to_its_place(name):
    role = make_role(name, *FP32, "model.max_length=256")
    batch = make_batch([1, 200, 3, 50, 7, 2])
    mask = batch.response_mask
    by_length = Split(6, 256, minibatches=2)

    def numbers(split):
        if name == "critic":
            return (step.values(role, batch, split=split)[:, 1:],)
        return step.log_probs(role, batch, temperature=1.0, vocab_size=VOCAB_SIZE, split=split)

    whole, grouped, again = numbers(Split(6)), *(numbers(by_length) for _ in range(2))
    for expected, actual, repeated in zip(whole, grouped, again, strict=True):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual[mask], expected[mask], rtol=1e-4, atol=1e-5)
        assert torch.equal(actual, repeated)


def test_a_sequence_mean_weighs_short_and_long_responses_alike():
    role = make_role("critic", *FP32, "model.max_length=256")
    batch = make_batch([1, 200], values=torch.zeros(2, 203), returns=torch.zeros(2, 203))
    alone = [
        gradients(role, batch.select(slice(row, row + 1)), split=Split(1))[0]["loss_sum"] / count
        for row, count in ((0, 1), (1, 200))
    ]
    sums, _ = gradients(role, batch, "algo.critic_loss_aggregation=sequence_mean", split=Split(1))
    assert sums["loss_sum"] / sums["loss_count"] == pytest.approx(sum(alone) / 2)


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_a_fully_masked_micro_batch_adds_nothing(name):
    role = make_role(name, *FP32)
    batch = make_batch([3, 2, 0, 0])
    sums, actual = gradients(role, batch, split=Split(2))
    assert sums["loss_count"] == 5
    alone, expected = gradients(role, batch.select(slice(0, 2)), split=Split(2))
    assert sums == alone
    assert all(torch.equal(left, right) for left, right in zip(actual, expected, strict=True))


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_a_batch_without_response_tokens_changes_nothing(name):
    role = make_role(name)
    train(role)
    expected = role.weights_sha256()
    sums = step.train_minibatch(role, make_batch([0, 0, 0, 0]), loss_of(role), split=Split(2))
    assert (sums["loss_sum"], sums["loss_count"], sums["grad_norm"], sums["skipped"]) == (0.0, 0.0, 0.0, 0.0)
    assert role.weights_sha256() == expected
    report = metrics.of_actor([sums]) if name == "actor" else metrics.of_critic([sums])
    assert report[f"{name}/loss"] == 0.0


# ---- broken gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_broken_gradient_skips_its_step_and_no_other(bad, overlap):
    ddp = [f"roles.actor.ddp.overlap_{name}={overlap}" for name in ("grad_reduce", "param_gather")]
    digests, results = [], []
    for has_bad_step in (False, True):
        fresh_saver()
        role = make_role("actor", *ddp)
        train(role, steps=2)
        if has_bad_step:
            before = weights_of(role)
            batch = make_batch([3, 2])
            batch.advantages[0, 4] = bad
            results.append(step.train_minibatch(role, batch, loss_of(role), split=Split(2)))
            assert same_weights(weights_of(role), before)
        train(role, steps=2)
        digests.append(role.weights_sha256())
    assert digests[0] == digests[1]
    good = step.train_minibatch(role, make_batch([3, 2]), loss_of(role), split=Split(2))
    assert (good["skipped"], results[0]["skipped"]) == (0.0, 1.0)
    report = metrics.of_actor([good, *results])
    assert report["actor/skipped_steps"] == 1.0
    assert report["actor/grad_norm"] == good["grad_norm"]


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forward_only", [True, False])
def test_one_micro_batch_has_logits_at_a_time(forward_only):
    role = make_role("actor")
    alive, outputs = [], []

    def count_alive(module, arguments):
        alive.append(sum(not output.expired() for output in outputs))

    hooks = [
        role.model.chunks[0].register_forward_pre_hook(count_alive),
        role.model.chunks[0].register_forward_hook(
            lambda module, arguments, output: outputs.append(StorageWeakRef(output.untyped_storage()))
        ),
    ]
    batch = make_batch([5] * 12)
    if forward_only:
        log_probs(role, batch)
    else:
        step.train_minibatch(role, batch, loss_of(role), split=Split(2))
    for hook in hooks:
        hook.remove()
    assert len(alive) == 6
    assert max(alive) <= 1
    assert all(output.expired() for output in outputs)


# ---- padding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize(("token", "number"), [(1, 0.0), (VOCAB_SIZE - 1, 1e6), (7, torch.nan)])
def test_what_padding_holds_is_never_seen(name, token, number):
    role = make_role(name)
    batch = make_batch([1, 5, 3, 2])
    mask = batch.response_mask
    is_padding = torch.nn.functional.pad(mask, (1, 0)).flip(1).cumsum(1).flip(1) == 0
    per_token = {key: tensor for key, tensor in batch.tensors().items() if tensor.shape == mask.shape}
    numbers = {key: tensor.where(mask, number) for key, tensor in per_token.items() if tensor.is_floating_point()}
    padded = replace(batch, **numbers, tokens=batch.tokens.masked_fill(is_padding, token))
    assert (padded.tokens != batch.tokens).sum() == 5 + 1 + 3 + 4
    if name == "actor":
        assert torch.equal(log_probs(role, padded)[mask], log_probs(role, batch)[mask])
    else:
        left, right = (step.values(role, some, split=Split(2))[:, :-1][mask] for some in (padded, batch))
        assert torch.equal(left, right)
    (sums, actual), (expected_sums, expected) = (gradients(role, some, split=Split(2)) for some in (padded, batch))
    assert sums == expected_sums
    assert all(torch.equal(left, right) for left, right in zip(actual, expected, strict=True))


def test_more_padding_changes_nothing_but_rounding():
    role = make_role("actor", *FP32)
    batch = make_batch([1, 5, 3, 2])
    per_token = {key: tensor for key, tensor in batch.tensors().items() if tensor.dim() == 2}
    wide = replace(batch, **{key: torch.nn.functional.pad(tensor, (0, 9)) for key, tensor in per_token.items()})
    _, expected = gradients(role, batch, split=Split(2))
    _, actual = gradients(role, wide, split=Split(2))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-7)


# ---- PPO -----------------------------------------------------------------------------------------------------------


PLAIN = ("advantages.gamma=1", "advantages.lam=1", "algo.whiten_advantages=false", "algo.centre_scores=false")


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("model.dtype=fp32", "algo.epochs=2"),
        ("algo.micro_batch_tokens=64",),
        ("algo.micro_batch_tokens=64", "training.packing=true"),
    ],
    ids=["bf16", "fp32", "by-length", "packed"],
)
def test_the_first_step_starts_at_the_sampling_policy_and_at_the_reference(extra):
    records = run_one(small_config(*extra))["metrics"]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert [record["actor/ppo_kl_first"] for record in records[1:]] == [0.0, 0.0]
    assert records[1]["kl"] == 0.0
    assert records[2]["kl"] != 0.0
    assert records[2]["actor/ppo_kl"] != 0.0


@pytest.mark.parametrize(
    "overrides",
    [
        ("algo.kl.placement=reward", "algo.kl.estimator=k1"),
        ("algo.kl.placement=loss", "algo.kl.estimator=k2"),
        ("algo.kl.placement=loss", "algo.kl.estimator=k3"),
    ],
    ids=["reward-k1", "loss-k2", "loss-k3"],
)
def test_without_a_reward_kl_pulls_a_perturbed_actor_back_to_the_reference(overrides):
    config = small_config(
        *("model.dtype=fp32", "offload=none", "roles.actor.optimizer.lr=2e-3", "algo.kl.coef=1", "advantages.lam=0"),
        *("algo.prompts_per_step=32", "algo.micro_batch_size=32", "algo.minibatches=2", "advantages.gamma=0"),
        *overrides,
    )
    run = worker.build(config, Phases(lambda record: None, gpu=False))
    run.prompts.replies = lambda said, examples, infos, payer: [Reply(0.0)] * len(said)
    loop.warm_up(run, loop.Outputs(None, None, None))
    with run.actor.awake():
        noisy = {name: w + 0.1 * normal(w.shape, seed=len(name)) for name, w in weights_of(run.actor).items()}
        run.actor.load_weights(noisy)
    fixed = torch.randint(run.vocab_size, (16, 12), generator=torch.Generator().manual_seed(5))
    fixed = Sequences(fixed, torch.ones_like(fixed[:, 1:], dtype=torch.bool))

    def distributions(tag):
        with run.actor.awake(kinds=FORWARD, tag=tag):
            return logits_of(run.actor.model.chunks[0].module, fixed.tokens).detach().log_softmax(-1)

    def kl_to_reference():
        actor, reference = distributions("actor"), distributions("ref")
        return (actor.exp() * (actor - reference)).sum(-1).mean().item()

    before = kl_to_reference()
    schedules = run.build_schedules()
    for number in range(1, 9):
        loop.ppo_step(run, number, schedules=schedules, kl_coef=1.0)
    assert before > 0.01
    assert kl_to_reference() < 0.9 * before


def test_actor_and_critic_see_the_kl_in_the_reward_and_the_logged_one_is_not_scaled():
    batch = make_batch([3, 1], scores=torch.tensor([1.0, 0.0]))
    mask = batch.response_mask
    result = credited(batch, torch.zeros(2, 7), *PLAIN, kl_coef=0.5)
    torch.testing.assert_close(result.kl, torch.full((2, 6), 0.1).where(mask, 0.0))
    expected = torch.zeros(2, 6)
    expected[0, 2:5] = torch.tensor([1 - 0.15, 1 - 0.10, 1 - 0.05])
    expected[1, 2] = -0.05
    torch.testing.assert_close(result.returns, expected)
    torch.testing.assert_close(result.advantages, expected)
    as_loss = ("algo.kl.placement=loss", "algo.kl.estimator=k2")
    result = credited(batch, torch.zeros(2, 7), *PLAIN, *as_loss, kl_coef=0.5)
    assert result.returns[mask].tolist() == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("whiten", [True, False])
def test_the_reward_of_an_empty_response_reaches_nobody(whiten):
    results = []
    for score in (0.0, 100.0):
        batch = make_batch([3, 0, 2], scores=torch.tensor([1.0, score, 0.0]))
        result = credited(batch, normal((3, 7), seed=1), *PLAIN, f"algo.whiten_advantages={whiten}")
        results.append((result.advantages, result.returns))
        assert not result.advantages[1].any()
        assert not result.returns[1].any()
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


@pytest.mark.parametrize("bootstrap", [True, False])
def test_a_response_recorded_as_truncated_may_end_with_the_critics_value(bootstrap):
    """Three equal rows; the first alone is recorded as truncated, though none ends with an end-of-sequence token."""
    values = torch.arange(21.0).view(3, 7)
    batch = make_batch([3, 3, 1], truncated=torch.tensor([True, False, True]), scores=torch.tensor([1.0, 1.0, 1.0]))
    result = credited(batch, values, *PLAIN, f"advantages.bootstrap_truncated={bootstrap}")
    # The last response tokens are in columns 5, 5 and 3 of `tokens`; the value there has seen the whole response.
    terminal = [values[0, 5].item(), 0.0, values[2, 3].item()] if bootstrap else [0.0, 0.0, 0.0]
    assert result.returns[0, 2:5].tolist() == [1.0 + terminal[0]] * 3
    assert result.returns[1, 2:5].tolist() == [1.0] * 3
    assert result.returns[2, 2].item() == 1.0 + terminal[2]
    assert result.advantages[0, 2].item() == 1.0 + terminal[0] - values[0, 2].item()
