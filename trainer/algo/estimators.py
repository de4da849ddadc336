"""How responses are credited: the contract of an advantage estimator, and the ones that are here.

The group ``advantages`` of the config names a class (``_target_``) and its fields; any dataclass that extends
:class:`AdvantageEstimator` will do, in this package or not. An estimator sees all responses of one rank before they are
split into minibatches and micro-batches. The responses to one question stand together on one rank, so the size of a
group is all that is needed to tell groups apart, and no split changes a result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.algo.advantages import gae, rewards_to_go, score_on_last_token
from trainer.algo.groups import GroupStatistics, group_statistics
from trainer.algo.masked import divide_or_zero, zero_padding


@dataclass(frozen=True)
class ScoredResponses:
    """One rank's responses of a step, and what they are paid.

    Attributes:
        rewards: [n, s], the score on the last token of a response, less the KL penalty on each where KL is a reward.
        response_mask: [n, s] bool.
        scores: [n], what the responses are paid, without KL; less its mean over the step where that is left out.
        truncated: [n] bool, cut off at the longest length.
        group_size: rows k * group_size up to (k + 1) * group_size - 1 are responses to one question; divides n.
        values: [n, s], the critic's value before each token; None without a critic.
        last_values: [n], its value after the last token; None without a critic.
    """

    rewards: Tensor
    response_mask: Tensor
    scores: Tensor
    truncated: Tensor
    group_size: int
    values: Tensor | None = None
    last_values: Tensor | None = None

    @property
    def sequence_rewards(self) -> Tensor:
        """[n]: each response's rewards, summed."""
        return zero_padding(self.rewards, mask=self.response_mask).sum(1)

    def in_groups(self, x: Tensor) -> GroupStatistics:
        """How [n] stands in its groups. Empty responses, which have no token to learn from, take no part."""
        return group_statistics(x, valid=self.response_mask.any(1), group_size=self.group_size)

    def on_every_token(self, x: Tensor) -> Tensor:
        """[n] per response -> [n, s]: the same for all of its tokens, zero elsewhere."""
        return zero_padding(x.float()[:, None].expand_as(self.response_mask), mask=self.response_mask)


Experience = ScoredResponses  # what estimators elsewhere may call it


class Estimate(NamedTuple):
    """``advantages`` [n, s] for the actor; ``returns`` [n, s] for the critic to learn, None without a critic."""

    advantages: Tensor
    returns: Tensor | None = None


class AdvantageEstimator(ABC):
    """Base of the estimator dataclasses: frozen, the fields are the keys of their YAML, no defaults in Python."""

    @property
    def needs_critic(self) -> bool:
        """Whether :meth:`estimate` reads values and gives returns; without one no critic is built."""
        return False

    @property
    def smallest_group(self) -> int:
        """Fewest responses per question that it can compare."""
        return 1

    def validate(self) -> None:
        """Check the fields before anything is launched; raises ValueError that names ``advantages.<field>``."""
        return

    @abstractmethod
    def estimate(self, experience: ScoredResponses) -> Estimate:
        """Advantages (and returns) of one rank's responses, zero off the mask. Called without gradients."""


def _check_unit_interval(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"advantages.{name}={value}: must be between 0 and 1")


class _OfCritic(AdvantageEstimator):
    """An estimator by GAE: of a critic's values, with a discount and perhaps their end of a truncated response."""

    gamma: float
    bootstrap_truncated: bool

    @property
    def needs_critic(self) -> bool:
        return True

    def _gae(self, experience: ScoredResponses, *, lam: float | Tensor) -> tuple[Tensor, Tensor]:
        """(advantages, returns), each [n, s], under a lambda."""
        assert experience.values is not None
        assert experience.last_values is not None
        bootstrap = experience.truncated & self.bootstrap_truncated
        return gae(
            experience.rewards,
            values=experience.values,
            response_mask=experience.response_mask,
            terminal_values=torch.where(bootstrap, experience.last_values, 0.0),
            gamma=self.gamma,
            lam=lam,
        )


@dataclass(frozen=True)
class Gae(_OfCritic):
    """Generalized advantage estimation (arXiv:1506.02438), for PPO: see :func:`trainer.algo.advantages.gae`.

    Fields:
        gamma, lam: discount and lambda, per token.
        bootstrap_truncated: a truncated response ends with the critic's value of what was written, instead of 0.
    """

    gamma: float
    lam: float
    bootstrap_truncated: bool

    def validate(self) -> None:
        _check_unit_interval("gamma", self.gamma)
        _check_unit_interval("lam", self.lam)

    def estimate(self, experience: ScoredResponses) -> Estimate:
        return Estimate(*self._gae(experience, lam=self.lam))


