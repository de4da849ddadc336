"""Many run directories, read for comparison: what was set, how it ended, what it measured.

Broken and unfinished runs are read as far as they go. Simplification: memory and seconds are those of rank 0.
"""

import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainer.common.units import leaves
from trainer.report.memory import Sample, host_bytes_by_owner, last_sleeps, median_seconds, timeline
from trainer.report.progress import step_seconds
from trainer.report.records import (
    BENCH_FILE,
    CONFIG_FILE,
    MEMORY_FILE,
    METRICS_FILE,
    RESULT_FILE,
    Record,
    read_config,
    read_records,
    read_result,
)

HYDRA_FOLDER = ".hydra"  # what Hydra composed: its record in a run directory


@dataclass(kw_only=True)
class Run:
    """One run directory.

    Attributes:
        name: the directory below what all compared runs share.
        state: "finished" (it has its result), "failed" (refused, or a worker left a traceback) or "unfinished".
        note: why it is not finished, or what could not be read.
        settings: dotted key -> value of the resolved config; empty if the run stopped before it had one.
        choices: config group -> chosen option, from Hydra's own record.
        overridden: keys that were given on the command line.
        accuracies, accuracy_errors: step -> held-out accuracy, and its standard error where there is one.
        host_bytes: role -> owner -> bytes kept on the host while the role sleeps.
        sleep_seconds, wake_seconds: of all regions once, each at its median.
        step_seconds: median over the PPO steps.
    """

    name: str
    state: str = "unfinished"
    note: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    overridden: Sequence[str] = ()
    rewards: Mapping[int, float] = field(default_factory=dict)
    accuracies: Mapping[int, float] = field(default_factory=dict)
    accuracy_errors: Mapping[int, float] = field(default_factory=dict)
    weights: str = ""
    parameters: Mapping[str, int] = field(default_factory=dict)
    host_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    sleep_seconds: float | None = None
    wake_seconds: float | None = None
    step_seconds: float | None = None

    def value(self, key: str) -> Any:
        return self.choices[key] if key in self.choices else self.settings.get(key)

    def kept(self, role: str, owner: str) -> int | None:
        return self.host_bytes[role][owner] if role in self.host_bytes else None

    def bytes_of(self, role: str) -> int | None:
        return sum(self.host_bytes[role].values()) if role in self.host_bytes else None

    def bytes_per_parameter(self, role: str) -> float | None:
        total, count = self.bytes_of(role), self.parameters.get(role)
        return total / count if total is not None and count else None

    @property
    def all_bytes(self) -> int | None:
        return sum(sum(owners.values()) for owners in self.host_bytes.values()) if self.host_bytes else None


def find_runs(directory: Path) -> list[Path]:
    """Run directories at or below ``directory``, run 10 after run 9; what lies in a run is no other."""
    found = []
    for path, folders, files in os.walk(directory):
        if BENCH_FILE in files:
            folders.clear()
        elif HYDRA_FOLDER in folders or {METRICS_FILE, RESULT_FILE} & set(files):
            found.append(Path(path))
            if "multirun.yaml" not in files:  # Hydra's own mark of a sweep
                folders.clear()
    return sorted(found, key=natural_order)


