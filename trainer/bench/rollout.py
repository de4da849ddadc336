"""``python -m trainer.bench.rollout``: rollout engines beside each other and beside what memory bandwidth allows.

The floor is the time to read, for each of the new tokens, the weights once (all but the embedding) and the keys and
values of all rows, at the bandwidth of a copy on the same device. Where an engine has a bar, the table shows it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from trainer.bench.launching import run_job, run_workers
from trainer.bench.rollout_config import BenchRolloutConfig
from trainer.bench.rollout_workers import RolloutJob, run_cases
from trainer.command import exits
from trainer.command.arguments import refuse_bad_overrides
from trainer.common.units import format_count
from trainer.config import compose as configuration
from trainer.config.schema import ComposedConfig, Config
from trainer.report.tables import Table

RESULT_FILE, TABLE_FILE = "rollout.json", "rollout.md"
CASES = {
    "native": "rollout=native",
    "compiled": "rollout=native rollout.compile=true",
    "hf": "rollout=hf",
    "generate": "a bare transformers.generate, dynamic cache",
    "ragged": "rollout=native, ragged lengths, as many rows at once as the full batch",
    "many": "rollout=native, the same with all rows at once",
    "long": "rollout=native, few long responses",
    "asleep": "rollout=native, from everything asleep",
}
_SLEEPING = ("asleep",)  # in a worker of its own, where models sleep


@dataclass
class BenchRolloutRoot(ComposedConfig):
    """The schema of ``conf/bench_rollout.yaml``."""

    bench: BenchRolloutConfig


def config_of(composed: DictConfig) -> Config:
    """The validated config without the section ``bench``."""
    keys = [field.name for field in dataclasses.fields(Config)]
    return configuration.to_config(OmegaConf.masked_copy(composed, keys))


def check(bench: BenchRolloutConfig, config: Config) -> None:
    """Raise ValueError for unknown cases, numbers below one and several workers."""
    unknown = [name for name in bench.cases if name not in CASES]
    if unknown or not bench.cases:
        raise ValueError(f"bench.cases={bench.cases}: must be some of {', '.join(CASES)}")
    for field in dataclasses.fields(bench):
        value = getattr(bench, field.name)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"bench.{field.name}={value}: must be at least 1")
    if config.launch.nproc != 1:
        raise ValueError(f"launch.nproc={config.launch.nproc}: one device is measured; use launch.nproc=1")


def run(bench: BenchRolloutConfig, configs: Mapping[str, Config], directory: Path, console: Console) -> bool:
    """Measure every case, write the results, and say whether all went well."""
    found: dict[str, Any] = {"cases": {}}
    for offload, config in configs.items():
        cases = tuple(name for name in bench.cases if (name in _SLEEPING) == (offload == "train"))
        if cases:
            console.print(f"offload={offload}: {', '.join(cases)}")
            job = RolloutJob(config, bench, cases)
            record = run_workers(run_cases, job, f"offload_{offload}", directory, console)
            measured = record.get("cases", dict.fromkeys(cases, record))
            found = {**record, **found, "cases": {**found["cases"], **measured}}
            (directory / RESULT_FILE).write_text(json.dumps(found, indent=1) + "\n")
    tables = [speed_table(found), bars_table(found)]
    facts = ", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items())
    heading = f"# Rollouts\n\n{found.get('platform')}, {facts}\n"
    (directory / TABLE_FILE).write_text("\n\n".join([heading, *(table.markdown() for table in tables)]) + "\n")
    for table in tables:
        console.print(table)
    console.print(f"tables: {directory / TABLE_FILE}   all numbers: {directory / RESULT_FILE}", soft_wrap=True)
    return all("error" not in case for case in found["cases"].values())


def speed_table(found: Mapping[str, Any]) -> Table:
    """Seconds and rates of each case; multiples of the floor for those that draw the full batch."""
    rows = []
    for name, case in found["cases"].items():
        if "seconds" in case:
            floor = found["floor_seconds"] if name in ("native", "compiled", "hf", "generate") else None
            rows.append(
                (
                    CASES[name],
                    f"{case['seconds']:.3f}",
                    format_count(case["tokens"] / case["seconds"]),
                    "-" if floor is None else f"{case['seconds'] / floor:.1f}",
                    f"{case['first_seconds']:.1f}",
                )
            )
        elif "error" in case:
            rows.append((CASES[name], case["error"][:60], "-", "-", "-"))
    return Table(title="Rollouts", columns=("", "s", "tokens/s", "x floor", "first call s"), rows=rows)


def bars_table(found: Mapping[str, Any]) -> Table:
    """What is wanted of one GPU, what was measured, and whether that is enough."""
    cases = {name: case for name, case in found["cases"].items() if "error" not in case}
    seconds = {name: case["seconds"] for name, case in cases.items() if "seconds" in case}
    rates = {name: cases[name]["tokens"] / seconds[name] for name in seconds}
    floor = found.get("floor_seconds")
    rows: list[tuple[str, str, str, str]] = []

    def bar(what: str, needs: tuple[str, ...], value: Any, limit: float, *, at_most: bool) -> None:
        if all(name in cases for name in needs):
            measured = value()
            is_met = measured <= limit if at_most else measured >= limit
            sign = "<=" if at_most else ">="
            rows.append((what, f"{measured:.2f}", f"{sign} {limit:g}", "yes" if is_met else "NO"))

    bar("native, x floor", ("native",), lambda: seconds["native"] / floor, 5.5, at_most=True)
    bar("compiled, x floor", ("compiled",), lambda: seconds["compiled"] / floor, 3.5, at_most=True)
    bar("hf / native", ("hf", "native"), lambda: seconds["hf"] / seconds["native"], 10, at_most=False)
    for name, limit in (("native", 4), ("compiled", 7)):
        needs = ("generate", name)
        bar(f"generate / {name}", needs, lambda n=name: seconds["generate"] / seconds[n], limit, at_most=False)
    for name in ("ragged", "many"):
        needs = (name, "native")
        bar(f"{name}, tokens/s of native's", needs, lambda n=name: rates[n] / rates["native"], 0.75, at_most=False)
    if "long" in cases and cases["long"]["held_bytes"]:
        case = cases["long"]
        bar(
            "long, bytes of the plan's",
            ("long",),
            lambda: case["held_bytes"] / case["planned_bytes"],
            1.02,
            at_most=True,
        )
    if "asleep" in cases:
        case = cases["asleep"]
        best = min(cycle["engine"] + cycle["first"] for cycle in case["cycles"])
        bar("first token beyond the actor's wake-up, s", ("asleep",), lambda: best, 0.3, at_most=True)
        used, before = (case[when]["gpu_used_bytes"] for when in ("memory_asleep", "memory_before"))
        if used is not None:
            bar("GPU MiB left asleep", ("asleep",), lambda: (used - before) / 2**20, 50, at_most=True)
        bar("bits kept over sleeps", ("asleep",), lambda: float(case["bits_kept"]), 1, at_most=False)
    return Table(title="Bars (one H200)", columns=("", "measured", "wanted", "met"), rows=rows)


@hydra.main(config_path="pkg://conf", config_name="bench_rollout", version_base="1.3")
def _hydra_job(composed: DictConfig) -> None:
    def prepare(overrides: list[str]) -> tuple[BenchRolloutConfig, dict[str, Config]]:
        bench = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(BenchRolloutConfig), composed.bench))
        assert isinstance(bench, BenchRolloutConfig)
        check(bench, config_of(composed))
        of_worker = {
            offload: config_of(hydra.compose("bench_rollout", overrides=[*overrides, f"offload={offload}"]))
            for offload in ("none", "train")
        }
        return bench, of_worker

    run_job(prepare, lambda prepared, directory, console: run(*prepared, directory, console))


def main() -> None:
    refuse_bad_overrides()
    configuration.register()
    ConfigStore.instance().store(name="bench_rollout_schema", node=BenchRolloutRoot)
    exits.leave(exits.code_of(_hydra_job))


if __name__ == "__main__":
    main()
