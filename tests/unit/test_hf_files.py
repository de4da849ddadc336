"""Hugging Face folders in and out: transformers and a Megatron model compute the same from the same files."""

import dataclasses
import json
import weakref
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests.helpers import roles
from tests.helpers.composing import config_of
from tests.helpers.megatron_world import logits_of, one_rank_world
from trainer.common.safetensors_folder import INDEX_FILE, WEIGHTS_FILE, SafetensorsFolder
from trainer.config.schema import ModelConfig
from trainer.megatron.build import build_gpt, named_tensors
from trainer.models.hf_bridge import from_hf, to_hf, views_by_file_name
from trainer.models.hf_files import save_hf
from trainer.plan.layout import WHOLE
from trainer.tasks.arithmetic import ArithmeticTask
from trainer.tasks.tokenizer import load_tokenizer

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 128, "head_dim": 24}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=24),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**SIZES | EXPERTS | {"intermediate_size": 96}, norm_topk_prob=True),
    "qwen3_moe_plain_softmax": Qwen3MoeConfig(**SIZES | EXPERTS | {"intermediate_size": 96}, norm_topk_prob=False),
}


@pytest.fixture(scope="module", autouse=True)
def world():
    with one_rank_world():
        yield


def save_checkpoint(folder, family, *, dtype=torch.float32, tied=False, shard_size="1GB"):
    """A random model of transformers in ``folder``; biases and norms are random too."""
    config = FAMILIES[family].__class__.from_dict({**FAMILIES[family].to_dict(), "tie_word_embeddings": tied})
    config.dtype = dtype
    torch.manual_seed(1)
    hf = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape).to(dtype))
    hf.save_pretrained(folder, max_shard_size=shard_size)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def model_of(folder, *overrides) -> ModelConfig:
    config = config_of("platform=cpu", "model=hf", f"model.path={folder}", f"tokenizer.path={folder}", *overrides)
    assert config.roles["actor"].model == config.roles["critic"].model == config.model
    return config.model


