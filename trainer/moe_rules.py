"""The rules about mixtures of experts and how their experts are spread; called by :mod:`trainer.rules`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.hf_architecture import check_family

if TYPE_CHECKING:
    from trainer.config import Config


def check_experts(config: Config) -> None:
    """A mixture of experts has enough of them, and the rollout engine can compute the actor's."""
    for role, role_config in config.roles.items():
        model, name = role_config.model, f"roles.{role}.model"
        if model.num_experts is None:
            continue
        chosen = model.num_experts_per_tok
        if chosen is None or chosen > model.num_experts:
            raise ValueError(
                f"{name}.num_experts={model.num_experts} with {name}.num_experts_per_tok="
                f"{'null' if chosen is None else chosen}: give 1 to {model.num_experts} experts per token, "
                "model.num_experts_per_tok=2 for example"
            )
    check_family(config.roles["actor"].model)


def check_expert_parallel(config: Config) -> None:
    """``parallel.expert`` divides the experts of every mixture, and the ranks of a pipeline stage."""
    size, ranks = config.parallel.expert, config.parallel.tp * config.data_parallel_size
    counts = {role: settings.model.num_experts for role, settings in config.roles.items() if settings.model.num_experts}
    if size > 1 and not counts:
        raise ValueError(
            f"parallel.expert={size}, but no role is a mixture of experts: use parallel.expert=1, or one such as "
            "model=tiny_moe"
        )
    if ranks % size or any(count % size for count in counts.values()):
        fits = [n for n in range(1, ranks + 1) if not (ranks % n or any(count % n for count in counts.values()))]
        experts = ", ".join(f"roles.{role}.model.num_experts={count}" for role, count in counts.items())
        raise ValueError(
            f"parallel.expert={size} does not divide the ranks of a pipeline stage, launch.nnodes * launch.nproc / "
            f"parallel.pp = {ranks}, and {experts}; these do: parallel.expert={', '.join(map(str, fits))}"
        )
