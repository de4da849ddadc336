"""What :class:`trainer.rollout.vllm_engine.engine.VllmEngine` holds, from the config alone. Imports no vllm."""

from __future__ import annotations

from trainer.common.multiples import round_up
from trainer.config.schema import Config, ModelConfig
from trainer.plan.holdings import EngineBytes, engine_bytes
from trainer.plan.layout import ITEM_BYTES, WHOLE, parameters
from trainer.rollout.native.cache import KvCache, of_run

PAGE_TOKENS = 32  # what vLLM calls a block; its attention on CPUs takes multiples of this
_VOCABULARY_MULTIPLE = 64
_SCALES = 4  # of every layer's attention, one fp32 number each


def cache(config: Config) -> KvCache:
    """Pages as large as vLLM's blocks, of which it keeps one for itself."""
    return of_run(config, tokens_of_page=PAGE_TOKENS)


def weight_bytes(model: ModelConfig, *, vocab_size: int) -> int:
    """Of the parameters, whose vocabulary vLLM pads, and of the tables that no weight sync brings."""
    found = parameters(model, vocab_size=vocab_size, value_head=False, parallel=WHOLE)
    rows = model.embedding_rows(vocab_size)
    padding = (round_up(rows, _VOCABULARY_MULTIPLE) - rows) * model.hidden_size * ITEM_BYTES[model.dtype]
    rotary = model.max_length * model.head_dim * ITEM_BYTES[model.dtype]
    scales = _SCALES * model.layers * ITEM_BYTES["fp32"]
    in_vocabulary = padding * (1 if model.tie_embeddings else 2)
    return sum(parameter.size_bytes for parameter in found) + in_vocabulary + rotary + scales


def planned(config: Config, *, vocab_size: int) -> EngineBytes:
    """vLLM's model, whole on every rank, and its keys and values."""
    kv = cache(config)
    sizes = {
        "weights": (
            weight_bytes(config.roles["actor"].model, vocab_size=vocab_size),
            "synced from the actor every step",
        ),
        "kv": (kv.page_bytes, f"{kv.rows} rows of {kv.row_tokens} tokens at once"),
    }
    return engine_bytes(config, sizes, has_own_weights=True)
