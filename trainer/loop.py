"""The training loop, top to bottom: a supervised warm-up of the actor, then PPO steps.

    collect: sync -> rollout -> log-probs (of the reference, of the actor) -> values -> advantages
    learn:   train critic -> train actor (which is backed up)
    then:    report -> checkpoint

Algorithms without a critic (GRPO and the like) leave out the two phases that are the critic's.
Whoever is not at work sleeps; a forward-only phase wakes parameters alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from trainer.algo.kl import next_kl_coef
from trainer.algo.policy_losses import PolicyLoss
from trainer.checkpoint.state import Checkpoints
from trainer.checkpoint.step_saver import StepSaver
from trainer.config.roles import REFERENCE, optimizer_steps
from trainer.config.schema import AlgoConfig, Config
from trainer.data.batch import Experience
from trainer.data.prompts import Prompts
from trainer.measure import evaluation, metrics, throughput
from trainer.measure.diagnostics import StepTraces
from trainer.measure.phases import Phases
from trainer.megatron.groups import combined_digest
from trainer.report import Logger, Progress, RunRecords
from trainer.roles.role import FORWARD, Role
from trainer.rollout.base import RolloutEngine
from trainer.tasks.base import Task
from trainer.training import step
from trainer.training.balance import Exchange
from trainer.training.drawing import draw
from trainer.training.experience import Credit, Judgement, experience_of
from trainer.training.finite import require_finite, require_progress
from trainer.training.micro_batches import Split
from trainer.training.minibatches import train_minibatches
from trainer.training.scoring import LOG_PROBS_PHASE, REFERENCE_PHASE, scored_log_probs
from trainer.training.warm_up import start_critic_from, supervised_steps

Schedules = Mapping[str, OptimizerParamScheduler]  # of learning rates, by role


@dataclass(frozen=True)
class Run:
    """What the loop works with; built by the worker, all of it on every rank, models asleep."""

    config: Config
    prompts: Prompts
    credit: Credit
    policy_loss: PolicyLoss
    roles: Mapping[str, Role]
    engine: RolloutEngine
    phases: Phases
    vocab_size: int

    @property
    def actor(self) -> Role:
        return self.roles["actor"]

    @property
    def critic(self) -> Role | None:
        return self.roles.get("critic")

    @property
    def learners(self) -> dict[str, Role]:
        """The roles that are trained."""
        return {name: role for name, role in self.roles.items() if role.spec.is_trained}

    def build_schedules(self) -> Schedules:
        steps = {name: optimizer_steps(self.config, name) for name in self.learners}
        return {name: self.roles[name].model.build_scheduler(total_steps=steps[name]) for name in steps}

    @property
    def judges(self) -> dict[str, Role]:
        """Phase -> the role that says in it what responses are paid."""
        return {f"{name}_scores": role for name, role in self.roles.items() if role.spec.is_judge}

    @property
    def scoring_phases(self) -> dict[str, str]:
        """Phase of a forward pass over a step's responses -> the role whose pass it is."""
        critics = {"values": self.critic.name} if self.critic else {}
        judges = {phase: role.name for phase, role in self.judges.items()}
        return {**judges, REFERENCE_PHASE: self.actor.name, LOG_PROBS_PHASE: self.actor.name, **critics}


@dataclass(frozen=True)
class Outputs:
    """Where results go; on ranks other than 0 all is silent, save traces, which every rank writes."""

    records: RunRecords | None
    progress: Progress | None
    log: Logger | None
    traces: StepTraces | None = None

    def report(self, record: Mapping[str, Any]) -> None:
        if self.records and self.log:
            self.records.metrics(dict(record))
            self.log.log(dict(record))
        if self.progress and record["step"] > 0:
            self.progress.step(dict(record))

    def trace(self, step: int) -> AbstractContextManager[None]:
        """What happens inside is traced if this step is to be."""
        return self.traces.around(step) if self.traces else nullcontext()


