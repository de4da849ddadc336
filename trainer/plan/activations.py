"""GPU memory of a pass that no buffer holds: what a forward pass keeps for the backward pass, and what both work with.

Bytes of one token in one layer. An element has e bytes, hidden states have size h, queries q (all heads), keys and
values k each, the MLP f:

    both norms       2 (4 h + 4 + 2 e h)     torch: an fp32 copy, the scale, the normalised, the result
                     2 (4 + 2 e h)           fused: the input in place of the fp32 copy and the normalised
    attention        e (2 q + 3 k) + e q     torch: turned queries and keys, the joint projection, mixed values
                     e (q + 2 k) + e q       fused: queries, keys, values, mixed values
                     4 heads                 log of each softmax's sum; no scores are kept (flash attention)
    MLP              5 e f                   torch: gate and up, up and gate once more, their product
                     3 e f                   fused: gate and up, their product

A mixture has its MLP once for each expert of a token, and the token before and after it. What
``training.recompute=selective`` keeps is all but the MLP, ``full`` keeps a layer's input (e h) alone; then one layer
at a time is there whole. Beside them are the ends of the model (last norm, head, and what log-probs are made with,
see :mod:`trainer.algo.log_probs`), or the gradients of one MLP, whichever is more. Tensor-parallel ranks share all of
it but the hidden states that meet the output layer. An earlier pipeline stage keeps as many more micro-batches as
stages follow. Context-parallel ranks share all of it, and one layer at a time works with the keys and values of all, as
they were gathered and as chunks see them, and with the gradients of both. The tests compare this with the tensors of
real passes, within 10 %.

Simplified: where no flash attention runs (on the CPU, in fp32), scores and gathered keys are kept too, which are not
counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.common.multiples import divide_up
from trainer.config.roles import role_spec
from trainer.config.schema import Config, ModelConfig
from trainer.plan.layout import ITEM_BYTES

_CHUNK_BYTES = {"torch": 5 << 26, "liger": 1 << 29, "te": 5 << 26}  # of the logits that exist at the same time
_LOGIT_BYTES = 20  # of one logit, where all of them are fewer


@dataclass(frozen=True)
class LayerBytes:
    """Of one token in one layer. ``gradients``: the most that the MLP's backward pass adds."""

    attention: int
    mlp: int
    gradients: int

    @property
    def whole(self) -> int:
        return self.attention + self.mlp


def layer_bytes(model: ModelConfig) -> LayerBytes:
    """What a layer keeps of one token where nothing is computed again; see above."""
    item, hidden = ITEM_BYTES[model.dtype], model.hidden_size
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    is_fused = model.kernels != "torch"
    norms = 2 * _norm_bytes(model)
    joint = 0 if is_fused else queries + 2 * keys
    attention = item * (queries + keys + (joint or keys) + queries) + 4 * model.heads
    per_expert = item * (3 if is_fused else 5) * model.ffn_size
    chosen = model.num_experts_per_tok if model.num_experts is not None else None
    mlp = per_expert if chosen is None else chosen * (per_expert + 2 * item * hidden)
    return LayerBytes(norms + attention, mlp, item * (hidden + (1 if is_fused else 3) * model.ffn_size * (chosen or 1)))


def _norm_bytes(model: ModelConfig) -> int:
    item, hidden = ITEM_BYTES[model.dtype], model.hidden_size
    own = item * hidden if model.kernels != "torch" else (4 + item) * hidden
    return own + 4 + item * hidden