def natural_order(path: Path | str) -> list[tuple[int, str]]:
    """A key to sort by: 10 comes after 9."""
    return [(len(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", str(path))]


def read_overrides(directory: Path) -> list[str]:
    """The command line's overrides of a run, as Hydra wrote them down; none where it wrote nothing that can be read."""
    path = directory / ".hydra" / "overrides.yaml"
    try:
        found = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError):
        return []
    return [str(override) for override in found] if isinstance(found, list) else []


def read_runs(directories: Iterable[Path]) -> list[Run]:
    """All runs at or below the directories, each once.

    Raises:
        ValueError: a directory does not exist or holds no run.
    """
    found: dict[Path, None] = {}
    for directory in directories:
        paths = find_runs(directory)
        if not paths:
            what = "holds no run" if directory.is_dir() else "is no directory"
            files = f"a {HYDRA_FOLDER} folder, {METRICS_FILE} or {RESULT_FILE}"
            raise ValueError(f"{directory} {what}: name directories of runs or sweeps, in which runs have {files}")
        found |= dict.fromkeys(path.resolve() for path in paths)
    root = Path(os.path.commonpath(found)) if len(found) > 1 else next(iter(found)).parent
    return [_read_run(path, name=str(path.relative_to(root))) for path in found]


def _read_run(directory: Path, *, name: str) -> Run:
    run, problems = Run(name=name), []

    def attempt(what: str, read: Callable[[], None]) -> None:
        try:
            read()
        except FileNotFoundError:
            problems.append(f"no {what}")
        except Exception as error:  # whatever a broken file leads to
            problems.append(f"{what} cannot be read ({type(error).__name__}: {error})")

    attempt(CONFIG_FILE, lambda: _read_config(run, directory))
    if (directory / HYDRA_FOLDER).is_dir():
        attempt(HYDRA_FOLDER, lambda: _read_hydra(run, directory / HYDRA_FOLDER))
    attempt(METRICS_FILE, lambda: _read_metrics(run, read_records(directory / METRICS_FILE)))
    attempt(MEMORY_FILE, lambda: _read_memory(run, read_records(directory / MEMORY_FILE)))
    if (directory / RESULT_FILE).exists():
        attempt(RESULT_FILE, lambda: _read_result(run, directory))
    tracebacks = sorted((directory / "logs").glob("rank_*.traceback"))
    if run.state != "finished" and tracebacks:
        run.state = "failed"
        problems.insert(0, next(iter(tracebacks[0].read_text(errors="replace").splitlines()), ""))
    elif not any((directory / name).exists() for name in (CONFIG_FILE, METRICS_FILE, RESULT_FILE)):
        run.state, problems = "failed", [f"no {CONFIG_FILE}: refused before its workers started"]
    elif run.state != "finished" and not problems:
        problems.append(f"no {RESULT_FILE}: cut off, or still running")
    run.note = "; ".join(problems)
    return run


def _read_config(run: Run, directory: Path) -> None:
    run.settings = dict(leaves(read_config(directory)))


def _read_result(run: Run, directory: Path) -> None:
    read_result(directory)
    run.state = "finished"


def _read_hydra(run: Run, directory: Path) -> None:
    choices = yaml.safe_load((directory / "hydra.yaml").read_text())["hydra"]["runtime"]["choices"]
    run.overridden = [text.partition("=")[0].lstrip("+~") for text in read_overrides(directory.parent)]
    run.choices = {group: str(option) for group, option in choices.items() if not group.startswith("hydra/")}


def _read_metrics(run: Run, metrics: Sequence[Record]) -> None:
    steps = [record for record in metrics if record["step"] > 0]
    run.rewards = {r["step"]: float(r["reward"]) for r in steps if r.get("reward") is not None}
    run.accuracies = {r["step"]: float(r["heldout_accuracy"]) for r in metrics if r.get("heldout_accuracy") is not None}
    run.accuracy_errors = {
        r["step"]: float(r["heldout_accuracy_se"]) for r in metrics if r.get("heldout_accuracy_se") is not None
    }
    run.parameters = {k.partition("/")[2]: v for r in metrics for k, v in r.items() if k.startswith("parameters/")}
    run.step_seconds = statistics.median(map(step_seconds, steps)) if steps else None
    last = metrics[-1] if metrics else {}
    run.weights = " ".join(str(last[key]) for key in sorted(last) if key.startswith("weights_sha256/"))


def _read_memory(run: Run, memory: Sequence[Record]) -> None:
    run.host_bytes, run.samples = host_bytes_by_owner(memory), timeline(memory)
    regions = last_sleeps(memory).values()

    def seconds(*states: str) -> float | None:
        medians = (median_seconds(memory, region=region, state=state) for region in regions for state in states)
        return sum(median or 0.0 for median in medians) if regions else None

    run.sleep_seconds, run.wake_seconds = seconds("asleep"), seconds("awake", "restored")
