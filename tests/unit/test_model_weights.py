"""Weights of a model folder: which file they come from, and which are refused, with the tensor's name."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from tests.helpers.composing import config_of
from trainer.common.safetensors_folder import INDEX_FILE, WEIGHTS_FILE, SafetensorsFolder
from trainer.models.folders import check_folders
from trainer.models.hf_bridge import from_hf
from trainer.models.hf_files import write_folder
from trainer.tasks.arithmetic import ArithmeticTask
from trainer.tasks.tokenizer import load_tokenizer

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
LAYER = "model.layers.1."
Q, K, DOWN = (f"{LAYER}{name}.weight" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(folder: Path, *, config=None, shard_size="1GB", **settings) -> Path:
    config = config or LlamaConfig(**{**SIZES, **settings})
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder, max_shard_size=shard_size)
    return folder


def model_of(folder: Path, *overrides):
    return config_of("platform=cpu", "model=hf", f"model.path={folder}", f"tokenizer.path={folder}", *overrides).model


def change(folder: Path, **tensors) -> None:
    """Write the tensors, by name with ``__`` for dots, into the folder's only file; None removes one."""
    state = load_file(folder / WEIGHTS_FILE)
    state |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(kept, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def read_all(folder: Path, *overrides, value_head=False) -> dict[str, torch.Tensor]:
    return dict(from_hf(SafetensorsFolder(folder), model=model_of(folder, *overrides), value_head=value_head))


# ---- which file a tensor comes from ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_the_index_decides_which_shard_a_tensor_comes_from(order, tmp_path):
    """A stale copy in another shard, be it an earlier or a later one."""
    save(tmp_path, shard_size="8KB")
    index = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    files = sorted(set(index.values()))[::order]
    name = next(name for name, file in index.items() if file == files[0])
    expected = SafetensorsFolder(tmp_path)[name]
    stale = load_file(tmp_path / files[-1]) | {name: torch.full_like(expected, 7.0), "model.old": torch.zeros(3)}
    save_file(stale, tmp_path / files[-1], metadata={"format": "pt"})
    found = SafetensorsFolder(tmp_path)
    assert torch.equal(found[name], expected)
    assert set(found) == set(index)
    assert "model.old" not in found


def test_an_index_and_shards_that_disagree_are_named(tmp_path):
    save(tmp_path, shard_size="8KB")
    file = tmp_path / INDEX_FILE
    content = json.loads(file.read_text())
    names, shards = list(content["weight_map"]), sorted(set(content["weight_map"].values()))
    other = next(shard for shard in shards if shard != content["weight_map"][names[0]])
    for changed, message in (
        ({names[0]: other}, rf"index.json says that {names[0]} is in {other}, which lacks it"),
        ({names[0]: "gone.safetensors"}, "lacks gone.safetensors"),
        ({names[0]: "../x.safetensors"}, r"names the file '\.\./x\.safetensors', which is none of the folder"),
        ({names[0]: 3}, rf"has weight_map\.{names[0]}=3, must be text"),
    ):
        file.write_text(json.dumps({"weight_map": content["weight_map"] | changed}))
        with pytest.raises(ValueError, match=message):
            SafetensorsFolder(tmp_path)
    for text, message in (
        ("[]", "index.json holds a list"),
        ("{}", "has no field weight_map"),
        ('{"weight_map": {}}', "has an empty weight_map"),
        ('{"weight_map": [1]}', r"has weight_map=\[1\], must be an object"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            SafetensorsFolder(tmp_path)


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path):
    save(tmp_path / "one", shard_size="8KB")
    save(tmp_path / "other", initializer_range=0.5)
    (tmp_path / "one" / WEIGHTS_FILE).write_bytes((tmp_path / "other" / WEIGHTS_FILE).read_bytes())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "one").state_dict()
    assert torch.equal(SafetensorsFolder(tmp_path / "one")[Q], theirs[Q])


def test_a_pointer_in_a_files_place_is_named(tmp_path):
    save(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with pytest.raises(ValueError, match=r"model.safetensors is a Git LFS pointer .* git lfs pull"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("before", [8_000, 1 << 30], ids=["shards", "one file"])
@pytest.mark.parametrize("after", [8_000, 1 << 30], ids=["shards", "one file"])
def test_a_folder_that_is_written_again_holds_the_new_model(before, after, tmp_path):
    task = ArithmeticTask(max_operand=9, operations=["plus"], forms="digits", heldout_fraction=0.1, seed=1)
    tokenizer = load_tokenizer(None, task=task, vocab_size=280)
    tokenizer.chat_template = "{{ messages[0].content }}!"
    (tmp_path / "mine.safetensors").write_bytes(b"somebody's")
    for layers, shard_bytes in ((3, before), (2, after)):
        config = LlamaConfig(**{**SIZES, "num_hidden_layers": layers})
        torch.manual_seed(layers)
        weights = AutoModelForCausalLM.from_config(config).float().state_dict()
        write_folder(weights.items(), config=config, tokenizer=tokenizer, folder=tmp_path, shard_bytes=shard_bytes)
        tokenizer.chat_template = None
    found = SafetensorsFolder(tmp_path)
    assert found.keys() == weights.keys()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(found[name], weights[name]) and torch.equal(theirs[name], weights[name]) for name in weights)
    assert load_tokenizer(str(tmp_path), task=task, vocab_size=280).chat_template is None
    used = {WEIGHTS_FILE} if after > 8_000 else {INDEX_FILE, *found.file_names}
    assert {path.name for path in tmp_path.glob("*safetensors*")} == used | {"mine.safetensors"}


# ---- tied embeddings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_its_own_is_kept_whatever_the_config_says_as_in_transformers(dtype, tmp_path):
    save(tmp_path, tie_word_embeddings=True)
    head = torch.randn(48, 16, generator=torch.Generator().manual_seed(5)).to(dtype)
    change(tmp_path, lm_head__weight=head)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).lm_head.weight, head)
    assert model_of(tmp_path).tie_embeddings is False
    assert torch.equal(read_all(tmp_path)["output_layer.weight"], head)
    assert "output_layer.weight" not in read_all(tmp_path, value_head=True)