def load(folder, *, value_head=False):
    """-> (ModelConfig, GPT with the folder's weights, its named tensors)."""
    model = model_of(folder)
    vocab_size = model.embedding_rows(0)
    gpt = build_gpt(model, vocab_size=vocab_size, parallel=WHOLE, seed=1, value_head=value_head)
    named = dict(named_tensors([SimpleNamespace(module=gpt)]))
    with torch.no_grad():
        for name, tensor in from_hf(SafetensorsFolder(folder), model=model, value_head=value_head).items():
            named[name].copy_(tensor)
    return model, gpt, named


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loaded_model_is_that_of_transformers(family, dtype, tied, tmp_path):
    hf = save_checkpoint(tmp_path, family, dtype=dtype, tied=tied)
    model, gpt, named = load(tmp_path)
    assert model.dtype == {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    theirs = views_by_file_name(hf.state_dict(), model=model)
    for name, tensor in to_hf(named.items(), model=model):
        assert torch.equal(tensor, theirs[name]), name
    tokens = torch.randint(VOCABULARY, (2, 150), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = hf.float()(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits_of(gpt.float(), tokens).detach(), expected, atol=1e-4, rtol=0)


def test_shards_are_one_model_and_export_shards_too(tmp_path):
    save_checkpoint(tmp_path / "whole", "qwen2")
    save_checkpoint(tmp_path / "shards", "qwen2", shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = (SafetensorsFolder(tmp_path / name) for name in ("whole", "shards"))
    assert set(whole) == set(shards)
    assert all(torch.equal(whole[name], shards[name]) for name in whole)

    model, _, named = load(tmp_path / "shards")
    save_hf(named.items(), model=model, tokenizer=tokenizer(), folder=tmp_path / "out", shard_bytes=40_000)
    assert (tmp_path / "out" / INDEX_FILE).is_file()
    assert not (tmp_path / "out" / WEIGHTS_FILE).exists()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(theirs[name], whole[name]) for name in whole)


def tokenizer():
    task = ArithmeticTask(max_operand=9, operations=["plus"], forms="digits", heldout_fraction=0.1, seed=1)
    return load_tokenizer(None, task=task, vocab_size=280)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_actor_is_exported_and_comes_back_bit_for_bit(family, tied, tmp_path):
    save_checkpoint(tmp_path / "in", family, dtype=torch.bfloat16, tied=tied)
    settings = ("model=hf", f"model.path={tmp_path / 'in'}", f"tokenizer.path={tmp_path / 'in'}")
    roles.fresh_saver()
    actor = roles.make_role("actor", *settings)
    actor.load_weights(from_hf(SafetensorsFolder(tmp_path / "in"), model=actor.config.model))
    start = roles.weights_of(actor)
    roles.train(actor)
    trained, model = roles.weights_of(actor), actor.config.model
    assert not roles.same_weights(start, trained)

    save_hf(named_tensors(actor.model.chunks), model=model, tokenizer=tokenizer(), folder=tmp_path / "out")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert hf.dtype == torch.bfloat16
    assert type(hf.config) is type(FAMILIES[family])
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(
            hf.float()(tokens).logits,
            logits_of(actor.model.chunks[0].module.float(), tokens).detach(),
            atol=1e-4,
            rtol=0,
        )
    returned, _, named = load(tmp_path / "out")
    assert returned.digest != model.digest
    assert dataclasses.replace(returned, path=None, digest=None) == dataclasses.replace(model, path=None, digest=None)
    assert roles.same_weights(dict(named), trained)


def test_the_generation_settings_of_the_start_are_exported(tmp_path):
    save_checkpoint(tmp_path / "in", "llama")
    settings = {"eos_token_id": [19, 2], "temperature": 0.6, "do_sample": False}  # which transformers does not save
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps(settings))
    model, _, named = load(tmp_path / "in")
    save_hf(named.items(), model=model, tokenizer=tokenizer(), folder=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == settings
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.eos_token_id == [19, 2]


def test_a_critic_has_the_body_and_a_head_of_its_own(tmp_path):
    for tied in (False, True):
        save_checkpoint(tmp_path, "llama", tied=tied)
        _, _, named = load(tmp_path, value_head=True)
        head = named["output_layer.weight"]
        assert head.shape == (1, 64)
        assert head.dtype == torch.float32
        assert torch.equal(
            named["embedding.word_embeddings.weight"], SafetensorsFolder(tmp_path)["model.embed_tokens.weight"]
        )


def test_loading_refreshes_main_params(tmp_path):
    """A step of size zero would bring back the random weights if only the model had been loaded."""
    save_checkpoint(tmp_path, "qwen3")
    roles.fresh_saver()
    critic = roles.make_role("critic", "model=hf", f"model.path={tmp_path}", f"tokenizer.path={tmp_path}")
    critic.load_weights(from_hf(SafetensorsFolder(tmp_path), model=critic.config.model, value_head=True))
    loaded = roles.weights_of(critic)
    roles.train(critic, lr=0.0)
    assert roles.same_weights(roles.weights_of(critic), loaded)


class CountingReads(Mapping):
    """A folder's tensors; counts how often one is read and how many that were read are alive at once."""

    def __init__(self, folder):
        self.folder = SafetensorsFolder(folder)
        self.reads, self.most_alive = [], 0

    def __getitem__(self, name):
        tensor = self.folder[name]
        self.reads.append((name, weakref.ref(tensor)))
        self.most_alive = max(self.most_alive, sum(reference() is not None for _, reference in self.reads))
        return tensor

    def __iter__(self):
        return iter(self.folder)

    def __len__(self):
        return len(self.folder)


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_a_folder_is_never_in_memory_as_a_whole(family, tmp_path):
    """While a tensor is copied into the model the parts of the next are read, at most query, key and value."""
    save_checkpoint(tmp_path, family)
    roles.fresh_saver()
    actor = roles.make_role("actor", "model=hf", f"model.path={tmp_path}", f"tokenizer.path={tmp_path}")
    state = CountingReads(tmp_path)
    actor.load_whole_weights(from_hf(state, model=actor.config.model))
    assert sorted(name for name, _ in state.reads) == sorted(state)  # each exactly once
    assert 3 <= state.most_alive <= 1 + 3 < len(state) / 4
    assert torch.equal(roles.weights_of(actor)["output_layer.weight"], state["lm_head.weight"])


@pytest.mark.parametrize("kept", [0.9, 0.01], ids=["data", "header"])
def test_a_truncated_file_is_named(kept, tmp_path):
    save_checkpoint(tmp_path, "llama", shard_size="40KB")
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match=rf"{file.name} is no whole safetensors file \(.*download it again"):
        SafetensorsFolder(tmp_path)


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    save_checkpoint(tmp_path, "llama")
    config_file = tmp_path / "config.json"
    config_file.write_text(config_file.read_text().replace(f'"vocab_size": {VOCABULARY}', '"vocab_size": 63'))
    roles.fresh_saver()
    actor = roles.make_role("actor", "model=hf", f"model.path={tmp_path}", f"tokenizer.path={tmp_path}")
    with pytest.raises(ValueError, match=r"embed_tokens.weight has the shape \(64, 64\), and .* \(63, 64\)"):
        actor.load_whole_weights(from_hf(SafetensorsFolder(tmp_path), model=actor.config.model))
    state = {"output_layer.weight": SafetensorsFolder(tmp_path)["lm_head.weight"]}
    with pytest.raises(ValueError, match=r"output_layer.weight has the shape \(63, 64\), the actor's is \(64, 64\)"):
        actor.load_weights({"output_layer.weight": state["output_layer.weight"][:63]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model of type gpt2: supported are llama, qwen2, qwen3, mixtral, qwen3_moe"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type=linear"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_what_a_gpt_of_ours_cannot_compute_is_refused_by_name(changes, message, tmp_path):
    settings = FAMILIES["llama"].to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        model_of(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: copy or download it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 7\n", "is a Git LFS pointer .* git lfs pull"),
        (b"\xef\xbb\xbf{}", "begins with a byte order mark"),
        (b'{"model_type": "lla', "is not JSON, but cut off"),
        (b"[]", "holds a list, must hold an object"),
        (b"[" * 100_000, "is nested too deep"),
        ({"num_hidden_layers": "2"}, "has num_hidden_layers='2', must be a whole number between 1 and"),
        ({"num_hidden_layers": 10**9}, "has num_hidden_layers=1000000000, must be a whole number between 1 and 1000"),
        ({"vocab_size": 10**12}, "has vocab_size=1000000000000, must be a whole number between 1 and"),
        ({"intermediate_size": 10**400}, "has intermediate_size=10+.*, must be a whole number between 1 and"),
        ({"num_attention_heads": 0}, "has num_attention_heads=0, must be a whole number between 1 and"),
        ({"rms_norm_eps": float("nan")}, "has rms_norm_eps=NaN, must be a finite number"),
        ({"tie_word_embeddings": "no"}, "has tie_word_embeddings='no', must be true or false"),
        ({"rope_parameters": [1]}, r"has rope_parameters=\[1\], must be an object"),
        ({"rope_parameters": LLAMA3 | {"factor": "8"}}, "(has rope_parameters.factor='8'|cannot be read)"),
        ({"layer_types": ["full_attention", 3]}, r"has layer_types\.1=3, must be text"),
        ({"dtype": "bananas"}, r"cannot be read \(AttributeError: .*bananas"),
        ({"id2label": [1]}, r"cannot be read \(AttributeError"),
    ],
)
def test_a_damaged_config_is_named_with_the_field(content, message, tmp_path):
    if isinstance(content, dict):
        content = json.dumps(FAMILIES["llama3"].to_dict() | content).encode()
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config\.json {message}"):
        model_of(tmp_path)


def test_sliding_windows_are_refused(tmp_path):
    Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="sliding-window attention"):
        model_of(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"sliding_window": 4096}, "sliding-window attention"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_what_a_mixture_of_ours_cannot_compute_is_refused_by_name(family, changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family].to_dict() | changes))
    with pytest.raises(ValueError, match=message):
        model_of(tmp_path)


