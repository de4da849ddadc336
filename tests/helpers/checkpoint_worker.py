"""The rank that runs small jobs with checkpoints, one after the other; used by test_checkpoint."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import patches
from tests.helpers.full_disk import largest_file
from tests.helpers.invariance_worker import FAULTS
from tests.helpers.recording import lasting, recorded
from trainer import worker
from trainer.config.schema import Config
from trainer.measure.phases import Phases
from trainer.megatron import platform


@dataclass(frozen=True)
class Case:
    """One job. ``copy_only``: no step, the restored state is saved again at once. ``disk_bytes``: no file may be
    larger. ``fault``: one of ``invariance_worker.FAULTS``."""

    name: str
    config: Config
    directory: Path
    resume_from: Path | None = None
    copy_only: bool = False
    disk_bytes: int | None = None
    fault: str | None = None


def run_cases(cases: Sequence[Case]) -> dict[str, Any]:
    """Name -> metrics of every step (times and sizes left out) and notes of each case, all in this worker group."""
    platform.set_up(cases[0].config)
    platform.set_up_process_groups(cases[0].config)
    return run_in_group(cases)


def run_in_group(cases: Sequence[Case]) -> dict[str, Any]:
    """The same in a worker group that is set up."""
    results = {}
    for case in cases:
        patches.revert("cpu_saver")  # a fresh saver for each run
        patches.apply("cpu_saver")
        platform.set_up_parallel_groups(case.config.parallel)
        with largest_file(case.disk_bytes), FAULTS[case.fault]():
            results[case.name] = _run(case)
    return results


def _run(case: Case) -> dict[str, Any]:
    from trainer import loop
    from trainer.checkpoint.state import Checkpoints

    outputs, records = recorded()
    notes: list[str] = []
    run = worker.build(case.config, Phases(lambda record: None, gpu=False))
    checkpoints = Checkpoints(
        case.config,
        case.directory,
        resume_from=case.resume_from,
        tokenizer=run.prompts.tokenizer,
        questions=run.prompts.digest,
        note=notes.append,
    )
    if case.copy_only:
        run.actor.sleep()
        run.critic.sleep()
        state = checkpoints.restore(run.roles)
        assert state is not None
        fields = {"kl_coef": state.kl_coef, "schedule_steps": state.schedule_steps, "record": state.record}
        checkpoints.save(run.roles, step=state.step, **fields)
    else:
        loop.train(run, outputs, checkpoints=checkpoints)
    checkpoints.finish()
    _check_ranks_agree(run)
    assert all(role.is_asleep("rest") for role in run.roles.values()) or not case.config.offload.train
    return {"metrics": lasting(records), "notes": notes}


def _check_ranks_agree(run: Any) -> None:
    """Every rank gathers the same weights under every tag."""
    from trainer.megatron.sharding import whole_tensors
    from trainer.roles.role import FORWARD

    for role in run.roles.values():
        for tag in role._weights.backuper.backup_tags if role._weights.backuper else (role.name,):
            with role.awake(kinds=FORWARD, tag=tag):
                whole = whole_tensors(role.model.chunks)
                found = b"".join(bytes(t.detach().contiguous().view(torch.uint8).flatten().numpy()) for _, t in whole)
            digests: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(digests, hashlib.sha256(found).hexdigest())
            assert len(set(digests)) == 1, (role.name, tag)