def test_a_head_that_repeats_the_embedding_stays_tied(tmp_path):
    save(tmp_path, tie_word_embeddings=True)
    assert model_of(tmp_path).tie_embeddings is True
    change(tmp_path, lm_head__weight=load_file(tmp_path / WEIGHTS_FILE)[EMBEDDING].clone())
    assert model_of(tmp_path).tie_embeddings is True
    assert "output_layer.weight" not in read_all(tmp_path)
    one_bit = load_file(tmp_path / WEIGHTS_FILE)[EMBEDDING].clone()
    one_bit[47, 15] += 1e-3
    change(tmp_path, lm_head__weight=one_bit)
    assert model_of(tmp_path).tie_embeddings is False


# ---- which tensors are refused ---------------------------------------------------------------------------------------

WRONG = {
    "transposed, wider": ({DOWN: lambda w: w.T.contiguous()}, rf"{DOWN} is transposed: it has the shape \(24, 16\)"),
    "as many values": ({K: lambda w: w.reshape(32, 8)}, rf"{K} has the shape \(32, 8\), .* \(16, 16\) there"),
    "one dimension": ({Q: lambda w: w.flatten()}, rf"{Q} has the shape \(256,\)"),
    "rows": ({EMBEDDING: lambda w: w[:-1].contiguous()}, rf"{EMBEDDING} has the shape \(47, 16\), .* \(48, 16\)"),
    "norm": ({"model.norm.weight": lambda w: w[:1].clone()}, r"model\.norm\.weight has the shape \(1,\), .* \(16\)"),
    "int8": ({Q: lambda w: w.to(torch.int8)}, rf"{Q} has the dtype int8, must be one of bfloat16, float16, float32"),
    "bool": ({DOWN: lambda w: w > 0}, rf"{DOWN} has the dtype bool"),
    "complex": ({K: lambda w: w.to(torch.complex64)}, rf"{K} has the dtype complex64"),
    "fp8": ({HEAD: lambda w: w.to(torch.float8_e4m3fn)}, rf"{HEAD} has the dtype float8_e4m3fn"),
    "nan": ({Q: lambda w: w.index_fill(0, torch.tensor([3]), torch.nan)}, rf"{Q} holds nan: 16 of its 256 values"),
    "inf": ({HEAD: lambda w: w.index_fill(0, torch.tensor([47]), -torch.inf)}, rf"{HEAD} holds -inf: 16 of its 768"),
    "half": ({DOWN: lambda w: (w * 1e9).half()}, rf"{DOWN} holds -?inf: \d+ of its 384 values are not finite"),
    "too large": ({Q: lambda w: w.double() * 1e300}, rf"{Q} holds \[.*\], which model\.dtype=fp32 has no finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_weight_is_refused_with_its_name(name, tmp_path):
    changes, message = WRONG[name]
    save(tmp_path)
    state = load_file(tmp_path / WEIGHTS_FILE)
    change(tmp_path, **{key: make(state[key]) for key, make in changes.items()})
    with pytest.raises(ValueError, match=message):
        read_all(tmp_path)


def test_a_largest_float32_has_no_finite_bf16(tmp_path):
    save(tmp_path)
    change(tmp_path, **{"model.norm.weight": torch.full((16,), torch.finfo(torch.float32).max)})
    assert read_all(tmp_path)["decoder.final_layernorm.weight"].isfinite().all()
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds .* model\.dtype=bf16 has no finite numbers for"):
        read_all(tmp_path, "model.dtype=bf16")


def test_values_are_not_looked_at_without_check_finite(tmp_path):
    save(tmp_path)
    change(tmp_path, **{Q: torch.full((16, 16), torch.nan), DOWN: torch.full((16, 24), 2.0)})
    assert read_all(tmp_path, "model.check_finite=false")[f"decoder.{LAYER[6:]}mlp.linear_fc2.weight"].mean() == 2.0


@pytest.mark.parametrize("tensor", ["mlp.gate", "mlp.experts.2.up_proj", "self_attn.q_norm"])
def test_an_experts_tensors_are_judged_too(tensor, tmp_path):
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 6}
    save(tmp_path, config=Qwen3MoeConfig(**sizes))
    assert read_all(tmp_path)
    name = f"{LAYER}{tensor}.weight"
    whole = load_file(tmp_path / WEIGHTS_FILE)[name]
    change(tmp_path, **{name: whole[:-1].clone()})
    with pytest.raises(ValueError, match=rf"{name} has the shape"):
        read_all(tmp_path)
    change(tmp_path, **{name: whole.masked_fill(whole == whole.max(), torch.inf)})
    with pytest.raises(ValueError, match=rf"{name} holds inf: \d+ of its"):
        read_all(tmp_path)


def test_the_head_of_a_sequence_classifier_has_one_label(tmp_path):
    save(tmp_path)
    change(tmp_path, score__weight=torch.randn(2, 16))
    with pytest.raises(ValueError, match=r"score\.weight has the shape \(2, 16\), .* \(1, 16\)"):
        read_all(tmp_path, value_head=True)


def test_headers_are_the_tensors_without_their_content(tmp_path):
    save(tmp_path)
    change(tmp_path, **{Q: torch.zeros(16, 16).to(torch.bfloat16), K: torch.zeros(16, 16, dtype=torch.bool)})
    folder = SafetensorsFolder(tmp_path)
    headers = folder.headers()
    assert {n: (t.shape, t.dtype) for n, t in headers.items()} == {n: (t.shape, t.dtype) for n, t in folder.items()}
    assert all(tensor.is_meta for tensor in headers.values())
    model = dataclasses.replace(model_of(tmp_path), check_finite=True)
    with pytest.raises(ValueError, match=f"{K} has the dtype bool"):
        dict(from_hf(headers, model=model))


def test_folders_are_judged_before_anything_is_launched(tmp_path):
    """By headers alone: no value is read."""
    save(tmp_path)
    settings = ("platform=cpu", "model=hf", f"model.path={tmp_path}", f"tokenizer.path={tmp_path}")
    change(tmp_path, **{Q: torch.full((16, 16), torch.nan)})
    check_folders(config_of(*settings))
    change(tmp_path, **{Q: torch.zeros(16, 16, dtype=torch.int8)})
    with pytest.raises(ValueError, match=rf"^roles\.actor\.model\.path={tmp_path}: {Q} has the dtype int8"):
        check_folders(config_of(*settings))
    change(tmp_path, **{Q: None})
    with pytest.raises(ValueError, match=rf"^roles\.actor\.model\.path={tmp_path}: the weights lack {Q}"):
        check_folders(config_of(*settings))
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/generation_config\.json is not JSON, but cut off"):
        check_folders(config_of(*settings))
    random = config_of("platform=cpu")
    check_folders(random)
