"""The batches of a step: sequences, what a rollout drew, and the experience that roles train on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from trainer.algo.policy_losses import PolicyTokens

SequencesT = TypeVar("SequencesT", bound="Sequences")
RolloutBatchT = TypeVar("RolloutBatchT", bound="RolloutBatch")


@dataclass(frozen=True)
class Sequences:
    """n sequences of one rank: prompt, response, padding on the right. Of several turns, what the environment has said
    between responses is a hole in the response mask.

    Ranks that hold a model together have the same ones. A subclass adds what is known of each sequence, [n], or of each
    token, [n, s-1], aligned with ``response_mask``; None where a run has no such thing.

    Attributes:
        tokens: [n, s] int64.
        response_mask: [n, s-1] bool; column t is about tokens[:, t + 1]: True where that is a response token.
    """

    tokens: Tensor
    response_mask: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self: SequencesT, rows: Tensor | slice) -> SequencesT:
        """The given sequences."""
        rows = rows if isinstance(rows, slice) else rows.to(self.tokens.device)
        return dataclasses.replace(self, **{name: tensor[rows] for name, tensor in self.tensors().items()})

    def cut(self: SequencesT, columns: int) -> SequencesT:
        """The first ``columns`` of ``tokens``, and what is about them."""
        surplus = self.tokens.shape[1] - columns
        per_token = {name: tensor for name, tensor in self.tensors().items() if tensor.dim() == 2}
        return dataclasses.replace(self, **{name: t[:, : t.shape[1] - surplus] for name, t in per_token.items()})

    def at_the_end(self, values: Tensor) -> Tensor:
        """values [n, s], one per column of ``tokens`` -> [n], that of each last response token, where a model has read
        the whole response."""
        mask = self.response_mask
        last = mask.shape[1] - mask.flip(1).int().argmax(dim=1, keepdim=True)
        return values.gather(1, last).squeeze(1)

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor of every field that holds one."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def lengths(self) -> Tensor:
        """[n]: columns of ``tokens`` up to and with the last response token (prompt and response; 0 without a
        response)."""
        mask = self.response_mask
        return (torch.arange(2, mask.shape[1] + 2, device=mask.device) * mask).amax(dim=1)


@dataclass(frozen=True)
class RolloutBatch(Sequences):
    """What a rollout drew, and what it is worth.

    Attributes:
        engine_log_probs: [n, s-1] fp32, the engine's own log-prob of each response token under the distribution that
            it was drawn from (after top-k, top-p and min-p); 0 elsewhere.
        truncated: [n] bool, cut off at the longest length, or ended by a limit of turns or tokens.
        scores: [n] fp32, what each response is paid, of several turns all together: by the environment, by ``reward``,
            or by judges.
        turn_rewards: [n, s-1] fp32, what of the score was paid for turns before the last, on the last token of each.
        weights_step: the PPO step that trained the weights it was drawn with; 0: those of the warm-up.
    """

    engine_log_probs: Tensor
    truncated: Tensor
    scores: Tensor
    turn_rewards: Tensor
    weights_step: int

    def paid(self: RolloutBatchT, scores: Tensor) -> RolloutBatchT:
        """The same with ``scores`` [n] paid in addition."""
        return dataclasses.replace(self, scores=self.scores + scores)


def joined(parts: Sequence[RolloutBatch], *, pad: int) -> RolloutBatch:
    """The rows of batches that were drawn with the same weights, one after the other, padded to the longest row.

    Args:
        pad: token that pads rows.
    """
    columns = max(part.tokens.shape[1] for part in parts)

    def filled(tensor: Tensor, part: RolloutBatch, name: str) -> Tensor:
        if tensor.dim() == 1:
            return tensor
        return functional.pad(tensor, (0, columns - part.tokens.shape[1]), value=pad if name == "tokens" else 0)

    names = parts[0].tensors()
    whole = {name: torch.cat([filled(getattr(part, name), part, name) for part in parts]) for name in names}
    return dataclasses.replace(parts[0], **whole)


@dataclass(frozen=True)
class Experience(RolloutBatch):
    """What roles train on. Everything per token is [n, s-1] fp32.

    Attributes:
        ref_log_probs: under the reference model; None where nothing reads them.
        old_log_probs: under the weights before this step's training, computed as training computes them; None: training
            itself gives them.
        entropy: of the distributions that the tokens are drawn from, under the same weights; None with them.
        kl: estimate of the KL divergence to the reference, not scaled; None without both log-probs.
        estimated_advantages: as the estimator gave them.
        advantages: what the actor's loss weighs tokens with: the same, or whitened, clipped, and times the importance
            weights.
        importance_weights: of the engine's tokens, see :mod:`trainer.algo.mismatch`; None where all weigh the same.
        values, returns: the critic's values before each token, and what they are to become; None without a critic.
    """

    ref_log_probs: Tensor | None
    old_log_probs: Tensor | None
    entropy: Tensor | None
    kl: Tensor | None
    estimated_advantages: Tensor
    advantages: Tensor
    importance_weights: Tensor | None
    values: Tensor | None
    returns: Tensor | None

    def policy_tokens(self, old_log_probs: Tensor) -> PolicyTokens:
        """What a policy loss may read of it, with these log-probs from before training."""
        return PolicyTokens(
            old_log_probs=old_log_probs,
            engine_log_probs=self.engine_log_probs,
            advantages=self.advantages,
            response_mask=self.response_mask,
            truncated=self.truncated,
            weights_step=self.weights_step,
        )
