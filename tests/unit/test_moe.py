"""trainer.megatron.moe: routing by hand, and a load-balancing loss that no split, padding or aggregation distorts."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn import functional

import conf
from tests.helpers.composing import config_of
from tests.helpers.roles import (
    ddp_buffers,
    fresh_saver,
    loss_of,
    make_batch,
    make_role,
    same_weights,
    train,
    weights_of,
)
from trainer.config.schema import ModelConfig
from trainer.measure import metrics
from trainer.megatron import moe
from trainer.megatron.groups import tensor_parallel_group
from trainer.training import step
from trainer.training.micro_batches import Split

_TINY = OmegaConf.to_container(OmegaConf.load(Path(conf.__file__).parent / "model/tiny.yaml"))
MODEL = ModelConfig(**{**_TINY, "kernels": "torch", "attention_backend": "sdpa"})  # type: ignore[dict-item]
MOE = ("model.num_experts=4", "model.num_experts_per_tok=2", "model.ffn_size=64")
FP32 = ("model.dtype=fp32", "optimizer.clip_grad=0", "model.max_length=256")


pytestmark = pytest.mark.usefixtures("saver")


# ---- routing -------------------------------------------------------------------------------------------------------


class _Settings:
    params_dtype, sequence_parallel = torch.float32, False


def route(probabilities, *, normalized, chosen=2):
    """The router's answer to tokens that it gives these probabilities."""
    experts = len(probabilities[0])
    model = dataclasses.replace(
        MODEL, hidden_size=experts, num_experts=experts, num_experts_per_tok=chosen, norm_topk_prob=normalized
    )
    router = moe.Router(model, _Settings)
    with torch.no_grad():
        router.weight.copy_(torch.eye(experts))
    return router(torch.tensor(probabilities).log()[:, None])  # one sequence


def test_weights_of_the_chosen_experts():
    """Softmax over the chosen ones is the softmax over all, scaled to sum to one."""
    probabilities = [[0.5, 0.125, 0.25, 0.125], [0.1, 0.2, 0.3, 0.4]]
    weights, is_chosen = route(probabilities, normalized=False)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0, 0.25, 0], [0, 0, 0.3, 0.4]]))
    assert is_chosen.tolist() == [[True, False, True, False], [False, False, True, True]]
    weights, _ = route(probabilities, normalized=True)
    torch.testing.assert_close(weights, torch.tensor([[2 / 3, 0, 1 / 3, 0], [0, 0, 3 / 7, 4 / 7]]))
    weights, is_chosen = route(probabilities, normalized=True, chosen=1)
    assert weights.tolist() == is_chosen.float().tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]


def test_routing_weights_are_fp32_in_a_bf16_model():
    """1/3 and 2/3 in bf16 would sum to 1.0016."""
    role = make_role("actor", *MOE)
    found = []
    for layer in moe._moe_layers(role.model.chunks[0]):
        layer.router.register_forward_hook(lambda module, inputs, outputs: found.append((inputs[0], outputs[0])))
    step.log_probs(role, make_batch([3, 2]), temperature=1.0, vocab_size=64, split=Split(2))
    assert len(found) == 2
    for hidden, weights in found:
        assert (hidden.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)), atol=1e-6, rtol=0)


# ---- load balancing ------------------------------------------------------------------------------------------------


def test_the_loss_by_hand():
    """Two sequences of two tokens, then padding; two experts, one per token."""
    probabilities = torch.tensor([[[0.75, 0.25], [0.75, 0.25]], [[0.75, 0.25], [0.25, 0.75]], [[0.9, 0.1]] * 2])
    is_chosen = functional.one_hot(probabilities.argmax(-1), 2).bool()
    is_real = torch.tensor([[True, True], [True, True], [False, False]])
    group = tensor_parallel_group()
    losses = moe.load_balancing_loss(probabilities, is_chosen, is_real=is_real, group=group)
    assert losses.tolist() == [2 * (1.0 * 0.75 + 0.0), 2 * (0.5 * 0.5 + 0.5 * 0.5)]
    nothing = torch.zeros(3, 2, dtype=torch.bool)
    empty = moe.load_balancing_loss(probabilities, is_chosen, is_real=nothing, group=group)
    assert empty.tolist() == [0, 0]


