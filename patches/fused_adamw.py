"""An AdamW of Transformer Engine's FusedAdam shape for megatron-core, where neither TE nor Apex is installed.

Target: the names Adam, USING_PYTORCH_OPTIMIZER of megatron.core.optimizer, and Adam, HAVE_APEX_OR_TE,
    USING_TE_OPTIMIZER of megatron.core.optimizer.distrib_optimizer.
Why: with torch's AdamW megatron-core initialises no ``step`` in the optimizer state, so the first step fails once the
    state is made before it; and its distributed checkpoints of such a state load silently wrong.
How: a torch.optim.Optimizer that keeps two moments per parameter in ``state`` and ``step`` in the param group, as
    FusedAdam does, and computes with torch's own fused AdamW kernel (Loshchilov & Hutter, arXiv:1711.05101).
Upstream: https://github.com/NVIDIA/Megatron-LM (optimizer/__init__.py, "Falling back to Torch optimizers").
Remove when: megatron-core's fallback creates and checkpoints a complete state for torch.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw

from patches.registry import Patch, Replacement, missing_names


class FusedShapeAdamW(torch.optim.Optimizer):
    """AdamW with ``exp_avg`` and ``exp_avg_sq`` (fp32, shape of the parameter) in the state, ``step`` in the group."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("only decoupled weight decay (adam_w_mode=True) is supported")
        if capturable:
            raise ValueError("capture in CUDA graphs (capturable=True, optimizer_cuda_graph) is not supported")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def initialize_state(self, param: torch.Tensor) -> None:
        self.state[param] = {name: torch.zeros_like(param.data) for name in ("exp_avg", "exp_avg_sq")}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. ``closure`` is not supported and must be None."""
        assert closure is None
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            group["step"] = group.get("step", 0) + 1
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.initialize_state(param)
            beta1, beta2 = group["betas"]
            steps = torch.full((len(params),), group["step"] - 1.0, dtype=torch.float32, device=params[0].device)
            adamw(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                list(steps.unbind()),
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def _replacements() -> list[Replacement]:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:  # TE or Apex is there: nothing to replace
        return []
    return [
        (optimizer, "Adam", FusedShapeAdamW),
        (optimizer, "USING_PYTORCH_OPTIMIZER", False),
        (distrib_optimizer, "Adam", FusedShapeAdamW),
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
        (distrib_optimizer, "USING_TE_OPTIMIZER", True),
    ]


def _probe() -> tuple[str, str]:
    from patches.probe import probe_optimizer_step

    replacements = _replacements()
    if not replacements:
        return "OK", "not needed: Transformer Engine or Apex is there"
    missing = missing_names(replacements)
    return ("CHANGED", f"there is no {', '.join(missing)}") if missing else probe_optimizer_step()


PATCH = Patch(
    name="fused_adamw",
    target="Adam in megatron.core.optimizer and .distrib_optimizer",
    why="AdamW with a complete, checkpointable state where TE and Apex are absent",
    replacements=_replacements,
    probe=_probe,
    after=("cpu_platform",),  # importing megatron looks for a GPU
)
