"""The typed sections of a config, each set once.

Their fields have no defaults: a default lives in exactly one place, the YAML under ``conf/``. The rules that join
several fields are in :mod:`trainer.config.rules`; :mod:`trainer.config.compose` makes a :class:`Config` of what Hydra
composed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, List, Optional  # noqa: UP035  (omegaconf reads these annotations)

PARAM_FLAG = "disable_param_buffers_cpu_backup"
GRAD_FLAG = "disable_grad_buffers_cpu_backup"


class Section:
    """Base of every section: each field is set once, by the constructor.

    ``@dataclass(frozen=True)`` would say the same, but omegaconf marks nodes of frozen dataclasses read-only, and
    Hydra could then override nothing in them.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise dataclasses.FrozenInstanceError(f"cannot assign to {type(self).__name__}.{name}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete {type(self).__name__}.{name}")


@dataclass
class RopeScalingConfig(Section):
    """Llama 3's stretching of rotary positions for longer texts than ``original_length`` tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass
class ModelConfig(Section):
    """Architecture of one role's GPT body. Sizes in elements; ``dtype`` is ``bf16`` or ``fp32``.

    ``path``: a Hugging Face model folder whose weights the role starts from, or null for random ones. ``vocab_size``:
    rows of the embedding, null for as many as the tokenizer has entries. ``num_experts``: of every layer, each with
    ``ffn_size``; null for a dense model, to which the three settings after it mean nothing. ``kernels``: who computes
    norms, SwiGLU and rotary positions, ``torch``, ``liger`` or ``te`` (Transformer Engine), one of which ``auto`` has
    become. ``attention_backend``: the core attention, ``sdpa`` (torch's) or ``te``.
    """

    path: Optional[str]  # noqa: UP045
    layers: int
    hidden_size: int
    ffn_size: int
    heads: int
    kv_heads: int
    head_size: Optional[int]  # noqa: UP045
    vocab_size: Optional[int]  # noqa: UP045
    max_length: int
    rope_theta: float
    rope_scaling: Optional[RopeScalingConfig]  # noqa: UP045
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    num_experts: Optional[int]  # noqa: UP045
    num_experts_per_tok: Optional[int]  # noqa: UP045
    norm_topk_prob: bool
    router_aux_loss_coef: float
    init_std: float
    dtype: str
    kernels: str
    attention_backend: str

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

    min_lr_ratio: float
    lr_schedule: str
    lr_warmup_steps: int
    lr_wsd_decay_style: str
    lr_wsd_decay_steps: Optional[int]  # noqa: UP045
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_grad: float


@dataclass
class OptimizerConfig(SharedOptimizerConfig):
    lr: float


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

    head: str
    trained: bool
    tags: Optional[List[str]]  # noqa: UP006, UP045
    model: ModelConfig
    optimizer: Optional[OptimizerConfig]  # noqa: UP045
    ddp: Optional[DdpConfig]  # noqa: UP045


@dataclass
class OffloadConfig(Section):
    """``train``: models sleep while they are not at work. ``destroy_process_groups``: during rollouts, when everything
    sleeps, ranks give back the memory of their communicators too, and make them again afterwards."""

    train: bool
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
    ``tags``: each rank's weights backuper keeps ``full`` tags, or its data-parallel share of them (``sharded``).
    ``optim_format``: of Adam's moments while they sleep; ``bf16`` takes fewer bytes and does not keep all bits.
    ``piece_mib``: size of the pieces in which the optimizer state sleeps and wakes up."""

    roles: Dict[str, RestoreConfig]  # noqa: UP006
    tags: str
    optim_format: str
    disk: DiskConfig
    piece_mib: float
    poison: bool
    retain_cpu_backup: bool
    cpu_backup_backend: str


@dataclass
class ParallelConfig(Section):
    """Ranks that hold one model together: ``tp`` share every layer (and, between layers, the sequence), ``pp`` have a
    stage of layers each, cut into ``vpp`` chunks that take turns. ``cp``: ranks per sequence. ``expert``: ranks of a
    stage, tensor and data parallel alike, over which the experts of a layer are spread."""

    tp: int
    pp: int
    vpp: int
    cp: int
    expert: int

    @property
    def model_ranks(self) -> int:
        """Ranks that work on one sequence."""
        return self.tp * self.pp * self.cp


@dataclass
class TokenizerConfig(Section):
    """``path``: a Hugging Face tokenizer folder, or null to train a BPE of ``vocab_size`` entries on the task.

    ``chat_template``: questions become a user's turn in the tokenizer's own template.
    """

    path: Optional[str]  # noqa: UP045
    vocab_size: int
    chat_template: bool


@dataclass
class DataConfig(Section):
    """``too_long``: what becomes of a prompt or a warm-up's answer that is too long, ``error``, ``drop`` or
    ``truncate``; see :mod:`trainer.data.selection`."""

    too_long: str


@dataclass
class RolloutConfig(Section):
    """How responses are drawn. ``top_k``: 0 for all tokens. ``stop``: strings that end a response, besides the
    tokenizer's end of sequence. ``kv_cache_gib``: of each rank, null for what a step needs. ``compile``: through
    torch.compile. ``batch_invariant``: the bits of a response depend on no other that is decoded with it."""

    engine: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: List[str]  # noqa: UP006
    max_prompt_tokens: int
    max_new_tokens: int
    kv_cache_gib: Optional[float]  # noqa: UP045
    compile: bool
    batch_invariant: bool


@dataclass
class KlConfig(Section):
    placement: str
    estimator: str
    coef: float
    clamp: float
    target: Optional[float]  # noqa: UP045
    horizon: int


@dataclass
class AlgoConfig(Section):
    """``old_log_probs``: where the log-probs before training come from, a ``forward`` pass of their own or the one pass
    that trains (``training``); ``auto``: the latter where it gives the same."""

    num_steps: int
    warmup_steps: int
    warmup_lr: float
    warmup_batch_size: int
    prompts_per_step: int
    responses_per_prompt: int
    epochs: int
    minibatches: int
    shuffle_seed: int
    old_log_probs: str
    micro_batch_size: int
    micro_batch_tokens: Optional[int]  # noqa: UP045
    whiten_advantages: bool
    clip_low: float
    clip_high: float
    dual_clip: Optional[float]  # noqa: UP045
    log_ratio_clamp: float
    value_clip: Optional[float]  # noqa: UP045
    entropy_coef: float
    loss_aggregation: str
    loss_length: int
    critic_warmup_steps: int
    start_critic_from_actor: Optional[bool]  # noqa: UP045
    heldout_prompts: int
    evaluate_every: Optional[int]  # noqa: UP045
    kl: KlConfig

    @property
    def uses_reference(self) -> bool:
        """Whether KL to the reference model counts, or may come to; otherwise nobody keeps or asks that model."""
        return self.kl.coef > 0 or self.kl.target is not None

    @property
    def needs_log_probs_before_training(self) -> bool:
        """Whether something reads them before the pass that trains, or later passes train on the same responses."""
        has_kl_in_reward = self.uses_reference and self.kl.placement == "reward"
        return self.epochs * self.minibatches > 1 or has_kl_in_reward

    @property
    def old_log_probs_come_from_training(self) -> bool:
        """Whether a step has no forward pass of its own for them; one that does not train the actor has it always."""
        return self.old_log_probs != "forward" and not self.needs_log_probs_before_training


@dataclass
class PlatformConfig(Section):
    """``peak_tflops``: dense bf16 peak of one device, for MFU; null: known by the device's name, or not at all."""

    name: str
    deterministic: bool
    peak_tflops: Optional[float]  # noqa: UP045


@dataclass
class LaunchConfig(Section):
    """``nproc`` workers on each of ``nnodes`` nodes; :mod:`trainer.command.nodes` explains ``node_rank`` and
    ``rdzv_endpoint``. ``max_restarts``: how often a job whose worker fails goes on from its newest checkpoint.
    ``host_memory_gib``, ``gpu_memory_gib``: what the node and each GPU have; null where that is not known."""

    nproc: int
    nnodes: int
    node_rank: Optional[int]  # noqa: UP045
    rdzv_endpoint: Optional[str]  # noqa: UP045
    max_restarts: int
    threads_per_worker: int
    host_memory_gib: Optional[float]  # noqa: UP045
    gpu_memory_gib: Optional[float]  # noqa: UP045


@dataclass
class LoggerConfig(Section):
    kind: str
    project: str


@dataclass
class DiagnosticsConfig(Section):
    """``detect_anomaly``: torch.autograd's, which stops at the first NaN of a backward pass and names the operation.
    ``profile_steps``: steps that torch.profiler traces."""

    detect_anomaly: bool
    profile_steps: List[int]  # noqa: UP006


@dataclass
class CheckpointConfig(Section):
    """``every_steps``: a checkpoint after every so many PPO steps and after the last one, null for none.
    ``keep_last``: how many are kept. ``keep_best``: measure the held-out accuracy at each, and keep the best one too.
    ``async_save``: the run goes on while a copy in host memory is written."""

    every_steps: Optional[int]  # noqa: UP045
    keep_last: int
    keep_best: bool
    async_save: bool


@dataclass
class Config(Section):
    """The whole run. ``task`` and ``advantages`` are mappings with ``_target_``; its class (a dataclass) gives the
    types of the rest. ``roles`` has no critic where the advantage estimator needs none. ``reward`` names a function
    (response, example) -> float that pays in training, where the task's verdict does not.

    ``resume``: where the run goes on from. ``auto``: its own directory's latest checkpoint, if there is one; a path: a
    run directory or a checkpoint; null: nowhere, it starts anew. ``objective``: see :mod:`trainer.config.objectives`.
    """

    seed: int
    task_name: str
    tags: List[str]  # noqa: UP006
    export_hf: bool
    model: ModelConfig
    optimizer: SharedOptimizerConfig
    roles: Dict[str, RoleConfig]  # noqa: UP006
    offload: OffloadConfig
    memory: MemoryConfig
    parallel: ParallelConfig
    tokenizer: TokenizerConfig
    task: Dict[str, Any]  # noqa: UP006
    data: DataConfig
    reward: Optional[str]  # noqa: UP045
    rollout: RolloutConfig
    advantages: Dict[str, Any]  # noqa: UP006
    algo: AlgoConfig
    platform: PlatformConfig
    launch: LaunchConfig
    logger: LoggerConfig
    diagnostics: DiagnosticsConfig
    checkpoint: CheckpointConfig
    resume: Optional[str]  # noqa: UP045
    objective: List[str]  # noqa: UP006

    @property
    def largest_vocab_size(self) -> int:
        """Entries that a tokenizer may have: those of the smallest embedding, where a checkpoint sets it."""
        rows = [role.model.vocab_size for role in self.roles.values() if role.model.vocab_size is not None]
        return min(rows, default=self.tokenizer.vocab_size)

    @property
    def critic_starts_from_actor(self) -> bool:
        """Whether the critic gets the warmed-up actor's body: by default if both architectures are equal."""
        if "critic" not in self.roles:
            return False
        wanted = self.algo.start_critic_from_actor
        return self.roles["actor"].model == self.roles["critic"].model if wanted is None else wanted

    @property
    def world_size(self) -> int:
        return self.launch.nnodes * self.launch.nproc

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.parallel.model_ranks


@dataclass
class ComposedConfig(Config):
    """What Hydra composes: as :class:`Config`, with the roles of ``memory`` beside its settings (``memory.actor``)."""

    memory: Dict[str, Any]  # type: ignore[assignment]  # noqa: UP006
