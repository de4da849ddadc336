"""Does the plan fit the machine, and which memory policies would?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib import resources

import yaml

from trainer.config import rules
from trainer.config.schema import GRAD_FLAG, PARAM_FLAG, Config, RestoreConfig
from trainer.plan.footprint import Footprint, footprint
from trainer.plan.holdings import EngineBytes
from trainer.plan.role_bytes import ranks_that_share_tags

GIB = 2**30


def check_fits(config: Config, *, vocab_size: int, engine: EngineBytes) -> None:
    """Raise ValueError if the predicted bytes exceed ``launch.host_memory_gib`` or ``launch.gpu_memory_gib``.

    The message says what is needed and which memory policies would fit. null means unknown: nothing to check.
    """
    problems = _problems(config, footprint(config, vocab_size=vocab_size, engine=engine))
    if not problems:
        return
    fitting = []
    for name, other in _other_policies(config):
        prediction = footprint(other, vocab_size=vocab_size, engine=engine)
        if not _problems(other, prediction):
            fitting.append((prediction.node_host_peak_bytes, name))
    advice = (
        f"these policies fit: {', '.join(name for _, name in sorted(fitting))}"
        if fitting
        else "no memory policy fits: use a smaller model, or more ranks, which share the optimizer state (data "
        "parallel) or the whole model (parallel.tp, parallel.pp)"
    )
    raise ValueError(f"the plan does not fit: {'; '.join(problems)}. {advice[0].upper()}{advice[1:]}")


def fits(config: Config, prediction: Footprint) -> bool:
    """Whether nothing that is known about the machine speaks against the config."""
    return not _problems(config, prediction)


def _problems(config: Config, prediction: Footprint) -> list[str]:
    needed = {
        "host": (prediction.node_host_peak_bytes, "of host memory on the node"),
        "gpu": (0 if prediction.host_is_device else prediction.device_peak_bytes, "of GPU memory per rank"),
    }
    return [
        f"it needs {size / GIB:.2f} GiB {where}, more than launch.{name}_memory_gib={limit:g}"
        for name, (size, where) in needed.items()
        if (limit := getattr(config.launch, f"{name}_memory_gib")) is not None and size > limit * GIB
    ]


def _other_policies(config: Config) -> Iterator[tuple[str, Config]]:
    """Overrides -> the config under them: every option of the group ``memory``, its flags following from it, with tags
    as they are and, where several ranks could share them, shared. Refused ones are left out."""
    for file in resources.files("conf").joinpath("memory").iterdir():
        if file.name.endswith(".yaml"):
            name = f"memory={file.name.removesuffix('.yaml')}"
            changed = with_policy(config, yaml.safe_load(file.read_text()))
            choices = {name: changed}
            if max(ranks_that_share_tags(config)) > 1 and config.memory.tags == "full":
                memory = dataclasses.replace(changed.memory, tags="sharded")
                choices[f"{name} memory.tags=sharded"] = dataclasses.replace(changed, memory=memory)
            yield from ((overrides, choice) for overrides, choice in choices.items() if _is_allowed(choice))


def _is_allowed(config: Config) -> bool:
    try:
        rules.check(config, explicit_flags=())
    except ValueError:
        return False
    return True


def with_policy(config: Config, policy: dict[str, dict[str, str]]) -> Config:
    """``config`` with another memory policy: role -> the values of its :class:`RestoreConfig`."""
    roles = {}
    for role, role_config in config.roles.items():
        sources = {PARAM_FLAG: policy[role]["restore_params_from"], GRAD_FLAG: policy[role]["restore_grads_from"]}
        flags = {flag: config.offload.train and source != "saver" for flag, source in sources.items()}
        roles[role] = dataclasses.replace(role_config, ddp=dataclasses.replace(role_config.ddp, **flags))
    restore = {role: RestoreConfig(**values) for role, values in policy.items()}
    return dataclasses.replace(config, roles=roles, memory=dataclasses.replace(config.memory, **restore))
