"""Model FLOPs of passes over a batch, and the peak of devices: what model FLOPs utilisation (MFU) is the ratio of.

As in PaLM (arXiv:2204.02311, appendix B), each weight of a matrix multiplication costs 2 FLOPs a token in a forward
pass and 6 in forward and backward pass together, to which attention adds scores and mixed values. Attention is counted
over the causal half and over each sequence's own length, as Megatron-LM's training script counts it (PaLM counts the
whole square). The vocabulary projection counts, the embedding look-up does not. What is computed for padding, or a
second time, does not count: that is the difference to hardware FLOPs.

Simplified: norms, activations, rotary positions, softmax and loss are left out, as everywhere.
"""

from __future__ import annotations

from trainer.config.schema import ModelConfig, PlatformConfig
from trainer.models.shapes import ATTENTION, MLP, ROUTER, elements

TRAINING_PASSES = 3  # a backward pass costs two forward passes

# Part of the name that CUDA gives the device -> peak dense bf16 TFLOP/s, from NVIDIA's data sheets (which print twice
# as much as well, "with sparsity"). The first that fits counts.
_PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 149.7,
    "RTX 4090": 165.2,
}


def matmul_parameters(model: ModelConfig) -> int:
    """Weights of the body that a token is multiplied with: four attention projections, three of the MLP (of a mixture,
    the router and three of each of its experts)."""
    mlp = elements(model, *MLP)
    if model.num_experts is not None:
        assert model.num_experts_per_tok is not None
        mlp = model.num_experts_per_tok * mlp + elements(model, ROUTER)
    return model.layers * (elements(model, *ATTENTION) + mlp)


def forward_flops(
    model: ModelConfig, *, vocab_size: int, value_head: bool, tokens: float, square_tokens: float, predicted: float
) -> float:
    """Of one forward pass; times :data:`TRAINING_PASSES` with the backward pass.

    Args:
        vocab_size: rows of the output layer.
        value_head: the model has one in its place, which gives a value of every token.
        tokens: sum over sequences of their lengths.
        square_tokens: sum of the squares of the lengths.
        predicted: tokens whose log-probs are computed, those of responses; no other meets the output layer.
    """
    head = model.hidden_size * (tokens if value_head else vocab_size * predicted)
    # Two products (scores, mixed values), 2 FLOPs each, over half of the square.
    attention = 2 * model.layers * model.heads * model.head_dim * square_tokens
    return 2 * (matmul_parameters(model) * tokens + head) + attention


def break_even_length(model: ModelConfig) -> float:
    """Tokens of a sequence whose attention over each other costs as much as the weights that they meet."""
    return matmul_parameters(model) / (model.layers * model.heads * model.head_dim)


def peak_flops_per_second(platform: PlatformConfig, *, device_name: str | None) -> float | None:
    """Dense bf16 peak of one device: ``platform.peak_tflops``, else by its name; None where it is not known, as for
    CPUs (``device_name`` None)."""
    if platform.peak_tflops is not None:
        return platform.peak_tflops * 1e12
    known = (tflops for name, tflops in _PEAK_TFLOPS.items() if device_name is not None and name in device_name)
    peak = next(known, None)
    return None if peak is None else peak * 1e12
