"""``python -m trainer.bench``: compose one config per case, launch fresh workers for each, show one table.

A case that fails prints its traceback; the others go on. Results are written after every case.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from trainer.bench import cases, launching, measure, swap
from trainer.bench.cases import CASES, BenchConfig, BenchRoot, Case, CaseJob
from trainer.bench.launching import run_job, run_workers
from trainer.bench.table import NEEDS_GPU, document, summarize, tables
from trainer.command import exits
from trainer.command.arguments import refuse_bad_overrides
from trainer.common.json_files import TEXT
from trainer.config import compose as configuration
from trainer.config.identity import config_hash
from trainer.config.schema import Config
from trainer.plan.footprint import footprint, plan_rows
from trainer.report import read_records
from trainer.report.records import BENCH_FILE
from trainer.rollout.engines import planned_bytes

TABLE_FILE = "bench.md"


def bench_of(composed: DictConfig) -> BenchConfig:
    """The typed section ``bench``; merged once more, because ``+key`` overrides bypass the schema."""
    bench = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(BenchConfig), composed.bench))
    assert isinstance(bench, BenchConfig)
    return bench


def config_of(case: Case, overrides: list[str]) -> Config:
    """The validated config of one case under the command's overrides; Hydra must be initialized."""
    composed = hydra.compose("bench", overrides=[*overrides, *case.overrides])
    config = launching.config_of(composed)
    if "critic" not in config.roles:
        raise ValueError("the benchmark measures actor and critic, and this algorithm has no critic: use algo=ppo")
    return config


def run(bench: BenchConfig, configs: Mapping[str, Config], directory: Path, console: Console) -> bool:
    """Measure every case of ``configs``, add the records to those in the directory, and say whether all went well."""
    first, records = next(iter(configs.values())), []
    roofline = run_workers(measure.measure_roofline, CaseJob(first, bench, None), "roofline", directory, console)
    failed = "error" in roofline
    for name, config in configs.items():
        case = CASES[name]
        record: dict[str, Any] = {"case": name, "config_hash": config_hash(config)}
        if case.needs_gpu and config.platform.name == "cpu":
            record["error"] = NEEDS_GPU
        else:
            console.print(f"{name}: {case.meaning}")
            job = CaseJob(config, bench, case.peer)
            worker = swap.run_swap if case.swaps else measure.run_case
            record |= run_workers(worker, job, name, directory, console)
            failed |= "error" in record or not record["bits_kept"]
        if "error" not in record:
            if case.peer is None and not case.swaps:
                record["plan"] = plan_rows(
                    footprint(
                        config,
                        vocab_size=bench.vocab_size,
                        engine=planned_bytes(config, vocab_size=bench.vocab_size),
                    )
                )
            record.setdefault("roofline", None if "error" in roofline else roofline)  # that of a disk is its own
            if not case.swaps:
                record["summary"] = summarize(record)
        with (directory / BENCH_FILE).open("a") as file:
            file.write(json.dumps(record) + "\n")
        newest = {record["case"]: record for record in read_records(directory / BENCH_FILE, fields={"case": TEXT})}
        records = [newest[known] for known in CASES if known in newest]
        (directory / TABLE_FILE).write_text(document(records, cases={n: c.meaning for n, c in CASES.items()}))
    for table in tables(records):
        console.print(table)
    console.print(f"table: {directory / TABLE_FILE}   all numbers: {directory / BENCH_FILE}", soft_wrap=True)
    return not failed


@hydra.main(config_path="pkg://conf", config_name="bench", version_base="1.3")
def _hydra_job(composed: DictConfig) -> None:
    def prepare(overrides: list[str]) -> tuple[BenchConfig, dict[str, Config]]:
        bench = bench_of(composed)
        cases.check(bench, overrides)
        return bench, {name: config_of(CASES[name], overrides) for name in bench.cases}

    run_job(prepare, lambda prepared, directory, console: run(*prepared, directory, console))


def main() -> None:
    refuse_bad_overrides()
    configuration.register()
    ConfigStore.instance().store(name="bench_schema", node=BenchRoot)
    exits.leave(exits.code_of(_hydra_job))


if __name__ == "__main__":
    main()
