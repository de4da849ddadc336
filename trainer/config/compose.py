"""The border between Hydra and Torpor: YAML in, typed immutable sections out.

Everything else works with the dataclasses of :mod:`trainer.config.schema` and never sees omegaconf.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.algo.estimators import AdvantageEstimator
from trainer.algo.mismatch import Correction
from trainer.algo.policy_losses import PolicyLoss
from trainer.common.imports import import_named
from trainer.config import objectives, rules
from trainer.config.hf_architecture import architecture_of
from trainer.config.marks import Mark
from trainer.config.roles import drops_copy
from trainer.config.rules.model import default_attention_backend, default_kernels
from trainer.config.schema import GRAD_FLAG, PARAM_FLAG, ComposedConfig, Config, MemoryConfig, RestoreConfig
from trainer.config.settings import is_marked
from trainer.tasks import Environment
from trainer.tasks.tokenizer import tokenizer_digest


def register() -> None:
    """Give Hydra the schema and the resolvers that ``conf/`` uses. Safe to call again."""
    ConfigStore.instance().store(name="schema", node=ComposedConfig)
    for name, resolver in {
        "no_backup": lambda offload, source: drops_copy(source, sleeps=bool(offload)),
        "detect_platform": _detect_platform,
        "checkpoint": lambda path, field: architecture_of(path)[field],
        "tokenizer_digest": tokenizer_digest,
        "attention_backend": default_attention_backend,
        "equal": lambda left, right: left == right,
        "directions": lambda objective: [objectives.DIRECTIONS.get(x) for x in objective],
        "trial_number": lambda job, known: int(job) + int(known),
        "if_null": lambda value, then, otherwise: then if value is None else otherwise,
        "threads_per_worker": lambda nproc: max(1, _usable_cores() // max(1, int(nproc))),
    }.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def _detect_platform() -> str:
    """``cuda`` where the driver shows a device, else ``cpu``; torch asks the driver's library, without a context."""
    return "cuda" if torch.cuda.device_count() > 0 else "cpu"


