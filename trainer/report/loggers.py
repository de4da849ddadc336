"""Where metrics go besides metrics.jsonl (config group `logger`): nowhere, TensorBoard, Weights & Biases."""

import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from trainer.config.schema import LoggerConfig
from trainer.report.records import Record

KINDS = ("none", "tensorboard", "wandb")


class Logger:
    """Takes the records of metrics.jsonl. This one, `logger=none`, lets them pass."""

    def log(self, record: Record) -> None:
        """Log the finite numbers of a record under its step; text and nulls are left to metrics.jsonl."""

    def close(self, *, failed: bool = False) -> None:
        """Write out what is pending; ``failed``: the run has not come to its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close(failed=exception_type is not None)
        except Exception as error:  # metrics.jsonl has all that was logged
            print(f"the logger could not be closed: {type(error).__name__}: {error}", file=sys.stderr)


class TensorBoardLogger(Logger):
    """Event files in <run directory>/tensorboard."""

    def __init__(self, directory: Path, *, hyperparameters: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "tensorboard"))
        if hyperparameters:
            text = json.dumps(hyperparameters, indent=2, default=str)
            self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def log(self, record: Record) -> None:
        for key, value in _numbers(record).items():
            self._writer.add_scalar(key, value, record["step"])
        self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


class WandbLogger(Logger):
    """A run of the configured project; WANDB_MODE=offline (environment) keeps it in the run directory."""

    def __init__(self, directory: Path, *, project: str, hyperparameters: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(project=project, name=directory.name, dir=str(directory), config=dict(hyperparameters))

    def log(self, record: Record) -> None:
        self._run.log(_numbers(record), step=record["step"])

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


def check_installed(logger: LoggerConfig) -> None:
    """Raise ImportError, which names the extra to install, if the logger's package is not there."""
    if logger.kind in KINDS[1:] and find_spec(logger.kind) is None:
        raise ImportError(f"logger={logger.kind} needs: pip install 'torpor[{logger.kind}]'")


def open_loggers(logger: LoggerConfig, directory: Path, *, hyperparameters: Mapping[str, Any] | None = None) -> Logger:
    """The logger that the config asks for, to be closed or used as a context manager, on rank 0 only.

    Args:
        logger: the config section `logger`.
        directory: the run directory.
        hyperparameters: the run's config as plain values, shown beside the metrics.

    Raises:
        ValueError: the kind is not one of KINDS.
        ImportError: as :func:`check_installed`.
    """
    check_installed(logger)
    match logger.kind:
        case "none":
            return Logger()
        case "tensorboard":
            return TensorBoardLogger(directory, hyperparameters=hyperparameters or {})
        case "wandb":
            return WandbLogger(directory, project=logger.project, hyperparameters=hyperparameters or {})
    raise ValueError(f"logger.kind is {logger.kind!r}; choose one with logger={'|'.join(KINDS)}")


def _numbers(record: Record) -> dict[str, float]:
    # NaN is kept out because wandb and TensorBoard draw it differently; metrics.jsonl says null.
    return {
        key: value
        for key, value in record.items()
        if key != "step" and isinstance(value, int | float) and value - value == 0
    }
