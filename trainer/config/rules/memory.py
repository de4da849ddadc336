"""What comes back from where after a sleep, and the flags that follow from it."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from trainer.common.machine import filesystem_of
from trainer.config.node_copies import ranks_of_copies
from trainer.config.roles import role_spec, role_specs, trained_role, trained_roles
from trainer.config.schema import Config

ExplicitFlags = Collection[tuple[str, str]]  # (role, flag name)

PARAM_SOURCES = ("saver", "backuper", "main_params")
GRAD_SOURCES = ("saver", "none")
FROZEN_SOURCES = ("saver", "backuper")  # of the parameters of a role that is not trained, which has nothing else
NOTHING = ("none",)
OPTIM_KEEPERS = ("saver", "arena", "packed", "disk")
_IN_HOST_MEMORY = ("tmpfs", "ramfs", "devtmpfs")  # file systems


def check_explicit_flags(config: Config, explicit_flags: ExplicitFlags) -> None:
    """A flag that the user set must be able to mean something."""
    for role, flag in explicit_flags:
        ddp = trained_role(config, role).ddp
        if not getattr(ddp, flag):
            continue
        if not config.offload.train:
            raise ValueError(
                f"roles.{role}.ddp.{flag}=true with offload=none: nothing sleeps, so there is no backup to "
                "disable. Use offload=train, or leave the flag out"
            )
        if "param" in flag and not ddp.use_distributed_optimizer:
            raise ValueError(
                f"roles.{role}.ddp.{flag}=true needs roles.{role}.ddp.use_distributed_optimizer=true: only the "
                "distributed optimizer has a parameter buffer"
            )


def check_nccl_ub(config: Config) -> None:
    for role, settings in trained_roles(config).items():
        ddp = settings.ddp
        flagged = ddp.disable_grad_buffers_cpu_backup or ddp.disable_param_buffers_cpu_backup
        if ddp.nccl_ub and (flagged or config.offload.train):
            raise ValueError(
                f"roles.{role}.ddp.nccl_ub=true does not go with sleeping buffers: NCCL's user buffers come from "
                "its own allocator, which torch_memory_saver cannot pause. Use offload=none, or "
                f"roles.{role}.ddp.nccl_ub=false"
            )


def check_destroy_process_groups(config: Config) -> None:
    if config.offload.destroy_process_groups and not config.offload.train:
        raise ValueError(
            "offload.destroy_process_groups=true with offload=none: communicators are destroyed while everything "
            "sleeps, and nothing does. Use offload=train, or offload.destroy_process_groups=false"
        )


def check_policies(config: Config) -> None:
    """Every role has a policy. That of a role which is not there is fine: ``memory=...`` names all that may be."""
    for role in config.roles:
        if role not in config.memory.roles:
            raise ValueError(
                f"roles.{role} has no memory policy: give +memory.{role}={{restore_params_from: saver, "
                "restore_grads_from: none, optim_keeper: saver}, the last one none for a role that is not trained"
            )


def check_restore_sources(config: Config) -> None:
    for role, spec in role_specs(config).items():
        restore = config.memory.roles[role]
        for field, allowed in (
            ("restore_params_from", PARAM_SOURCES if spec.is_trained else FROZEN_SOURCES),
            ("restore_grads_from", GRAD_SOURCES if spec.is_trained else NOTHING),
            ("optim_keeper", OPTIM_KEEPERS if spec.is_trained else NOTHING),
        ):
            value = getattr(restore, field)
            if value not in allowed:
                raise ValueError(f"memory.{role}.{field}={value}: must be one of {', '.join(allowed)}")
        if restore.restore_params_from == "backuper" and not spec.has_backuper:
            others = "saver (as memory=lean does)" + (" or =main_params (memory=rebuild)" if spec.is_trained else "")
            raise ValueError(
                f"memory.{role}.restore_params_from=backuper: the {role} has no weights backuper (roles.{role}.tags is "
                f"null). Use memory.{role}.restore_params_from={others}"
            )


def check_flags_against_sources(config: Config) -> None:
    """A set flag drops the saver's copy, so the buffer must come back from somewhere else."""
    if not config.offload.train:
        return
    for role, settings in trained_roles(config).items():
        restore = config.memory.roles[role]
        params_policy = "memory=lean or memory=rebuild" if role_spec(config, role).has_backuper else "memory=rebuild"
        for kind, flag, source, policy in (
            ("param", "disable_param_buffers_cpu_backup", restore.restore_params_from, params_policy),
            ("grad", "disable_grad_buffers_cpu_backup", restore.restore_grads_from, "memory=no_grads"),
        ):
            applies = kind == "grad" or settings.ddp.use_distributed_optimizer
            if applies and getattr(settings.ddp, flag) and source == "saver":
                raise ValueError(
                    f"roles.{role}.ddp.{flag}=true but memory.{role}.restore_{kind}s_from=saver: the {role} would "
                    f"wake up with garbage, since the saver keeps no copy. What drops it safely: {policy}"
                )


