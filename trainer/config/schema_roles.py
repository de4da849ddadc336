"""The typed sections of a role, and of what becomes of roles that sleep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Dict, List, Optional  # noqa: UP035  (omegaconf reads these annotations)

from trainer.common.limits import Limits, Words
from trainer.config.marks import Mark
from trainer.config.section import Section

PARAM_FLAG = "disable_param_buffers_cpu_backup"
GRAD_FLAG = "disable_grad_buffers_cpu_backup"


@dataclass
class RopeScalingConfig(Section):
    """Llama 3's stretching of rotary positions for longer texts than ``original_length`` tokens."""

    factor: Annotated[float, Limits(1, 1e6)]
    low_freq_factor: Annotated[float, Limits(1e-6, 1e6)]
    high_freq_factor: Annotated[float, Limits(1e-6, 1e6)]
    original_length: Annotated[int, Limits(1, 100_000_000)]


@dataclass
class ModelConfig(Section):
    """Architecture of one role's GPT body. Sizes in elements; ``dtype`` is ``bf16`` or ``fp32``.

    ``path``: a Hugging Face model folder whose weights the role starts from, or null for random ones. ``vocab_size``:
    rows of the embedding, null for as many as the tokenizer has entries. ``num_experts``: of every layer, each with
    ``ffn_size``; null for a dense model, to which the three settings after it mean nothing. ``kernels``: who computes
    norms, SwiGLU and rotary positions, ``torch``, ``liger`` or ``te`` (Transformer Engine), one of which ``auto`` has
    become. ``attention_backend``: the core attention, ``sdpa`` (torch's) or ``te``. ``check_finite``: look for NaN and
    infinities in the folder's weights. ``digest``: by which the folder's content is known again wherever it lies.
    """

    path: Annotated[Optional[str], Mark.OUTSIDE]  # noqa: UP045
    layers: Annotated[int, Limits(1, 1000), Mark.ARCHITECTURE]
    hidden_size: Annotated[int, Limits(2, 1_000_000), Mark.ARCHITECTURE]
    ffn_size: Annotated[int, Limits(1, 10_000_000), Mark.ARCHITECTURE]
    heads: Annotated[int, Limits(1, 10_000), Mark.ARCHITECTURE]
    kv_heads: Annotated[int, Limits(1, 10_000), Mark.ARCHITECTURE]
    head_size: Annotated[Optional[int], Limits(2, 10_000), Mark.ARCHITECTURE]  # noqa: UP045
    vocab_size: Annotated[Optional[int], Limits(1, 10_000_000), Mark.ARCHITECTURE]  # noqa: UP045
    max_length: Annotated[int, Limits(2, 100_000_000), Mark.WEIGHTS]
    rope_theta: Annotated[float, Limits(1, 1e12), Mark.ARCHITECTURE]
    rope_scaling: Annotated[Optional[RopeScalingConfig], Mark.ARCHITECTURE]  # noqa: UP045
    norm_eps: Annotated[float, Limits(1e-20, 1), Mark.ARCHITECTURE]
    qkv_bias: Annotated[bool, Mark.ARCHITECTURE]
    qk_norm: Annotated[bool, Mark.ARCHITECTURE]
    tie_embeddings: Annotated[bool, Mark.ARCHITECTURE]
    num_experts: Annotated[Optional[int], Limits(2, 10_000), Mark.ARCHITECTURE]  # noqa: UP045
    num_experts_per_tok: Annotated[Optional[int], Limits(1, 10_000), Mark.ARCHITECTURE]  # noqa: UP045
    norm_topk_prob: Annotated[bool, Mark.ARCHITECTURE]
    router_aux_loss_coef: Annotated[float, Limits(0, 1e6), Mark.WEIGHTS]
    init_std: Annotated[float, Limits(0, 100)]
    dtype: Annotated[str, Words("bf16", "fp32"), Mark.WEIGHTS]
    kernels: Annotated[str, Words("auto", "torch", "liger", "te")]
    attention_backend: Annotated[str, Words("sdpa", "te")]
    check_finite: Annotated[bool, Mark.OUTSIDE]
    digest: Annotated[Optional[str], Mark.ARCHITECTURE]  # noqa: UP045

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.hidden_size // self.heads if self.head_size is None else self.head_size

    def embedding_rows(self, tokenizer_entries: int) -> int:
        """Size of the vocabulary that goes with a tokenizer; rows beyond its entries are never drawn."""
        return tokenizer_entries if self.vocab_size is None else self.vocab_size


