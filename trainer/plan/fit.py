"""Does the plan fit the machine, and which memory policies would?"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from importlib import resources

import yaml

from trainer.config import rules
from trainer.config.roles import drops_copy, trained_roles
from trainer.config.schema import GRAD_FLAG, PARAM_FLAG, Config, RestoreConfig
from trainer.plan.activations import micro_batch_tokens
from trainer.plan.footprint import Footprint, footprint
from trainer.plan.holdings import EngineBytes
from trainer.plan.role_bytes import ranks_that_share_tags

GIB = 2**30


def check_fits(
    config: Config,
    *,
    vocab_size: int,
    engine: EngineBytes,
    host_bytes: int | None = None,
    gpu_bytes: int | None = None,
) -> None:
    """Raise ValueError if the predicted bytes exceed ``launch.host_memory_gib``, ``launch.gpu_memory_gib`` (null: not
    known), or what the disk has free. The message says what is needed and which memory policies would fit.

    Args:
        host_bytes: what the machine lets the run have, where ``launch.host_memory_gib`` is null; None: not known.
        gpu_bytes: what a GPU reports, likewise for the schedule and ``launch.gpu_memory_gib``.
    """
    sizes = {"vocab_size": vocab_size, "engine": engine, "reported_gpu_bytes": gpu_bytes}
    problems = _problems(config, footprint(config, **sizes), host_bytes)
    if not problems:
        return
    fitting = []
    for name, other in _other_policies(config):
        prediction = footprint(other, **sizes)
        if not _problems(other, prediction, host_bytes):
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
    return not _problems(config, prediction, None)


def _problems(config: Config, prediction: Footprint, host_bytes: int | None) -> list[str]:
    launch, problems = config.launch, []
    host, limit = prediction.node_host_peak_bytes, host_bytes
    whose = f"the {(host_bytes or 0) / GIB:.2f} that this machine or its control group allows"
    if launch.host_memory_gib is not None:
        limit, whose = launch.host_memory_gib * GIB, f"launch.host_memory_gib={launch.host_memory_gib:g}"
    if limit is not None and host > limit:
        problems.append(f"it needs {host / GIB:.2f} GiB of host memory on the node, more than {whose}")
    if prediction.refusal is not None:
        problems.append(prediction.refusal)
    device, of_gpu = prediction.device_peak_bytes, launch.gpu_memory_gib
    if not config.offload.auto and of_gpu is not None and not prediction.host_is_device and device > of_gpu * GIB:
        problems.append(
            f"it needs {device / GIB:.2f} GiB of GPU memory per rank, more than launch.gpu_memory_gib={of_gpu:g}"
            f"{_of_activations(config, prediction)}"
        )
    if prediction.node_disk_bytes:
        assert config.memory.disk.path is not None
        free = shutil.disk_usage(config.memory.disk.path).free
        if prediction.node_disk_bytes > free:
            problems.append(
                f"it needs {prediction.node_disk_bytes / GIB:.2f} GiB of the disk of "
                f"memory.disk.path={config.memory.disk.path}, which has {free / GIB:.2f} free"
            )
    return problems


def _of_activations(config: Config, prediction: Footprint) -> str:
    peak = max(prediction.moments, key=lambda moment: moment.device_bytes + moment.activation_bytes)
    if not peak.activation_bytes:
        return ""
    setting = "micro_batch_size" if config.algo.micro_batch_tokens is None else "micro_batch_tokens"
    more = "" if config.training.recompute == "full" else " or training.recompute=full"
    return (
        f" ({peak.name}: {peak.activation_bytes / GIB:.2f} are activations of {micro_batch_tokens(config)} tokens; "
        f"less with a smaller algo.{setting}{more})"
    )


def _other_policies(config: Config) -> Iterator[tuple[str, Config]]:
    """Overrides -> the config under them: every option of the group ``memory``, its flags following from it, with tags
    as they are and, where several ranks could share them, shared. Refused ones are left out."""
    for file in resources.files("conf").joinpath("memory").iterdir():
        if file.name.endswith(".yaml"):
            name = f"memory={file.name.removesuffix('.yaml')}"
            changed = with_policy(config, yaml.safe_load(file.read_text()))
            choices = {name: changed}
            if max(ranks_that_share_tags(config)) > 1 and config.memory.tags == "full":
                for tags in ("sharded", "node"):
                    memory = dataclasses.replace(changed.memory, tags=tags)
                    choices[f"{name} memory.tags={tags}"] = dataclasses.replace(changed, memory=memory)
            yield from ((overrides, choice) for overrides, choice in choices.items() if _is_allowed(choice))


def _is_allowed(config: Config) -> bool:
    try:
        rules.check(config, explicit_flags=())
    except ValueError:
        return False
    return True


def with_policy(config: Config, policy: dict[str, dict[str, str]]) -> Config:
    """``config`` with another memory policy: role -> the values of its :class:`RestoreConfig`. Roles that it does not
    name keep theirs."""
    memory = {**config.memory.roles, **{role: RestoreConfig(**values) for role, values in policy.items()}}
    roles = dict(config.roles)
    for role, settings in trained_roles(config).items():
        sources = {PARAM_FLAG: memory[role].restore_params_from, GRAD_FLAG: memory[role].restore_grads_from}
        flags = {flag: drops_copy(source, sleeps=config.offload.train) for flag, source in sources.items()}
        roles[role] = dataclasses.replace(roles[role], ddp=dataclasses.replace(settings.ddp, **flags))
    return dataclasses.replace(config, roles=roles, memory=dataclasses.replace(config.memory, roles=memory))
