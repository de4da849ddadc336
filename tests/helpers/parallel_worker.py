"""The rank that does the same work under several parallel layouts; used by test_parallel."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed

from tests.helpers.data_parallel_worker import my_share
from tests.helpers.expert_parallel_worker import asleep
from tests.helpers.invariance_worker import run_configs
from tests.helpers.roles import VOCAB_SIZE, fresh_saver, loss_of, make_batch, make_role, normal, small_config
from trainer import worker
from trainer.algo.log_probs import linear_log_probs_and_entropy, log_probs_and_entropy
from trainer.common.safetensors_folder import SafetensorsFolder
from trainer.config.pieces import make_task
from trainer.config.schema import Config
from trainer.megatron import platform
from trainer.megatron.groups import pipeline_group
from trainer.megatron.moe import load_balancing_loss
from trainer.megatron.sharding import whole_tensors
from trainer.models.hf_bridge import from_hf, to_hf
from trainer.roles.role import Role
from trainer.tasks.tokenizer import load_tokenizer
from trainer.training import step
from trainer.training.micro_batches import Split
from trainer.training.warm_up import start_critic_from

ROWS = 263  # of the embedding: an odd number, more than there are tokens
MODEL = (
    *("model.dtype=fp32", "model.layers=4", "model.qk_norm=true", f"model.vocab_size={ROWS}"),
    *("offload=none", "optimizer.clip_grad=0.01"),
)


@dataclass(frozen=True)
class Job:
    """What one worker group does: small pieces of work per layout, whole runs, and roles put to sleep."""

    layouts: dict[str, tuple[str, ...]]
    runs: dict[tuple[str, str], Config]
    sleepers: dict[str, tuple[str, ...]]
    directory: Path


def run_job(job: Job) -> dict[str, Any]:
    """What rank 0 found: ``layouts``, ``runs`` (see :func:`run_configs`), ``asleep`` and, with four ranks,
    ``vocabulary`` and ``balance``."""
    first = small_config(*MODEL, *next(iter(job.layouts.values())))
    platform.set_up(first)
    platform.set_up_process_groups(first)
    layouts = {name: _run_layout((*MODEL, *o), job.directory / name) for name, o in job.layouts.items()}
    found: dict[str, Any] = {"layouts": layouts}
    found["runs"] = run_configs(job.runs)
    found["asleep"] = {}
    for name, overrides in job.sleepers.items():
        platform.set_up_parallel_groups(small_config(*overrides).parallel)
        found["asleep"][name] = asleep("actor", overrides, lengths=(90, 5, 7, 8))
    if distributed.get_world_size() == 4:
        found["vocabulary"] = _split_vocabulary()
        found["balance"] = _split_sequences()
    return found


def _run_layout(overrides: tuple[str, ...], folder: Path) -> dict[str, Any]:
    config = small_config(*overrides)
    platform.set_up_parallel_groups(config.parallel)
    roles = {}
    for name in ("actor", "critic"):
        fresh_saver()
        roles[name] = make_role(name, *overrides, vocab_size=ROWS)
    actor, critic = roles["actor"], roles["critic"]
    tokenizer = load_tokenizer(None, task=make_task(config), vocab_size=ROWS)
    parts: Any = SimpleNamespace(actor=actor, prompts=SimpleNamespace(tokenizer=tokenizer))
    worker.export(parts, folder if distributed.get_rank() == 0 else None)
    exported = _exported(actor)
    actor.copy_to_tag("ref")
    found = {name: _work(role) for name, role in roles.items()}
    assert actor._weights.backuper is not None
    start_critic_from(actor._weights.backuper.get("ref"), critic)
    distributed.barrier()
    trained = _exported(actor)
    actor.load_whole_weights(from_hf(SafetensorsFolder(folder), model=actor.config.model))
    return {
        **found,
        "exported": exported,
        "trained": trained,
        "imported": _exported(actor),
        "folder": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()},
        "critic_from_actor": {name: _digest(tensor) for name, tensor in whole_tensors(critic.model.chunks)},
    }


def _exported(actor: Role) -> list[tuple[str, str]]:
    """(Hugging Face name, digest) of the actor's tensors."""
    return [
        (name, _digest(tensor)) for name, tensor in to_hf(whole_tensors(actor.model.chunks), model=actor.config.model)
    ]


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy()).hexdigest()


