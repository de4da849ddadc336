"""``python -m trainer.bench.training``: a PPO step of this project beside a plain loop of transformers and PyTorch.

All cases start from the same weights and see the same prompts, seeds, minibatches and micro-batches; the first step's
numbers, which the table shows too, are therefore equal but for rounding. Times are medians over the steps after it.
Later steps draw from weights that rounding has driven apart, which is why rates, and not seconds alone, are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, List  # noqa: UP035  (omegaconf reads these annotations)

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from trainer.bench.bars import Bar, bars_table, ratio_bar
from trainer.bench.launching import config_of, run_job, run_workers
from trainer.bench.training_workers import TrainingJob, run_plain, run_plain_liger, run_torpor
from trainer.command import exits
from trainer.command.arguments import refuse_bad_overrides
from trainer.common.units import format_count
from trainer.config import compose as configuration
from trainer.config.identity import config_hash
from trainer.config.roles import trained_roles
from trainer.config.schema import AUTO, ComposedConfig, Config, Section
from trainer.report.tables import UNKNOWN, Table, text

RESULT_FILE, TABLE_FILE, WEIGHTS_FOLDER = "training.json", "training.md", "initial_weights"

CASES = {  # name -> (what it is, overrides, worker)
    "lean": ("Torpor, models asleep in turn (memory=lean)", ("offload=train", "memory=lean"), run_torpor),
    "resident": ("Torpor, nothing sleeps (offload=none)", ("offload=none",), run_torpor),
    "auto": ("Torpor, what has to sleep (offload=auto)", ("offload=auto",), run_torpor),
    "plain": ("a plain loop of transformers and PyTorch, nothing sleeps", ("offload=none",), run_plain),
    "plain_liger": ("the same loop, Liger's kernels in its models", ("offload=none",), run_plain_liger),
    "padded": (
        "Torpor, all sequences as long as the longest",
        ("offload=none", "algo.micro_batch_tokens=null"),
        run_torpor,
    ),
    "packed": ("Torpor, sequences back to back", ("offload=none", "training.packing=true"), run_torpor),
}
_ROOM = "@"  # auto@24: with room for 24 GiB
_BAR_PHASES = ("ref_log_probs", "log_probs", "values", "train_critic", "train_actor")
_BARS = {"plain": 0.8, "plain_liger": 1.05}  # peer -> at most so many times its seconds
_MOST_WITH_ROOM, _MOST_EXPOSED = 1.02, 0.5  # auto's step beside resident's; seconds that it adds, beside lean's
_SAME = (
    "response_tokens",
    "reward",
    "kl",
    "entropy",
    "actor/loss",
    "actor/grad_norm",
    "critic/loss",
    "critic/grad_norm",
)
Record = Mapping[str, Any]
Worker = Callable[[TrainingJob], dict[str, Any]]


@dataclass
class BenchTrainingConfig(Section):
    """The section ``bench``; its defaults lie in ``conf/bench_training.yaml``."""

    cases: List[str]  # noqa: UP006
    rooms_gib: List[float]  # noqa: UP006
    steps: int
    case_timeout_seconds: int

    @property
    def names(self) -> list[str]:
        """Of all cases: those asked for, and ``auto`` once more for each size of room."""
        return [*self.cases, *(f"auto{_ROOM}{room:g}" for room in self.rooms_gib)]


@dataclass
class BenchTrainingRoot(ComposedConfig):
    """The schema of ``conf/bench_training.yaml``."""

    bench: BenchTrainingConfig


def check(bench: BenchTrainingConfig, config: Config) -> None:
    """Raise ValueError for what the two sides could not do alike."""
    unknown = [name for name in bench.cases if name not in CASES]
    if unknown or not bench.cases or bench.cases[0] in _BARS:
        raise ValueError(
            f"bench.cases={bench.cases}: must be some of {', '.join(CASES)}, and the first not plain or plain_liger, "
            "since it writes the weights that the others start from"
        )
    if any(not room > 0 for room in bench.rooms_gib):
        raise ValueError(f"bench.rooms_gib={bench.rooms_gib}: must be GiB of GPU memory, each above 0")
    if bench.steps < 2:
        raise ValueError(f"bench.steps={bench.steps}: must be at least 2, since the first is left out of the times")
    if config.algo.micro_batch_tokens == AUTO:
        raise ValueError(
            f"algo.micro_batch_tokens={AUTO}: all cases have the same micro-batches; give a number of tokens"
        )
    if config.launch.nproc != 1:
        raise ValueError(f"launch.nproc={config.launch.nproc}: the plain loop has one worker; use launch.nproc=1")
    if "critic" not in config.roles:
        raise ValueError("the plain loop has a critic: use algo=ppo")
    if not config.critic_starts_from_actor:
        raise ValueError("the plain loop's critic starts from the actor: leave roles.critic.model as the actor's")
    for name, role in trained_roles(config).items():
        if role.optimizer.lr_schedule != "constant" or role.optimizer.lr_warmup_steps:
            raise ValueError(
                f"the plain loop has a constant learning rate: use roles.{name}.optimizer.lr_schedule=constant and "
                f"roles.{name}.optimizer.lr_warmup_steps=0"
            )


def case_of(name: str) -> tuple[str, tuple[str, ...], Worker]:
    """What a case is, its overrides, its worker."""
    kind, _, room = name.partition(_ROOM)
    meaning, overrides, worker = CASES[kind]
    if room:
        meaning, overrides = f"{meaning}, room for {room} GiB", (*overrides, f"launch.gpu_memory_gib={room}")
    return meaning, overrides, worker


def training_tables(records: Mapping[str, Record]) -> list[Table]:
    """``records``: case -> what its worker returned. Seconds and rates per phase, the numbers of the first step, and
    the bars that ``resident`` is measured by beside its peers."""
    phases = dict.fromkeys(
        key.removeprefix("seconds/") for record in records.values() for key in record["steps"][-1] if "seconds/" in key
    )
    seconds = {name: _medians(record, "seconds/") for name, record in records.items()}
    rates = {name: _medians(record, "tokens_per_second/") for name, record in records.items()}
    utilisation = {name: _medians(record, "mfu/") for name, record in records.items()}
    columns = ("s", "tok/s", "MFU") if any(utilisation.values()) else ("s", "tok/s")
    for name, record in records.items():
        seconds[name]["step"] = median(step["wall_seconds"] for step in record["steps"][1:])

    def row(phase: str) -> list[str]:
        cells = [phase]
        for name in records:
            rate = rates[name].get(phase)
            shown = UNKNOWN if rate is None else format_count(rate)
            values = (text(seconds[name].get(phase), ".3f"), shown, text(utilisation[name].get(phase), ".1%"))
            cells += values[: len(columns)]
        return cells

    added = {name: seconds[name]["step"] - seconds["resident"]["step"] for name in _beside_resident(seconds)}
    exposed = ["beyond resident"]
    for name in records if added else ():
        exposed += [text(added.get(name), ".3f"), *[UNKNOWN] * (len(columns) - 1)]
    header = [f"{name} {what}" for name in records for what in columns]
    peak = {name: record["gpu_peak_allocated_bytes"] for name, record in records.items()}
    first = [
        (key, *(f"{record['steps'][0][key]:.6g}" for record in records.values()))
        for key in _SAME
        if all(key in record["steps"][0] for record in records.values())
    ]
    first.append(("GPU GiB at most", *(text(b if b is None else b / 2**30, ".1f") for b in peak.values())))
    bars = _bars(seconds, peak)
    totals = [row("step"), *([exposed] if added else [])]
    return [
        Table(title="A PPO step", columns=("phase", *header), rows=[row(p) for p in phases], totals=totals),
        Table(title="The same work: numbers of the first step", columns=("", *records), rows=first),
        *([bars_table(bars)] if bars else []),
    ]


def _bars(seconds: Mapping[str, Mapping[str, float]], peak: Mapping[str, int | None]) -> list[Bar]:
    if "resident" not in seconds:
        return []
    ours, bars = seconds["resident"], []
    for peer, ratio in _BARS.items():
        for phase in _BAR_PHASES if peer in seconds else ():
            theirs = seconds[peer].get(phase)
            bars.append(ratio_bar(f"{phase}: seconds of {peer}", ours.get(phase), theirs, at_most=ratio))
    if "plain_liger" in peak:
        bars.append(ratio_bar("GPU memory of plain_liger", peak["resident"], peak["plain_liger"], at_most=1.05))
    if "auto" in seconds:
        step = seconds["auto"]["step"]
        bars.append(ratio_bar("auto: seconds of resident's step", step, ours["step"], at_most=_MOST_WITH_ROOM))
    for name in _beside_resident(seconds):
        if _ROOM in name and "lean" in seconds:
            added, of_lean = (max(seconds[one]["step"] - ours["step"], 0.0) for one in (name, "lean"))
            bars.append(ratio_bar(f"{name}: seconds that lean adds to a step", added, of_lean, at_most=_MOST_EXPOSED))
    return bars


def _beside_resident(names: Collection[str]) -> list[str]:
    """The cases that do what ``resident`` does, but for what sleeps."""
    return [name for name in names if name == "lean" or name.startswith("auto")] if "resident" in names else []


def _medians(record: Record, prefix: str) -> dict[str, float]:
    """Over the steps after the first."""
    keys = [key for key in record["steps"][-1] if key.startswith(prefix)]
    return {key.removeprefix(prefix): median(step[key] for step in record["steps"][1:]) for key in keys}


def run(bench: BenchTrainingConfig, configs: Mapping[str, Config], directory: Path, console: Console) -> bool:
    """Measure every case, write the results, and say whether all went well."""
    results: dict[str, Record] = {}
    for name, config in configs.items():
        meaning, _, worker = case_of(name)
        console.print(f"{name}: {meaning}")
        job = TrainingJob(config, directory / WEIGHTS_FOLDER, bench.steps, bench.case_timeout_seconds)
        results[name] = run_workers(worker, job, name, directory, console)
        results[name] = {"config_hash": config_hash(config), **results[name]}
        (directory / RESULT_FILE).write_text(json.dumps(results, indent=1) + "\n")
    measured = {name: record for name, record in results.items() if "error" not in record}
    if measured:
        tables = training_tables(measured)
        (directory / TABLE_FILE).write_text(_document(tables, measured))
        for table in tables:
            console.print(table)
    console.print(f"tables: {directory / TABLE_FILE}   all numbers: {directory / RESULT_FILE}", soft_wrap=True)
    return len(measured) == len(configs)


def _document(tables: Sequence[Table], records: Mapping[str, Record]) -> str:
    facts = dict.fromkeys(
        f"- {r['platform']}, {', '.join(f'{k} {v}' for k, v in r['versions'].items())}" for r in records.values()
    )
    meanings = [f"- `{name}`: {case_of(name)[0]}" for name in records]
    notes = (
        "Seconds and rates are medians over the steps after the first. The seconds of `step` include what happens "
        "between phases, its rates do not; beyond resident: less those of the step in which nothing sleeps. Tokens are "
        "real ones, padding not counted; MFU counts what the model needs."
    )
    parts = [f"# {tables[0].title}", "\n".join(facts), tables[0].markdown(), notes, "\n".join(meanings)]
    further = [part for table in tables[1:] for part in (f"## {table.title}", table.markdown())]
    return "\n\n".join([*parts, *further]) + "\n"


@hydra.main(config_path="pkg://conf", config_name="bench_training", version_base="1.3")
def _hydra_job(composed: DictConfig) -> None:
    def prepare(overrides: list[str]) -> tuple[BenchTrainingConfig, dict[str, Config]]:
        bench = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(BenchTrainingConfig), composed.bench))
        assert isinstance(bench, BenchTrainingConfig)
        check(bench, config_of(composed))
        of_case = {name: [*overrides, *case_of(name)[1]] for name in bench.names}
        return bench, {name: config_of(hydra.compose("bench_training", overrides=x)) for name, x in of_case.items()}

    run_job(prepare, lambda prepared, directory, console: run(*prepared, directory, console))


def main() -> None:
    refuse_bad_overrides()
    configuration.register()
    ConfigStore.instance().store(name="bench_training_schema", node=BenchTrainingRoot)
    exits.leave(exits.code_of(_hydra_job))


if __name__ == "__main__":
    main()
