"""Computing activations again changes no bit, saves what the plan says, and the plan is right about what is there."""

import pytest
import torch

from tests.helpers.composing import config_of, footprint_of
from tests.helpers.roles import (
    VOCAB_SIZE,
    ddp_buffers,
    fresh_saver,
    loss_of,
    make_batch,
    make_role,
    small_config,
)
from tests.helpers.tensor_memory import TensorMemory
from trainer import loop, worker
from trainer.measure.phases import Phases
from trainer.plan import activations
from trainer.plan.fit import check_fits
from trainer.plan.micro_batch import with_micro_batch_tokens, with_tokens
from trainer.rollout.engines import planned_bytes
from trainer.training import step
from trainer.training.micro_batches import Split

pytestmark = pytest.mark.usefixtures("saver")

MODES = ("none", "selective", "full")
MIXTURE = ("model.num_experts=4", "model.num_experts_per_tok=2", "model.ffn_size=96", "model.router_aux_loss_coef=0.5")


def trained(name, *overrides, batch, rows):
    """(reported sums, gradients) of one step."""
    fresh_saver()
    role = make_role(name, *overrides)
    sums = step.train_minibatch(role, batch, loss_of(role), split=Split(rows))
    return sums, [buffer.grad_data.clone() for buffer in ddp_buffers(role)]


@pytest.mark.parametrize(
    "overrides", [(), ("model.dtype=fp32", "model.qk_norm=true"), MIXTURE], ids=["", "fp32", "moe"]
)
@pytest.mark.parametrize("name", ["actor", "critic"])
def test_what_is_computed_again_gives_the_same_bits(name, overrides):
    """Losses, gradients and, of a mixture, the load-balancing loss and its gradient."""
    batch = make_batch([1, 5, 3, 2, 9, 4])
    (sums, gradients), *others = (
        trained(name, *overrides, f"training.recompute={mode}", batch=batch, rows=2) for mode in MODES
    )
    assert ("aux_loss_sum" in sums) == (overrides == MIXTURE)
    for other_sums, other_gradients in others:
        assert other_sums == sums
        assert all(torch.equal(left, right) for left, right in zip(gradients, other_gradients, strict=True))


def test_the_load_balancing_loss_of_a_step_that_failed_half_way_is_forgotten():
    role = make_role("actor", *MIXTURE, "training.recompute=full")
    batch, loss = make_batch([3, 2, 5, 4]), loss_of(role)
    with pytest.raises(RuntimeError, match="no loss"):
        step.train_minibatch(role, batch, step.Loss(fail, loss.compute, "token_mean"), split=Split(2))
    sums = step.train_minibatch(role, batch, loss, split=Split(2))
    fresh_saver()
    role = make_role("actor", *MIXTURE, "training.recompute=full")
    assert step.train_minibatch(role, batch, loss, split=Split(2)) == sums


def fail(*_):
    raise RuntimeError("no loss")


@pytest.fixture
def flash_attention():
    """On the CPU too, where it is slow: it keeps what a GPU's keeps."""
    enabled = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(True)
    yield
    torch.backends.cuda.enable_flash_sdp(enabled)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize(
    "overrides", [("model.ffn_size=320",), ("model.ffn_size=192", "model.dtype=fp32"), MIXTURE], ids=["", "fp32", "moe"]
)
def test_the_plan_knows_the_activations_of_a_pass(overrides, name, mode, flash_attention):
    overrides = ("model.layers=4", "model.max_length=256", f"training.recompute={mode}", *overrides)
    role, config = make_role(name, *overrides), small_config(*overrides)
    batch = make_batch([124] * 12)
    sizes = {"tokens": batch.tokens.numel(), "vocab_size": VOCAB_SIZE, "stage": 0}
    with TensorMemory() as memory:
        step.train_minibatch(role, batch, loss_of(role), split=Split(12))
    planned = activations.training_bytes(config, name, **sizes)
    assert 0.9 * planned < memory.peak_bytes < 1.1 * planned
    with TensorMemory() as memory:
        if name == "critic":
            step.values(role, batch, split=Split(12))
        else:
            step.log_probs(role, batch, temperature=1.0, vocab_size=VOCAB_SIZE, split=Split(12))
    planned = activations.forward_bytes(config, name, **sizes)
    assert memory.peak_bytes < 1.1 * planned
    if config.roles[name].model.num_experts is None:
        assert 0.9 * planned < memory.peak_bytes


