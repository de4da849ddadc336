"""Builds real roles and engines and reports their bytes beside what the plan predicts; used by test_footprint."""

import os
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, distributed

from tests.helpers.composing import footprint_of
from tests.helpers.data_parallel_worker import OVERLAP, small_buckets
from tests.helpers.roles import VOCAB_SIZE, ddp_buffers, fresh_saver, make_role, small_config
from trainer.config.pieces import make_task
from trainer.megatron import platform
from trainer.megatron.build import named_tensors
from trainer.megatron.groups import pipeline_group, pipeline_rank
from trainer.memory.saver import make_saver
from trainer.plan.role_bytes import role_bytes
from trainer.roles.role import Role
from trainer.rollout.engines import make_engine
from trainer.rollout.hf import _tensors
from trainer.tasks.tokenizer import load_tokenizer

NO_DISTRIBUTED = tuple(f"roles.{role}.ddp.use_distributed_optimizer=false" for role in ("actor", "critic"))
ODD = ("model.hidden_size=40", "model.ffn_size=50", "model.layers=3")  # nothing is a multiple of an alignment
EXPERTS = ("model.num_experts=5", "model.num_experts_per_tok=2")
CASES: dict[str, tuple[str, ...]] = {
    "lean": (),
    "full": ("memory=full",),
    "no_grads": ("memory=no_grads",),
    "rebuild": ("memory=rebuild",),
    "redundant_copy": ("roles.actor.ddp.disable_param_buffers_cpu_backup=false",),
    "tied": ("model.tie_embeddings=true",),
    "qkv_bias": ("model.qkv_bias=true", "model.kv_heads=4", *ODD),
    "qk_norm": ("model.qk_norm=true", "model.kv_heads=1"),
    "fp32": ("model.dtype=fp32", *ODD),
    "mixtral": (*EXPERTS, *ODD),
    "qwen3_moe": (*EXPERTS, "model.qk_norm=true"),
    "no_distributed": (*NO_DISTRIBUTED, *ODD),
    "fp32_no_distributed": (*NO_DISTRIBUTED, "model.dtype=fp32"),
    "sharded": ("memory.tags=sharded",),
    "sharded_full_odd": ("memory=full", "memory.tags=sharded", *ODD),
    "sharded_rebuild_fp32": ("memory=rebuild", "memory.tags=sharded", "model.dtype=fp32"),
    "node": ("memory.tags=node",),
    "node_no_distributed": (*NO_DISTRIBUTED, "memory.tags=node", *ODD),
    "buckets": OVERLAP,
    "sharded_buckets": (*OVERLAP, "memory.tags=sharded", *ODD),
    "odd_buckets": (*OVERLAP, *ODD),
}
# With two ranks only. Nothing that they share is a multiple of anything; the last stage of a tied model has a copy.
EVEN = (*ODD, "model.layers=4", "model.qkv_bias=true")
SHARED_CASES: dict[str, tuple[str, ...]] = {
    "tp": ("parallel.tp=2", *EVEN),
    "tp_tied": ("parallel.tp=2", "memory=rebuild", "model.tie_embeddings=true"),
    "pp": ("parallel.pp=2", *EVEN),
    "pp_tied": ("parallel.pp=2", "model.tie_embeddings=true", "memory=full", *EVEN),
    "vpp": ("parallel.pp=2", "parallel.vpp=2", *EVEN),
    "vpp_no_distributed": ("parallel.pp=2", "parallel.vpp=2", *NO_DISTRIBUTED, *EVEN),
    "tp_mixtral": ("parallel.tp=2", "memory.tags=sharded", *EXPERTS, *ODD),
    "tp_no_distributed_mixtral": ("parallel.tp=2", *NO_DISTRIBUTED, *EXPERTS, *ODD),
    "tp_expert_mixtral": ("parallel.tp=2", "parallel.expert=2", *EXPERTS, *ODD, "model.num_experts=6"),
    "cp": ("parallel.cp=2", "memory.tags=sharded", *EVEN),
    "cp_node": ("parallel.cp=2", "memory.tags=node", *EVEN),
    "tp_node": ("parallel.tp=2", "memory.tags=node", *EVEN),
    "vpp_mixtral": ("parallel.pp=2", "parallel.vpp=2", *EXPERTS, *ODD, "model.layers=4"),
}
ENGINE_CASES = ("lean", "tied", "qkv_bias", "qk_norm", "fp32", "mixtral", "qwen3_moe")
SMALL_BUCKET = 20_000


def run_cases(payload: None) -> dict[tuple[str, str], dict[str, Any]]:
    """(case, role or engine) -> measured and predicted bytes."""
    ranks = f"launch.nproc={os.environ['WORLD_SIZE']}"
    platform.set_up(small_config(ranks))
    platform.set_up_process_groups(small_config(ranks))
    results = {}
    shared = SHARED_CASES if distributed.get_world_size() == 2 else {}
    for case, overrides in (CASES | shared).items():
        platform.set_up_parallel_groups(small_config(ranks, *overrides).parallel)
        for name in ("actor", "critic"):
            results[case, name] = _role_case(name, (ranks, *overrides), has_buckets="buckets" in case)
        if case in ENGINE_CASES:
            for engine in ("hf", "native"):
                results[case, engine] = _engine_case((ranks, *overrides, f"rollout={engine}"))
    return results


