"""The rank that does the same work on its share of one global batch; used by test_data_parallel."""

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

from tests.helpers.roles import (
    POLICIES,
    VOCAB_SIZE,
    credited,
    ddp_buffers,
    fresh_saver,
    loss_of,
    make_batch,
    make_role,
    normal,
    same_weights,
    small_config,
    train,
    weights_of,
)
from trainer.data.batch import Experience
from trainer.measure import metrics
from trainer.megatron import build, platform
from trainer.megatron.groups import data_parallel_rank, data_parallel_size
from trainer.roles import model as model_module
from trainer.roles.role import FORWARD, Role
from trainer.training import step
from trainer.training.balance import Exchange
from trainer.training.micro_batches import Split, micro_batches

FP32 = ("model.dtype=fp32", "model.max_length=256")
OVERLAP = tuple(f"roles.actor.ddp.overlap_{name}=true" for name in ("grad_reduce", "param_gather"))


def run_checks(payload: None) -> dict[str, Any]:
    """Results of every check, on rank 0."""
    config = small_config(f"launch.nproc={os.environ['WORLD_SIZE']}")
    platform.set_up(config)
    platform.set_up_process_groups(config)
    return {check.__name__: check() for check in CHECKS}


def my_share(batch: Experience) -> Experience:
    rows = len(batch) // data_parallel_size()
    return batch.select(slice(data_parallel_rank() * rows, (data_parallel_rank() + 1) * rows))


def full_gradients(role: Role) -> list[Tensor]:
    """Of each buffer; every rank has summed its own shard only. Padding, which depends on the ranks, is cut off."""
    ranks, gradients = data_parallel_size(), []
    for buffer in ddp_buffers(role):
        assert len(buffer.buckets) == 1
        everyones = [torch.empty_like(buffer.grad_data) for _ in range(ranks)]
        distributed.all_gather(everyones, buffer.grad_data)
        shards = [everyones[rank].chunk(ranks)[rank] for rank in range(ranks)]
        gradients.append(torch.cat(shards)[: buffer.numel_unpadded].clone())
    return gradients


def gradients_of_uneven_lengths() -> dict[tuple[str, str, int | str], Any]:
    """(role, aggregation, micro-batch size or "by_length") -> (sums, gradients): lengths 1, 3, 50, 200.

    With two ranks the first needs one micro-batch by length or packed, the second two.
    """
    results = {}
    for name in ("actor", "critic"):
        fresh_saver()
        role = make_role(name, *FP32, "optimizer.clip_grad=0", f"roles.{name}.optimizer.lr=0")
        for mode in ("token_mean", "sequence_mean", "fixed_length"):
            loss = loss_of(role, f"algo.loss_aggregation={mode}", f"algo.critic_loss_aggregation={mode}")
            batch = my_share(make_batch([1, 3, 50, 200]))
            for micro_batch_size in (1, 2, 4)[: len(batch)]:
                sums = step.train_minibatch(role, batch, loss, split=Split(micro_batch_size))
                results[name, mode, micro_batch_size] = (sums, full_gradients(role))
            sums = step.train_minibatch(role, batch, loss, split=Split(1, 256))
            results[name, mode, "by_length"] = (sums, full_gradients(role))
            sums = step.train_minibatch(role, batch, loss, split=Split(1, 208, break_even=50.0))
            results[name, mode, "packed"] = (sums, full_gradients(role))
    return results


