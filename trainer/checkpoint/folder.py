"""Checkpoint folders, complete or absent, and where a run goes on from. Knows files and configs, no tensors.

    <run directory>/checkpoints/
        latest                    name of the checkpoint to go on from; replaced last
        best                      name of the one with the highest held-out accuracy, where that is kept
        step_<n>/manifest.json    where the run stood, its config, size and SHA-256 of every other file
        step_<n>/<role>/          see :mod:`trainer.checkpoint.state`
        step_<n>/tokenizer/       a Hugging Face tokenizer folder
        step_<n>.tmp/             being written, or left by a killed run: the next start removes it

Everything is on disk (fsync) before ``latest`` names it, and older checkpoints are removed after that, so a run may be
killed at any moment. :mod:`trainer.checkpoint.manifest` judges whether a folder is whole.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import MANIFEST_FILE, Manifest, fault_in, read_manifest, write_manifest
from trainer.common.files import sync, write_whole
from trainer.config.identity import to_plain
from trainer.config.marks import Mark
from trainer.config.roles import REFERENCE
from trainer.config.schema import Config
from trainer.config.settings import is_marked

FOLDER = "checkpoints"
_LATEST, _BEST, _TEMPORARY = "latest", "best", ".tmp"
_ACCURACY = "heldout_accuracy"


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the files of ``step`` into."""
    remove_leftovers(folder)
    temporary = folder / f"step_{step}{_TEMPORARY}"
    temporary.mkdir(parents=True)
    return temporary


def remove_leftovers(folder: Path) -> None:
    """Remove what killed saves left. Only when nobody is saving, and in the folder of a run."""
    for leftover in _leftovers(folder):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _leftovers(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.glob(f"*{_TEMPORARY}")
        if (path.is_dir() and re.fullmatch(r"step_\d+", path.stem)) or path.stem in (_LATEST, _BEST)
    ]


def not_of_a_run(folder: Path) -> list[str]:
    """Names in ``folder`` of what a run would remove although none has put it there: what looks like a save that was
    cut off, and steps that are no checkpoints. Asked where no run has been; checkpoints that were copied there are
    welcome."""
    steps = [path for path in _steps(folder) if not (path / MANIFEST_FILE).exists()]
    return sorted(path.name for path in [*_leftovers(folder), *steps])


def commit(temporary: Path, manifest: Manifest, *, keep_last: int, keep_best: bool) -> Path:
    """Turn a folder of files that are on disk into a checkpoint, name it the latest, and keep the last few.

    With ``keep_best`` it is named the best too if no older one has reached its held-out accuracy; the best is kept.
    """
    folder, final = temporary.parent, temporary.with_suffix("")
    write_manifest(temporary, manifest)
    if final.exists():  # of a later life of the run that went on from an earlier checkpoint: never the latest
        shutil.rmtree(final)
    os.replace(temporary, final)
    sync(folder)
    if keep_best and _is_best(manifest, folder):
        write_whole(folder / _BEST, f"{final.name}\n")
    write_whole(folder / _LATEST, f"{final.name}\n")
    past, kept = [path for path in _steps(folder) if _step_of(path) <= manifest.step], best(folder.parent)
    for old in past[:-keep_last]:
        if old != kept:
            shutil.rmtree(old)
    return final


def _is_best(manifest: Manifest, folder: Path) -> bool:
    accuracy, before = manifest.record.get(_ACCURACY), best(folder.parent)
    if accuracy is None or before is None or fault_in(before) is not None:
        return accuracy is not None
    return accuracy > read_manifest(before).record[_ACCURACY]


def latest(run_directory: Path) -> Path | None:
    """The checkpoint that ``latest`` names; None if the run has saved none."""
    return _named_by(run_directory / FOLDER / _LATEST)


def best(run_directory: Path) -> Path | None:
    """The checkpoint that ``best`` names; None if there is none (or a kill came while the same step was saved anew)."""
    found = _named_by(run_directory / FOLDER / _BEST)
    return found if found is not None and found.exists() else None


def _named_by(pointer: Path) -> Path | None:
    if not pointer.exists():
        return None
    name = pointer.read_text(errors="replace").strip()
    if not re.fullmatch(r"step_\d+", name):
        known = ", ".join(path.name for path in _steps(pointer.parent)) or "none"
        raise ValueError(
            f"{pointer} holds {name!r}, must hold the name of a checkpoint (there are: {known}): write one into it, or "
            "give resume=<path of a checkpoint>"
        )
    return pointer.parent / name


def read(checkpoint: Path, *, checksums: bool = False) -> Manifest:
    """The manifest of a whole checkpoint.

    Args:
        checksums: read every file and compare its SHA-256 too, where one was saved.

    Raises:
        ValueError: a file is missing or is not as it was saved, or the manifest is damaged; names the file and the
            newest earlier checkpoint beside it that is whole.
    """
    fault = fault_in(checkpoint, checksums=checksums)
    if fault is None:
        return read_manifest(checkpoint)
    older = [path for path in _steps(checkpoint.parent) if _step_of(path) < _step_of(checkpoint)]
    whole = next((path for path in reversed(older) if fault_in(path, checksums=checksums) is None), None)
    advice = f"the previous whole checkpoint is resume={whole}" if whole else "no whole one is older"
    raise ValueError(f"the checkpoint {checkpoint} cannot be used: {fault}; {advice}")


