"""What a sweep must be told before its first job: a choice that its jobs cannot make any more, the numbers of trials
that a stored study goes on with."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import CompactHydraException
from hydra.types import RunMode

from trainer.command.exits import JobError

if TYPE_CHECKING:
    from omegaconf import DictConfig

_OF_THE_SWEEP = ("launcher", "sweeper", "sweep")  # sections of hydra that are read once, before any job is composed
_NO_TRIAL = "No trials are completed yet."  # Optuna's, when it is to name the best one
_JOB_NUMBER = "${hydra.job.num}"


def refuse_other_record(config: DictConfig) -> None:
    """Raise ValueError if Hydra is to write its record into job folders: it would, before anybody has asked whose they
    are."""
    subdir = config.hydra.output_subdir
    if subdir is not None:
        raise ValueError(
            f"hydra.output_subdir={subdir}: a job leaves Hydra's record in .hydra of its own folder, once the folder "
            "is its own. Leave hydra.output_subdir at null"
        )


def require_folder(setting: str, path: str) -> None:
    """Raise ValueError unless there is, or can be made, a folder where Hydra is to make one."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{setting}={path} cannot be made a folder ({error.strerror}): choose another") from error


def refuse_choices_of_jobs(config: DictConfig) -> None:
    """Raise ValueError if an option that is swept chooses or sets up a launcher or a sweeper: the sweep has its own by
    then, and would ignore it in silence."""
    loader = GlobalHydra.instance().config_loader()
    given = OverridesParser.create(config_loader=loader).parse_overrides(list(config.hydra.overrides.task))
    options = {
        override.get_key_element(): list(override.sweep_string_iterator())
        for override in given
        if override.is_discrete_sweep() and loader.get_group_options(override.key_or_group)
    }
    plain = [override.input_line for override in given if not override.is_sweep_override()]
    for group, values in options.items():
        for value in values:
            choices = {other: others[0] for other, others in options.items()} | {group: value}
            overrides = [*config.hydra.overrides.hydra, *plain, *(f"{key}={word}" for key, word in choices.items())]
            try:
                composed = loader.load_configuration(config.hydra.job.config_name, overrides, RunMode.RUN)
            except Exception:  # Hydra says it better when it composes the job
                continue
            for section in _OF_THE_SWEEP:
                if str(composed.hydra[section]) != str(config.hydra[section]):
                    raise ValueError(
                        f"{group}={value} sets hydra.{section}, which is read once for the whole sweep, before its "
                        "jobs are composed: give that on the command line (hydra/launcher=..., hydra/sweeper=..., "
                        f"hydra.{section}.<setting>=...), or run the sweep with {group}={value} alone"
                    )


def end_in_one_line() -> None:
    """What the next sweep's sweeper or launcher raises becomes a JobError, which Hydra shows without frames: a study
    that cannot be opened, a search without a finished trial, a process that was killed. What a job raises stays."""
    logging.getLogger("alembic").setLevel(logging.WARNING)  # which Optuna imports, and which lists its parts
    plugins: Any = Plugins.instance()
    instantiate = plugins.instantiate_sweeper

    def guarded(**given: Any) -> Any:
        plugins.instantiate_sweeper = instantiate
        with _in_one_line():
            sweeper = instantiate(**given)
        sweeper.sweep = _in_one_line()(sweeper.sweep)
        return sweeper

    plugins.instantiate_sweeper = guarded


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except CompactHydraException:
        raise
    except Exception as error:
        if any(frame.name == "hydra_job" for frame in traceback.extract_tb(error.__traceback__)):
            raise
        if str(error) == _NO_TRIAL:
            raise JobError("error: the search has no best trial: none has finished") from error
        text = (str(error).strip() or "no more is known").splitlines()[0]
        raise JobError(f"error: the sweep ended: {type(error).__name__}: {text}") from error


def number_trials(config: DictConfig) -> None:
    """Let the folders of a stored study's trials bear the numbers that they have in the study. Hydra's begin at 0 with
    every command, where the folders of earlier trials are."""
    sweeper = config.hydra.sweeper
    storage = sweeper.get("storage")
    if "optuna" not in sweeper._target_ or storage is None:
        return
    known = _trials(str(sweeper.study_name), str(storage))
    if known and f"'subdir': '{_JOB_NUMBER}'" in str(config.hydra.sweep):
        config.hydra.overrides.hydra.append(f"hydra.sweep.subdir='${{trial_number:{_JOB_NUMBER},{known}}}'")


def _trials(study: str, storage: str) -> int:
    """How many trials the study has; 0 if there is none."""
    import optuna  # an extra, which the sweeper needs too

    try:
        return len(optuna.load_study(study_name=study, storage=storage).trials)
    except KeyError:
        return 0
    except Exception as error:  # of the database's driver
        raise ValueError(
            f"hydra.sweeper.storage={storage} cannot be opened ({type(error).__name__}: {str(error).splitlines()[0]}): "
            "give a database, such as sqlite:///study.db, in a folder that exists"
        ) from error
