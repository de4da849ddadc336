"""Bad and extreme values for every setting, and what becomes of a command that has one of them.

A case is a list of overrides. It goes the way of a command up to its launch: Hydra's parser and composition, the typed
config, the rules, the plan, the records' JSON.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import re
from collections.abc import Iterator, Sequence
from importlib import resources

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import CompactHydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

import conf
from tests.helpers.composing import composed
from trainer.common.limits import Limits, Words
from trainer.common.units import leaves
from trainer.config import compose as configuration
from trainer.config.hints import known_keys
from trainer.config.identity import config_hash, to_plain
from trainer.config.overrides import check_overrides
from trainer.config.pieces import make_task
from trainer.config.schema import Config
from trainer.config.settings import setting_of
from trainer.plan.fit import check_fits
from trainer.plan.footprint import footprint, plan_rows
from trainer.rollout.engines import planned_bytes
from trainer.tasks.tokenizer import vocab_size_of

Case = tuple[str, ...]
GROUPS = {path.name for path in resources.files(conf).iterdir() if path.is_dir()}

NUMBERS = ("0", "-1", "0.5", "1000000000000", "9223372036854775808", "1e400", "-inf", "nan", f"1{'0' * 400}")
TEXTS = ("abc", "''", "true", "null", "???", "'[/b]'", "'a\x00b'", "x" * 10_000, "é😀")
SECTIONS = ("[1,2]", "{}", "{a:{b:[nan]}}")
INTERPOLATIONS = ("${seed}", "${nothing}", "${roles}", "'${'")
VALUES = (*NUMBERS, *TEXTS, *SECTIONS, *INTERPOLATIONS)
OF_SHARED = ("null", "nan", "abc", "{a:1}")  # of a role's settings that have a top-level setting like them

# What a command has beside the case: everything at its default, and pieces that are not in a default run.
BASES: tuple[Case, ...] = (
    ("platform=cpu",),
    ("platform=cpu", "algo=grpo"),
    ("platform=cpu", "model=tiny_moe", "memory=rebuild", "rollout=hf"),
    ("platform=cpu", "task=reasoning_gym", "task.dataset=chain_sum"),
    ("platform=cpu", "task=calculator"),
    ("platform=cpu", "task=guess_number"),
)


@functools.cache
def base_config(base: Case) -> DictConfig:
    return composed(*base)


@functools.cache
def settings_of(base: Case) -> tuple[str, ...]:
    """Every dotted key that a command with these overrides can set, sections included."""
    config = to_plain(configuration.to_config(base_config(base)))
    keys = {key: None for key, _ in leaves(config)}
    for key in [*keys, *known_keys()]:
        parts = key.split(".")
        present = key.startswith("roles.critic.") <= ("critic" in config["roles"])
        if present and key not in ("memory.roles", "task_name"):
            keys |= {".".join(parts[:end]): None for end in range(1, len(parts) + 1)}
    return tuple(keys)


def extremes(key: str) -> tuple[str, ...]:
    """The ends of the setting's limits and what lies just beyond them; its words."""
    found: list[str] = []
    for rule in setting_of(key).said:
        if isinstance(rule, Limits):
            for end, beyond in ((rule.smallest, -1), (rule.largest, 1)):
                found += [str(end), str(end + beyond * max(1, abs(end) // 1000))]
        elif isinstance(rule, Words):
            found += rule.allowed
    return tuple(found)


def all_cases(bases: Sequence[Case] = BASES) -> Iterator[tuple[Case, Case]]:
    """(base, case): every setting with every value; of further bases only settings that the first does not have."""
    seen: set[str] = set()
    for base in bases:
        for key in settings_of(base):
            if key not in seen:
                is_shared = key.startswith("roles.") and (".model." in key or ".optimizer." in key)
                values = dict.fromkeys(OF_SHARED if is_shared else (*VALUES, *extremes(key)))
                yield from ((base, (f"{key}={value}",)) for value in values)
        seen |= set(settings_of(base))


def mixed_cases(count: int, *, seed: int, bases: Sequence[Case] = BASES) -> Iterator[tuple[Case, Case]]:
    """Several settings at an end of their limits at once, which every rule and the plan must stand."""
    draw = random.Random(seed)
    for _ in range(count):
        base = draw.choice(bases)
        keys = [key for key in settings_of(base) if extremes(key)]
        chosen = draw.sample(keys, draw.randint(2, 8))
        ends = {key: [end for rule in setting_of(key).said for end in _ends(rule)] for key in chosen}
        yield base, tuple(f"{key}={draw.choice(ends[key])}" for key in chosen if ends[key])


def _ends(rule: object) -> Sequence[str]:
    if isinstance(rule, Limits):
        return str(rule.smallest), str(rule.largest)
    return rule.allowed if isinstance(rule, Words) else ()


def outcome(base: Case, case: Case) -> str:
    """ "accepted", "refused" with a message that names a setting of the case, or what is wrong."""
    names = {part for override in case for part in override.partition("=")[0].split(".")[-2:]}
    names |= {name for override in case for name in re.findall(r"\$\{([\w.:]+)", override)}
    clear: tuple[type[Exception], ...] = (ValueError,)
    try:
        check_overrides(case)
        clear = (CompactHydraException,)  # all else that Hydra raises is a traceback
        config = composed_with(base, case)
        clear = (ValueError, ImportError, OmegaConfBaseException)
        run_to_launch(configuration.to_config(config))
    except Exception as error:
        text = f"{getattr(error, 'full_key', '')} {error} {error.__cause__ or ''}"
        if isinstance(error, clear) and any(name in text for name in names):
            return "refused"
        problem = "names no setting" if isinstance(error, clear) else "no clear error"
        return f"{problem}: {type(error).__name__}: {str(error)[:200]}"
    return "accepted"


def composed_with(base: Case, case: Case) -> DictConfig:
    """As ``composed(*base, *case)``; only what chooses options of groups is composed anew, which takes long."""
    if any(override.partition("=")[0] in GROUPS for override in case):
        return composed(*base, *case)
    overrides = OverridesParser.create().parse_overrides(list(case))
    config = copy.deepcopy(base_config(base))
    ConfigLoaderImpl._apply_overrides_to_config(overrides, config)
    return config


def run_to_launch(config: Config) -> None:
    """What a command does with its config before it launches workers, but for the folders."""
    config_hash(config)
    json.loads(json.dumps(to_plain(config), allow_nan=False))
    vocab_size = vocab_size_of(config.tokenizer.path, task=make_task(config), vocab_size=config.largest_vocab_size)
    engine = planned_bytes(config, vocab_size=vocab_size)
    check_fits(config, vocab_size=vocab_size, engine=engine)
    plan_rows(footprint(config, vocab_size=vocab_size, engine=engine))
