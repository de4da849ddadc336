"""``python -m trainer.bench.passes``: forward and backward passes of one model, beside transformers' with and without
Liger's kernels.

Every case has a body of the config's architecture with random weights and an fp32 value head, so no logits are made,
and passes over batches of random tokens without padding. Nothing is optimized, nobody sleeps. One worker per case.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List  # noqa: UP035  (omegaconf reads these annotations)

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from trainer.bench.bars import Bar, bars_table, ratio_bar, share_bar
from trainer.bench.launching import config_of, run_job, run_workers
from trainer.bench.passes_worker import PassesJob, parse_shape, run_passes
from trainer.command import exits
from trainer.command.arguments import refuse_bad_overrides
from trainer.config import compose as configuration
from trainer.config.schema import ComposedConfig, Config, Section
from trainer.report.tables import Table, text

RESULT_FILE = "passes.json"

CASES = {  # name -> (what it is, overrides)
    "torch": ("Torpor, model.kernels=torch", ("model.kernels=torch",)),
    "liger": ("Torpor, model.kernels=liger", ("model.kernels=liger",)),
    "te": ("Torpor, model.kernels=te", ("model.kernels=te",)),
    "plain": ("transformers as it is", ("model.kernels=torch",)),
    "plain_liger": ("transformers with Liger's RMSNorm, SwiGLU and rotary kernels", ("model.kernels=torch",)),
}


@dataclass
class BenchPassesConfig(Section):
    """The section ``bench``; its defaults lie in ``conf/bench_passes.yaml``."""

    cases: List[str]  # noqa: UP006
    shapes: List[str]  # noqa: UP006
    repeats: int
    case_timeout_seconds: int


@dataclass
class BenchPassesRoot(ComposedConfig):
    """The schema of ``conf/bench_passes.yaml``."""

    bench: BenchPassesConfig


def check(bench: BenchPassesConfig, config: Config) -> None:
    """Raise ValueError for cases and shapes that there are not."""
    unknown = [name for name in bench.cases if name not in CASES]
    if unknown or not bench.cases:
        raise ValueError(f"bench.cases={bench.cases}: must be some of {', '.join(CASES)}")
    for shape in bench.shapes:
        parse_shape(shape)
    if config.launch.nproc != 1:
        raise ValueError(f"launch.nproc={config.launch.nproc}: each case has one worker; use launch.nproc=1")


def passes_tables(records: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """``records``: case -> shape -> what was measured."""
    shapes = list(next(iter(records.values())))
    columns = [f"{shape} {what}" for shape in shapes for what in ("fwd ms", "fwd+bwd ms", "MFU", "GiB")]
    rows = []
    for name, of_shapes in records.items():
        cells = [name]
        for shape in shapes:
            found = of_shapes[shape]
            cells += [f"{found[f'{way}_seconds'] * 1e3:.1f}" for way in ("forward", "both")]
            cells += [text(found["mfu"], ".1%"), text(found["peak_gib"], ".1f")]
        rows.append(cells)
    passes = Table(title="Forward and backward passes", columns=("case", *columns), rows=rows)
    bars = _bars(records, shapes)
    return [passes, bars_table(bars)] if bars else [passes]


def _bars(records: Mapping[str, Mapping[str, Any]], shapes: Sequence[str]) -> list[Bar]:
    """Of the fastest kernels that were measured."""
    ours = next((name for name in ("liger", "te", "torch") if name in records), "")
    bars = []
    for shape in shapes if ours else ():
        seconds = {name: of_shapes[shape]["both_seconds"] for name, of_shapes in records.items()}
        bars.append(share_bar(f"{ours} {shape}: MFU", records[ours][shape]["mfu"], at_least=0.5))
        for peer, ratio in (("plain", 0.8), ("plain_liger", 1.05)):
            if peer in records:
                name = f"{ours} {shape}: seconds of {peer}"
                bars.append(ratio_bar(name, seconds[ours], seconds[peer], at_most=ratio))
    return bars


def run(bench: BenchPassesConfig, configs: Mapping[str, Config], directory: Path, console: Console) -> bool:
    """Measure every case, write the results, and say whether all went well."""
    results: dict[str, dict[str, Any]] = {}
    for name, config in configs.items():
        console.print(f"{name}: {CASES[name][0]}")
        job = PassesJob(config, name, tuple(bench.shapes), bench.repeats, bench.case_timeout_seconds)
        results[name] = run_workers(run_passes, job, name, directory, console)
        (directory / RESULT_FILE).write_text(json.dumps(results, indent=1) + "\n")
    measured = {name: record["shapes"] for name, record in results.items() if "error" not in record}
    for table in passes_tables(measured) if measured else ():
        console.print(table)
    console.print(f"all numbers: {directory / RESULT_FILE}", soft_wrap=True)
    return len(measured) == len(configs)


@hydra.main(config_path="pkg://conf", config_name="bench_passes", version_base="1.3")
def _hydra_job(composed: DictConfig) -> None:
    def prepare(overrides: Sequence[str]) -> tuple[BenchPassesConfig, dict[str, Config]]:
        bench = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(BenchPassesConfig), composed.bench))
        assert isinstance(bench, BenchPassesConfig)
        check(bench, config_of(composed))
        of_case = {name: [*overrides, *CASES[name][1]] for name in bench.cases}
        return bench, {name: config_of(hydra.compose("bench_passes", overrides=x)) for name, x in of_case.items()}

    run_job(prepare, lambda prepared, directory, console: run(*prepared, directory, console))


def main() -> None:
    refuse_bad_overrides()
    configuration.register()
    ConfigStore.instance().store(name="bench_passes_schema", node=BenchPassesRoot)
    exits.leave(exits.code_of(_hydra_job))


if __name__ == "__main__":
    main()