def _role_case(name: str, overrides: tuple[str, ...], *, has_buckets: bool) -> dict[str, Any]:
    fresh_saver()
    config, events = small_config(*overrides), []
    vocab_size = VOCAB_SIZE + config.parallel.model_ranks - 1  # odd where ranks share it
    with small_buckets() if has_buckets else nullcontext():
        role = make_role(name, *overrides, events=events, vocab_size=vocab_size)
    if role._weights.backuper:
        role.copy_to_tag("ref")
    measured = _bytes_of(role)
    role.sleep()
    bucket_size = SMALL_BUCKET if has_buckets and name == "actor" else None
    stage = pipeline_rank()
    sizes = role_bytes(config, name, vocab_size=vocab_size, stage=stage, bucket_size=bucket_size)
    predicted = {**sizes.kinds, "main_params": sizes.main_params, "parameter_count": sizes.parameter_count}
    if role._weights.backuper:
        predicted["tag"] = sizes.tag_share
    return {
        **_of_every_stage({"measured": measured, "predicted": predicted}),
        "buckets": len(ddp_buffers(role)[0].buckets),
        "events": _largest(
            [(e["kind"], e["keeper"], e["flag"], e["released_bytes"], e["backup_bytes"]) for e in events]
        ),
        "holdings": [
            (h.kind, h.keeper, h.flag, h.train_bytes, h.host_asleep_bytes)
            for h in footprint_of(config, vocab_size=vocab_size, stage=stage).of_role(name)
        ],
    }


def _of_every_stage(found: dict[str, Any]) -> dict[str, list[Any]]:
    """The values of all pipeline stages, as lists."""
    everyones: list[Any] = [None] * pipeline_group().size()
    distributed.all_gather_object(everyones, found, group=pipeline_group())
    return {key: [each[key] for each in everyones] for key in found}


def _largest(events: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """What every rank of a pipeline stage recorded, each with its largest bytes."""
    group: Any = parallel_state.get_tensor_and_data_parallel_group()
    everyones: list[Any] = [None] * group.size()
    distributed.all_gather_object(everyones, events, group=group)
    return [
        (*same[0][:3], *(max(sizes) for sizes in zip(*(e[3:] for e in same), strict=True)))
        for same in zip(*everyones, strict=True)
    ]


def _bytes_of(role: Role) -> dict[str, int]:
    """Bytes of the real tensors; of the optimizer's and of a tag, on the rank that holds most."""
    buffers = ddp_buffers(role)
    in_buffers = {b.param_data.untyped_storage().data_ptr() for b in buffers if b.param_data is not None}
    rest = [t for _, t in named_tensors(role.model.chunks) if t.untyped_storage().data_ptr() not in in_buffers]
    tags = (
        {role._weights.backuper.bytes_of(tag) for tag in role._weights.backuper.backup_tags}
        if role._weights.backuper
        else {0}
    )
    assert len(tags) == 1
    sizes, main = [piece.nbytes for piece in role.model.state.pieces], role.model.state.main_pieces
    largest = torch.tensor([sum(sizes), sum(sizes[:main]), *tags])
    distributed.all_reduce(
        largest, op=distributed.ReduceOp.MAX, group=parallel_state.get_tensor_and_data_parallel_group()
    )
    measured = {
        "param": sum(b.param_data.nbytes for b in buffers if b.param_data is not None),
        "grad": sum(b.grad_data.nbytes for b in buffers),
        "optim": int(largest[0]),
        "main_params": int(largest[1]),
        "rest": sum(tensor.nbytes for tensor in rest),
        "parameter_count": role.model.parameter_count(),
    }
    if role._weights.backuper:
        measured["tag"] = int(largest[2])
    return measured


def _engine_case(overrides: tuple[str, ...]) -> dict[str, Any]:
    fresh_saver()
    config = small_config(*overrides)
    tokenizer = load_tokenizer(None, task=make_task(config), vocab_size=config.tokenizer.vocab_size)
    actor, saver = make_role("actor", *overrides, vocab_size=len(tokenizer)), make_saver(config)
    engine: Any = make_engine(config, actor=actor, tokenizer=tokenizer, saver=saver, observer=lambda event: None)
    if config.rollout.engine == "hf":
        held = list(_tensors(engine.model))
    else:
        held = [t for name, t in vars(engine._slots).items() if isinstance(t, Tensor) and name != "_is_stop"]
    (holding,) = footprint_of(config, vocab_size=len(tokenizer)).of_role("engine")
    return {"measured": sum(tensor.nbytes for tensor in held), "predicted": holding.train_bytes}
