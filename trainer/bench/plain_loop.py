"""The peer: PPO as a plain loop of transformers and PyTorch, everything resident, nothing of Megatron's.

Actor and critic are transformers models in the dtype of the config; each optimizer works on fp32 copies of the
parameters (AdamW, fused kernel) and gradients are summed in fp32. The actor generates with the weights it trains, so
there is nothing to sync; the reference is a second copy of it; the critic is the actor's body with an fp32 head.
Prompts, sampling, advantages, losses and micro-batches are this project's own functions, so that both sides do the same
work on the same shapes. One rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.algo.log_probs import log_probs_and_entropy
from trainer.common.safetensors_folder import SafetensorsFolder
from trainer.common.seeds import seed_for
from trainer.config.pieces import make_correction, make_estimator, make_policy_loss, make_task
from trainer.config.roles import TrainedRole, trained_role
from trainer.config.schema import Config
from trainer.data.batch import Experience, Sequences
from trainer.data.prompts import Prompts
from trainer.data.rewards import Payer
from trainer.measure import metrics, throughput
from trainer.measure.phases import Phases
from trainer.memory.saver import NullSaver
from trainer.rollout.hf import HfEngine
from trainer.tasks.tokenizer import load_tokenizer, vocabulary_size
from trainer.training import step
from trainer.training.episodes import play
from trainer.training.experience import Credit, Judgement, experience_of
from trainer.training.micro_batches import Split, in_order, micro_batches

Reader = Callable[[Tensor], tuple[Tensor, ...]]
_SCORING = {"ref_log_probs": "actor", "log_probs": "actor", "values": "critic"}


class ValueModel(nn.Module):
    """A transformers body and one fp32 value per token; the head starts at zero, as the critic's does."""

    def __init__(self, body: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(hidden_size, 1, bias=False, device=torch.cuda.current_device(), dtype=torch.float32)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [b, s] -> values [b, s, 1]."""
        return self.head(self.body(input_ids=tokens, use_cache=False).last_hidden_state.float())


def use_liger(model: nn.Module) -> None:
    """Replace a transformers model's RMSNorm, SwiGLU and rotary positions by Liger's Triton kernels, as
    ``use_liger_kernel`` of transformers' own trainer does. (Logits are made whole, for losses that are not its.)"""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)


class PlainTrainer:
    """Forward passes and optimizer steps of one model, as in :mod:`trainer.training.step`.

    ``read``: tokens [b, s] -> what losses need of the output. Batches are padded on the right and causal, so
    no mask is needed.
    """

    def __init__(self, model: nn.Module, role: TrainedRole, read: Reader) -> None:
        settings, self.read, self._clip = role.optimizer, read, role.optimizer.clip_grad
        self._params = [param.requires_grad_() for param in model.parameters()]
        self._mains = [param.detach().float().clone() for param in self._params]
        self._grads = [torch.zeros_like(main) for main in self._mains]
        for main, grad in zip(self._mains, self._grads, strict=True):
            main.grad = grad
        decay = {dim: [main for main in self._mains if (main.dim() > 1) == (dim > 1)] for dim in (1, 2)}
        self._optimizer = torch.optim.AdamW(
            [{"params": decay[2]}, {"params": decay[1], "weight_decay": 0.0}],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def train_minibatch(self, batch: Experience, loss: step.Loss[Experience], split: Split) -> dict[str, float]:
        """One optimizer step; the sums that :func:`trainer.training.step.train_minibatch` reports."""
        reports = []
        for part in micro_batches(batch, split):
            micro_batch = part.take(batch)
            numerator, count, stats = loss.compute(micro_batch, *self.read(micro_batch.tokens))
            numerator.backward()
            torch._foreach_add_(self._grads, [param.grad for param in self._params if param.grad is not None])
            for param in self._params:
                param.grad = None
            reports.append({**stats, "loss_sum": numerator.detach(), "loss_count": count})
        sums = step.summed(reports)
        torch._foreach_div_(self._grads, sums["loss_count"].float())
        norm = torch.nn.utils.clip_grad_norm_(self._mains, self._clip or torch.inf, foreach=True)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._params, self._mains)
        torch._foreach_zero_(self._grads)
        return {**{name: float(value) for name, value in sums.items()}, "grad_norm": float(norm), "skipped": 0.0}


def infer(read: Reader, batch: Sequences, split: Split) -> tuple[Tensor, ...]:
    """What ``read`` gives of every micro-batch, over the whole batch in order; without gradients."""
    parts = micro_batches(batch, split)
    with torch.no_grad():
        results = [read(part.take(batch).tokens) for part in parts]
    return tuple(in_order(tensors, parts, batch=batch) for tensors in zip(*results, strict=True))


class PlainLoop:
    """PPO steps from the weights in ``folder``, a Hugging Face model folder that the other side wrote.

    ``prepare`` is called with the model from which all others are copied.
    """

    def __init__(
        self, config: Config, phases: Phases, *, folder: Path, prepare: Callable[[nn.Module], None] | None = None
    ) -> None:
        self._config, self._phases = config, phases
        self._credit, task = Credit(make_estimator(config), make_correction(config)), make_task(config)
        self._policy_loss = make_policy_loss(config)
        tokenizer = load_tokenizer(config.tokenizer.path, task=task, vocab_size=config.largest_vocab_size)
        self._vocab_size = vocabulary_size(tokenizer)
        self._prompts = Prompts(config, task=task, tokenizer=tokenizer)
        actor, critic = (trained_role(config, name) for name in ("actor", "critic"))
        self._engine = HfEngine(
            actor.model, config.rollout, tokenizer=tokenizer, saver=NullSaver(), observer=lambda event: None
        )
        self._engine.wake_up(SafetensorsFolder(folder).items())
        model: Any = self._engine.model  # the engine generates with the weights that are trained here
        if prepare:
            prepare(model)
        reference = copy.deepcopy(model)
        values = ValueModel(copy.deepcopy(model.base_model), critic.model.hidden_size)
        self._actor = PlainTrainer(model, actor, partial(self._log_probs, model))
        self._critic = PlainTrainer(values, critic, lambda tokens: (values(tokens).squeeze(-1),))
        self._reference = partial(self._log_probs, reference)

    def _log_probs(self, model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [b, s-1] of all tokens but the first."""
        logits, next_tokens = model(input_ids=tokens, use_cache=False).logits, functional.pad(tokens[:, 1:], (0, 1))
        log_probs, entropy = log_probs_and_entropy(
            logits, next_tokens, temperature=self._config.rollout.temperature, vocab_size=self._vocab_size
        )
        return log_probs[:, :-1], entropy[:, :-1]

    def ppo_step(self, number: int) -> dict[str, Any]:
        """One PPO step; metrics as those of :func:`trainer.loop.ppo_step`, as far as both sides have them."""
        config, settings, phase = self._config, self._config.algo, self._phases.phase
        splits = Split.of_training(config), Split.of_scoring(config)
        split, scoring = (replace(how, break_even=None) for how in splits)  # these models take a sequence a row

        with phase("rollout", step=number):
            examples = self._prompts.for_step(number)
            seed = seed_for(config.seed, "rollout", step=number)
            episodes = play(config, self._prompts, self._engine, examples, seed=seed, payer=Payer.REWARD)
            drawn = episodes.batch(weights_step=number - 1)
        ref_log_probs = old_log_probs = entropy = None
        if settings.uses_reference:
            with phase("ref_log_probs", step=number):
                ref_log_probs, _ = infer(self._reference, drawn, scoring)
        if not settings.old_log_probs_come_from_training:
            with phase("log_probs", step=number):
                old_log_probs, entropy = infer(self._actor.read, drawn, scoring)
        with phase("values", step=number):
            (values,) = infer(self._critic.read, drawn, scoring)
        with phase("advantages", step=number):
            judged = Judgement(ref_log_probs, old_log_probs, entropy, values)
            batch = experience_of(drawn, judged, settings=settings, credit=self._credit, kl_coef=settings.kl.coef)
        with phase("train_critic", step=number):
            critic_sums = self._train(self._critic, batch, step.value_loss(settings), number, split)
        with phase("train_actor", step=number):
            temperature, kl_coef = config.rollout.temperature, settings.kl.coef
            how = {"temperature": temperature, "vocab_size": self._vocab_size, "kl_coef": kl_coef}
            loss = step.policy_loss(settings, self._policy_loss, **how)
            actor_sums = self._train(self._actor, batch, loss, number, split)
        with phase("report", step=number):
            work = throughput.of_step(config, batch, vocab_size=self._vocab_size, scoring=_SCORING)
            self._phases.rate_with(work.rates)
            return {
                **metrics.of_rollout(batch),
                **metrics.of_critic(critic_sums),
                **metrics.of_actor(actor_sums),
            }

    def _train(
        self, trainer: PlainTrainer, batch: Experience, loss: step.Loss[Experience], number: int, split: Split
    ) -> list[dict[str, float]]:
        return [
            trainer.train_minibatch(batch.select(rows), loss, split)
            for epoch in range(self._config.algo.epochs)
            for rows in self._prompts.minibatch_rows(len(batch), step=number, epoch=epoch)
        ]
