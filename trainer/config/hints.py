"""One-line hints for keys that Hydra or omegaconf refused: what replaced them, why there are none, or the nearest."""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
import typing
from collections.abc import Iterator

from trainer.config.schema import Config, RestoreConfig, RoleConfig

_BACKUPER = (
    "there is no switch for the weights backuper any more: which copies exist follows from the memory policy. "
    "memory=rebuild keeps no host copy of the actor's parameters, memory=lean only the backuper's"
)
_NO_CRITIC = "algo=grpo, rloo and reinforce_pp have no critic: leave roles.critic out of the command, or use algo=ppo"
_ESTIMATOR = "it belongs to the advantage estimator: advantages.{0}, where advantages={1}"
_PRECISION_AWARE = (
    "not supported: with it main params live inside the optimizer in another precision than fp32 (by default as the 16 "
    "bits that bf16 parameters lack), from which parameters cannot be rebuilt bit for bit, as memory=rebuild does"
)
EXPLAINED_KEYS = {
    "gamma": _ESTIMATOR.format("gamma", "gae or reinforce_pp"),
    "lam": _ESTIMATOR.format("lam", "gae"),
    "bootstrap_truncated": _ESTIMATOR.format("bootstrap_truncated", "gae"),
    "disable_weights_backuper": _BACKUPER,
    "enable_weights_backuper": _BACKUPER,
    "offload_train": "use offload=train or offload=none",
    "use_precision_aware_optimizer": _PRECISION_AWARE,
}
# What the presets in conf/hydra build on -> the extra that brings it.
EXTRAS = {
    "hydra/launcher/joblib": "joblib",
    "hydra/launcher/submitit_local": "submitit",
    "hydra/launcher/submitit_slurm": "submitit",
    "hydra/launcher/ray": "ray",
    "hydra/sweeper/optuna": "optuna",
}


def hint_for(error: BaseException) -> str | None:
    """A hint for the refused key that caused ``error``, or None if there is none to give."""
    for cause in _chain(error):
        if "Recursive interpolation" in str(cause):
            return "the options model=shared and optimizer=shared are for roles (model@roles.critic.model=shared)"
        missing = re.search(r"Could not (?:find|load) '(hydra/\w+/\w+)'", str(cause))
        if missing and missing.group(1) in EXTRAS:
            return f"pip install 'torpor[{EXTRAS[missing.group(1)]}]'"
        if "missing EQUAL" in str(cause):
            return "a setting is one word, <name>=<value>, as in seed=3; python -m trainer --help shows more"
        if quoted := _quoted(cause):
            is_list = str(cause).startswith("Ambiguous value")
            return "with -m it is a sweep, of one job for each value; " * is_list + quoted
        key = getattr(cause, "full_key", None) or _key_in(str(cause))
        if key:
            return _hint_for_key(key)
    return None


def _quoted(error: BaseException) -> str | None:
    """How to write an override whose value Hydra's grammar could not read, or took for a list."""
    ambiguous = re.search(r"^Ambiguous value for argument '(.*)'$", str(error), re.MULTILINE)
    override = ambiguous.group(1) if ambiguous else getattr(error, "override", "")
    key, equals, value = override.partition("=")
    if not equals or value[:1] in "'\"[{" or not re.fullmatch(r"[\w./@+~-]+", key):
        return None
    quoted = "'" + value.replace("'", r"\'") + "'"
    whole = shlex.quote(f"{key}={quoted}") if re.search(r'["$`\\!]', quoted) else f'"{key}={quoted}"'
    return f"a value with = , ( [ {{ # ~ or letters beyond ASCII needs quotes, and these need the shell's: {whole}"


def hint_for_flags(arguments: list[str]) -> str | None:
    """A hint for arguments in the style of argparse: an explained flag (``--disable-weights-backuper``), a setting with
    dashes, a flag of Hydra's between settings."""
    if {"-m", "--multirun"} & set(arguments[1:-1]) and "=" in arguments[0]:
        return "flags such as -m stand before all settings, or after all of them"
    for argument in arguments:
        name = argument.lstrip("-+~").partition("=")[0].replace("-", "_").rpartition(".")[2]
        if name in EXPLAINED_KEYS:
            return EXPLAINED_KEYS[name]
        alike = [key for key in known_keys() if argument.startswith("--") and name in (key, _last(key))]
        if alike:
            return f"settings have no dashes: {min(alike, key=len)}=<value>"
    return None


def _hint_for_key(key: str) -> str | None:
    section, _, last = key.rpartition(".")
    if last in EXPLAINED_KEYS:
        return EXPLAINED_KEYS[last]
    known = list(known_keys())
    if key in known:
        return None  # the value was refused, not the key
    if key in ("roles.critic", "critic"):
        return _NO_CRITIC
    if key.startswith("hydra."):
        return f"python -m trainer --cfg hydra -p {section}, with your other overrides, shows the settings there are"
    names = {_last(name) for name in known}
    alike = difflib.get_close_matches(last, names, n=3, cutoff=0.6)
    nearest = sorted((name for name in known if _last(name) in alike), key=lambda name: -_similarity(name, key))
    if section.partition(".")[0] == "task" or (section and not nearest):
        return f"python -m trainer --cfg job -p {section}, with your other overrides, shows the settings there are"
    return f"did you mean {' or '.join(nearest[:3])}?" if nearest else None


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _similarity(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


def known_keys() -> Iterator[str]:
    """Every dotted key of the schema, those of the usual roles included."""
    yield from _fields(Config, "")
    for role in ("actor", "critic"):
        yield from _fields(RoleConfig, f"roles.{role}.")
        yield from _fields(RestoreConfig, f"memory.{role}.")


def _fields(section: type, prefix: str) -> Iterator[str]:
    types = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        yield f"{prefix}{field.name}"
        for section in (types[field.name], *typing.get_args(types[field.name])):  # a section that may be null, too
            if dataclasses.is_dataclass(section) and typing.get_origin(types[field.name]) is not dict:
                yield from _fields(section, f"{prefix}{field.name}.")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _key_in(message: str) -> str | None:
    found = re.search(r"(?:full_key: |Key ')([\w.]+)", message)
    return found.group(1) if found else None
