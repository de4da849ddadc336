"""Which kernels and which core attention a model gets, and what is said where those that are wanted are absent."""

import dataclasses
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.helpers.composing import config_of
from tests.helpers.megatron_world import one_rank_world
from trainer.config.rules import model as model_rules
from trainer.megatron.build import build_gpt
from trainer.megatron.kernels import layer_parts
from trainer.megatron.layers import CausalAttention, core_attention
from trainer.plan.layout import WHOLE


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Makes packages that can be found (and not imported): what find_spec sees of installed ones."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(*packages):
        for package in packages:
            (tmp_path / package).mkdir()
            (tmp_path / package / "__init__.py").write_text("raise ImportError('no CUDA')\n")
            monkeypatch.setitem(sys.modules, package, None)
            monkeypatch.delitem(sys.modules, package)
            assert model_rules.find_spec(package)

    return install


@pytest.fixture
def bare(monkeypatch):
    """Whatever is installed, nothing of it can be found."""
    monkeypatch.setattr(model_rules, "find_spec", lambda name: None)


def values(field, *overrides):
    return {name: getattr(role.model, field) for name, role in config_of(*overrides).roles.items()}


def both(value):
    return {"actor": value, "critic": value}


@pytest.mark.usefixtures("bare")
def test_torch_does_it_all_where_nothing_else_is():
    for platform in ("platform=cpu", "platform=cuda"):
        assert values("attention_backend", platform) == both("sdpa")
        assert values("kernels", platform) == values("kernels", platform, "model.kernels=auto") == both("torch")


def test_transformer_engine_attends_where_it_is_installed_and_there_are_gpus(install):
    install("transformer_engine")
    assert values("attention_backend", "platform=cuda") == both("te")
    assert values("attention_backend", "platform=cpu") == both("sdpa")
    assert values("attention_backend", "platform=cuda", "model.attention_backend=sdpa") == both("sdpa")
    one = values("attention_backend", "platform=cuda", "roles.critic.model.attention_backend=sdpa")
    assert one == {"actor": "te", "critic": "sdpa"}


@pytest.mark.parametrize(
    ("packages", "kernels"),
    [
        (["liger_kernel", "triton", "transformer_engine"], "liger"),
        (["liger_kernel", "triton"], "liger"),
        (["transformer_engine"], "te"),
    ],
)
def test_the_fastest_kernels_that_are_installed_are_used_where_there_are_gpus(install, packages, kernels):
    install(*packages)
    assert values("kernels", "platform=cuda") == both(kernels)
    assert values("kernels", "platform=cpu") == both("torch")
    assert values("kernels", "platform=cuda", "model.kernels=torch") == both("torch")
    one = values("kernels", "platform=cuda", "roles.critic.model.kernels=torch")
    assert one == {"actor": kernels, "critic": "torch"}


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("platform", "setting", "message"),
    [
        (
            "cuda",
            "attention_backend=te",
            "roles.actor.model.attention_backend=te, but Transformer Engine is not installed",
        ),
        ("cpu", "attention_backend=te", "attention_backend=te with platform.name=cpu: Transformer Engine needs a GPU"),
        ("cpu", "attention_backend=flash", "attention_backend=flash: must be one of sdpa, te"),
        ("cuda", "kernels=liger", "kernels=liger, but liger_kernel and triton cannot be imported: pip install 'torpor"),
        ("cuda", "kernels=te", "kernels=te, but transformer_engine cannot be imported: pip install"),
        ("cpu", "kernels=liger", "kernels=liger with platform.name=cpu: Liger's Triton kernels need a GPU"),
        ("cpu", "kernels=apex", "kernels=apex: must be one of auto, torch, liger, te"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(platform, setting, message):
    with pytest.raises(ValueError, match=message):
        config_of(f"platform={platform}", f"model.{setting}")


def test_a_model_is_built_of_the_parts_that_its_config_names():
    with one_rank_world():
        model = config_of("platform=cpu", "model.qk_norm=true").model
        for kernels, attention in (("torch", "PackableSelfAttention"), ("liger", "FusedSelfAttention")):
            named = dataclasses.replace(model, kernels=kernels)
            gpt = build_gpt(named, vocab_size=64, parallel=WHOLE, seed=1, value_head=False)
            layer = gpt.decoder.layers[0]  # type: ignore[union-attr, index]
            norms = (layer.input_layernorm, layer.pre_mlp_layernorm, gpt.decoder.final_layernorm)
            norms += (layer.self_attention.q_layernorm, layer.self_attention.k_layernorm)
            assert {type(norm) for norm in norms} == {layer_parts(kernels).norm}
            assert type(layer.self_attention).__name__ == attention
            assert isinstance(layer.self_attention.core_attention, CausalAttention)
            assert (layer.mlp.activation_func is gpt.config.activation_func) == (kernels == "torch")


def test_an_installation_that_does_not_work_is_named_when_the_model_is_built():
    with one_rank_world():
        with pytest.raises(ValueError, match=r"transformer_engine cannot be imported .* model.attention_backend=sdpa"):
            core_attention("te")


_ROTARY = """
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd as turned
from trainer.megatron.rotary_triton import split_and_turn, turn

generator = torch.Generator().manual_seed(0)
normal = lambda *shape: torch.randn(shape, generator=generator)
for s, b, groups, per_group, width in ((5, 3, 2, 3, 8), (7, 1, 1, 2, 12), (4, 2, 3, 1, 6)):
    angles = torch.outer(torch.arange(20.0), 100.0 ** -torch.linspace(0, 1, width // 2))
    angles = torch.cat([angles, angles], -1)[:, None, None]
    for dtype, tolerance in ((torch.float32, {}), (torch.bfloat16, {"rtol": 2e-2, "atol": 2e-2})):
        for positions in (None, torch.randint(20, (s * b,), generator=generator)):
            joint = normal(s, b, groups * (per_group + 2) * width).to(dtype).requires_grad_()
            parts = joint.view(s, b, groups, per_group + 2, width)
            query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
            own = angles[:s] if positions is None else angles[positions].view(s, b, 1, width)
            expected = (turned(query, own), turned(key, own), value)
            found = split_and_turn(joint, angles, groups=groups, width=width, positions=positions)
            one_by_one = (turn(query, angles, positions=positions), turn(key, angles, positions=positions), value)
            weights = [normal(*x.shape) for x in expected]
            gradients = [
                torch.autograd.grad(sum((x * w).sum() for x, w in zip(some, weights)), joint)[0]
                for some in (expected, found, one_by_one)
            ]
            for some, gradient in ((found, gradients[1]), (one_by_one, gradients[2])):
                for ours, theirs in zip((*some, gradient), (*expected, gradients[0])):
                    torch.testing.assert_close(ours, theirs, **tolerance)
            assert all(x.is_contiguous() for x in found)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, whose interpreter runs kernels on the CPU")
def test_the_rotary_kernel_splits_and_turns_as_megatron_does():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ROTARY], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
