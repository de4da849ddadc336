"""Tokens for policy losses to be tried on."""

import torch
from torch import Tensor

from trainer.algo.policy_losses import PolicyTokens


def policy_tokens(old_log_probs: Tensor, *, advantages: Tensor, response_mask: Tensor) -> PolicyTokens:
    """[b, s] each; the engine's log-probs are the old ones, and nothing is truncated."""
    return PolicyTokens(
        old_log_probs=old_log_probs,
        engine_log_probs=old_log_probs,
        advantages=advantages,
        response_mask=response_mask,
        truncated=torch.zeros(len(old_log_probs), dtype=torch.bool),
        weights_step=0,
    )