def _work(role: Role) -> dict[str, Any]:
    """Outputs before training, the sums of four optimizer steps, and the whole weights after them."""
    batch = my_share(make_batch([5, 3, 1, 4]))
    if role.name == "actor":
        outputs = step.log_probs(role, batch, temperature=0.7, vocab_size=VOCAB_SIZE, split=Split(1))
    else:
        outputs = (step.values(role, batch, split=Split(1)),)
    loss = loss_of(role, "algo.entropy_coef=0.1")
    splits = [Split(1)] * 4
    if pipeline_group().size() == 1:  # two of the sequences share a micro-batch, padded and packed
        splits[2:] = Split(1, 16), Split(1, 16, break_even=50.0)
    steps = [step.train_minibatch(role, batch, loss, split=split) for split in splits]
    weights = {name: tensor.detach().clone() for name, tensor in whole_tensors(role.model.chunks)}
    return {"outputs": outputs, "steps": steps, "weights": weights}


def _split_vocabulary() -> list[dict[str, Tensor]]:
    """What every rank gets for logits whose vocabulary of 5 entries they share: two, two, one and none."""
    rank, width = distributed.get_rank(), 2
    logits = normal((2, 6, 4 * width), seed=0).double()
    targets = torch.arange(12).remainder(5).view(2, 6)
    own = logits[..., rank * width : (rank + 1) * width].clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        own, targets, temperature=0.7, vocab_size=5, group=distributed.group.WORLD
    )
    (log_probs * torch.arange(6.0) + entropy.square()).sum().backward()
    found = {"logits": logits, "targets": targets, "log_probs": log_probs.detach(), "entropy": entropy.detach()}
    everyones: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyones, {**found, "gradient": own.grad, "linear": _split_linear(targets)})
    return everyones


def _split_linear(targets: Tensor) -> dict[str, Tensor]:
    """The same from hidden states and this rank's part of the output layer, of all tokens but the first."""
    rank, width = distributed.get_rank(), 2
    hidden = normal((12, 3), seed=1).double().requires_grad_()
    whole = normal((4 * width, 3), seed=2).double()
    own = whole[rank * width : (rank + 1) * width].clone().requires_grad_()
    log_probs, entropy = linear_log_probs_and_entropy(
        hidden,
        own,
        targets.flatten()[1:],
        rows=torch.arange(1, 12),
        temperature=0.7,
        vocab_size=5,
        group=distributed.group.WORLD,
    )
    (log_probs * torch.arange(11.0) + entropy.square()).sum().backward()
    assert hidden.grad is not None
    assert own.grad is not None
    found = {"hidden": hidden.detach(), "weight": whole, "log_probs": log_probs.detach(), "entropy": entropy.detach()}
    return {**found, "hidden_gradient": hidden.grad, "weight_gradient": own.grad}


def _split_sequences() -> list[dict[str, Tensor]]:
    """What every rank gets for the load of three sequences, of 8, 3 and no tokens, of which each has two columns."""
    columns = slice(2 * distributed.get_rank(), 2 * distributed.get_rank() + 2)
    probabilities = normal((8, 3, 5), seed=0).double().softmax(-1)
    is_chosen = torch.zeros_like(probabilities, dtype=torch.bool).scatter(-1, probabilities.topk(2).indices, True)
    is_real = torch.arange(8)[:, None] < torch.tensor([8, 3, 0])
    own = probabilities[columns].clone().requires_grad_()
    world: Any = distributed.group.WORLD
    losses = load_balancing_loss(own, is_chosen[columns], is_real=is_real[columns], group=world)
    (losses * torch.arange(1.0, 4.0)).sum().backward()
    found = {"probabilities": probabilities, "is_chosen": is_chosen, "is_real": is_real, "losses": losses.detach()}
    everyones: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyones, {**found, "gradient": own.grad})
    return everyones
