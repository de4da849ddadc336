"""Real roles of a tiny model in this process, and batches for them to work on."""

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import patches
from tests.helpers.composing import SMALL, config_of
from tests.helpers.megatron_world import one_rank_world
from trainer.config.pieces import make_correction, make_estimator, make_policy_loss
from trainer.config.schema import Config
from trainer.data.batch import Experience, RolloutBatch
from trainer.megatron.build import named_tensors
from trainer.memory.arena import HostArenas
from trainer.memory.saver import make_saver
from trainer.plan import make_plan
from trainer.roles.role import Role
from trainer.training import step
from trainer.training.experience import Credit, Judgement, experience_of
from trainer.training.micro_batches import Split

VOCAB_SIZE = 64
POLICIES = ("full", "no_grads", "lean", "rebuild")


@contextmanager
def one_thread_world() -> Iterator[None]:
    """The world of a worker with one rank and one thread, for a whole test module."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with one_rank_world():
        patches.apply("one_rank_groups")
        yield
    torch.set_num_threads(threads)


def fresh_saver() -> None:
    """Forget the regions of earlier roles."""
    patches.revert("cpu_saver")
    patches.apply("cpu_saver")


@functools.cache
def small_config(*overrides: str) -> Config:
    return config_of(*SMALL, *overrides)


def make_role(
    name: str,
    *overrides: str,
    events: list[dict[str, Any]] | None = None,
    seed: int = 1,
    arenas: HostArenas | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> Role:
    """An awake role; a critic's value head, which starts at zero, gets random weights, so that its body learns too."""
    config = small_config(*overrides)
    role = Role(
        name,
        config,
        plan=make_plan(config),
        saver=make_saver(config),
        vocab_size=vocab_size,
        seed=seed,
        observer=([] if events is None else events).append,
        arenas=arenas or HostArenas.of(config),
    )
    if name == "critic":
        head = normal((1, config.roles[name].model.hidden_size), seed=seed)
        role.load_whole_weights({"output_layer.weight": head})
    return role


def normal(shape: Any, *, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_batch(lengths: list[int], *, prompt: int = 3, seed: int = 0, **given: Tensor) -> Experience:
    """Random sequences with responses of these lengths, padding with id 0, and something for every loss to read, save
    what is ``given``."""
    shape = (len(lengths), prompt + max(lengths) + 1)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB_SIZE, shape, generator=generator)
    column, length = torch.arange(shape[1])[None], torch.tensor(lengths)[:, None]
    mask = ((column >= prompt) & (column < prompt + length))[:, 1:]
    per_token = (shape[0], shape[1] - 1)
    made = Experience(
        tokens=tokens.where(column < prompt + length, 0),
        response_mask=mask,
        engine_log_probs=torch.full(per_token, -4.0).where(mask, 0.0),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        scores=torch.zeros(len(lengths)),
        turn_rewards=torch.zeros(per_token),
        weights_step=0,
        ref_log_probs=torch.full(per_token, -4.1).where(mask, 0.0),
        old_log_probs=torch.full(per_token, -4.0).where(mask, 0.0),
        entropy=torch.zeros(per_token),
        kl=torch.zeros(per_token),
        estimated_advantages=torch.zeros(per_token),
        advantages=normal(per_token, seed=seed + 1).where(mask, 0.0),
        importance_weights=None,
        values=normal(per_token, seed=seed + 2).where(mask, 0.0),
        returns=normal(per_token, seed=seed + 3).where(mask, 0.0),
    )
    return dataclasses.replace(made, **given)


def credited(batch: Experience, values: Tensor | None, *overrides: str, kl_coef: float = 0.0) -> Experience:
    """``batch`` with advantages of its own log-probs and scores, and of a critic's ``values`` [n, s]."""
    config = small_config(*overrides)
    drawn = {field.name: getattr(batch, field.name) for field in dataclasses.fields(RolloutBatch)}
    credit = Credit(make_estimator(config), make_correction(config))
    judged = Judgement(batch.ref_log_probs, batch.old_log_probs, batch.entropy, values)
    return experience_of(RolloutBatch(**drawn), judged, settings=config.algo, credit=credit, kl_coef=kl_coef)


def loss_of(role: Role, *overrides: str) -> step.Loss[Experience]:
    """PPO's loss for the role."""
    config = small_config(*overrides)
    if role.name == "critic":
        return step.value_loss(config.algo)
    how = {"temperature": 1.0, "vocab_size": VOCAB_SIZE, "kl_coef": config.algo.kl.coef}
    return step.policy_loss(config.algo, make_policy_loss(config), **how)


def train(role: Role, *, lr: float = 1e-2, steps: int = 1, lengths: tuple[int, ...] = (1, 5, 3, 2)) -> None:
    """PPO steps on random sequences; the weights move."""
    for number in range(steps):
        role.model.set_learning_rate(lr)
        sums = step.train_minibatch(role, make_batch(list(lengths), seed=number), loss_of(role), split=Split(2))
        assert sums["skipped"] == 0.0


def weights_of(role: Role) -> dict[str, Tensor]:
    """Copies of the role's awake tensors."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors(role.model.chunks)}


def same_weights(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def ddp_buffers(role: Role) -> list[Any]:
    return [buffer for chunk in role.model.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