def gradients(role, batch, *overrides, micro_batch_size):
    role.model.set_learning_rate(0.0)
    sums = step.train_minibatch(role, batch, loss_of(role, *overrides), split=Split(micro_batch_size))
    return sums, [buffer.grad_data.clone() for buffer in ddp_buffers(role)]


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("name", ["actor", "critic"])
def test_no_split_changes_a_gradient_with_a_large_coefficient(name, mode):
    role = make_role(name, *FP32, *MOE, "model.router_aux_loss_coef=1.0")
    batch = make_batch([1, 3, 50, 200])
    overrides = (f"algo.loss_aggregation={mode}", f"algo.critic_loss_aggregation={mode}")
    expected_sums, expected = gradients(role, batch, *overrides, micro_batch_size=4)
    assert 1.0 < expected_sums["aux_loss_sum"] / expected_sums["loss_count"] < 4.0
    for micro_batch_size in (1, 2):
        sums, actual = gradients(role, batch, *overrides, micro_batch_size=micro_batch_size)
        assert sums["aux_loss_sum"] == pytest.approx(expected_sums["aux_loss_sum"], rel=1e-6)
        for left, right in zip(actual, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6 * right.abs().max().item())


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
def test_the_gradient_is_that_of_the_mean_over_sequences(mode):
    """The coefficient's share of the gradient, against autograd through hand-made losses of each layer's router."""
    batch, grads = make_batch([1, 3, 7, 5]), {}
    for coef in (0.0, 0.5):
        fresh_saver()
        role = make_role("actor", *FP32, *MOE, f"model.router_aux_loss_coef={coef}")
        sums, grads[coef] = gradients(
            role, batch, f"algo.loss_aggregation={mode}", f"algo.critic_loss_aggregation={mode}", micro_batch_size=2
        )
    lengths = torch.tensor([1.0, 3, 7, 5])
    weights = lengths / lengths.sum() if mode == "token_mean" else torch.full((4,), 0.25)
    columns = torch.arange(batch.tokens.shape[1])[:, None]
    is_real = columns < 3 + lengths  # prompts have three tokens
    losses = []

    def hook(module, inputs, outputs):
        probabilities = functional.linear(inputs[0], module.weight).softmax(-1)
        is_chosen = outputs[1].view(probabilities.shape)
        group = tensor_parallel_group()
        of_sequences = moe.load_balancing_loss(probabilities, is_chosen, is_real=is_real, group=group)
        losses.append((of_sequences * weights).sum())

    for layer in moe._moe_layers(role.model.chunks[0]):
        layer.router.register_forward_hook(hook)
    with role.training():
        role.model.chunks[0](batch.tokens, columns.T.expand_as(batch.tokens), None)
        (0.5 * sum(losses)).backward()
        expected = [buffer.grad_data.clone() for buffer in ddp_buffers(role)]
    assert sums["aux_loss_sum"] / sums["loss_count"] == pytest.approx(float(sum(losses)) / 2, rel=1e-5)
    for with_it, without, right in zip(grads[0.5], grads[0.0], expected, strict=True):
        assert right.abs().max() > 0
        torch.testing.assert_close(with_it - without, right, rtol=1e-3, atol=1e-5 * right.abs().max().item())


def test_padding_has_no_part_in_it():
    role = make_role("actor", *FP32, *MOE, "model.router_aux_loss_coef=1.0")
    batch = make_batch([4, 2])
    sums, expected = gradients(role, batch, micro_batch_size=2)
    other = replace(batch, tokens=batch.tokens.where(batch.tokens > 0, 7))
    assert not torch.equal(other.tokens, batch.tokens)
    assert gradients(role, other, micro_batch_size=2)[0] == pytest.approx(sums, rel=1e-6)
    for left, right in zip(gradients(role, other, micro_batch_size=2)[1], expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6 * right.abs().max().item())


def test_it_is_reported_and_evens_the_load():
    """Without the coefficient the load stays as uneven as it is; with it, it becomes even."""
    ends = {}
    for coef in (0.0, 10.0):
        fresh_saver()
        role = make_role("critic", *FP32, *MOE, f"model.router_aux_loss_coef={coef}", "model.init_std=0.2")
        role.model.set_learning_rate(1e-2)
        batch = make_batch([9, 12, 7, 11])
        history = [step.train_minibatch(role, batch, loss_of(role), split=Split(2)) for _ in range(30)]
        ends[coef] = metrics.of_critic(history[-1:])["critic/aux_loss"]
    assert ends[10.0] - 1 < (ends[0.0] - 1) / 2, ends
    fresh_saver()
    dense = make_role("critic")
    assert "critic/aux_loss" not in metrics.of_critic(
        [step.train_minibatch(dense, make_batch([2, 1]), loss_of(dense), split=Split(2))]
    )


