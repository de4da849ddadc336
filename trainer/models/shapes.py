"""The matrices of a layer, one table for all who count or check them: planned bytes, FLOPs, files.

Names are those of Hugging Face's Llama family; mixtures' experts have an MLP's names, whatever their files call them.
Megatron keeps query, key and value in one tensor, and gate and up projection in another.
"""

from __future__ import annotations

from trainer.config.schema import ModelConfig

Shape = tuple[int, int]  # outputs, inputs

QKV = ("q_proj", "k_proj", "v_proj")
ATTENTION = (*QKV, "o_proj")
GATE_AND_UP = ("gate_proj", "up_proj")
MLP = (*GATE_AND_UP, "down_proj")
ROUTER = "gate"


def layer_matrices(model: ModelConfig) -> dict[str, Shape]:
    """Name -> shape; those of ``MLP`` are of one expert, and the router's is there, in a mixture of experts."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    hidden, ffn = model.hidden_size, model.ffn_size
    router = {} if model.num_experts is None else {ROUTER: (model.num_experts, hidden)}
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
        **router,
    }


def elements(model: ModelConfig, *names: str) -> int:
    """Elements of the matrices of ``names`` together."""
    shapes = layer_matrices(model)
    return sum(shapes[name][0] * shapes[name][1] for name in names)
