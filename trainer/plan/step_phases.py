"""What sleeps in a run and what every phase of its loop uses, as the scheduler takes it.

A role's parameters and what lies beside them sleep together, so they are one region, ``<role>/param``; ``<role>/grad``
and ``<role>/optim`` are the others. The rollout engine is one, ``engine``. A copy of a weights tag in GPU memory,
``<role>/weights/<tag>``, is awake in all phases or in none: what is not resident comes from the host at every switch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from trainer.config.roles import REFERENCE, RoleSpec, role_specs
from trainer.config.schema import Config
from trainer.plan import NO_BUFFER, Plan, PlanRow, make_plan, weights_kind
from trainer.plan.holdings import ENGINE, EngineBytes, backed_up_tags
from trainer.plan.keepers import OWN_KEEPERS, kept_bytes
from trainer.plan.reserve import reserve_bytes
from trainer.plan.role_bytes import RoleBytes, role_bytes
from trainer.plan.schedule import LoopPhase, Move, Region


def tag_region(role: str, tag: str) -> str:
    """The region of a weights tag's copy in GPU memory."""
    return f"{role}/weights/{tag}"


@dataclass(frozen=True)
class StepPhases:
    """Regions and phases of one rank of a pipeline stage.

    Attributes:
        reserves: phase -> bytes that no region holds, where they are measured.
    """

    config: Config
    plan: Plan
    sizes: Mapping[str, RoleBytes]
    engine: EngineBytes
    vocab_size: int
    stage: int
    reserves: Mapping[str, int]

    @classmethod
    def of(
        cls, config: Config, *, vocab_size: int, engine: EngineBytes, stage: int, reserves: Mapping[str, int]
    ) -> StepPhases:
        sizes = {role: role_bytes(config, role, vocab_size=vocab_size, stage=stage) for role in config.roles}
        return cls(config, make_plan(config), sizes, engine, vocab_size, stage, reserves)

    @property
    def switched_tags(self) -> list[str]:
        """The actor's tags that a step switches between: the reference's, and its own if that restores its weights."""
        if not self.config.algo.uses_reference:
            return []
        kept = backed_up_tags(self.plan, role_specs(self.config)["actor"])
        return [tag for tag in kept if tag in ("actor", REFERENCE)]

    def regions(self, resident: Collection[str]) -> list[Region]:
        found = [region for spec in role_specs(self.config).values() for region in self._of_role(spec, resident)]
        found.append(Region(name=ENGINE, size_bytes=sum(h.train_bytes for h in self.engine.holdings)))
        size = self.sizes["actor"].tag
        found += [Region(name=tag_region("actor", tag), size_bytes=size) for tag in self.switched_tags]
        return [region for region in found if region.size_bytes]

    def _of_role(self, spec: RoleSpec, resident: Collection[str]) -> Iterator[Region]:
        name, sizes = spec.name, self.sizes[spec.name].kinds
        yield self._param_region(spec, resident)
        if spec.is_trained:
            grad, optim = self.plan.row(name, "grad"), self.plan.row(name, "optim")
            yield _kept_by_saver(grad, sizes["grad"]) if grad.saver_backup else _free(grad, sizes["grad"])
            kept = kept_bytes(
                optim.keeper,
                sizes["optim"],
                main_params=self.sizes[name].main_params,
                optim_format=self.config.memory.optim_format,
            )
            copied = kept.disk or kept.host
            own = Region(
                name=optim.tag,
                size_bytes=sizes["optim"],
                leave_bytes=copied,
                return_bytes=copied,
                copies_beside_work=True,
            )
            yield own if optim.keeper in OWN_KEEPERS else _kept_by_saver(optim, sizes["optim"])

    def _param_region(self, spec: RoleSpec, resident: Collection[str]) -> Region:
        """Parameters and rest. The saver copies at every sleep; a resident tag restores them without a copy."""
        name, sizes = spec.name, self.sizes[spec.name]
        row = self.plan.row(name, weights_kind(self.plan, name))
        region = Region(name=f"{name}/param", size_bytes=sizes.kinds["param"] + sizes.kinds["rest"])
        if row.keeper == "backuper" and name not in resident:
            region = replace(region, leave_bytes=sizes.tag_share if spec.is_trained else 0, return_bytes=sizes.tag)
        if row.keeper == "main_params":
            main = sizes.main_params
            region = replace(region, return_bytes=main, rebuilt_from=f"{name}/optim", rebuild_bytes=main)
        if row.saver_backup:
            copied = sizes.kinds[row.kind]
            again = sizes.tag if row.keeper == "saver" and name in set(self.switched_tags) - set(resident) else 0
            out, back = (
                region.leave_bytes + copied,
                region.return_bytes + copied + again,
            )  # a wake-up restores the tag too
            region = replace(region, leave_bytes=out, return_bytes=back, leaves_unchanged=True)
        return region

    # ---- phases ----------------------------------------------------------------------------------------------------

    def phases(self, resident: Collection[str]) -> list[LoopPhase]:
        """Those of a step in order, then the occasional ones."""
        always = frozenset(tag_region("actor", tag) for tag in resident)
        return [replace(phase, uses=phase.uses | always) for phase in self._phases()]

    def _phases(self) -> Iterator[LoopPhase]:
        specs, actor, engine = role_specs(self.config), self._forward("actor"), frozenset({ENGINE})
        has_own_weights = self.engine.has_own_weights
        if has_own_weights:
            yield self._phase("sync", actor | engine, role=None)
        rollout = engine if has_own_weights else actor | engine
        yield self._phase("rollout", rollout, role="actor")
        for name, spec in specs.items():
            if spec.is_judge:
                yield self._phase(f"{name}_scores", self._forward(name), role=name)
        weights = frozenset({"actor/param"})
        own = self.plan.row("actor", weights_kind(self.plan, "actor")).keeper in ("backuper", "main_params")
        algo = self.config.algo
        switched = weights if own and algo.uses_reference else frozenset[str]()
        if algo.uses_reference:
            yield replace(self._phase("ref_log_probs", weights, role="actor"), replaces=switched)
        has_pass = algo.critic_warmup_steps > 0 or not algo.old_log_probs_come_from_training
        if has_pass:
            yield replace(self._phase("log_probs", actor, role="actor"), restores=switched)
        if "critic" in specs:
            yield self._phase("values", self._forward("critic"), role="critic")
        trained = [name for name in ("critic", "actor") if name in specs]
        for name in trained:
            uses = self._training(name)
            restores = frozenset[str]() if has_pass else switched & uses
            trains = self._phase(f"train_{name}", uses, role=name, trains=True)
            yield replace(trains, changes=uses, restores=restores)
        yield replace(self._phase("evaluate", rollout | actor, role="actor"), in_every_step=False)
        for name in trained:
            setting_up = self._phase(f"warm_up {name}", self._training(name), role=name, trains=True)
            yield replace(setting_up, in_every_step=False)

    def _phase(self, name: str, uses: frozenset[str], *, role: str | None, trains: bool = False) -> LoopPhase:
        estimated = reserve_bytes(self.config, role, trains=trains, vocab_size=self.vocab_size, stage=self.stage)
        return LoopPhase(name=name, uses=uses, reserve_bytes=self.reserves.get(name, estimated))

    def _forward(self, role: str) -> frozenset[str]:
        """Rebuilding reads main params; if the saver keeps the optimizer state, that wakes the whole of it."""
        weights, optim = self.plan.row(role, weights_kind(self.plan, role)), self.plan.row(role, "optim")
        reads_optim = weights.keeper == "main_params" and optim.keeper not in OWN_KEEPERS
        return frozenset({f"{role}/param", *([optim.tag] if reads_optim else [])})

    def _training(self, role: str) -> frozenset[str]:
        kinds = [row.kind for row in self.plan.of_role(role) if row.keeper != NO_BUFFER and row.kind != "rest"]
        return frozenset({f"{role}/param", *(f"{role}/{kind}" for kind in kinds)})

    # ---- what is copied whatever sleeps ----------------------------------------------------------------------------

    def switches(self, resident: Collection[str]) -> list[Move]:
        """Copies of weights tags that lie in host memory, but for those that bring a region of its own bytes back."""
        sizes = self.sizes["actor"]
        tags, size = set(self.switched_tags) - set(resident), sizes.tag
        moves = [Move(tag_region("actor", REFERENCE), "ref_log_probs", False, size, False)] if REFERENCE in tags else []
        row = self.plan.row("actor", weights_kind(self.plan, "actor"))
        if "actor" in tags and row.keeper not in ("backuper", "main_params"):
            own, names = tag_region("actor", "actor"), [phase.name for phase in self._phases()]
            moves.append(Move(own, "ref_log_probs", True, sizes.tag_share, False))
            back = "log_probs" if "log_probs" in names else "train_actor"
            moves.append(Move(own, back, False, size, False))
        return moves


def _free(row: PlanRow, size: int) -> Region:
    return Region(name=row.tag, size_bytes=size)


def _kept_by_saver(row: PlanRow, size: int) -> Region:
    return Region(name=row.tag, size_bytes=size, leave_bytes=size, return_bytes=size, leaves_unchanged=True)
