"""FLOPs against a count of what torch really computes; tokens per second and MFU by hand."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.roles import VOCAB_SIZE, fresh_saver, loss_of, make_batch, make_role, small_config
from trainer.measure import throughput
from trainer.measure.throughput import StepWork, Work
from trainer.models.flops import forward_flops, matmul_parameters, peak_flops_per_second
from trainer.training import step
from trainer.training.micro_batches import Split

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize(
    ("name", "extra"),
    [("actor", ()), ("critic", ()), ("actor", ("model.num_experts=4", "model.num_experts_per_tok=2"))],
)
def test_the_formula_counts_what_torch_computes(name, extra):
    """Without padding, torch counts the same, save that it computes the whole square of the attention and, in training,
    the logits of the responses once more."""
    fresh_saver()
    role = make_role(name, "model.dtype=fp32", "model.head_size=24", *extra)
    batch, length = make_batch([12, 12, 12], prompt=4).cut(16), 16
    sizes = {"vocab_size": VOCAB_SIZE, "value_head": name == "critic", "tokens": 3 * length, "predicted": 3 * 12}
    expected = forward_flops(role.config.model, **sizes, square_tokens=2 * 3 * length**2)
    with FlopCounterMode(display=False) as counter:
        if name == "critic":
            step.values(role, batch, split=Split(3))
        else:
            step.log_probs(role, batch, temperature=1.0, vocab_size=VOCAB_SIZE, split=Split(3))
    assert counter.get_total_flops() == expected
    with FlopCounterMode(display=False) as counter:
        step.train_minibatch(role, batch, loss_of(role), split=Split(3))
    again = 0 if name == "critic" else 2 * 64 * VOCAB_SIZE * 3 * 12
    # The first layer's input needs no gradient of its own in torch either: the embedding takes it.
    assert counter.get_total_flops() == 3 * expected + again


def test_weights_that_multiply_every_token():
    model = small_config().roles["actor"].model  # hidden 64, ffn 128, 4 heads and 2 key-value heads of 16, 2 layers
    assert matmul_parameters(model) == 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)


def test_the_head_meets_every_token_of_values_and_the_responses_alone_of_log_probs():
    model = small_config().roles["actor"].model
    sizes = {"vocab_size": 1000, "tokens": 10, "square_tokens": 0, "predicted": 3}
    body = 2 * 10 * matmul_parameters(model)
    assert forward_flops(model, value_head=False, **sizes) == body + 2 * 64 * 1000 * 3
    assert forward_flops(model, value_head=True, **sizes) == body + 2 * 64 * 10


def test_the_work_of_a_step_counts_real_tokens():
    config = small_config("algo.epochs=2")
    batch = make_batch([1, 5], prompt=3)  # lengths 4 and 8
    work = throughput.of_step(
        config,
        batch,
        vocab_size=100,
        scoring={"ref_log_probs": "actor", "log_probs": "actor", "values": "critic"},
    )
    model = config.roles["actor"].model
    flops = {
        role: forward_flops(
            model, vocab_size=100, value_head=role == "critic", tokens=12, square_tokens=16 + 64, predicted=6
        )
        for role in ("actor", "critic")
    }
    assert work.phases == {
        "rollout": Work(6, flops["actor"]),
        "ref_log_probs": Work(12, flops["actor"]),
        "log_probs": Work(12, flops["actor"]),
        "values": Work(12, flops["critic"]),
        "train_actor": Work(24, 6 * flops["actor"]),
        "train_critic": Work(24, 6 * flops["critic"]),
    }
    assert (work.tokens, work.ranks, work.peak_flops_per_second) == (12, 1, None)


def test_rates_divide_by_seconds_ranks_and_peak():
    phases = {"rollout": Work(60, 40.0), "train_actor": Work(120, 400.0), "values": Work(120, 40.0)}
    seconds = {"rollout": 2.0, "train_actor": 4.0, "sync": 4.0, "evaluate": 100.0}  # no critic: no values
    rates = StepWork(phases, tokens=120, ranks=2, peak_flops_per_second=100.0).rates(seconds)
    assert rates == {
        "tokens_per_second/rollout": 30.0,
        "tokens_per_second/train_actor": 30.0,
        "tokens_per_second/step": 12.0,
        "tokens_per_second_per_rank/step": 6.0,
        "mfu/rollout": 0.1,
        "mfu/train_actor": 0.5,
        "mfu/step": 0.22,
    }
    unknown = StepWork(phases, tokens=120, ranks=2, peak_flops_per_second=None).rates(seconds)
    assert not [name for name in unknown if name.startswith("mfu")]


@pytest.mark.parametrize(
    ("device_name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H20", 148),
        ("NVIDIA L40S", 362),
        ("NVIDIA GB200", 2500),
        ("Tesla V100-SXM2-16GB", None),
        (None, None),
    ],
)
def test_the_peak_goes_by_the_device_unless_it_is_given(device_name, tflops):
    peak = peak_flops_per_second(small_config().platform, device_name=device_name)
    assert peak == (None if tflops is None else tflops * 1e12)
    assert peak_flops_per_second(small_config("platform.peak_tflops=5").platform, device_name=device_name) == 5e12
