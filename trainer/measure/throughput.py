"""How fast a PPO step went: real tokens per second and model FLOPs utilisation, per phase and of the step.

Real tokens are those of prompts and responses, padding not counted; in the rollout, the tokens drawn. A phase that
passes over them several times (``algo.epochs``) counts them each time; the turns of an episode count each token once.
The step counts each of its tokens once, however many passes it takes, over the seconds of all its phases save
evaluations and checkpoints; its FLOPs are those of all phases together. See :mod:`trainer.models.flops` for what a FLOP
is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trainer.config.roles import role_spec, trained_roles
from trainer.config.schema import Config
from trainer.data.batch import Sequences
from trainer.megatron.groups import sum_over_ranks
from trainer.models.flops import TRAINING_PASSES, forward_flops, peak_flops_per_second

NOT_OF_THE_STEP = ("evaluate", "checkpoint")


@dataclass(frozen=True)
class Work:
    """What was done in some phase, all ranks together."""

    tokens: float
    flops: float


@dataclass(frozen=True)
class StepWork:
    """The work of one PPO step.

    Attributes:
        phases: phase -> its work; phases that did not take place may be among them.
        tokens: real tokens of the step's sequences.
        ranks: devices that shared the work.
        peak_flops_per_second: of one device, None where it is not known.
    """

    phases: Mapping[str, Work]
    tokens: float
    ranks: int
    peak_flops_per_second: float | None

    def rates(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """``tokens_per_second/<phase>`` and ``mfu/<phase>`` of the phases that took ``seconds``, and of ``step``.

        Tokens are of all ranks together; MFU, in [0, 1], is the mean over the ranks. Without a peak there is no MFU.
        """
        done = {name: work for name, work in self.phases.items() if name in seconds}
        step_seconds = sum(value for name, value in seconds.items() if name not in NOT_OF_THE_STEP)
        times = {**{name: seconds[name] for name in done}, "step": step_seconds}
        done["step"] = Work(self.tokens, sum(work.flops for work in done.values()))
        rates = {f"tokens_per_second/{name}": work.tokens / times[name] for name, work in done.items()}
        rates["tokens_per_second_per_rank/step"] = rates["tokens_per_second/step"] / self.ranks
        if self.peak_flops_per_second is not None:
            available = self.ranks * self.peak_flops_per_second
            rates |= {f"mfu/{name}": work.flops / times[name] / available for name, work in done.items()}
        return rates


def of_step(config: Config, batch: Sequences, *, vocab_size: int, scoring: Mapping[str, str]) -> StepWork:
    """The work that a PPO step on ``batch`` (this rank's) is. Collective over the data-parallel group.

    Args:
        vocab_size: entries of the tokenizer.
        scoring: phase of one forward pass over the batch -> the role whose pass it is.
    """
    lengths = batch.lengths().double()
    sums = sum_over_ranks(
        {"tokens": lengths.sum(), "square_tokens": lengths.square().sum(), "drawn": batch.response_mask.sum()}
    )
    tokens = sums["tokens"]

    def forward(role: str) -> float:
        model = config.roles[role].model
        return forward_flops(
            model,
            vocab_size=model.embedding_rows(vocab_size),
            value_head=role_spec(config, role).has_value_head,
            tokens=tokens,
            square_tokens=sums["square_tokens"],
            predicted=sums["drawn"],
        )

    epochs = config.algo.epochs
    flops = {role: forward(role) for role in config.roles}
    phases = {"rollout": Work(sums["drawn"], flops["actor"])}
    phases |= {phase: Work(tokens, flops[role]) for phase, role in scoring.items()}
    trainings = {role: flops[role] * epochs * TRAINING_PASSES for role in trained_roles(config)}
    phases |= {f"train_{role}": Work(tokens * epochs, work) for role, work in trainings.items()}
    device_name = torch.cuda.get_device_name() if config.platform.name == "cuda" else None
    return StepWork(
        phases=phases,
        tokens=tokens,
        ranks=config.world_size,
        peak_flops_per_second=peak_flops_per_second(config.platform, device_name=device_name),
    )
