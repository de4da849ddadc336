"""What a run reports, for tests that compare runs with one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.loop import Outputs

_PASSING = ("seconds/", "tokens_per_second", "mfu/", "host_", "asleep_", "mov")


def lasting(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Records of metrics.jsonl without what depends on the machine's load and memory."""
    return [{key: value for key, value in record.items() if not key.startswith(_PASSING)} for record in records]


def recorded() -> tuple[Outputs, list[dict[str, Any]]]:
    """Outputs of a run, and the list to which they add each record of its metrics. In a worker, once it is set up."""
    from trainer.loop import Outputs

    records: list[dict[str, Any]] = []

    class Recorder:
        def metrics(self, record: dict[str, Any]) -> None:
            records.append(record)

        def log(self, record: dict[str, Any]) -> None:
            pass

    recorder: Any = Recorder()
    return Outputs(recorder, None, recorder), records
