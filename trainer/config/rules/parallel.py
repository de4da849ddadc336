"""How ranks share a model, and when they exchange what."""

from __future__ import annotations

import math

from trainer.common.multiples import divisors, round_up
from trainer.config.roles import trained_roles
from trainer.config.schema import Config, ModelConfig


def check_context_parallel(config: Config) -> None:
    """Each sequence is cut into 2 * ``parallel.cp`` chunks; the attention that knows of others is torch's."""
    cp, rollout = config.parallel.cp, config.rollout
    if cp == 1:
        return
    length = rollout.max_prompt_tokens + rollout.max_new_tokens
    if 2 * cp > length:
        raise ValueError(
            f"parallel.cp={cp} cuts every sequence into {2 * cp} chunks, and the longest, rollout.max_prompt_tokens + "
            f"rollout.max_new_tokens, has {length} tokens: use parallel.cp={max(1, length // 2)} or less, or longer "
            "sequences"
        )
    for role, role_config in config.roles.items():
        for setting, instead in (("attention_backend", "sdpa"), ("kernels", "torch")):
            if getattr(role_config.model, setting) == "te":
                raise ValueError(
                    f"roles.{role}.model.{setting}=te with parallel.cp={cp}: Transformer Engine cuts sequences among "
                    f"ranks otherwise than it is done here. Use model.{setting}={instead}"
                    + (" or liger" if setting == "kernels" else "")
                    + ", or parallel.cp=1"
                )


def check_world_size(config: Config) -> None:
    parallel, nproc, nnodes = config.parallel, config.launch.nproc, config.launch.nnodes
    ranks = parallel.model_ranks
    if config.world_size % ranks:
        workers = f"launch.nproc={nproc}"
        if nnodes > 1:
            workers = f"launch.nnodes * launch.nproc = {nnodes} * {nproc} = {config.world_size}"
        unit = ranks // math.gcd(ranks, nnodes)
        raise ValueError(
            f"{workers} is no multiple of parallel.tp * parallel.pp * parallel.cp = {parallel.tp} * {parallel.pp} * "
            f"{parallel.cp} = {ranks}: use launch.nproc={unit * max(1, nproc // unit)} or other parallel sizes"
        )


def check_tensor_parallel(config: Config) -> None:
    for role, role_config in config.roles.items():
        model, name, tp = role_config.model, f"roles.{role}.model", config.parallel.tp
        shared = {"heads": model.heads, "kv_heads": model.kv_heads}
        if model.num_experts is None:  # an expert lies whole on its rank
            shared["ffn_size"] = model.ffn_size
        if any(size % tp for size in shared.values()):
            fits = divisors(math.gcd(*shared.values()))
            *first, last = (f"{field}={size}" for field, size in shared.items())
            raise ValueError(
                f"parallel.tp={tp} does not divide {name}.{', '.join(first)} and {last}; these do: "
                f"parallel.tp={', '.join(map(str, fits))}"
            )


def check_pipeline_layers(config: Config) -> None:
    pp, vpp = config.parallel.pp, config.parallel.vpp
    if vpp > 1 and pp == 1:
        raise ValueError(
            f"parallel.vpp={vpp} with parallel.pp=1: chunks of layers take turns on pipeline stages, and there is one "
            "stage. Use parallel.pp=2 or more, or parallel.vpp=1"
        )
    for role, role_config in config.roles.items():
        layers = role_config.model.layers
        if layers % (pp * vpp):
            raise ValueError(
                f"roles.{role}.model.layers={layers} is no multiple of parallel.pp * parallel.vpp = {pp} * {vpp} = "
                f"{pp * vpp}, and every chunk has as many layers. What fits: {_chunkings(role_config.model)}"
            )


def _chunkings(model: ModelConfig) -> str:
    """Every way to cut the layers into more than one chunk."""
    fits = [(pp, vpp) for pp in divisors(model.layers)[1:] for vpp in divisors(model.layers // pp)]
    named = [f"parallel.pp={pp}" + (f" parallel.vpp={vpp}" if vpp > 1 else "") for pp, vpp in fits]
    return "; ".join(["parallel.pp=1", *named])


def check_pipeline_micro_batches(config: Config) -> None:
    """Stages exchange micro-batches of one shape; interleaved chunks take turns over as many as there are stages."""
    algo, dp, parallel = config.algo, config.data_parallel_size, config.parallel
    if parallel.pp == 1 or algo.micro_batch_tokens is not None:  # which a pipeline refuses for another reason
        return
    in_turns = parallel.pp if parallel.vpp > 1 else 1
    unit = dp * algo.micro_batch_size * in_turns
    given = f"data-parallel size * algo.micro_batch_size{' * parallel.pp' if in_turns > 1 else ''}"
    is_one_micro_batch = in_turns == 1 and algo.warmup_batch_size <= unit
    if algo.warmup_steps and not is_one_micro_batch and algo.warmup_batch_size % unit:
        raise ValueError(
            f"algo.warmup_batch_size={algo.warmup_batch_size} is no multiple of {given} = {unit}, which a pipeline "
            f"needs: use algo.warmup_batch_size={round_up(algo.warmup_batch_size, unit)}"
        )
    samples, unit = algo.prompts_per_step * algo.responses_per_prompt, unit * algo.minibatches
    if samples % unit:
        prompts_unit = unit // math.gcd(unit, algo.responses_per_prompt)
        raise ValueError(
            f"algo.prompts_per_step * algo.responses_per_prompt = {samples} is no multiple of {given} * "
            f"algo.minibatches = {unit}, which a pipeline needs: use "
            f"algo.prompts_per_step={round_up(algo.prompts_per_step, prompts_unit)}"
        )


def check_expert_parallel(config: Config) -> None:
    """``parallel.expert`` divides the experts of every mixture, and the ranks of a pipeline stage."""
    size, ranks = config.parallel.expert, config.world_size // config.parallel.pp
    counts = {role: settings.model.num_experts for role, settings in config.roles.items() if settings.model.num_experts}
    if size > 1 and not counts:
        raise ValueError(
            f"parallel.expert={size}, but no role is a mixture of experts: use parallel.expert=1, or one such as "
            "model=tiny_moe"
        )
    if ranks % size or any(count % size for count in counts.values()):
        fits = divisors(math.gcd(ranks, *counts.values()))
        experts = ", ".join(f"roles.{role}.model.num_experts={count}" for role, count in counts.items())
        raise ValueError(
            f"parallel.expert={size} does not divide the ranks of a pipeline stage, launch.nnodes * launch.nproc / "
            f"parallel.pp = {ranks}, and {experts}; these do: parallel.expert={', '.join(map(str, fits))}"
        )


def check_overlap(config: Config) -> None:
    for role, settings in trained_roles(config).items():
        ddp = settings.ddp
        if ddp.overlap_param_gather and not (ddp.use_distributed_optimizer and ddp.overlap_grad_reduce):
            raise ValueError(
                f"roles.{role}.ddp.overlap_param_gather=true needs roles.{role}.ddp.use_distributed_optimizer=true "
                f"and roles.{role}.ddp.overlap_grad_reduce=true"
            )
