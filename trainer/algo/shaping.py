"""What becomes of scores and advantages besides what a verifier and an estimator say of them."""

import torch
from torch import Tensor


def overlong_penalty(token_counts: Tensor, *, limit: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv:2503.14476 eq. 13) for [n] responses of ``token_counts`` tokens.

    0 up to ``limit - buffer`` tokens, from there linearly to -1 at ``limit``, the longest that a response can be.
    """
    return -((token_counts - (limit - buffer)) / buffer).clamp(0.0, 1.0).to(torch.float32)
