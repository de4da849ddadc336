"""Ranks that must compute in step although each decodes rows of its own: those over which experts are spread."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed

from trainer.config.schema import ModelConfig
from trainer.megatron.groups import expert_group
from trainer.rollout.native.experts import spreads_over_rows


@dataclass(frozen=True)
class Lockstep:
    """``group``: these ranks; None where each may go at its own pace."""

    group: distributed.ProcessGroup | None

    @classmethod
    def of(cls, model: ModelConfig) -> Lockstep:
        if model.num_experts is None or not spreads_over_rows(expert_group()):
            return cls(None)
        return cls(distributed.group.WORLD)

    def __bool__(self) -> bool:
        return self.group is not None

    def most(self, *values: int) -> list[int]:
        """Of each of these numbers the largest on any rank. Collective."""
        if self.group is None:
            return list(values)
        numbers = torch.tensor(values, device=torch.cuda.current_device())
        distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX, group=self.group)
        return numbers.tolist()