def train(run: Run, outputs: Outputs, *, checkpoints: Checkpoints | None = None) -> dict[str, Any]:
    """Run the whole job, or what is left of it after a checkpoint, and return the last metrics record.

    A job that saves checkpoints ends after the step in which it was asked to stop.
    """
    settings, phases = run.config.algo, run.phases
    resumed = checkpoints.restore(run.learners) if checkpoints else None
    if resumed is None:
        warm_up(run, outputs)
    schedules = run.build_schedules()
    saver = StepSaver(checkpoints, run.learners, schedules=schedules, phases=phases)
    if resumed is None:
        record: dict[str, Any] = {
            "step": 0,
            **evaluate(run, at_step=0),
            **{f"parameters/{name}": role.model.parameter_count() for name, role in run.roles.items()},
            **phases.end_step(),
        }
        kl_coef = settings.kl.coef
        outputs.report(record)
        if saver.save_if_due(record, kl_coef=kl_coef):
            return record
    else:
        record, kl_coef = dict(resumed.record), resumed.kl_coef
        for name, schedule in schedules.items():
            schedule.step(resumed.schedule_steps[name])
    for step_number in range(record["step"] + 1, settings.num_steps + 1):
        last = record
        with saver.around_step_after(last, kl_coef=kl_coef), outputs.trace(step_number):
            record = {"step": step_number, **ppo_step(run, step_number, schedules=schedules, kl_coef=kl_coef)}
        if step_number > settings.critic_warmup_steps:  # while only the critic trains, there is nothing to steer
            kl_coef = _next_kl_coef(run.config, kl_coef, record.get("kl"))
        if _needs_accuracy(settings, step_number, checkpoints):
            record |= evaluate(run, at_step=step_number)
        if step_number == settings.num_steps:
            record |= _weights_sha256(run, step_number)
        record |= phases.end_step()
        outputs.report(record)
        for name in run.learners:
            require_progress((last, record), name, optimizer_steps=settings.epochs * settings.minibatches)
        if saver.save_if_due(record, kl_coef=kl_coef):
            break
    return record


def warm_up(run: Run, outputs: Outputs) -> None:
    """Supervised steps of the actor; then the weights are the reference, and the critic's start."""
    settings, actor, progress = run.config.algo, run.actor, outputs.progress

    def on_step(number: int, loss: float) -> None:
        if progress:
            progress.warm_up(number, total=settings.warmup_steps, loss=loss)

    with run.phases.phase("warm_up", step=0), actor.awake():
        supervised_steps(run.config, run.prompts, actor, vocab_size=run.vocab_size, on_step=on_step)
        if settings.uses_reference:
            actor.copy_to_tag(REFERENCE)
    if run.critic and run.config.critic_starts_from_actor:
        with run.phases.phase("warm_up", step=0):
            weights = actor.weights_on_host(REFERENCE if settings.uses_reference else actor.name)
            with run.critic.awake():
                start_critic_from(weights, run.critic)
        if progress:
            whose = "warmed-up actor" if settings.warmup_steps else "actor"
            progress.note(f"the critic starts from the {whose}; only its value head is new")


def ppo_step(run: Run, number: int, *, schedules: Schedules, kl_coef: float) -> dict[str, float]:
    """One step: from prompts to trained critic and actor."""
    found, experience = collect(run, number, kl_coef=kl_coef)
    learnt = learn(run, experience, number, schedules=schedules, kl_coef=kl_coef)
    with run.phases.phase("report", step=number):
        work = throughput.of_step(run.config, experience, vocab_size=run.vocab_size, scoring=run.scoring_phases)
        run.phases.rate_with(work.rates)
        return {
            **metrics.of_rollout(experience),
            **found,
            **learnt,
            "kl_coef": kl_coef,
            **{f"{name}/lr": role.model.learning_rate() for name, role in run.learners.items()},
        }