def check_main_params_source(config: Config) -> None:
    for role, settings in trained_roles(config).items():
        if not config.offload.train or config.memory.roles[role].restore_params_from != "main_params":
            continue
        if not settings.ddp.use_distributed_optimizer:
            raise ValueError(
                f"memory.{role}.restore_params_from=main_params needs "
                f"roles.{role}.ddp.use_distributed_optimizer=true: only the distributed optimizer has a parameter "
                "buffer, which is dropped and filled again from the fp32 main params; without it the parameters sleep "
                "among tensors that nothing rebuilds. Use it, or another policy (memory=lean)"
            )


def check_disk(config: Config) -> None:
    """The disk keeper needs a folder that does not lie in host memory."""
    users = [role for role in config.roles if config.memory.roles[role].optim_keeper == "disk"]
    if not users or not config.offload.train:
        return
    path = config.memory.disk.path
    given = f"memory.{users[0]}.optim_keeper=disk with memory.disk.path={'null' if path is None else path}"
    if path is None:
        raise ValueError(f"{given}: give it a folder on a local disk, e.g. memory.disk.path=/mnt/nvme")
    if not os.path.isdir(path):  # which takes any text, as Path does not
        raise ValueError(f"{given}: there is no such folder. Use one on a local disk, e.g. memory.disk.path=/mnt/nvme")
    if filesystem_of(Path(path)) in _IN_HOST_MEMORY:
        raise ValueError(
            f"{given}: that folder lies in host memory ({filesystem_of(Path(path))}), of which sleeping on a disk is "
            "to take none. Use a folder on a local disk, or another keeper (memory=rebuild)"
        )


def check_optim_format(config: Config) -> None:
    """Rounded moments need a keeper that keeps them so, and do not go with a promise of equal bits."""
    if config.memory.optim_format == "fp32" or not config.offload.train:
        return
    for role in trained_roles(config):
        keeper = config.memory.roles[role].optim_keeper
        if keeper not in ("arena", "disk"):
            raise ValueError(
                f"memory.optim_format=bf16 with memory.{role}.optim_keeper={keeper}, which keeps bits as they are: use "
                f"memory.{role}.optim_keeper=arena or disk, or memory.optim_format=fp32"
            )
    if config.platform.deterministic:
        raise ValueError(
            "memory.optim_format=bf16 with platform.deterministic=true: a run whose moments are rounded whenever they "
            "sleep does not compute the bits of one that does not sleep. Use memory.optim_format=fp32, or "
            "platform.deterministic=false"
        )


def check_tags(config: Config) -> None:
    """Shares of a weights tag are those of a parameter buffer, which only the distributed optimizer has."""
    for role, settings in trained_roles(config).items():
        shares_tags = config.memory.tags == "sharded" and role_spec(config, role).has_backuper
        if shares_tags and not settings.ddp.use_distributed_optimizer:
            raise ValueError(
                f"memory.tags=sharded with roles.{role}.ddp.use_distributed_optimizer=false: ranks share the parameter "
                "buffer, which only the distributed optimizer has. Use "
                f"roles.{role}.ddp.use_distributed_optimizer=true, or memory.tags=node or memory.tags=full"
            )


def check_node_copies(config: Config) -> None:
    """Every rank writes its share of its node's copy of a tag, and a checkpoint holds the shares: they are the same on
    all nodes. Where no node has two ranks with the same part of the model, every rank's copy is the node's."""
    if config.memory.tags == "node" and len({len(ranks) for ranks in ranks_of_copies(config)}) > 1:
        raise ValueError(
            f"memory.tags=node with launch.nproc={config.launch.nproc} and launch.nnodes={config.launch.nnodes}: some "
            "part of the model lies on more ranks of one node than of another. Use a launch.nproc that is a multiple "
            "of the ranks that hold one model together, or memory.tags=full"
        )
