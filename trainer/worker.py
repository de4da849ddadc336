"""One rank of a run: set up the platform, build both roles and the engine, run the loop, write the records."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import platform
from trainer.config import Config, to_plain
from trainer.plan import make_plan
from trainer.plan.footprint import footprint, plan_rows
from trainer.rules import make_task

if TYPE_CHECKING:
    from trainer.loop import Run as LoopRun
    from trainer.phases import Phases


@dataclass(frozen=True)
class Job:
    """What the parent hands to every worker."""

    config: Config
    directory: Path


def run(job: Job) -> dict[str, Any]:
    """Train and return the last metrics record with the held-out accuracies; called by the launcher on every rank."""
    patch_lines = platform.set_up(job.config)
    platform.set_up_process_groups(job.config)
    from trainer.loop import Outputs, train  # imports megatron, which must come after the patches
    from trainer.phases import Phases
    from trainer.report import Progress, RunRecords, open_loggers, write_report

    is_writer = int(os.environ["RANK"]) == 0
    with ExitStack() as stack:
        outputs, write = Outputs(None, None, None), _discard
        if is_writer:
            records = stack.enter_context(RunRecords(job.directory))
            log = stack.enter_context(
                open_loggers(job.config.logger, job.directory, hyperparameters=to_plain(job.config))
            )
            outputs = Outputs(records, stack.enter_context(Progress(job.config.algo.num_steps)), log)
            write = records.memory
        phases = Phases(write, gpu=job.config.platform.name == "cuda")
        with phases.phase("build", step=0):
            parts = build(job.config, phases)
        result = train(parts, outputs)
    if is_writer:
        write_report(
            job.directory,
            config=to_plain(job.config),
            summary={
                "platform": platform.describe(job.config),
                "patches": ", ".join(line.partition(":")[0] for line in patch_lines),
            },
            plan=plan_rows(footprint(job.config, vocab_size=parts.vocab_size)),
        )
    return result


def _discard(record: dict[str, Any]) -> None:
    pass


def build(config: Config, phases: Phases) -> LoopRun:
    """Task, tokenizer, roles and engine of one run, all asleep; the process groups must exist."""
    from trainer.data import Prompts
    from trainer.distributed import seed_for
    from trainer.loop import Run
    from trainer.memory.saver import make_saver
    from trainer.role import Role
    from trainer.rollout.hf import HfEngine
    from trainer.tokenizer import load_tokenizer

    task = make_task(config)
    tokenizer = load_tokenizer(config.tokenizer.path, task=task, vocab_size=config.tokenizer.vocab_size)
    saver = make_saver(config)
    plan = make_plan(config)
    roles = {}
    for name in ("actor", "critic"):
        roles[name] = Role(
            name,
            config,
            plan=plan,
            saver=saver,
            vocab_size=len(tokenizer),
            seed=seed_for(config.seed, f"init/{name}"),
            observer=phases.observe,
            pinned=config.platform.name == "cuda" and config.offload.train,
        )
        roles[name].sleep()  # before the next one is built, so that one at a time has to fit
    engine = HfEngine(
        roles["actor"].config.model, config.rollout, tokenizer=tokenizer, saver=saver, observer=phases.observe
    )
    engine.sleep()
    return Run(
        config=config,
        prompts=Prompts(config, task=task, tokenizer=tokenizer),
        actor=roles["actor"],
        critic=roles["critic"],
        engine=engine,
        phases=phases,
        vocab_size=len(tokenizer),
    )