def collect(run: Run, number: int, *, kl_coef: float) -> tuple[dict[str, float], Experience]:
    """Responses to the prompts of step ``number``, judged by all models and credited; and, of the groups as they were
    drawn, what the metrics say."""
    config, phases, actor, critic = run.config, run.phases, run.actor, run.critic
    split = Split.of_scoring(config)

    if run.engine.has_own_weights:
        with phases.phase("sync", step=number):
            run.engine.sync(actor)
    with phases.phase("rollout", step=number):
        drawn = draw(config, run.prompts, run.engine, step=number, is_judged=bool(run.judges))
        batch = drawn.batch
        exchange = Exchange.of(batch, split)
        moved = exchange.there(batch)
    for phase, judge in run.judges.items():
        with phases.phase(phase, step=number), judge.awake(kinds=FORWARD):
            batch = batch.paid(exchange.back(step.final_values(judge, moved, split=split)))
            require_finite(batch.scores, source=f"the {judge.name}", when=f"step {number}, {phase}")
    log_probs = scored_log_probs(
        config,
        actor,
        moved,
        trains_actor=number > config.algo.critic_warmup_steps,
        vocab_size=run.vocab_size,
        phase=lambda name: phases.phase(name, step=number),
    )
    values = None
    if critic:
        with phases.phase("values", step=number), critic.awake(kinds=FORWARD):
            values = exchange.back(step.values(critic, moved, split=split))
    with phases.phase("advantages", step=number):
        of_phase = {phase: (exchange.back(one), exchange.back(other)) for phase, (one, other) in log_probs.items()}
        ref_log_probs, _ = of_phase.get(REFERENCE_PHASE, (None, None))
        judged = Judgement(ref_log_probs, *of_phase.get(LOG_PROBS_PHASE, (None, None)), values)
        experience = experience_of(batch, judged, settings=config.algo, credit=run.credit, kl_coef=kl_coef)
        found = metrics.of_drawing(drawn.rounds, groups=drawn.drawn_groups, flat=drawn.flat_groups)
        if not isinstance(run.prompts.environment, Task):
            found |= metrics.of_episodes(drawn.tally)
        found |= metrics.of_groups(batch, group_size=config.algo.responses_per_prompt)
        return found, exchange.there(experience)


def learn(run: Run, experience: Experience, number: int, *, schedules: Schedules, kl_coef: float) -> dict[str, float]:
    """Train the critic, then the actor, on the experience of step ``number``; what the metrics say of it."""
    settings, phases, actor, critic = run.config.algo, run.phases, run.actor, run.critic
    critic_sums = actor_sums = None
    if critic:
        with phases.phase("train_critic", step=number), critic.awake():
            critic_sums = _train(run, critic, experience, step.value_loss(settings), number, schedules)
    if number > settings.critic_warmup_steps:
        with phases.phase("train_actor", step=number), actor.awake():
            how = {"temperature": run.config.rollout.temperature, "vocab_size": run.vocab_size, "kl_coef": kl_coef}
            loss = step.policy_loss(settings, run.policy_loss, **how)
            actor_sums = _train(run, actor, experience, loss, number, schedules)
            actor.backup()
    return {**metrics.of_critic(critic_sums), **metrics.of_actor(actor_sums)}


def evaluate(run: Run, *, at_step: int) -> dict[str, float | None]:
    """Held-out accuracy under the actor's weights."""
    with run.phases.phase("evaluate", step=at_step):
        run.engine.sync(run.actor)
        return evaluation.evaluate(run.config, run.prompts, run.engine, at_step=at_step)


def _needs_accuracy(settings: AlgoConfig, number: int, checkpoints: Checkpoints | None) -> bool:
    every = settings.evaluate_every
    is_due = number == settings.num_steps or (every is not None and number % every == 0)
    return is_due or (checkpoints is not None and checkpoints.needs_accuracy(number))


def _train(
    run: Run, role: Role, experience: Experience, loss: step.Loss[Experience], number: int, schedules: Schedules
) -> list[dict[str, float]]:
    """All optimizer steps of one PPO step; the reported sums of each, first to last."""
    settings, when = run.config.algo, f"step {number}, train_{role.name}"
    limit = settings.target_kl if role is run.actor else None
    epochs = (run.prompts.minibatch_rows(len(experience), step=number, epoch=epoch) for epoch in range(settings.epochs))
    return train_minibatches(
        role,
        experience,
        loss,
        rows=itertools.chain.from_iterable(epochs),
        split=Split.of_training(run.config),
        schedule=schedules[role.name],
        stops=lambda sums: limit is not None and metrics.ppo_kl(sums) > limit,
        when=when,
    )


def _next_kl_coef(config: Config, kl_coef: float, observed: float | None) -> float:
    kl = config.algo.kl
    if kl.target is None or observed is None:
        return kl_coef
    batch_size = config.algo.prompts_per_step * config.algo.responses_per_prompt
    return next_kl_coef(kl_coef, observed=observed, target=kl.target, horizon=kl.horizon, batch_size=batch_size)


def _weights_sha256(run: Run, number: int) -> dict[str, str]:
    digests = {}
    for role in run.roles.values():
        with run.phases.phase("report", step=number), role.awake():
            digests[f"weights_sha256/{role.name}"] = combined_digest(role.weights_sha256())
    return digests
