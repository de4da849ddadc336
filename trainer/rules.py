"""The rules that join several settings, one function each, all checked before anything is launched.

Every function takes the whole config and raises ValueError: what was given, what is allowed, and the override that
changes it. :func:`check` runs them all; those of the algorithm are in :mod:`trainer.rules_algo`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hydra.utils import get_class

from trainer import limits, memory_rules, moe_rules, objectives, parallel_rules, rules_algo, speed_rules
from trainer.hf_architecture import FIXED, architecture_of
from trainer.tasks.verifiers import import_function
from trainer.tokenizer import check_vocab_size

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.tasks import Task

ExplicitFlags = Collection[tuple[str, str]]

PARAM_SOURCES = ("saver", "backuper", "main_params")
GRAD_SOURCES = ("saver", "none")
OPTIM_KEEPERS = ("saver", "arena")


def check(config: Config, *, explicit_flags: ExplicitFlags) -> None:
    """Check every rule.

    Args:
        explicit_flags: (role, flag name) pairs that the user set, as opposed to those that follow from the policy.

    Raises:
        ValueError: the first broken rule.
    """
    limits.check_choices(config)
    limits.check_ranges(config)
    rules_algo.check(config)
    check_explicit_flags(config, explicit_flags)
    check_nccl_ub(config)
    check_destroy_process_groups(config)
    check_restore_sources(config)
    check_flags_against_sources(config)
    check_main_params_source(config)
    memory_rules.check_tags(config)
    check_overlap(config)
    check_model_shapes(config)
    parallel_rules.check_parallel(config)
    moe_rules.check_experts(config)
    moe_rules.check_expert_parallel(config)
    check_nodes(config)
    objectives.check(config.objective)
    check_checkpoints(config)
    check_batch_sizes(config)
    speed_rules.check(config)
    check_lengths(config)
    check_profile_steps(config)
    check_task(config)
    check_tokenizer(config)


def check_nccl_ub(config: Config) -> None:
    for role, role_config in config.roles.items():
        ddp = role_config.ddp
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


def _restore(config: Config, role: str) -> Any:
    return getattr(config.memory, role)


def check_restore_sources(config: Config) -> None:
    for role in config.roles:
        restore = _restore(config, role)
        for field, allowed in (
            ("restore_params_from", PARAM_SOURCES),
            ("restore_grads_from", GRAD_SOURCES),
            ("optim_keeper", OPTIM_KEEPERS),
        ):
            value = getattr(restore, field)
            if value not in allowed:
                raise ValueError(f"memory.{role}.{field}={value}: must be one of {', '.join(allowed)}")
        if role != "actor" and restore.restore_params_from == "backuper":
            raise ValueError(
                f"memory.{role}.restore_params_from=backuper: only the actor has a weights backuper. Use "
                f"memory.{role}.restore_params_from=saver (as memory=lean does) or =main_params (memory=rebuild)"
            )


def check_explicit_flags(config: Config, explicit_flags: ExplicitFlags) -> None:
    """A flag that the user set must be able to mean something."""
    for role, flag in explicit_flags:
        ddp = config.roles[role].ddp
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


def check_flags_against_sources(config: Config) -> None:
    """A set flag drops the saver's copy, so the buffer must come back from somewhere else."""
    if not config.offload.train:
        return
    for role, role_config in config.roles.items():
        restore = _restore(config, role)
        params_policy = "memory=lean or memory=rebuild" if role == "actor" else "memory=rebuild"
        for kind, flag, source, policy in (
            ("param", "disable_param_buffers_cpu_backup", restore.restore_params_from, params_policy),
            ("grad", "disable_grad_buffers_cpu_backup", restore.restore_grads_from, "memory=no_grads"),
        ):
            applies = kind == "grad" or role_config.ddp.use_distributed_optimizer
            if applies and getattr(role_config.ddp, flag) and source == "saver":
                raise ValueError(
                    f"roles.{role}.ddp.{flag}=true but memory.{role}.restore_{kind}s_from=saver: the {role} would "
                    f"wake up with garbage, since the saver keeps no copy. What drops it safely: {policy}"
                )