BENCH = ("model=bench_1b", "platform=cuda", "rollout.max_new_tokens=1000", "rollout.max_prompt_tokens=24")
VOCABULARY = 32768


def resolved(*overrides):
    config = config_of(*BENCH, "algo.micro_batch_tokens=auto", *overrides)
    engine = planned_bytes(config, vocab_size=VOCABULARY)
    return with_micro_batch_tokens(config, vocab_size=VOCABULARY, engine=engine)


def test_a_micro_batch_grows_with_the_memory_and_with_what_is_computed_again():
    found = {
        (gib, mode): resolved(f"launch.gpu_memory_gib={gib}", f"training.recompute={mode}").algo.micro_batch_tokens
        for gib in (40, 80)
        for mode in MODES
    }
    assert found[40, "none"] < found[40, "selective"] < found[40, "full"]
    assert all(2 * found[40, mode] < found[80, mode] for mode in ("none", "selective"))
    assert resolved("launch.gpu_memory_gib=2000").algo.micro_batch_tokens == 256 * 2 * 1024  # a whole minibatch
    assert resolved("launch.gpu_memory_gib=2000", "algo.minibatches=4").algo.micro_batch_tokens == 256 * 1024


@pytest.mark.parametrize("mode", MODES)
def test_it_is_the_largest_that_fits(mode):
    config = resolved("launch.gpu_memory_gib=40", f"training.recompute={mode}")
    tokens = config.algo.micro_batch_tokens
    peaks = [footprint_of(with_tokens(config, some), vocab_size=VOCABULARY) for some in (tokens, tokens + 64)]
    reserved = 900 / 1024
    needs = [
        max(m.device_bytes + 1.1 * m.activation_bytes for m in peak.moments if m.name.startswith("train")) / 2**30
        for peak in peaks
    ]
    assert needs[0] <= 40 - reserved < needs[1]
    assert footprint_of(config, vocab_size=VOCABULARY).device_peak_bytes < 40 * 2**30


def test_what_does_not_fit_says_what_would_help():
    with pytest.raises(
        ValueError, match=r"one sequence of .* = 1024 tokens needs .*Use shorter sequences, training.rec"
    ):
        resolved("launch.gpu_memory_gib=22")
    for offload, message in {
        "train": r"are activations of 65536 tokens; less with a smaller algo.micro_batch_size or training.recompute",
        "auto": r"the phase train_actor needs .* smaller micro-batches .*training.recompute=full",
    }.items():
        config = config_of(*BENCH, "launch.gpu_memory_gib=80", f"offload={offload}")
        engine = planned_bytes(config, vocab_size=VOCABULARY)
        with pytest.raises(ValueError, match=message):
            check_fits(config, vocab_size=VOCABULARY, engine=engine)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("auto", "algo.micro_batch_tokens=auto with launch.gpu_memory_gib=null"),
        ("some", "algo.micro_batch_tokens=some: must be a whole number between"),
        ("1.5", "algo.micro_batch_tokens=1.5: must be a whole number between"),
        ("true", "algo.micro_batch_tokens=True: must be a whole number between"),
    ],
)
def test_numbers_of_tokens_that_mean_nothing_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        config_of(f"algo.micro_batch_tokens={override}")


def test_every_pipeline_stage_and_tensor_parallel_rank_has_its_part():
    def bytes_of(*overrides, stage=0):
        config = config_of(*BENCH, "algo.micro_batch_size=1", *overrides)
        return activations.training_bytes(config, "critic", tokens=4096, vocab_size=VOCABULARY, stage=stage)

    whole, half = bytes_of(), bytes_of("parallel.tp=2", "launch.nproc=2")
    assert half == pytest.approx(whole / 2, rel=1e-6)
    first, last = (bytes_of("parallel.pp=2", "launch.nproc=2", stage=stage) for stage in (0, 1))
    assert last == pytest.approx(whole / 2, rel=0.1)
    assert first == pytest.approx(whole, rel=0.1)  # two micro-batches of half of the layers


def test_a_worker_works_with_the_number_that_fits():
    config = small_config("algo.micro_batch_tokens=auto", "launch.gpu_memory_gib=1")
    run = worker.build(config, Phases(lambda record: None, gpu=False))
    assert run.config.algo.micro_batch_tokens == 8 * (32 + 4)  # all of a minibatch
    loop.warm_up(run, loop.Outputs(None, None, None))
    _, experience = loop.collect(run, 1, kl_coef=0.01)
    assert experience.old_log_probs is not None
    assert (experience.old_log_probs[experience.response_mask] < 0).all()
