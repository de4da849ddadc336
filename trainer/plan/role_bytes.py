"""How many bytes one role takes on one rank, before anybody decides who keeps what.

A rank's part of the model is that of its pipeline stage; of the ranks of a stage, the one that holds most is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.common.multiples import divide_up
from trainer.config.node_copies import ranks_of_a_copy
from trainer.config.roles import role_spec, role_specs, trained_role
from trainer.config.schema import Config
from trainer.plan.layout import (
    ITEM_BYTES,
    WHOLE,
    Buffer,
    Parameter,
    buffers_of,
    default_bucket_size,
    optimizer_elements,
    parameters,
    rotary_table_bytes,
    tag_bytes,
)


@dataclass(frozen=True)
class RoleBytes:
    """One role on one rank, before anybody decides who keeps what.

    Attributes:
        kinds: buffer kind of :mod:`trainer.plan` -> device bytes while awake.
        main_params: the part of ``optim`` that holds main params.
        tag: of one weights tag, as a rank restores it.
        tag_share: what a rank writes of it; its share of the host memory where the ranks of a node have one copy.
        weights: of all tensors that a forward pass reads.
        stage_weights: the same of the ranks of a pipeline stage that hold its weights together.
        stage_optim: of these ranks' optimizer states where they are not distributed, fp32 parameters that are their own
            main params, and so not in ``optim``, included.
    """

    parameter_count: int
    kinds: dict[str, int]
    main_params: int
    tag: int
    tag_share: int
    weights: int
    stage_weights: int
    stage_optim: int


def model_parameters(config: Config, *, vocab_size: int) -> dict[str, int]:
    """Role -> parameters of the whole model, each counted once."""
    return {
        name: sum(
            parameter.size
            for parameter in parameters(
                config.roles[name].model, vocab_size=vocab_size, value_head=spec.has_value_head, parallel=WHOLE
            )
        )
        for name, spec in role_specs(config).items()
    }


def role_bytes(
    config: Config, role: str, *, vocab_size: int, stage: int = 0, bucket_size: int | None = None
) -> RoleBytes:
    """Sizes of one role's buffers on the largest rank of a pipeline stage. ``bucket_size`` in elements replaces
    Megatron's default."""
    spec, model, parallel = role_spec(config, role), config.roles[role].model, config.parallel
    ddp = trained_role(config, role).ddp if spec.is_trained else None
    is_distributed, stage_ranks = ddp is not None and ddp.use_distributed_optimizer, config.world_size // parallel.pp
    chunks = [
        parameters(
            model, vocab_size=vocab_size, value_head=spec.has_value_head, parallel=parallel, stage=stage, chunk=chunk
        )
        for chunk in range(parallel.vpp)
    ]
    buffers: list[Buffer] = []
    if ddp is not None:
        bucket_size = bucket_size or default_bucket_size(ddp, data_parallel=config.data_parallel_size)
        for found in chunks:
            buffers += buffers_of(found, ddp=ddp, parallel=parallel, stage_ranks=stage_ranks, bucket_size=bucket_size)
    optimizer, main_params = optimizer_elements(buffers, distributed_optimizer=is_distributed, stage_ranks=stage_ranks)
    found = tuple(parameter for chunk in chunks for parameter in chunk)
    table, shares_tags = rotary_table_bytes(model), config.memory.tags == "sharded" and spec.is_trained
    tag = tag_bytes(found, buffers, table_bytes=table, stage_ranks=stage_ranks if shares_tags else None)
    return RoleBytes(
        parameter_count=sum(parameter.size for parameter in found),
        kinds=_kinds(found, buffers, distributed_optimizer=is_distributed, table=table)
        | {"optim": optimizer * ITEM_BYTES["fp32"]},
        main_params=main_params * ITEM_BYTES["fp32"],
        tag=tag,
        tag_share=divide_up(tag, ranks_of_a_copy(config)) if config.memory.tags == "node" else tag,
        weights=table + sum(p.size_bytes for p in found),
        stage_weights=parallel.tp * table
        + sum(p.size_bytes * (parallel.expert if p.in_expert_buffer else parallel.tp) for p in found),
        stage_optim=sum(buffer.spread * _undistributed_optimizer_bytes(buffer) for buffer in buffers),
    )


def ranks_that_share_tags(config: Config) -> tuple[int, int]:
    """(of the actor's parameters, of its experts): so many ranks hold the same, and share a tag if tags are shared."""
    of_experts = config.world_size // config.parallel.pp // config.parallel.expert
    is_mixture = config.roles["actor"].model.num_experts is not None
    return config.weight_copies, of_experts if is_mixture else config.weight_copies


def _undistributed_optimizer_bytes(buffer: Buffer) -> int:
    elements, _ = optimizer_elements([buffer], distributed_optimizer=False, stage_ranks=1)
    own_main = sum(end - start for start, end in buffer.layout.spans) if buffer.dtype == "fp32" else 0
    return (elements + own_main) * ITEM_BYTES["fp32"]


def _kinds(
    found: tuple[Parameter, ...], buffers: Sequence[Buffer], *, distributed_optimizer: bool, table: int
) -> dict[str, int]:
    param = sum(buffer.layout.size * ITEM_BYTES[buffer.dtype] for buffer in buffers)
    return {
        "param": param if distributed_optimizer else 0,
        "grad": sum(buffer.layout.size for buffer in buffers) * ITEM_BYTES["fp32"],
        "rest": table + (0 if distributed_optimizer else sum(parameter.size_bytes for parameter in found)),
    }