def check_main_params_source(config: Config) -> None:
    for role, role_config in config.roles.items():
        if not config.offload.train or _restore(config, role).restore_params_from != "main_params":
            continue
        if not role_config.ddp.use_distributed_optimizer:
            raise ValueError(
                f"memory.{role}.restore_params_from=main_params needs "
                f"roles.{role}.ddp.use_distributed_optimizer=true: only the distributed optimizer has a parameter "
                "buffer, which is dropped and filled again from the fp32 main params; without it the parameters sleep "
                "among tensors that nothing rebuilds. Use it, or another policy (memory=lean)"
            )


def check_overlap(config: Config) -> None:
    for role, role_config in config.roles.items():
        ddp = role_config.ddp
        if ddp.overlap_param_gather and not (ddp.use_distributed_optimizer and ddp.overlap_grad_reduce):
            raise ValueError(
                f"roles.{role}.ddp.overlap_param_gather=true needs roles.{role}.ddp.use_distributed_optimizer=true "
                f"and roles.{role}.ddp.overlap_grad_reduce=true"
            )


def check_nodes(config: Config) -> None:
    """What needs no look at the environment; the rest is in :func:`trainer.nodes.find_nodes`."""
    nnodes, rank, endpoint = config.launch.nnodes, config.launch.node_rank, config.launch.rdzv_endpoint
    if rank is not None and not rank < nnodes:
        raise ValueError(
            f"launch.node_rank={rank} with launch.nnodes={nnodes}: must be between 0 and {nnodes - 1}, another one on "
            "every node"
        )
    if endpoint is not None and not re.fullmatch(r".+:[1-9]\d{0,4}", endpoint):
        raise ValueError(f"launch.rdzv_endpoint={endpoint}: must be <host of node 0>:<free port there>")


def _model_key(config: Config, role: str, field: str) -> str:
    """The override that changes the setting: the top-level one as long as the role agrees with it."""
    shared = getattr(config.model, field) == getattr(config.roles[role].model, field)
    return f"model.{field}" if shared else f"roles.{role}.model.{field}"


def check_model_shapes(config: Config) -> None:
    for role, role_config in config.roles.items():
        model, name = role_config.model, f"roles.{role}.model"
        if model.head_size is not None and model.head_size % 2:
            raise ValueError(
                f"{name}.head_size={model.head_size} is odd, and rotary positions turn pairs: use "
                f"{_model_key(config, role, 'head_size')}={model.head_size + 1}, or null for hidden_size / heads"
            )
        if model.head_size is None and model.hidden_size % (2 * model.heads):
            raise ValueError(
                f"{name}.hidden_size={model.hidden_size} is no multiple of 2 * {name}.heads = 2 * {model.heads} "
                f"(rotary positions turn pairs): use "
                f"{_model_key(config, role, 'hidden_size')}={_next(model.hidden_size, 2 * model.heads)}"
            )
        if model.heads % model.kv_heads:
            fits = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
            raise ValueError(
                f"{name}.heads={model.heads} is no multiple of {name}.kv_heads={model.kv_heads}: "
                f"use {_model_key(config, role, 'kv_heads')}={' or '.join(map(str, fits))}"
            )


def check_checkpoints(config: Config) -> None:
    """A role that starts from a Hugging Face folder has the folder's architecture."""
    for role, role_config in config.roles.items():
        model, name = role_config.model, f"roles.{role}.model"
        if model.path is None:
            continue
        architecture, given = architecture_of(model.path), asdict(model)
        for field in FIXED:
            if given[field] != architecture[field]:
                raise ValueError(
                    f"{name}.{field}={given[field]}, but the checkpoint in {name}.path={model.path} has {field}="
                    f"{architecture[field]}: leave it to the checkpoint (model=hf, or model@{name}=hf for one role), "
                    "or choose a model with random weights (model=tiny)"
                )
        if model.max_length > architecture["max_length"]:
            raise ValueError(
                f"{name}.max_length={model.max_length} is more than the {architecture['max_length']} tokens that the "
                f"checkpoint in {name}.path={model.path} was made for: use at most "
                f"{_model_key(config, role, 'max_length')}={architecture['max_length']}"
            )


