"""Which runs belong together and what tells them apart. Pure."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.common.units import format_setting
from trainer.config.marks import Mark
from trainer.config.settings import is_marked
from trainer.report.compare import Run


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed. ``settings``: what tells them from other groups, (name, value)."""

    settings: Sequence[tuple[str, str]]
    runs: Sequence[Run]

    @property
    def label(self) -> str:
        """E.g. "memory=lean actor.optimizer.lr=0.001"."""
        return joined_label([self])

    def median(self, value: Callable[[Run], float | None]) -> float | None:
        """Over the runs in which it is known."""
        known = [x for run in self.runs if (x := value(run)) is not None]
        return statistics.median(known) if known else None

    def curves(self, value: Callable[[Run], Mapping[int, float]]) -> dict[int, list[float]]:
        """step -> the values of all runs that measured it."""
        steps = sorted({step for run in self.runs for step in value(run)})
        return {step: [value(run)[step] for run in self.runs if step in value(run)] for step in steps}


def differing(runs: Sequence[Run]) -> list[str]:
    """Keys of the config that not all configured runs agree on, in the config's order."""
    configured = [run for run in runs if run.settings]
    keys = dict.fromkeys(key for run in configured for key in run.settings)
    return [key for key in keys if len({repr(run.settings.get(key)) for run in configured}) > 1]


def telling_keys(runs: Sequence[Run]) -> dict[str, str]:
    """The few keys that tell the runs apart, seeds aside: group choices and command-line overrides that differ, then
    whatever else differs and does not follow from those (a policy's flags do, and the groups that an algorithm
    chooses). With each the shortest end of it that no other key has."""
    configured = [run for run in runs if run.settings]
    leaf_keys = [key for key in differing(runs) if not is_marked(key, Mark.SEED)]
    groups = dict.fromkeys(group for run in configured for group in run.choices)
    chosen = [group for group in groups if all(group in run.choices for run in configured)]
    named = {key for run in configured for key in run.overridden}
    choices = [key for key in chosen if len({run.choices[key] for run in configured}) > 1]
    keys = [key for key in choices + leaf_keys if key in named]
    for key in choices + leaf_keys:
        seen: dict[str, str] = {}
        values = [(repr([run.value(known) for known in keys]), repr(run.value(key))) for run in configured]
        if any(seen.setdefault(known, value) != value for known, value in values):
            keys.append(key)
    known_keys = {key for run in configured for key in run.settings}
    return {key: key if key in chosen else _shortest_end(key, known_keys) for key in keys}


def _shortest_end(key: str, known_keys: Iterable[str]) -> str:
    parts = key.split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts) - 1, 0, -1)]
    return next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in known_keys) == 1), key)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs with a config, those that differ only in the seed together, in the order of their first run."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.settings:
            decides = [pair for pair in run.settings.items() if not is_marked(pair[0], Mark.SEED)]
            groups.setdefault(repr(decides), []).append(run)
    keys = telling_keys(runs)
    told = [
        [(name, format_setting(members[0].value(key))) for key, name in keys.items()] for members in groups.values()
    ]
    return [Group(settings, members) for settings, members in zip(told, groups.values(), strict=True)]


def joined_label(groups: Sequence[Group]) -> str:
    """One label for several groups: as a sweep would list their values if they are all combinations of them."""
    values: dict[str, dict[str, None]] = {}
    for group in groups:
        for name, value in group.settings:
            values.setdefault(name, {})[value] = None
    if math.prod(map(len, values.values())) == len(groups):
        return " ".join(f"{name}={','.join(options)}" for name, options in values.items()) or "all runs"
    return " | ".join(group.label for group in groups)


def ledger(group: Group) -> Any:
    """Host bytes by role and owner, with which groups are alike whatever else differs."""
    return [(dict(run.host_bytes), run.parameters) for run in group.runs if run.host_bytes][:1]


def alike(groups: Sequence[Group], value: Callable[[Group], Any]) -> list[list[Group]]:
    """Groups with equal values together, in the order of their first."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(repr(value(group)), []).append(group)
    return list(found.values())


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other point beats in one coordinate without losing in the other (less is better),
    by their first coordinate."""

    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a != b and a[0] <= b[0] and a[1] <= b[1]

    front = [i for i, point in enumerate(points) if not any(beats(other, point) for other in points)]
    return sorted(front, key=lambda i: points[i])