def to_config(composed: DictConfig) -> Config:
    """Turn a composed Hydra config into a validated :class:`Config`.

    The composed node is merged into the schema once more, because ``+key`` and ``++key`` overrides bypass it.

    Raises:
        omegaconf.errors.OmegaConfBaseException: an unknown key or a value of the wrong type.
        ValueError: a rule of :mod:`trainer.config.rules` is broken; names the values and the override to change.
    """
    _check_sections(composed)
    _check_whole_roles(composed)
    _check_model_folders(composed)
    values = _valued(composed, lambda: OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
    assert isinstance(values, dict)
    values["task"] = _typed_piece("task", values["task"], base=Environment)
    values["memory"] = _typed_memory(values["memory"])
    values["advantages"] = _typed_piece("advantages", values["advantages"], base=AdvantageEstimator)
    values["policy_loss"] = _typed_piece("policy_loss", values["policy_loss"], base=PolicyLoss)
    values["mismatch"] = _typed_piece("mismatch", values["mismatch"], base=Correction)
    for model in (values["model"], *(role["model"] for role in values["roles"].values())):
        if model["kernels"] == "auto":
            model["kernels"] = default_kernels(values["platform"]["name"])
    typed = _merged(lambda: OmegaConf.structured(Config), values)
    explicit = frozenset(_explicit_flags(composed))
    config = _valued(typed, lambda: OmegaConf.to_object(typed))  # also in sections that have no type until now
    assert isinstance(config, Config)
    rules.check(config, explicit_flags=explicit)
    return config


def _merged(schema: Callable[[], Any], values: dict[Any, Any]) -> DictConfig | ListConfig:
    """``values`` with the types of what ``schema`` makes."""
    try:
        return OmegaConf.merge(schema(), values)
    except OmegaConfBaseException as error:
        if error.full_key:
            raise
        key, value = _refused_part(schema, values)
        raise ValueError(f"{key}={value}: {str(error).splitlines()[0]}") from error


def _refused_part(schema: Callable[[], Any], values: Any, path: tuple[str, ...] = ()) -> tuple[str, Any]:
    """(key, value) of the smallest part that omegaconf cannot merge and does not name, a mapping for a list."""
    for key, value in values.items() if isinstance(values, dict) else ():
        alone = functools.reduce(lambda inner, name: {name: inner}, reversed((*path, key)), value)
        try:
            OmegaConf.merge(schema(), alone)
        except OmegaConfBaseException:
            return _refused_part(schema, value, (*path, key))
    return ".".join(path), values


def _valued(settings: DictConfig | ListConfig, take: Callable[[], Any]) -> Any:
    """What ``take`` makes of the settings. Raises ValueError that names all without a value where omegaconf names the
    first, or what refers to it."""
    try:
        return take()
    except OmegaConfBaseException:
        missing = sorted(OmegaConf.missing_keys(settings))
        if not missing:
            raise
    examples = " ".join(f"{key}=..." for key in missing)  # here, where no hint finds omegaconf's error behind this one
    raise ValueError(f"no value given for {', '.join(missing)}: add {examples} to the command")


def _check_sections(composed: DictConfig) -> None:
    """What omegaconf does not hold to its type, because its keys are anybody's, holds settings."""
    found = {name: composed[name] for name in ("roles", "memory", "task", "advantages")}
    for role in composed.roles if isinstance(found["roles"], DictConfig) else ():
        settings = found[f"roles.{role}"] = composed.roles[role]
        for part in ("model", "optimizer", "ddp") if isinstance(settings, DictConfig) else ():
            if not OmegaConf.is_missing(settings, part) and settings[part] is not None:
                found[f"roles.{role}.{part}"] = settings[part]
    for name, section in found.items():
        if not isinstance(section, DictConfig):
            raise ValueError(f"{name}={section}: must be a section with settings, {name}.<setting>=<value>")


def _check_whole_roles(composed: DictConfig) -> None:
    """A role comes from three groups, or two if it is not trained; with only some of them, omegaconf's errors would
    speak of missing values."""
    for role in composed.roles:
        groups = {"role": "head", "model": "model", "optimizer": "optimizer"}
        whole = f"role@roles.{role}={role} model@roles.{role}.model=shared optimizer@roles.{role}.optimizer=shared"
        missing = [group for group, key in groups.items() if _is_empty(composed.roles[role], key)]
        if missing:
            raise ValueError(
                f"roles.{role} has nothing from the group {' and '.join(missing)}: a role needs {whole}. An algorithm "
                "without a critic (algo=grpo, rloo or reinforce_pp) leaves all three of it out"
            )


def _is_empty(role: DictConfig, key: str) -> bool:
    """Whether a role's setting, or all values of its section, are still missing."""
    if OmegaConf.is_missing(role, key) or not isinstance(role[key], DictConfig):
        return OmegaConf.is_missing(role, key)
    return all(OmegaConf.is_missing(role[key], name) for name in role[key])


def _check_model_folders(composed: DictConfig) -> None:
    """First of all, since else omegaconf's error about an interpolation hides what is wrong with the folder."""
    models = {"model": composed.model, **{f"roles.{role}.model": node.model for role, node in composed.roles.items()}}
    for name, model in models.items():
        if OmegaConf.is_missing(model, "path"):
            raise ValueError(f"no value given for {name}.path: add {name}.path=... to the command, a model folder")
        if model.path is not None:
            architecture_of(model.path)


def _typed_piece(section: str, given: dict[str, Any], *, base: type) -> dict[str, Any]:
    """Merge ``given`` into the dataclass that its ``_target_`` names, so that its values have types too."""
    values = dict(given)
    target = values.pop("_target_", None)
    if not isinstance(target, str):
        raise ValueError(f"{section} has no _target_: name its class with {section}._target_=package.module.Class")
    piece = import_named(target, setting=f"{section}._target_")
    if not (isinstance(piece, type) and issubclass(piece, base) and dataclasses.is_dataclass(piece)):
        of_tasks = "trainer.tasks.Task or trainer.tasks.Environment"
        public = of_tasks if base is Environment else f"{base.__module__}.{base.__name__}"
        raise ValueError(f"{section}._target_={target} is no dataclass derived from {public}")
    known = [field.name for field in dataclasses.fields(piece)]
    for key in values:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"{section}.{key} is not a setting of {target}; {takes}")

    def schema() -> DictConfig:
        made = OmegaConf.create({section: OmegaConf.structured(piece)})  # nested, so that errors say section.<key>
        OmegaConf.set_readonly(made[section], False)  # which it is for a frozen dataclass
        return made

    typed = OmegaConf.to_container(_merged(schema, {section: values}), throw_on_missing=True)
    assert isinstance(typed, dict)
    return {"_target_": target, **typed[section]}


def _typed_memory(given: dict[str, Any]) -> dict[str, Any]:
    """The section ``memory`` as :class:`MemoryConfig` has it: what is no setting of the section is a role's."""
    settings = {field.name for field in dataclasses.fields(MemoryConfig)} - {"roles"}
    roles = {key: value for key, value in given.items() if key not in settings}
    schema = OmegaConf.create({"memory": {role: OmegaConf.structured(RestoreConfig) for role in roles}})
    restore = OmegaConf.to_container(OmegaConf.merge(schema, {"memory": roles}), throw_on_missing=True)
    assert isinstance(restore, dict)
    return {**{key: given[key] for key in given.keys() & settings}, "roles": restore["memory"]}


def left_to_the_machine(composed: DictConfig) -> frozenset[str]:
    """Keys of the settings that every machine decides for itself, because nobody gave a value."""
    return frozenset(
        f"{section}.{key}"
        for section, settings in composed.items_ex(resolve=False)
        if isinstance(settings, DictConfig) and not settings._is_none()
        for key in settings
        if is_marked(f"{section}.{key}", Mark.PER_NODE) and OmegaConf.is_interpolation(settings, str(key))
    )


def _explicit_flags(composed: DictConfig) -> Iterable[tuple[str, str]]:
    """The (role, flag) pairs whose node is no interpolation any more: the user set them."""
    trained = {str(role): node for role, node in composed.roles.items() if node.ddp is not None}
    for role, node in trained.items():
        for flag in (PARAM_FLAG, GRAD_FLAG):
            if not OmegaConf.is_interpolation(node.ddp, flag):
                yield role, flag