def check_batch_sizes(config: Config) -> None:
    algo, dp = config.algo, config.data_parallel_size
    if algo.prompts_per_step % dp:
        raise ValueError(
            f"algo.prompts_per_step={algo.prompts_per_step} is no multiple of the data-parallel size {dp} "
            f"(launch.nnodes * launch.nproc / parallel.tp / parallel.pp): use "
            f"algo.prompts_per_step={_next(algo.prompts_per_step, dp)}"
        )
    samples = algo.prompts_per_step * algo.responses_per_prompt
    unit = dp * algo.minibatches * algo.micro_batch_size
    if samples % unit and algo.micro_batch_tokens is None:
        prompts = _next(algo.prompts_per_step, math.lcm(dp, unit // math.gcd(unit, algo.responses_per_prompt)))
        per_minibatch, rest = divmod(samples, dp * algo.minibatches)
        fits = [size for size in range(1, algo.micro_batch_size + 1) if not rest and per_minibatch % size == 0]
        smaller = f" or algo.micro_batch_size={fits[-1]}" if fits and per_minibatch else ""
        raise ValueError(
            f"algo.prompts_per_step * algo.responses_per_prompt = {algo.prompts_per_step} * "
            f"{algo.responses_per_prompt} = {samples} is no multiple of data-parallel size * algo.minibatches * "
            f"algo.micro_batch_size = {dp} * {algo.minibatches} * {algo.micro_batch_size} = {unit}: use "
            f"algo.prompts_per_step={prompts}{smaller}"
        )
    if algo.warmup_batch_size % dp:
        raise ValueError(
            f"algo.warmup_batch_size={algo.warmup_batch_size} is no multiple of the data-parallel size {dp}: use "
            f"algo.warmup_batch_size={_next(algo.warmup_batch_size, dp)}"
        )


def _next(value: int, divisor: int) -> int:
    return -(-value // divisor) * divisor


def check_lengths(config: Config) -> None:
    length = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    for role, role_config in config.roles.items():
        if length > role_config.model.max_length:
            raise ValueError(
                f"rollout.max_prompt_tokens + rollout.max_new_tokens = {config.rollout.max_prompt_tokens} + "
                f"{config.rollout.max_new_tokens} = {length} exceeds roles.{role}.model.max_length="
                f"{role_config.model.max_length}: use {_model_key(config, role, 'max_length')}={length} "
                "or shorter sequences"
            )


def check_profile_steps(config: Config) -> None:
    absent = [step for step in config.diagnostics.profile_steps if not 1 <= step <= config.algo.num_steps]
    if absent:
        raise ValueError(
            f"diagnostics.profile_steps={config.diagnostics.profile_steps}: step {absent[0]} is none of the "
            f"algo.num_steps={config.algo.num_steps} steps of this run"
        )


def make_task(config: Config) -> Task:
    """The run's task (cheap, torch-free)."""
    settings = dict(config.task)
    return get_class(settings.pop("_target_"))(**settings)


def check_task(config: Config) -> None:
    """Build the task and let it judge its own settings; find the reward function."""
    make_task(config).validate()
    if config.reward is not None:
        import_function(config.reward, setting="reward")


def check_tokenizer(config: Config) -> None:
    checkpoint = config.roles["actor"].model.path
    if config.tokenizer.path is None:
        if checkpoint is not None:
            raise ValueError(
                f"tokenizer.path=null with roles.actor.model.path={checkpoint}: the checkpoint knows nothing of a "
                f"tokenizer trained on the task. Use tokenizer.path={checkpoint}"
            )
        if config.tokenizer.chat_template:
            raise ValueError(
                "tokenizer.chat_template=true with tokenizer.path=null: a tokenizer trained on the task has no chat "
                "template. Use tokenizer.chat_template=false, or a folder whose tokenizer has one"
            )
        check_vocab_size(config.tokenizer.vocab_size)
    elif not os.path.isdir(config.tokenizer.path):
        raise ValueError(
            f"tokenizer.path={config.tokenizer.path} is no folder (relative paths start at the directory of the "
            "command): give a Hugging Face tokenizer folder, or tokenizer.path=null to train one on the task"
        )
