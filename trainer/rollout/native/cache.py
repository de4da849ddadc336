"""How large the key-value cache of ``rollout=native`` is, and how many rows it holds at once."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from trainer.common.multiples import divide_up, round_up
from trainer.config.schema import Config, ModelConfig
from trainer.plan.holdings import EngineBytes, engine_bytes
from trainer.plan.layout import ITEM_BYTES

MOST_ROWS = 1024  # at once; a decoding step with more is bound by arithmetic, so that more rows gain nothing
INVARIANT_ROWS = 64  # at once under rollout.batch_invariant, however many there are
_PRODUCT_PAGE_TOKENS = 16
_FLASH_PAGE_TOKENS = 256
_STATE_COLUMNS = 5


@dataclass(frozen=True)
class KvCache:
    """One rank's cache, in pages that hold the keys and values of some tokens in all layers of the rank.

    Attributes:
        rows: responses that are decoded at once, at most.
        row_tokens: prompt and response of one of them, at most.
        response_tokens: of these, of the response.
        pages: of all rows, and one that takes what nobody reads.
        token_bytes: of the keys and values of one token.
        table_bytes: of the rotary table.
    """

    rows: int
    row_tokens: int
    response_tokens: int
    page_tokens: int
    pages: int
    token_bytes: int
    table_bytes: int

    @property
    def pages_per_row(self) -> int:
        return divide_up(self.row_tokens, self.page_tokens)

    @property
    def page_bytes(self) -> int:
        """Of all pages."""
        return self.pages * self.page_tokens * self.token_bytes

    @property
    def size_bytes(self) -> int:
        """Of the whole region: pages, and what is known of each row (its numbers, pages, draws and results)."""
        row = 8 * _STATE_COLUMNS + 4 * self.pages_per_row + 8 + 4 * self.response_tokens
        row += (8 + 4 + 4) * (self.response_tokens + 1)
        return self.page_bytes + (self.rows + 1) * row + self.table_bytes


def of_run(config: Config, *, tokens_of_page: int | None = None) -> KvCache:
    """The cache of a validated config: as large as ``rollout.kv_cache_gib``, or else as all responses of a step on this
    rank need at their full length, though for :data:`MOST_ROWS` at most.

    Args:
        tokens_of_page: None: as our own attention wants it.

    Raises:
        ValueError: ``rollout.kv_cache_gib`` is too small for one row.
    """
    model, rollout, parallel = config.roles["actor"].model, config.rollout, config.parallel
    responses = config.algo.prompts_per_step * config.algo.responses_per_prompt
    return cache_of(
        model,
        row_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens,
        response_tokens=rollout.max_new_tokens,
        rows=INVARIANT_ROWS if rollout.batch_invariant else min(divide_up(responses, config.weight_copies), MOST_ROWS),
        page_tokens=tokens_of_page
        or page_tokens(
            cuda=config.platform.name == "cuda",
            dtype=model.dtype,
            row_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens,
        ),
        ranks=(parallel.tp, parallel.pp),
        cache_bytes=None if rollout.kv_cache_gib is None else int(rollout.kv_cache_gib * 2**30),
    )


def cache_of(
    model: ModelConfig,
    *,
    row_tokens: int,
    response_tokens: int,
    rows: int,
    page_tokens: int,
    ranks: tuple[int, int] = (1, 1),
    cache_bytes: int | None = None,
) -> KvCache:
    """A cache for ``rows`` rows, or for as many of them as ``cache_bytes`` hold.

    Args:
        ranks: tensor- and pipeline-parallel ranks that share the model.

    Raises:
        ValueError: it holds no row.
    """
    tp, pp = ranks
    token_bytes = model.layers // pp * (model.kv_heads // tp) * 2 * model.head_dim * ITEM_BYTES[model.dtype]
    pages_per_row = divide_up(row_tokens, page_tokens)
    if cache_bytes is not None:
        held = cache_bytes // (page_tokens * token_bytes) - 1
        if held < pages_per_row:
            needed = (pages_per_row + 1) * page_tokens * token_bytes
            raise ValueError(
                f"rollout.kv_cache_gib={cache_bytes / 2**30:g} holds {max(0, held) * page_tokens} tokens, and one row "
                f"of rollout.max_prompt_tokens + rollout.max_new_tokens = {row_tokens} needs {needed / 2**30:.3g} GiB: "
                "raise rollout.kv_cache_gib, or use null, which is as large as a step needs"
            )
        rows = min(rows, held // pages_per_row)
    return KvCache(
        rows=rows,
        row_tokens=row_tokens,
        response_tokens=response_tokens,
        page_tokens=page_tokens,
        pages=rows * pages_per_row + 1,
        token_bytes=token_bytes,
        table_bytes=2 * row_tokens * model.head_dim * ITEM_BYTES[model.dtype],
    )


def page_tokens(*, cuda: bool, dtype: str, row_tokens: int) -> int:
    """Tokens of one page, as the attention wants it that :mod:`trainer.rollout.native.attention` chooses."""
    if not cuda or dtype != "bf16":
        return _PRODUCT_PAGE_TOKENS
    return _FLASH_PAGE_TOKENS if has_block_tables() else round_up(row_tokens, _PRODUCT_PAGE_TOKENS)


def has_block_tables() -> bool:
    """Whether torch's variable-length attention reads paged keys and values (torch 2.13; 2.11 does not)."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return False
    return "block_table" in inspect.signature(varlen.varlen_attn).parameters


def planned(config: Config, *, vocab_size: int) -> EngineBytes:
    """The region of the cache, and on a GPU that of what the graphs of decoding steps need in between."""
    model, cache = config.roles["actor"].model, of_run(config)
    sizes = {"kv": (cache.size_bytes, f"{cache.rows} rows of {cache.row_tokens} tokens at once")}
    if config.platform.name == "cuda" and config.parallel.tp == config.parallel.pp == 1:
        sizes["graphs"] = (cache.rows * _step_bytes(model, vocab_size=vocab_size), "estimated")
    return engine_bytes(config, sizes, has_own_weights=False)


def _step_bytes(model: ModelConfig, *, vocab_size: int) -> int:
    """An estimate, for one row, of the tensors that a decoding step holds at once at its largest: the logits, their
    probabilities and a masked copy of these."""
    return model.embedding_rows(vocab_size) * (ITEM_BYTES[model.dtype] + 3 * ITEM_BYTES["fp32"])
