"""One rank of a run: set up the platform, build both roles and the engine, run the loop, write the records."""

from __future__ import annotations

import functools
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed

from trainer.checkpoint import folder
from trainer.common import garbage
from trainer.config.identity import to_plain
from trainer.config.pieces import make_correction, make_estimator, make_policy_loss, make_task
from trainer.config.roles import role_specs
from trainer.config.schema import Config
from trainer.megatron import platform
from trainer.plan import make_plan
from trainer.plan.footprint import footprint, plan_rows
from trainer.plan.holdings import ENGINE, arena_bytes
from trainer.plan.micro_batch import with_micro_batch_tokens
from trainer.plan.schedule_rows import default_rates, predicted_seconds, schedule_rows
from trainer.plan.step_schedule import make_schedule, room_bytes
from trainer.rollout.engines import make_engine, planned_bytes

if TYPE_CHECKING:
    from trainer.data.selection import Selection
    from trainer.loop import Run as LoopRun
    from trainer.measure.phases import Phases
    from trainer.roles.role import Role


EXPORT_FOLDER = "hf_model"


def _discard(_: Any) -> None:
    pass


@dataclass(frozen=True)
class Job:
    """What the parent hands to every worker."""

    config: Config
    directory: Path
    resume_from: Path | None  # a checkpoint
    selection: Selection | None = None  # of examples; None: nothing was measured and nothing is left out


def run(job: Job) -> dict[str, Any]:
    """Train and return the last metrics record, of an earlier step than the config's last if the job was asked to stop;
    called by the launcher on every rank."""
    with garbage.paused():
        patch_lines = platform.set_up(job.config)
        platform.set_up_process_groups(job.config)
        job = _as_on_node_0(job)
        from trainer.checkpoint.state import Checkpoints  # imports megatron, which must come after the patches
        from trainer.loop import Outputs, train
        from trainer.measure.diagnostics import FOLDER, StepTraces
        from trainer.measure.phases import Phases
        from trainer.report import Progress, RunRecords, open_loggers, write_report

    is_writer = int(os.environ["RANK"]) == 0
    done = None if job.resume_from is None else folder.read(job.resume_from).step
    with ExitStack() as stack:
        outputs, write = Outputs(None, None, None), _discard
        if is_writer:
            records = stack.enter_context(RunRecords(job.directory, resumed_after=done))
            log = stack.enter_context(
                open_loggers(job.config.logger, job.directory, hyperparameters=to_plain(job.config))
            )
            progress = Progress(job.config.algo.num_steps)
            outputs = Outputs(records, stack.enter_context(progress), log)
            write = records.memory
        note = outputs.progress.note if outputs.progress else _discard
        phases = Phases(write, gpu=job.config.platform.name == "cuda")
        phases.ledger("baseline", step=done or 0)
        with phases.phase("build", step=done or 0):
            gpu_bytes = platform.device_memory_bytes(job.config)
            parts = build(job.config, phases, selection=job.selection, note=note)
            garbage.collect_for_good()
        note(
            f"kernels: {_of_roles(job.config, 'kernels')}; core attention: {_of_roles(job.config, 'attention_backend')}"
        )
        if job.config.algo.epochs * job.config.algo.minibatches == 1:
            note("one update a step (algo.epochs=1 algo.minibatches=1): all ratios are 1, and nothing is clipped")
        for name, path in starting_points(job.config).items() if done is None else ():
            note(f"the {name} starts from {path}{_head(parts.roles[name], path)}")
        traces = StepTraces(job.config.diagnostics.profile_steps, job.directory / FOLDER, note=note)
        outputs = replace(outputs, traces=traces)
        checkpoints = Checkpoints(
            job.config,
            job.directory,
            resume_from=job.resume_from,
            tokenizer=parts.prompts.tokenizer,
            questions=parts.prompts.digest,
            note=note,
        )
        with checkpoints.finishing():
            result = train(parts, outputs, checkpoints=checkpoints)
        if result["step"] < job.config.algo.num_steps:  # asked to stop
            return result
        phases.ledger("asleep", step=result["step"])
        if job.config.export_hf:
            export(parts, job.directory / EXPORT_FOLDER if is_writer else None)
    if is_writer:
        summary = {
            "platform": platform.describe(job.config),
            "kernels": _of_roles(job.config, "kernels"),
            "attention": _of_roles(job.config, "attention_backend"),
            "questions": _questions(job),
            "patches": ", ".join(line.partition(":")[0] for line in patch_lines),
        }
        engine = planned_bytes(job.config, vocab_size=parts.vocab_size)
        sizes = {"vocab_size": parts.vocab_size, "reported_gpu_bytes": gpu_bytes}
        of_writer = footprint(job.config, engine=engine, stage=0, **sizes)
        try:
            followed, planned = parts.phases.turns.schedule, {}
            if followed is not None:
                seconds = predicted_seconds(followed, make_plan(job.config), **default_rates())
                planned = {"schedule": schedule_rows(followed), "moving_seconds": seconds}
            config = to_plain(job.config)
            write_report(job.directory, config=config, summary=summary, plan=plan_rows(of_writer), **planned)
        except Exception as error:  # the job has finished all the same: its records are whole
            print(f"no report: {type(error).__name__}: {error}", file=sys.stderr)
    return result


def _as_on_node_0(job: Job) -> Job:
    """Where the job's files lie and what it goes on from is what node 0 says; all nodes share that disk."""
    if job.config.launch.nnodes == 1:
        return job
    places = [(job.directory, job.resume_from)]
    distributed.broadcast_object_list(places)
    directory, resume_from = places[0]
    if resume_from is not None and not resume_from.is_dir():
        raise ValueError(
            f"node 0 goes on from {resume_from}, which is not here: give all nodes one shared hydra.run.dir"
        )
    return replace(job, directory=directory, resume_from=resume_from)


