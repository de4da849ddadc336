"""What a sweeper may optimise of a job: numbers that every finished job has, each with its better direction.

heldout_accuracy   mean score of greedy responses to held-out questions after the last step, in [0, 1]
host_bytes         most that one rank keeps in host memory for whoever sleeps, in the last step
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.schema import Config

DIRECTIONS = {"heldout_accuracy": "maximize", "host_bytes": "minimize"}
_RECORD_KEYS = {"heldout_accuracy": "heldout_accuracy", "host_bytes": "asleep_backup_bytes"}
_ERROR_KEYS = ("heldout_accuracy_se",)


def of_record(record: Mapping[str, Any]) -> dict[str, float]:
    """All objectives of a job whose last metrics record is given, and their standard errors where they have one."""
    errors = {key: record[key] for key in _ERROR_KEYS if record.get(key) is not None}
    return {name: record[key] for name, key in _RECORD_KEYS.items()} | errors


def values(results: Mapping[str, float], *, names: Sequence[str]) -> float | tuple[float, ...]:
    """What Hydra's sweepers expect: a number for one objective, a tuple for several."""
    found = tuple(float(results[name]) for name in names)
    return found[0] if len(found) == 1 else found


def check_objective(config: Config) -> None:
    names = config.objective
    if not names or len(set(names)) < len(names) or not set(names) <= DIRECTIONS.keys():
        allowed = " and ".join(DIRECTIONS)
        raise ValueError(f"objective=[{','.join(names)}]: must list one or more of {allowed}, each once")