@dataclass
class SharedOptimizerConfig(Section):
    """What both optimizers share unless a role says otherwise; the learning rate always belongs to a role."""

    min_lr_ratio: Annotated[float, Limits(0, 1)]
    lr_schedule: Annotated[str, Words("constant", "linear", "cosine", "wsd")]
    lr_warmup_steps: Annotated[int, Limits(0, 1_000_000_000)]
    lr_wsd_decay_style: Annotated[str, Words("exponential", "linear", "cosine", "minus_sqrt")]
    lr_wsd_decay_steps: Annotated[Optional[int], Limits(1, 1_000_000_000)]  # noqa: UP045
    beta1: Annotated[float, Limits(0, 0.999999)]
    beta2: Annotated[float, Limits(0, 0.999999)]
    eps: Annotated[float, Limits(1e-20, 1)]
    weight_decay: Annotated[float, Limits(0, 100)]
    clip_grad: Annotated[float, Limits(0, 1e9)]


@dataclass
class OptimizerConfig(SharedOptimizerConfig):
    lr: Annotated[float, Limits(0, 1000)]


@dataclass
class DdpConfig(Section):
    """Arguments of Megatron's DistributedDataParallel; the two flags are this project's (see patches)."""

    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    nccl_ub: bool
    disable_grad_buffers_cpu_backup: bool
    disable_param_buffers_cpu_backup: bool


@dataclass
class RoleConfig(Section):
    """A role; :mod:`trainer.config.roles` says what its description means.

    ``head``: ``vocabulary`` or ``value``. ``trained``: false for a role whose weights stay as they are; it has neither
    ``optimizer`` nor ``ddp``. ``tags``: further weights that its weights backuper keeps, null for a role without one.
    """

    head: Annotated[str, Words("vocabulary", "value")]
    trained: bool
    tags: Optional[List[str]]  # noqa: UP006, UP045
    model: ModelConfig
    optimizer: Optional[OptimizerConfig]  # noqa: UP045
    ddp: Optional[DdpConfig]  # noqa: UP045


@dataclass
class OffloadConfig(Section):
    """``train``: models sleep while they are not at work; ``auto``: only where others need the room.
    ``reserve_gib``: GPU memory of each rank for what the plan does not count, null for an estimate.
    ``destroy_process_groups``: during rollouts ranks give back the memory of their communicators too, and make them
    again afterwards."""

    train: bool
    auto: bool
    reserve_gib: Annotated[Optional[float], Limits(0, 1e6), Mark.OUTSIDE]  # noqa: UP045
    destroy_process_groups: bool


@dataclass
class RestoreConfig(Section):
    """Where one role's DDP buffers come back from: ``saver``, ``backuper``, ``main_params`` (grads: or ``none``).

    ``optim_keeper``: who keeps the optimizer state, ``saver``, ``arena`` (an exact-size host arena of our own),
    ``packed`` (coded in fewer bytes, without loss) or ``disk`` (a file in ``memory.disk.path``). Both others are
    ``none`` for a role that is not trained.
    """

    restore_params_from: str
    restore_grads_from: str
    optim_keeper: str


@dataclass
class DiskConfig(Section):
    """``path``: a folder on a local disk, for those whose ``optim_keeper`` is ``disk``."""

    path: Optional[str]  # noqa: UP045


@dataclass
class MemoryConfig(Section):
    """``roles``: role -> what comes back from where, in YAML ``memory.<role>``; of more roles than a run may have.
    ``tags``: each rank's weights backuper keeps ``full`` tags, or its data-parallel share of them (``sharded``), or the
    ranks of a node that hold the same have one copy (``node``).
    ``optim_format``: of Adam's moments while they sleep; ``bf16`` takes fewer bytes and does not keep all bits.
    ``piece_mib``: size of the pieces in which the optimizer state sleeps and wakes up."""

    roles: Dict[str, RestoreConfig]  # noqa: UP006
    tags: Annotated[str, Words("full", "sharded", "node")]
    optim_format: Annotated[str, Words("fp32", "bf16")]
    disk: DiskConfig
    piece_mib: Annotated[float, Limits(2**-10, 1_000_000)]
    poison: bool
    retain_cpu_backup: bool
    cpu_backup_backend: Annotated[str, Words("pinned", "mmap")]