def starting_point(config: Config, run_directory: Path, *, questions: str | None = None) -> Path | None:
    """The checkpoint from which ``resume`` lets the job in ``run_directory`` go on; None if it starts anew.

    A run directory given to ``resume`` means its latest checkpoint. A job that has saved checkpoints of its own goes on
    from its latest, so the same command can be repeated, unless ``resume`` names one of them.

    Args:
        questions: digest of the job's examples; None: not compared.

    Raises:
        ValueError: there is no checkpoint, it is damaged, or it is of another model or tokenizer, or of other questions
            although the task's settings are the same.
    """
    own = latest(run_directory)
    if config.resume is None:
        if own is not None:
            raise ValueError(
                f"{run_directory} holds checkpoints and resume=null starts over: go on from them with resume=auto, or "
                "choose another hydra.run.dir (in a sweep hydra.sweep.dir)"
            )
        return None
    checkpoint = own
    if config.resume != "auto" and (own is None or Path(config.resume).resolve().parent == own.resolve().parent):
        checkpoint = _named(Path(config.resume))
    if checkpoint is not None:
        manifest = read(checkpoint, checksums=config.checkpoint.checksums)
        _check(config, manifest, checkpoint)
        if questions is not None:
            _check_questions(config, manifest, checkpoint, questions)
    return checkpoint


def is_inside(resume: str | None, run_directory: Path) -> bool:
    """Whether ``resume`` names nothing outside of the run's own directory."""
    return resume in (None, "auto") or Path(resume).resolve().is_relative_to(run_directory.resolve())


def differences(saved: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (saved, given) of every setting that is not equal."""
    found = {}
    for key in dict.fromkeys([*saved, *given]):
        left, right = saved.get(key), given.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found |= differences(left, right, f"{prefix}{key}.")
        elif left != right:
            found[f"{prefix}{key}"] = (left, right)
    return found


def _named(path: Path) -> Path:
    """The checkpoint that a path given by the user means."""
    if os.path.isdir(path / FOLDER):  # which takes any text, as Path does not
        found = latest(path)
        if found is not None:
            return found
    elif path.parent.name == FOLDER and path.name in (_LATEST, _BEST) and os.path.isfile(path):
        found = _named_by(path)
        assert found is not None
        return found
    elif (path.parent.name == FOLDER and os.path.isdir(path)) or os.path.exists(path / MANIFEST_FILE):  # a copy
        return path
    raise ValueError(
        f"resume={path}: no checkpoint there. Give a run directory with {FOLDER}/{_LATEST}, or one of its "
        f"{FOLDER}/step_<n> (or {FOLDER}/{_BEST}), or a copy of one; a run saves checkpoints with "
        "checkpoint.every_steps=<number>"
    )


def run_directory_of(checkpoint: Path) -> Path | None:
    """The directory of the run that saved ``checkpoint``; None for a copy that lies elsewhere."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == FOLDER else None


def _check(config: Config, manifest: Manifest, checkpoint: Path) -> None:
    """Raise ValueError where the saved weights would mean something else under this config."""
    marks = (Mark.ARCHITECTURE, Mark.WEIGHTS, *([Mark.CORPUS] if config.tokenizer.path is None else []))
    found = [
        _difference(key, saved, given)
        for key, (saved, given) in differences(manifest.config, to_plain(config)).items()
        if is_marked(key, *marks) and not key.startswith("model.")  # from which roles take theirs
    ]
    if found:
        on_task = any(problem.startswith("task.") for problem in found)
        reason = " (the tokenizer is trained on the task: another task or seed gives tokens another meaning)" * on_task
        raise ValueError(f"the checkpoint {checkpoint} does not fit this config: {'; '.join(found)}{reason}")
    absent = sorted(set(config.roles) - set(manifest.optimizer_steps))
    if absent:
        raise ValueError(
            f"the checkpoint {checkpoint} has no {' and '.join(absent)}: it was saved by an algorithm without. Go on "
            "from it with algo=grpo, rloo or reinforce_pp"
        )
    if config.algo.uses_reference and REFERENCE not in manifest.tags["actor"]:
        raise ValueError(
            f"the checkpoint {checkpoint} has no reference model: it was saved with algo.kl.coef=0, and algo.kl.coef="
            f"{config.algo.kl.coef:g} with algo.kl.target={config.algo.kl.target} needs one. Go on from it with "
            "algo.kl.coef=0 algo.kl.target=null"
        )
    wanted = config.algo.num_steps
    if manifest.step > wanted or (manifest.step == wanted and "heldout_accuracy" not in manifest.record):
        raise ValueError(
            f"algo.num_steps={wanted}, but the checkpoint {checkpoint} is already after step {manifest.step}: "
            f"use algo.num_steps={manifest.step + 1} or more"
        )


def _check_questions(config: Config, manifest: Manifest, checkpoint: Path, questions: str) -> None:
    is_trained_on_them = config.tokenizer.path is None
    if questions == manifest.questions or not (is_trained_on_them or manifest.config.get("task") == config.task):
        return
    other = "the tokenizer is trained on them, so tokens would get another meaning"
    if not is_trained_on_them:
        other = "to go on with others, give them in a file of their own (task.path=...) and a new hydra.run.dir"
    raise ValueError(
        f"the checkpoint {checkpoint} was saved with other questions than this task has now, although its settings "
        f"are the same: a file of the task, or the package that makes them, has changed. Restore it; {other}"
    )


def _difference(key: str, saved: Any, given: Any) -> str:
    section, _, name = key.rpartition(".")
    if name == "digest":
        return f"{section}.path has other content than what was saved ({key}={given} where {saved} was)"
    return f"{key}={given} where {saved} was saved"


def _steps(folder: Path) -> list[Path]:
    """Checkpoints in ``folder``, lowest step first."""
    return sorted((path for path in folder.glob("step_*") if path.suffix != _TEMPORARY), key=_step_of)


def _step_of(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("step_")
    return int(number) if number.isdigit() else -1
