"""The rank that runs one small job under several memory settings in turn; used by test_invariance."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import distributed

import patches
from tests.helpers.recording import lasting, recorded
from trainer import worker
from trainer.config.schema import Config
from trainer.measure.phases import Phases
from trainer.megatron import platform
from trainer.megatron.groups import combined_digest


def run_matrix(payload: tuple[Mapping[str, Config], str | None]) -> dict[str, Any]:
    """Name -> results of each config, all in this one worker group.

    The second item of the payload names a deliberate fault of :data:`FAULTS`, or is None.
    """
    configs, fault = payload
    first = next(iter(configs.values()))
    platform.set_up(first)
    platform.set_up_process_groups(first)
    return run_configs(configs, fault=fault)


def run_configs(configs: Mapping[Any, Config], *, fault: str | None = None) -> dict[Any, Any]:
    """The same in a worker group that is set up."""
    results = {}
    for name, config in configs.items():
        if config.platform.name == "cpu":  # a fresh saver for each run
            patches.revert("cpu_saver")
            patches.apply("cpu_saver")
        platform.set_up_parallel_groups(config.parallel)
        with FAULTS[fault]():
            results[name] = run_one(config)
    return results


def run_one(config: Config) -> dict[str, Any]:
    """Every metric of every step (times and sizes left out) and the digests of all ranks' final weights."""
    from trainer import loop

    outputs, records = recorded()
    events: list[dict[str, Any]] = []
    notes: list[str] = []
    run = worker.build(config, Phases(events.append, gpu=False), note=notes.append)
    held = _held_at_most(run.phases.turns)
    loop.train(run, outputs)
    with run.actor.awake(tag=None):
        checksum = combined_digest(run.actor.weights_sha256())
    slept = any("kind" in event for event in events)
    last_step = [event for event in events if event["step"] == config.algo.num_steps and "state" in event]
    return {
        "metrics": lasting(records),
        "actor_after_one_more_cycle": checksum,
        "slept": slept,
        "held_bytes": max(held, default=0),
        "moving_phases": sorted({event["phase"] for event in last_step}),
        "notes": notes,
    }


def _held_at_most(turns: Any) -> list[int]:
    """To which the bytes of all regions that are awake are added at the end of every phase of a scheduled run."""
    held: list[int] = []
    end = turns.end

    def measured(phase: str) -> None:
        end(phase)
        held.append(sum(turns._sizes[name] for name in turns.awake))

    if turns.keeps_awake:
        turns.end = measured
    return held


@contextmanager
def _no_fault() -> Iterator[None]:
    yield


@contextmanager
def _without_switch_model() -> Iterator[None]:
    """Wake-up no longer ends with the restore of the tag's weights."""
    from trainer.roles.weights import RoleWeights

    def skip(self: RoleWeights, tag: str) -> None:
        self.active_tag = tag

    with mock.patch.object(RoleWeights, "switch_to", skip):
        yield


@contextmanager
def _critic_flag_forced() -> Iterator[None]:
    """The critic's parameter buffer loses its backup behind the validator's back."""
    from trainer.roles import model

    original = model.wrap_ddp

    def force(gpt: Any, ddp: Any, *, disable_param_backup: bool, **others: Any) -> Any:
        has_value_head = type(gpt.output_layer).__name__ == "ValueHead"
        return original(gpt, ddp, disable_param_backup=disable_param_backup or has_value_head, **others)

    with mock.patch.object(model, "wrap_ddp", force):
        yield


@contextmanager
def _late_copies() -> Iterator[None]:
    """Optimizer states are copied when somebody waits for it, and not before: as on a GPU at its slowest."""
    from trainer.memory import stores
    from trainer.memory.arena_store import ArenaStore

    class LateStore(ArenaStore):
        def start_write(self, number: int, piece: Any) -> Any:
            return functools.cache(lambda: super(LateStore, self).start_write(number, piece)())

        def start_read(self, number: int, piece: Any) -> Any:
            return functools.cache(lambda: super(LateStore, self).start_read(number, piece)())

    with mock.patch.object(stores, "ArenaStore", LateStore):
        yield


@contextmanager
def _out_of_memory() -> Iterator[None]:
    """The third forward-only pass and the third of training find no memory on the last rank: the one when it has done
    its work, the other at the loss of its last micro-batch."""
    from trainer.roles import model

    original, calls = model.run_passes, {True: 0, False: 0}
    is_short = distributed.get_rank() == distributed.get_world_size() - 1

    def run_passes(chunks: Any, inputs: Any, on_output: Any, *, forward_only: bool, **options: Any) -> Any:
        calls[forward_only] += 1
        is_due = is_short and calls[forward_only] == 3

        def short(number: int, *arguments: Any, **more: Any) -> Any:
            if is_due and not forward_only and number == len(inputs) - 1:
                raise torch.OutOfMemoryError("made up")
            return on_output(number, *arguments, **more)

        result = original(chunks, inputs, short, forward_only=forward_only, **options)
        if is_due:
            raise torch.OutOfMemoryError("made up")
        return result

    with mock.patch.object(model, "run_passes", run_passes):
        yield


@contextmanager
def _infinite_gradient() -> Iterator[None]:
    """The critic's first optimizer step meets an infinite gradient on the last rank."""
    from trainer.training import step

    original = step.train_minibatch
    is_due = distributed.get_rank() == distributed.get_world_size() - 1

    def train_minibatch(role: Any, *arguments: Any, **options: Any) -> dict[str, float]:
        nonlocal is_due
        if not is_due or role.name != "critic":
            return original(role, *arguments, **options)
        is_due = False
        parameter = next(role.model.chunks[0].parameters())
        hook = parameter.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        try:
            return original(role, *arguments, **options)
        finally:
            hook.remove()

    with mock.patch.object(step, "train_minibatch", train_minibatch):
        yield


@contextmanager
def _nan_weights() -> Iterator[None]:
    """One weight of the actor is NaN when the warm-up begins."""
    from trainer import loop

    original = loop.warm_up

    def warm_up(run: Any, outputs: Any) -> None:
        with run.actor.awake(), torch.no_grad():
            name, tensor = next(iter(run.actor.whole_weights()))
            run.actor.load_whole_weights({name: torch.full_like(tensor, torch.nan)})
        original(run, outputs)

    with mock.patch.object(loop, "warm_up", warm_up):
        yield


@contextmanager
def _nan_returns() -> Iterator[None]:
    """What the critic's values are to become is NaN in PPO step 2."""
    from trainer import loop

    original = loop.collect

    def collect(run: Any, number: int, **options: Any) -> Any:
        drawing, experience = original(run, number, **options)
        returns = torch.full_like(experience.returns, torch.nan)
        return drawing, dataclasses.replace(experience, returns=returns) if number == 2 else experience

    with mock.patch.object(loop, "collect", collect):
        yield


FAULTS: dict[str | None, Callable[[], Any]] = {
    None: _no_fault,
    "without_switch_model": _without_switch_model,
    "critic_flag_forced": _critic_flag_forced,
    "late_copies": _late_copies,
    "out_of_memory": _out_of_memory,
    "infinite_gradient": _infinite_gradient,
    "nan_weights": _nan_weights,
    "nan_returns": _nan_returns,
}
