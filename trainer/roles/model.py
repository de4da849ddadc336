"""What computes in a role: its part of the model and the optimizer, as megatron-core has them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, distributed

from trainer.common.seeds import seed_for
from trainer.config.roles import role_spec, trained_role
from trainer.config.schema import Config, DdpConfig
from trainer.megatron import optimizer as optimizers
from trainer.megatron.build import build_chunks, frozen, move_rest, wrap_ddp
from trainer.megatron.moe import drop_routing
from trainer.megatron.schedule import Input, run_passes
from trainer.megatron.sharding import Chunk, Share, ddp_buffers, named_tensors
from trainer.memory.arena import HostArenas
from trainer.memory.regions import RoleRegions
from trainer.plan import Plan
from trainer.roles.digest import digest

MIB = 2**20


class ModelChunks:
    """This rank's part of a model, with what can be asked of it alone; the benchmark's peers have it too.

    Attributes:
        optimizer: Megatron's; None of a role that is not trained.
    """

    optimizer: Any = None

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks

    def tensors(self) -> dict[str, Tensor]:
        """Name in the whole model -> this rank's tensor, of all that a forward pass reads."""
        return dict(named_tensors(self.chunks))

    def parameter_count(self) -> int:
        return sum(param.numel() for chunk in self.chunks for param in chunk.parameters())

    def grad_buffers(self) -> Iterator[Tensor]:
        """The buffers in which gradients add up."""
        return (buffer.grad_data for buffer in ddp_buffers(self.chunks))

    def drop_grads(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def zero_grads(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.drop_grads()


class RoleModel(ModelChunks):
    """Knows nothing of sleep: what a method touches must be awake.

    Attributes:
        chunks: one, or one for each virtual pipeline stage of this rank.
        optimizer, state: Megatron's, and its tensors; None of a role that is not trained.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        *,
        plan: Plan,
        regions: RoleRegions,
        arenas: HostArenas,
        vocab_size: int,
        seed: int,
    ) -> None:
        spec, settings = role_spec(config, name), config.roles[name]
        self._name, self._trained = name, trained_role(config, name) if spec.is_trained else None
        gpts = build_chunks(
            settings.model,
            vocab_size=vocab_size,
            parallel=config.parallel,
            seed=seed,
            value_head=spec.has_value_head,
            recompute=config.training.recompute if spec.is_trained else "none",
        )
        grad, param = (bool(plan.row(name, kind).flag) for kind in ("grad", "param"))

        def wrapped(gpt: GPTModel, ddp: DdpConfig) -> Chunk:
            region_for = regions.of_ddp_buffer
            return wrap_ddp(gpt, ddp, disable_grad_backup=grad, disable_param_backup=param, region_for=region_for)

        trained = self._trained
        super().__init__([frozen(gpt) if trained is None else wrapped(gpt, trained.ddp) for gpt in gpts])
        move_rest(self.chunks, regions.region("rest"))
        self.optimizer = self.state = None
        if trained is not None:
            self.optimizer, self.state = optimizers.build_optimizer(
                self.chunks,
                trained,
                region=regions.optimizer_region,
                piece_bytes=int(config.memory.piece_mib * MIB),
            )
            regions.keep_optimizer_state(
                self.state.pieces,
                main_pieces=self.state.main_pieces,
                config=config,
                arenas=arenas,
                rounding_seed=functools.partial(self._rounding_seed, config.seed),
            )
            self.set_param_hooks(enabled=False)

    def _rounding_seed(self, seed: int, piece: int) -> int:
        step, rank = self.step_count(), distributed.get_rank()
        return seed_for(seed, f"rounding/{self._name}/{piece}", step=step, rank=rank)

    # ---- tensors -----------------------------------------------------------------------------------------------

    def gpts(self) -> list[GPTModel]:
        """This rank's part of the model, for passes other than Megatron's."""
        return [chunk.module for chunk in self.chunks]

    def optimizer_tensors(self) -> tuple[Tensor, ...]:
        """Main params and moments."""
        return () if self.state is None else self.state.pieces

    def not_finite(self) -> list[str]:
        """Names of the tensors that hold NaN or infinity."""
        return [name for name, tensor in self.tensors().items() if not tensor.isfinite().all()]

    def digest(self) -> str:
        """SHA-256 (hex) of tensors and optimizer state, see :mod:`trainer.roles.digest`."""
        weights = ((name, [tensor]) for name, tensor in self.tensors().items())
        state = [] if self.state is None else [("optimizer", self.state.pieces)]
        return digest([*weights, *state])

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy ``weights`` into the model and refresh the fp32 main params. Raises ValueError: an unknown name, or
        another shape than the tensor of that name has."""
        own = self.tensors()
        unknown = sorted(set(weights) - set(own))
        if unknown:
            raise ValueError(f"the {self._name} has no tensors called {', '.join(unknown)}")
        for name, tensor in weights.items():
            if tensor.shape != own[name].shape:
                raise ValueError(
                    f"{name} has the shape {tuple(tensor.shape)}, the {self._name}'s is {tuple(own[name].shape)}"
                )
            own[name].copy_(tensor)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def rebuild_params(self, main_params: Sequence[Tensor] | None) -> None:
        """Parameters from the main params: the awake ones or, while the state sleeps, these copies of its pieces."""
        assert self.state is not None
        with nullcontext() if main_params is None else self.state.main_params_from(main_params):
            optimizers.copy_main_to_model_params(self.optimizer, self.chunks)

    # ---- work ----------------------------------------------------------------------------------------------

    def passes(
        self,
        inputs: Sequence[Input],
        on_output: Callable[..., Any],
        *,
        forward_only: bool,
        around: Callable[[int], AbstractContextManager[Any]] = nullcontext,
        before_reducing: Callable[[], None] | None = None,
    ) -> list[Any]:
        """See :func:`trainer.megatron.schedule.run_passes`."""
        hooks = {"around": around, "before_reducing": before_reducing}
        return run_passes(self.chunks, inputs, on_output, forward_only=forward_only, **hooks)

    def drop_activations(self) -> None:
        """Forget what a pass has left outside of every region."""
        drop_routing(self.chunks)

    def step(self) -> tuple[bool, float]:
        return optimizers.step(self.optimizer)

    def set_param_hooks(self, *, enabled: bool) -> None:
        """Hooks that gather parameters during a forward pass, where there are any. Disabling them completes the
        gather, so that others see whole parameters."""
        if self._trained is None or not self._trained.ddp.overlap_param_gather:
            return
        for chunk in self.chunks:
            if enabled:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook(param_sync=True)

    def build_scheduler(self, *, total_steps: int) -> OptimizerParamScheduler:
        """The learning-rate schedule of the role's settings over ``total_steps`` optimizer steps."""
        assert self._trained is not None, self._name
        return optimizers.build_scheduler(self.optimizer, self._trained, total_steps=total_steps)

    def step_count(self) -> int:
        """Adam's, of the steps that were not skipped."""
        return optimizers.step_count(self.optimizer)

    def set_step_count(self, count: int) -> None:
        optimizers.set_step_count(self.optimizer, count)

    def learning_rate(self) -> float:
        """Of the next step."""
        return optimizers.learning_rate(self.optimizer)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Outside of any schedule."""
        optimizers.set_learning_rate(self.optimizer, learning_rate)

    def restart_optimizer(self) -> None:
        """Moments and step count of an optimizer that was just built."""
        assert self.state is not None, self._name
        self.state.zero_moments()
        optimizers.set_step_count(self.optimizer, 0)

    def shares(self, own: Mapping[str, Tensor]) -> list[Share]:
        """This rank's shares of the optimizer state; ``own``: :meth:`tensors`. None without an optimizer."""
        return [] if self.optimizer is None else list(optimizers.shares(self.optimizer, own))
