"""trainer.models.hf_bridge: transformers computes the same function from the same weights, both ways."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

import conf
from tests.helpers.megatron_world import logits_of, one_rank_world
from trainer.config.schema import ModelConfig
from trainer.megatron.build import build_gpt, named_tensors
from trainer.models.hf_bridge import from_hf, hf_config, to_hf, views_by_file_name
from trainer.plan.layout import WHOLE

_TINY = OmegaConf.to_container(OmegaConf.load(Path(conf.__file__).parent / "model/tiny.yaml"))
TINY = ModelConfig(**{**_TINY, "kernels": "torch", "attention_backend": "sdpa"})  # type: ignore[dict-item]
SMALL = dataclasses.replace(
    TINY, layers=2, hidden_size=64, ffn_size=96, heads=4, kv_heads=2, rope_theta=5e5, norm_eps=1e-3, dtype="fp32"
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "mixtral": EXPERTS,
    "qwen3_moe": {**EXPERTS, "qk_norm": True, "norm_topk_prob": False},
}


@pytest.fixture(scope="module", autouse=True)
def world():
    with one_rank_world():
        yield


def hf_config_of(model, *, vocab_size):
    return hf_config(model, vocab_size=vocab_size, bos_token_id=None, eos_token_id=1, pad_token_id=0)


def random_gpt(model, *, vocab_size):
    """Every parameter random, so that norms and biases count too. -> (model, its named tensors)."""
    gpt = build_gpt(model, vocab_size=vocab_size, parallel=WHOLE, seed=1, value_head=False)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            parameter.normal_(mean, 0.2, generator=generator)
    return gpt, {name: tensor.detach() for name, tensor in named_tensors([SimpleNamespace(module=gpt)])}


def assert_same_logits(model, *, vocab_size, attention):
    gpt, named = random_gpt(model, vocab_size=vocab_size)
    hf = AutoModelForCausalLM.from_config(hf_config_of(model, vocab_size=vocab_size), attn_implementation=attention)
    views = views_by_file_name(dict(hf.named_parameters()), model=model)
    weights = dict(to_hf(named.items(), model=model))
    assert views.keys() == weights.keys()
    for name, view in views.items():
        view.data.copy_(weights[name])
    tokens = torch.randint(vocab_size, (3, 17), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = logits_of(gpt, tokens)
        actual = hf.eval()(tokens).logits
    assert actual.std() > 0.1
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family, tied, attention):
    model = dataclasses.replace(SMALL, tie_embeddings=tied, **FAMILIES[family])
    assert hf_config_of(model, vocab_size=50).model_type == family
    assert_same_logits(model, vocab_size=50, attention=attention)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_one_key_for_all_queries_and_one_for_each(kv_heads):
    assert_same_logits(dataclasses.replace(SMALL, kv_heads=kv_heads), vocab_size=50, attention="sdpa")


def test_default_architecture():
    assert_same_logits(dataclasses.replace(TINY, dtype="fp32"), vocab_size=256, attention="sdpa")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bitwise_the_same(family, tied):
    model = dataclasses.replace(SMALL, tie_embeddings=tied, dtype="bf16", **FAMILIES[family])
    _, named = random_gpt(model, vocab_size=50)
    returned = dict(from_hf(dict(to_hf(named.items(), model=model)), model=model))
    assert set(named) - set(returned) == {"rotary_pos_emb.inv_freq"}
    assert set(returned) <= set(named)
    assert all(torch.equal(named[name], tensor) for name, tensor in returned.items())


def test_layout_of_fused_projections():
    """Rows numbered by hand: 4 query heads of size 1 share 2 key-value heads; gate comes before up."""
    model = dataclasses.replace(SMALL, hidden_size=4, heads=4, kv_heads=2, ffn_size=2)
    layer, hf_layer = "decoder.layers.1.", "model.layers.1."
    qkv = torch.arange(8.0)[:, None].expand(-1, 4)  # q0 q1 k0 v0 q2 q3 k1 v1
    fc1 = torch.arange(4.0)[:, None].expand(-1, 4)
    named = [
        (f"{layer}self_attention.linear_qkv.weight", qkv),
        (f"{layer}mlp.linear_fc1.weight", fc1),
    ]
    rows = {name: tensor[:, 0].tolist() for name, tensor in to_hf(named, model=model)}
    assert rows == {
        f"{hf_layer}self_attn.q_proj.weight": [0, 1, 4, 5],
        f"{hf_layer}self_attn.k_proj.weight": [2, 6],
        f"{hf_layer}self_attn.v_proj.weight": [3, 7],
        f"{hf_layer}mlp.gate_proj.weight": [0, 1],
        f"{hf_layer}mlp.up_proj.weight": [2, 3],
    }


def test_no_family_has_bias_and_norm():
    model = dataclasses.replace(SMALL, qkv_bias=True, qk_norm=True)
    with pytest.raises(ValueError, match=r"model\.qkv_bias=true together with model\.qk_norm=true"):
        hf_config_of(model, vocab_size=50)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"qkv_bias": True}, r"model\.num_experts=4 together with model\.qkv_bias=true .* set model\.qkv_bias=false"),
        ({"norm_topk_prob": False}, r"norm_topk_prob=false and model\.qk_norm=false .* model\.norm_topk_prob=true"),
    ],
)
def test_mixtures_without_a_family(settings, message):
    with pytest.raises(ValueError, match=message):
        hf_config_of(dataclasses.replace(SMALL, **EXPERTS, **settings), vocab_size=50)


def test_unknown_tensors_are_refused():
    with pytest.raises(ValueError, match=r"chunk1\.output_layer\.weight has no counterpart"):
        list(to_hf([("chunk1.output_layer.weight", torch.zeros(50, 64))], model=SMALL))


def test_weights_of_another_architecture_are_refused():
    qwen2 = dataclasses.replace(SMALL, qkv_bias=True)
    state = dict(to_hf(random_gpt(qwen2, vocab_size=50)[1].items(), model=qwen2))
    with pytest.raises(ValueError, match=r"have, unlike the model, .*layers\.0\.self_attn\.k_proj\.bias"):
        list(from_hf(state, model=SMALL))
    del state["model.norm.weight"]
    with pytest.raises(ValueError, match=r"lack model\.norm\.weight: .*model\.layers"):
        list(from_hf(state, model=qwen2))


def test_spare_copies_in_hf_state_are_left_out():
    """Checkpoints of tied models may repeat the embedding, old ones hold the rotary table."""
    model = dataclasses.replace(SMALL, tie_embeddings=True)
    state = dict(to_hf(random_gpt(model, vocab_size=50)[1].items(), model=model))
    plain = dict(from_hf(state, model=model))
    spare = {"lm_head.weight": torch.zeros(50, 64), "model.rotary_emb.inv_freq": torch.zeros(8)}
    with_spare = dict(from_hf({**state, **spare}, model=model))
    assert with_spare.keys() == plain.keys()
    assert "output_layer.weight" not in with_spare