def training_bytes(config: Config, role: str, *, tokens: int, vocab_size: int, stage: int) -> int:
    """At the peak of a forward and backward pass, on a rank of a pipeline stage.

    Args:
        tokens: of a micro-batch, padding included.
        vocab_size: entries of the tokenizer.
    """
    model, parallel, layer = config.roles[role].model, config.parallel, layer_bytes(config.roles[role].model)
    kept, again = {
        "none": (layer.whole, 0),
        "selective": (layer.attention, layer.mlp),
        "full": (ITEM_BYTES[model.dtype] * model.hidden_size, layer.whole),
    }[config.training.recompute]
    gathered, tokens = _gathered_bytes(config, role, tokens), divide_up(tokens, parallel.cp)
    layers, in_flight = model.layers // parallel.pp, parallel.pp - stage
    if parallel.vpp > 1:  # of Megatron's interleaved schedule: chunks in flight over those of the stage
        in_flight = 1 + (2 * (parallel.pp - stage - 1) + 1) / parallel.vpp
    working = tokens * again // parallel.tp + max(tokens * layer.gradients // parallel.tp, 2 * gathered)
    if stage == parallel.pp - 1:  # the ends have gone when the last layer's backward pass begins
        ends = tokens * _end_bytes(config, role) // parallel.tp + _head_bytes(config, role, tokens, vocab_size)
        working = max(working, ends)
    return int(tokens * layers * kept * in_flight / parallel.tp) + working


def forward_bytes(config: Config, role: str, *, tokens: int, vocab_size: int, stage: int) -> int:
    """At the peak of a forward pass without a backward pass: the tensors of an MLP, an attention or the head; of a
    mixture too many, since its experts run one after the other."""
    model, parallel, layer = config.roles[role].model, config.parallel, layer_bytes(config.roles[role].model)
    hidden, gathered = ITEM_BYTES[model.dtype] * model.hidden_size, _gathered_bytes(config, role, tokens)
    tokens = divide_up(tokens, parallel.cp)
    attention = tokens * (layer.attention - 2 * _norm_bytes(model)) // parallel.tp + gathered
    working = max(attention, tokens * layer.mlp // parallel.tp) + tokens * 4 * hidden // parallel.tp
    if stage == parallel.pp - 1:
        working = max(working, tokens * 4 * hidden + _head_bytes(config, role, tokens, vocab_size))
    return working


def _gathered_bytes(config: Config, role: str, tokens: int) -> int:
    """Keys and values of a micro-batch's ``tokens`` where ranks share sequences: gathered, and once more in the order
    of the chunks that see them, of which a rank's two see 2 cp + 1 of 2 cp together."""
    model, cp = config.roles[role].model, config.parallel.cp
    if cp == 1:
        return 0
    keys_and_values = 2 * model.kv_heads * model.head_dim * ITEM_BYTES[model.dtype] // config.parallel.tp
    return tokens * keys_and_values * (4 * cp + 1) // (2 * cp)


def longest_sequence(config: Config) -> int:
    return config.rollout.max_prompt_tokens + config.rollout.max_new_tokens


def micro_batch_tokens(config: Config) -> int:
    """The most tokens of a micro-batch, padding included."""
    algo, longest = config.algo, longest_sequence(config)
    if algo.micro_batch_tokens is None:
        return algo.micro_batch_size * longest
    return max(algo.micro_batch_tokens, longest)


def _end_bytes(config: Config, role: str) -> int:
    """Of one token: the last norm, what the head reads, and the fp32 tensors of both backward passes."""
    model = config.roles[role].model
    item = ITEM_BYTES[model.dtype]
    read = 4 if role_spec(config, role).has_value_head else item
    return _norm_bytes(model) + (read + 3 * 4 + item) * model.hidden_size


def _head_bytes(config: Config, role: str, tokens: int, vocab_size: int) -> int:
    """What log-probs are made with: some tokens' logits; the gradient of the output layer, in fp32 and rounded, where
    they are more than one chunk; the gathered hidden states of tensor-parallel ranks, and their gradient."""
    if role_spec(config, role).has_value_head:
        return 0
    model, tp = config.roles[role].model, config.parallel.tp
    rows = divide_up(model.embedding_rows(vocab_size), tp)
    logits, chunk = tokens * rows * _LOGIT_BYTES, _CHUNK_BYTES[model.kernels]
    item = ITEM_BYTES[model.dtype]
    weight = rows * model.hidden_size * (item if logits <= chunk else 4 + item)
    gathered = 2 * tokens * model.hidden_size * item if tp > 1 else 0
    return min(logits, chunk) + weight + gathered