# ---- the model -----------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_weights_and_no_two_are_alike():
    first, second = (weights_of(make_role("actor", *MOE, seed=3)) for _ in range(2))
    assert same_weights(first, second)
    drawn = {name: tensor for name, tensor in first.items() if ".experts." in name or ".router." in name}
    assert len(drawn) == 2 * (4 * 2 + 1)
    assert len({tensor.float().sum().item() for tensor in drawn.values()}) == len(drawn)
    assert first["decoder.layers.0.mlp.experts.3.linear_fc1.weight"].float().std() == pytest.approx(0.02, rel=0.05)
    assert first["decoder.layers.0.mlp.experts.3.linear_fc2.weight"].float().std() == pytest.approx(0.01, rel=0.05)


def test_nothing_of_a_forward_pass_outlives_a_sleep():
    role = make_role("actor", *MOE)
    train(role)
    dispatchers = [layer.token_dispatcher for layer in moe._moe_layers(role.model.chunks[0])]

    def kept():
        tensors = [value for d in dispatchers for value in vars(d).values() if isinstance(value, torch.Tensor)]
        return max(tensor.numel() for tensor in tensors)

    assert kept() > 4 * 16
    role.sleep()
    assert kept() == 4  # the fixed orders of the experts
    role.wake_up()
    train(role)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model=tiny_moe", "model.num_experts_per_tok=9"), r"num_experts=8 with .*num_experts_per_tok=9: give 1 to 8"),
        (("model.num_experts=4",), r"num_experts_per_tok=null: give 1 to 4 .*model\.num_experts_per_tok=2"),
        (("model=tiny_moe", "model.qkv_bias=true"), r"is no Hugging Face family: set model\.qkv_bias=false"),
        (("model=tiny_moe", "model.norm_topk_prob=false"), r"set model\.norm_topk_prob=true \(Mixtral\)"),
        (("parallel.expert=2", "launch.nproc=2"), r"no role is a mixture of experts: use parallel\.expert=1"),
        (
            ("model=tiny_moe", "parallel.expert=3", "launch.nproc=4"),
            r"parallel\.expert=3 does not divide .*, launch.* = 4, and .*; these do: parallel\.expert=1, 2, 4$",
        ),
        (
            ("model=tiny_moe", "model.num_experts=6", "parallel.expert=4", "launch.nproc=4"),
            r"and roles\.actor\.model\.num_experts=6, .*; these do: parallel\.expert=1, 2$",
        ),
        (("model=tiny_moe", "parallel.expert=2"), r"a pipeline stage, .* = 1, .*; these do: parallel\.expert=1$"),
        (
            ("model=tiny_moe", "parallel.expert=4", "parallel.pp=2", "launch.nproc=4"),
            r"a pipeline stage, launch\..* / parallel\.pp = 2, and .*: parallel\.expert=1, 2$",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        config_of("platform=cpu", *overrides)


def test_tensor_and_data_parallel_ranks_share_experts():
    """And an expert is not cut, so that its size need not be a multiple of anything."""
    mixture = ("platform=cpu", "model=tiny_moe", "parallel.tp=2", "launch.nproc=4", "algo.micro_batch_size=1")
    for size in (1, 2, 4):
        config = config_of(*mixture, "model.ffn_size=127", f"parallel.expert={size}")
        assert (config.data_parallel_size, config.parallel.expert) == (2, size)
    with pytest.raises(
        ValueError, match=r"parallel\.tp=2 does not divide roles\.critic\.model\.heads=4, kv_h.* and ffn_"
    ):
        config_of(*mixture, "model.ffn_size=127", "model@roles.critic.model=tiny", "roles.critic.model.ffn_size=127")


def test_one_role_may_be_dense():
    config = config_of(
        *("platform=cpu", "model=tiny_moe", "model@roles.critic.model=tiny", "parallel.expert=2", "launch.nproc=2")
    )
    assert [config.roles[role].model.num_experts for role in ("actor", "critic")] == [8, None]