@dataclass(frozen=True)
class DecoupledGae(_OfCritic):
    """GAE whose returns have a lambda of their own (Yuan et al. 2025, VC-PPO, arXiv:2503.01491, section 3.2): the
    critic can learn unbiased returns (``critic_lam=1``) while advantages keep the lower variance of a smaller lambda.

    Fields:
        gamma, lam: discount, and the lambda of advantages.
        critic_lam: the lambda of returns.
        bootstrap_truncated: as :class:`Gae`.
    """

    gamma: float
    lam: float
    critic_lam: float
    bootstrap_truncated: bool

    def validate(self) -> None:
        for name in ("gamma", "lam", "critic_lam"):
            _check_unit_interval(name, getattr(self, name))

    def estimate(self, experience: ScoredResponses) -> Estimate:
        advantages, _ = self._gae(experience, lam=self.lam)
        _, returns = self._gae(experience, lam=self.critic_lam)
        return Estimate(advantages, returns)


@dataclass(frozen=True)
class Vapo(_OfCritic):
    """Length-adaptive GAE (Yue et al. 2025, VAPO, arXiv:2504.05118, section 4.2): of a response of l tokens

        lambda = 1 - 1 / (alpha l), at least 0

    for advantages, so that the weights of its later errors add up to alpha l; returns have ``critic_lam``.

    Fields:
        gamma: discount per token, 1 in the paper.
        alpha: 0.05 in the paper, whose responses have thousands of tokens.
        critic_lam: 1 in the paper.
        bootstrap_truncated: as :class:`Gae`.
    """

    gamma: float
    alpha: float
    critic_lam: float
    bootstrap_truncated: bool

    def validate(self) -> None:
        for name in ("gamma", "critic_lam"):
            _check_unit_interval(name, getattr(self, name))
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"advantages.alpha={self.alpha}: must be a finite number greater than 0")

    def estimate(self, experience: ScoredResponses) -> Estimate:
        tokens = experience.response_mask.sum(1).clamp(min=1)
        advantages, _ = self._gae(experience, lam=(1 - 1 / (self.alpha * tokens)).clamp(min=0.0))
        _, returns = self._gae(experience, lam=self.critic_lam)
        return Estimate(advantages, returns)


@dataclass(frozen=True)
class Grpo(AdvantageEstimator):
    """Group-relative advantages (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2): on every token of
    response i of a question

        A_i = (R_i - mean(R)) / std(R)

    Fields:
        divide_by_std: False leaves the division out, which gives questions that are almost always or almost never
            answered more weight than others (Liu et al. 2025, "Dr. GRPO", arXiv:2503.20783, section 3.1). Its other
            remark, on lengths, is ``algo.loss_aggregation=fixed_length``.

    The deviation has n - 1 below the sum of squares, as in TRL and verl; the paper does not say. No epsilon is added to
    it: where all rewards of a question are equal, its advantages are 0.
    """

    divide_by_std: bool

    @property
    def smallest_group(self) -> int:
        return 2

    def estimate(self, experience: ScoredResponses) -> Estimate:
        group = experience.in_groups(experience.sequence_rewards)
        advantages = group.centred
        if self.divide_by_std:
            advantages = torch.where(group.deviation > 0, advantages / group.deviation, 0.0)
        return Estimate(experience.on_every_token(advantages))


@dataclass(frozen=True)
class Rloo(AdvantageEstimator):
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740, section 2.2): a response's
    reward, less the mean of the *other* responses to its question,

        A_i = R_i - sum_(j != i) R_j / (n - 1) = n / (n - 1) (R_i - mean(R))

    A whole response is one action, so the KL in its reward is that of the whole response."""

    @property
    def smallest_group(self) -> int:
        return 2

    def estimate(self, experience: ScoredResponses) -> Estimate:
        group = experience.in_groups(experience.sequence_rewards)
        return Estimate(experience.on_every_token(group.centred * divide_or_zero(group.count, group.count - 1)))


@dataclass(frozen=True)
class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): the discounted sum of the rewards from each token on. The KL is on
    single tokens, so advantages differ within a response. What takes the critic's place is
    ``algo.whiten_advantages=true``: the mean and deviation of the whole step, over all ranks.

    Fields:
        gamma: discount per token, 1 in the paper.
        group_baseline: subtract the mean score of the question's responses first ("REINFORCE++-baseline").
    """

    gamma: float
    group_baseline: bool

    @property
    def smallest_group(self) -> int:
        return 2 if self.group_baseline else 1

    def validate(self) -> None:
        _check_unit_interval("gamma", self.gamma)

    def estimate(self, experience: ScoredResponses) -> Estimate:
        rewards, mask = experience.rewards, experience.response_mask
        if self.group_baseline:
            mean = experience.scores - experience.in_groups(experience.scores).centred
            rewards = rewards - score_on_last_token(mean, response_mask=mask)
        return Estimate(rewards_to_go(rewards.float(), response_mask=mask, gamma=self.gamma))
