"""What a checkpoint reads of a role and writes into it: this rank's shares of weights and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trainer.megatron.sharding import Share
from trainer.memory.regions import RoleRegions
from trainer.roles.model import RoleModel
from trainer.roles.weights import RoleWeights


@dataclass(frozen=True)
class HostCopies:
    """What host memory holds of a sleeping role, each None where nothing does.

    Attributes:
        weights: name -> tensor.
        state: copies of the optimizer state's pieces.
    """

    weights: Mapping[str, Tensor] | None
    state: Sequence[Tensor] | None

    @classmethod
    def of(cls, name: str, weights: RoleWeights, regions: RoleRegions) -> HostCopies:
        keeper = regions.keeper_of_sleeping_state
        return cls(
            weights=weights.kept(name) if regions.is_asleep("rest") else None,
            state=None if keeper is None else keeper.host_tensors(),
        )

    @property
    def absent_kinds(self) -> set[str]:
        """The buffer kinds that must be awake to be read."""
        return ({"param"} if self.weights is None else set()) | ({"optim"} if self.state is None else set())

    def shares(self, name: str, model: RoleModel, weights: RoleWeights, regions: RoleRegions) -> list[Share]:
        """All shares, read from here where that is possible."""
        own = model.tensors()
        of_weights = _shares_of(own) if self.weights is None else weights.shares_of(name, kind="weights")
        state = model.shares(own)
        if model.state is not None:
            pieces = self.state
            if pieces is None:
                regions.wait_for_optimizer_state()
                pieces = model.state.pieces
            found = own if self.weights is None else self.weights
            state = [model.state.share_in(pieces, share, weights=found) for share in state]
        return [*of_weights, *weights.shares_of_further_tags(), *state]


def awake_shares(model: RoleModel, weights: RoleWeights) -> list[Share]:
    """All shares of an awake role: views of the tensors themselves."""
    own = model.tensors()
    return [*_shares_of(own), *weights.shares_of_further_tags(), *model.shares(own)]


def _shares_of(weights: Mapping[str, Tensor]) -> list[Share]:
    return [Share(name, 0, {"weights": tensor.detach().view(-1)}) for name, tensor in weights.items()]