def test_folders_and_settings_that_do_not_fit(tmp_path):
    FAMILIES["qwen3"].save_pretrained(tmp_path)
    both = (f"model.path={tmp_path}", f"tokenizer.path={tmp_path}")
    for overrides, message in (
        (("model=hf",), r"no value given for model\.path: add model\.path="),
        (("model=hf", "model.path=gone"), r"model\.path=gone holds no config\.json"),
        (
            both,
            rf"actor\.model\.hidden_size=128, but the checkpoint in roles\.actor\.model\.path={tmp_path} has",
        ),
        (
            ("model=hf", *both, "roles.critic.model.layers=3"),
            r"critic\.model\.layers=3, but .* layers=2: .*model=hf",
        ),
        (("model=hf", *both, "model.max_length=600"), r"max_length=600 is more than the 512 .* model\.max_length=512"),
        (("model=hf", both[0], "tokenizer.path=null"), r"tokenizer\.path=null with roles\.actor\.model\.path="),
        (("tokenizer.chat_template=true",), "has no chat template"),
    ):
        with pytest.raises(ValueError, match=message):
            config_of("platform=cpu", *overrides)
    with pytest.raises(ValueError, match=r"lacks model\.safetensors: weights are read from"):
        SafetensorsFolder(tmp_path)


def test_dtype_and_length_are_free_and_a_critic_may_be_another_model(tmp_path):
    FAMILIES["llama3"].save_pretrained(tmp_path)
    hf = ("platform=cpu", "model=hf", f"model.path={tmp_path}")
    config = config_of(*hf, "model.dtype=bf16", "model.max_length=100", "model@roles.critic.model=tiny")
    actor, critic = (config.roles[name].model for name in ("actor", "critic"))
    assert (actor.dtype, actor.max_length, actor.head_dim, actor.vocab_size) == ("bf16", 100, 16, VOCABULARY)
    assert dataclasses.asdict(actor.rope_scaling) == {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_length": 64,
    }
    assert (critic.path, critic.layers, critic.vocab_size) == (None, 2, None)
    assert config.tokenizer.path == str(tmp_path)
    assert not config.critic_starts_from_actor