def export(parts: LoopRun, folder: Path | None) -> None:
    """Write the actor as a Hugging Face folder. Collective; ranks that give no folder only add their parts."""
    from trainer.models.hf_files import save_hf
    from trainer.roles.role import FORWARD

    with parts.actor.awake(kinds=FORWARD):
        weights = parts.actor.whole_weights()
        if folder is not None:
            model, tokenizer = parts.actor.config.model, parts.prompts.tokenizer
            save_hf(weights, model=model, tokenizer=tokenizer, folder=folder)
        deque(weights, maxlen=0)


def _head(role: Role, folder: str) -> str:
    from trainer.common.safetensors_folder import SafetensorsFolder
    from trainer.models.hf_bridge import has_value_head

    is_new = role.spec.has_value_head and not has_value_head(SafetensorsFolder(Path(folder)))
    return "; its value head is new" if is_new else ""


def starting_points(config: Config) -> dict[str, str]:
    """Role -> the model folder whose weights it starts from; not a critic that is to get the warmed-up actor's."""
    paths = {name: spec.folder for name, spec in role_specs(config).items()}
    if config.critic_starts_from_actor:
        del paths["critic"]
    return {name: path for name, path in paths.items() if path is not None}


_MEANINGS = {"sdpa": "torch's scaled_dot_product_attention", "liger": "Liger's", "te": "Transformer Engine's"}


def _of_roles(config: Config, setting: str) -> str:
    """What the roles' models have there, in words."""
    values = {name: getattr(role.model, setting) for name, role in config.roles.items()}
    words = {name: _MEANINGS.get(value, f"{value}'s") for name, value in values.items()}
    same = set(words.values())
    return same.pop() if len(same) == 1 else ", ".join(f"{name}: {word}" for name, word in words.items())


def _questions(job: Job) -> str:
    if job.selection is None:
        return "not measured"
    hash_seed = os.environ.get("PYTHONHASHSEED", "random")
    return f"{job.selection.summary} (SHA-256 {job.selection.digest[:16]}, PYTHONHASHSEED={hash_seed})"


def _load(role: Role, folder: Path) -> None:
    """Give a role the weights of a model folder."""
    from trainer.common.safetensors_folder import SafetensorsFolder
    from trainer.models.folders import naming_folder, weights_for

    with naming_folder(role.spec):
        role.load_whole_weights(weights_for(role.spec, SafetensorsFolder(folder), model=role.config.model))


def build(
    config: Config,
    phases: Phases,
    *,
    selection: Selection | None = None,
    note: Callable[[str], None] = _discard,
) -> LoopRun:
    """Task, tokenizer, roles and engine of one run, asleep unless a schedule lets them stay awake; the process groups
    must exist. ``note`` takes a line when the run has to depart from its schedule.

    Raises:
        ValueError: ranks hold different examples, or others than those of ``selection``.
    """
    from trainer.common.seeds import seed_for
    from trainer.data.prompts import Prompts
    from trainer.loop import Run
    from trainer.megatron.groups import pipeline_rank
    from trainer.memory.arena import HostArenas
    from trainer.memory.saver import follow, make_saver
    from trainer.roles.role import Role
    from trainer.tasks.tokenizer import load_tokenizer, vocabulary_size
    from trainer.training.experience import Credit

    task = make_task(config)
    tokenizer = load_tokenizer(config.tokenizer.path, task=task, vocab_size=config.largest_vocab_size)
    vocab_size = vocabulary_size(tokenizer)
    engine_bytes = planned_bytes(config, vocab_size=vocab_size)
    config = with_micro_batch_tokens(config, vocab_size=vocab_size, engine=engine_bytes)
    saver, plan, stage = make_saver(config), make_plan(config), pipeline_rank()
    planned = functools.partial(
        make_schedule,
        config,
        vocab_size=vocab_size,
        engine=engine_bytes,
        room=room_bytes(config, platform.device_memory_bytes(config)),
        stage=stage,
    )
    schedule = planned()
    follow(
        saver,
        schedule,
        replan=lambda reserves: planned(reserves=reserves),
        corrects=config.offload.reserve_gib is None,
        note=note,
        ranks=config.world_size,
    )
    phases.turns = saver.turns
    tags = schedule.resident_tags if schedule else ()
    arenas = HostArenas.of(config, on_device=[f"weights/{tag}" for tag in tags])
    arenas.reserve(arena_bytes(config, vocab_size=vocab_size, stage=stage, schedule=schedule))
    prompts = Prompts(config, task=task, tokenizer=tokenizer, selection=selection)
    prompts.require_same_everywhere()
    paths = starting_points(config)
    roles = {}
    for name in config.roles:
        saver.turns.before_building(name)  # one at a time has to fit
        roles[name] = Role(
            name,
            config,
            plan=plan,
            saver=saver,
            vocab_size=config.roles[name].model.embedding_rows(vocab_size),
            seed=seed_for(config.seed, f"init/{name}"),
            observer=phases.observe,
            arenas=arenas,
        )
        if name in paths:
            _load(roles[name], Path(paths[name]))
        saver.turns.done(roles[name])
    saver.turns.before_building(ENGINE)
    engine = make_engine(config, actor=roles["actor"], tokenizer=tokenizer, saver=saver, observer=phases.observe)
    return Run(
        config=config,
        prompts=prompts,
        credit=Credit(make_estimator(config), make_correction(config)),
        policy_loss=make_policy_loss(config),
        roles=roles,
        engine=engine,
        phases=phases,
        vocab_size=vocab_size,
    )