def by_length_with_overlap() -> dict[str, Any]:
    """Log-probs by length, then a step on them with gradients reduced during the backward pass: KL between both, number
    of micro-batches on each rank."""
    fresh_saver()
    with small_buckets():
        role = make_role("actor", "model.max_length=256", *OVERLAP)
    batch = my_share(make_batch([1, 3, 50, 200, 2, 9, 180, 190]))
    old_log_probs, _ = step.log_probs(
        role, batch, temperature=1.0, vocab_size=VOCAB_SIZE, split=Split(1, 256, minibatches=2)
    )
    half = replace(batch, old_log_probs=old_log_probs).select(slice(0, len(batch) // 2))
    counts: list[Any] = [None] * data_parallel_size()
    distributed.all_gather_object(counts, len(micro_batches(half, Split(1, 256))))
    sums = step.train_minibatch(role, half, loss_of(role), split=Split(1, 256))
    return {"ppo_kl": sums["ppo_kl"], "grad_norm": sums["grad_norm"], "counts": counts, "weights": all_ranks_hold(role)}


def sequences_that_change_ranks() -> dict[str, Any]:
    """Of every rank: lengths before and after, whether all came back, and log-probs by the place of the prompt."""
    fresh_saver()
    role = make_role("actor", *FP32)
    split = Split(1, 256, minibatches=2, break_even=50.0)
    batch = my_share(make_batch([180, 200, 3, 2, 90, 1, 7, 4]))
    batch = batch.cut(max(batch.lengths().tolist()))  # ranks have as many columns as their longest needs
    exchange = Exchange.of(batch, split)
    moved = exchange.there(batch)
    everything = {
        name: torch.equal(exchange.back(tensor), batch.tensors()[name]) for name, tensor in moved.tensors().items()
    }
    log_probs = exchange.back(step.log_probs(role, moved, temperature=1.0, vocab_size=VOCAB_SIZE, split=split)[0])
    per_sequence = log_probs.where(batch.response_mask, 0.0).sum(1)
    own = {
        "before": batch.lengths().tolist(),
        "after": moved.lengths().tolist(),
        "is_back": all(everything.values()) and len(everything) > 5,
        "log_probs": per_sequence.tolist(),
    }
    everyones: list[Any] = [None] * data_parallel_size()
    distributed.all_gather_object(everyones, own)
    return {key: [each[key] for each in everyones] for key in own}


def metrics_of_one_step() -> dict[str, dict[str, float]]:
    """Everything between the rollout and the metrics, also where one rank has no response tokens."""
    results = {}
    for case, lengths in (("even", [4, 2, 5, 3]), ("rank_without_tokens", [0, 0, 3, 2])):
        fresh_saver()
        actor, critic = make_role("actor", *FP32), make_role("critic", *FP32)
        scores, truncated = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([False, True, False, False])
        batch = my_share(make_batch(lengths, scores=scores, truncated=truncated))
        old_log_probs, entropy = step.log_probs(actor, batch, temperature=1.0, vocab_size=VOCAB_SIZE, split=Split(2))
        values = step.values(critic, batch, split=Split(2))
        batch = credited(replace(batch, old_log_probs=old_log_probs, entropy=entropy), values, *FP32, kl_coef=0.1)
        sums = {
            role.name: [step.train_minibatch(role, batch, loss_of(role), split=Split(2)) for _ in range(2)]
            for role in (critic, actor)
        }
        rollout = metrics.of_rollout(batch)
        results[case] = {**rollout, **metrics.of_actor(sums["actor"]), **metrics.of_critic(sums["critic"])}
    return results


def advantages_without_a_critic() -> dict[str, Tensor]:
    """Algorithm -> advantages of all ranks' tokens: two questions with two responses each, an empty one among them."""
    results = {}
    for algo in ("grpo", "rloo", "reinforce_pp"):
        overrides = (f"algo={algo}", "algo.kl.placement=reward", "algo.kl.estimator=k1")
        batch = my_share(make_batch([4, 2, 0, 3], scores=torch.tensor([1.0, 0.0, 1.0, 0.5])))
        batch = credited(batch, None, *overrides, kl_coef=0.1)
        everyones: list[Any] = [None] * data_parallel_size()
        distributed.all_gather_object(everyones, batch.advantages)
        results[algo] = torch.cat(everyones)
    return results


def all_ranks_hold(role: Role) -> str:
    """Digest of the role's awake weights, which is the same on every rank and for every order of registration."""
    digest = hashlib.sha256()
    for _, tensor in sorted(weights_of(role).items()):
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    digests: list[Any] = [None] * data_parallel_size()
    distributed.all_gather_object(digests, digest.hexdigest())
    assert len(set(digests)) == 1, digests
    return digests[0]


def weights_after_every_change() -> dict[tuple[str, str], list[str]]:
    """(policy, role) -> digests after build, load, step, wake-up and step."""
    results = {}
    for policy in POLICIES:
        for name in ("actor", "critic"):
            fresh_saver()
            role = make_role(name, f"memory={policy}")
            history = [all_ranks_hold(role)]
            role.load_weights({key: w + 0.01 * normal(w.shape, seed=1) for key, w in weights_of(role).items()})
            history.append(all_ranks_hold(role))
            train(role)
            history.append(all_ranks_hold(role))
            trained = weights_of(role)
            role.sleep()
            role.wake_up(kinds=FORWARD)
            history.append(all_ranks_hold(role))
            assert same_weights(weights_of(role), trained)
            role.wake_up()
            train(role)
            history.append(all_ranks_hold(role))
            results[policy, name] = history
    return results


@contextmanager
def small_buckets() -> Iterator[None]:
    config = functools.partial(build.DistributedDataParallelConfig, bucket_size=20_000)
    with mock.patch.object(build, "DistributedDataParallelConfig", config):
        yield


@contextmanager
def reversed_registration() -> Iterator[None]:
    """The model knows its parts in the opposite order of its forward pass, so Megatron gathers them in that one."""
    original = model_module.wrap_ddp

    def wrap(gpt: Any, *arguments: Any, **options: Any) -> Any:
        for name in reversed(list(gpt._modules)):
            gpt._modules[name] = gpt._modules.pop(name)
        assert next(gpt.named_parameters())[0] == "output_layer.weight"
        return original(gpt, *arguments, **options)

    with mock.patch.object(model_module, "wrap_ddp", wrap):
        yield


def overlap_in_several_buckets() -> dict[str, Any]:
    """Losses and weights of steps between which the actor sleeps, wakes up as the reference and as itself."""
    cases: dict[str, tuple[str, ...]] = {
        "plain": ("offload=none",),
        "overlap": ("offload=none", *OVERLAP),
        "overlap_lean": ("memory=lean", *OVERLAP),
        "overlap_rebuild": ("memory=rebuild", *OVERLAP),
        "overlap_sharded": ("memory=lean", "memory.tags=sharded", *OVERLAP),
        "overlap_node": ("memory=lean", "memory.tags=node", f"launch.nproc={data_parallel_size()}", *OVERLAP),
        "overlap_rebuild_reversed": ("memory=rebuild", *OVERLAP),
    }
    results = {}
    for case, overrides in cases.items():
        fresh_saver()
        with small_buckets(), reversed_registration() if case.endswith("reversed") else nullcontext():
            role = make_role("actor", "optimizer.clip_grad=0", *overrides)
        role.copy_to_tag("ref")
        buckets, losses = [len(buffer.buckets) for buffer in ddp_buffers(role)], []
        for number in range(4):
            batch = make_batch([3, 5, 2, 4], seed=10 * number + data_parallel_rank())
            with role.awake():
                losses += [
                    step.train_minibatch(role, batch, loss_of(role), split=Split(2))["loss_sum"] for _ in range(2)
                ]
            for tag in ("ref", "actor"):
                with role.awake(kinds=FORWARD, tag=tag):
                    numbers, _ = step.log_probs(role, batch, temperature=1.0, vocab_size=VOCAB_SIZE, split=Split(2))
                    losses.append(numbers.sum().item())
        role.wake_up()
        results[case] = (buckets, losses, all_ranks_hold(role))
    return results


def shared_tags() -> dict[str, Any]:
    """What the backuper answers with whole tags and with shared ones, of an actor in several buckets."""
    results = {}
    for tags in ("full", "sharded", "node"):
        fresh_saver()
        with small_buckets():
            role = make_role("actor", f"memory.tags={tags}", f"launch.nproc={data_parallel_size()}", *OVERLAP)
        backuper = role._weights.backuper
        assert backuper is not None
        train(role)
        role.copy_to_tag("ref")
        train(role)
        given = {name: tensor * 0.5 for name, tensor in weights_of(role).items()}
        backuper.backup("half")
        for _, _, part in backuper.parts("half"):
            part.mul_(0.5)
        backuper.copy(src_tag="half", dst_tag="half again")
        role.sleep()
        held = {tag: {name: t.clone() for name, t in backuper.get(tag).items()} for tag in backuper.backup_tags}
        role.wake_up(kinds=FORWARD, tag="half")
        assert same_weights(weights_of(role), given)
        assert same_weights(held["half"], given)
        assert "no such name" not in backuper.get("half")
        bytes_of_ranks: list[Any] = [None] * data_parallel_size()
        distributed.all_gather_object(bytes_of_ranks, {tag: backuper.bytes_of(tag) for tag in backuper.backup_tags})
        results[tags] = (held, bytes_of_ranks)
    return results


CHECKS: tuple[Callable[[], Any], ...] = (
    gradients_of_uneven_lengths,
    by_length_with_overlap,
    sequences_that_change_ranks,
    metrics_of_one_step,
    advantages_without_a_critic,
    weights_after_every_change,
    overlap_in_several_buckets,
    shared_tags,
)
