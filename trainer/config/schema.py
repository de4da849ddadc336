"""The typed sections of a config, each set once; the longer ones have modules of their own.

Their fields have no defaults: a default lives in exactly one place, the YAML under ``conf/``. Beside its type a field
says which values are allowed (:mod:`trainer.common.limits`) and what depends on it (:mod:`trainer.config.marks`). The
rules that join several fields are in :mod:`trainer.config.rules`; :mod:`trainer.config.compose` makes a
:class:`Config` of what Hydra composed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Dict, List, Optional  # noqa: UP035  (omegaconf reads these annotations)

from trainer.common.limits import Limits, Words
from trainer.config.marks import Mark, Within
from trainer.config.schema_algo import AUTO, SEEDS, AlgoConfig, KlConfig, OverlongConfig
from trainer.config.schema_roles import (
    GRAD_FLAG,
    PARAM_FLAG,
    DdpConfig,
    DiskConfig,
    MemoryConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    RestoreConfig,
    RoleConfig,
    RopeScalingConfig,
    SharedOptimizerConfig,
)
from trainer.config.section import Section

__all__ = [
    "AUTO",
    "GRAD_FLAG",
    "PARAM_FLAG",
    "SEEDS",
    "AlgoConfig",
    "CheckpointConfig",
    "ComposedConfig",
    "ComposedModelConfig",
    "ComposedRoleConfig",
    "Config",
    "DataConfig",
    "DdpConfig",
    "DiagnosticsConfig",
    "DiskConfig",
    "KlConfig",
    "LaunchConfig",
    "LoggerConfig",
    "MemoryConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "ParallelConfig",
    "PlatformConfig",
    "RestoreConfig",
    "RoleConfig",
    "RolloutConfig",
    "RopeScalingConfig",
    "Section",
    "SharedOptimizerConfig",
    "TokenizerConfig",
    "TrainingConfig",
]


@dataclass
class ParallelConfig(Section):
    """Ranks that hold one model together: ``tp`` share every layer (and, between layers, the sequence), ``pp`` have a
    stage of layers each, cut into ``vpp`` chunks that take turns. ``cp``: ranks that hold the same and share every
    sequence. ``expert``: ranks of a stage, of whatever kind, over which the experts of a layer are spread."""

    tp: Annotated[int, Limits(1, 1000)]
    pp: Annotated[int, Limits(1, 1000)]
    vpp: Annotated[int, Limits(1, 1000)]
    cp: Annotated[int, Limits(1, 1000)]
    expert: Annotated[int, Limits(1, 10_000)]

    @property
    def model_ranks(self) -> int:
        """Ranks that work on one sequence."""
        return self.tp * self.pp * self.cp


@dataclass
class TrainingConfig(Section):
    """How forward and backward passes run. ``recompute``: what the backward pass computes again instead of keeping it,
    ``none``, the MLP or experts of every layer (``selective``), or whole layers (``full``). ``packing``: micro-batches
    hold whole sequences back to back, without padding."""

    recompute: Annotated[str, Words("none", "selective", "full")]
    packing: bool


@dataclass
class TokenizerConfig(Section):
    """``path``: a Hugging Face tokenizer folder, or null to train a BPE of ``vocab_size`` entries on the task.

    ``chat_template``: questions become a user's turn in the tokenizer's own template. ``digest``: by which the folder's
    content is known again wherever it lies.
    """

    path: Annotated[Optional[str], Mark.OUTSIDE]  # noqa: UP045
    vocab_size: Annotated[int, Limits(1, 10_000_000), Mark.WEIGHTS]
    chat_template: Annotated[bool, Mark.WEIGHTS]
    digest: Annotated[Optional[str], Mark.WEIGHTS]  # noqa: UP045


@dataclass
class DataConfig(Section):
    """``too_long``: what becomes of a prompt or a warm-up's answer that is too long, ``error``, ``drop`` or
    ``truncate``; see :mod:`trainer.data.selection`. ``replacement``: each question is drawn by itself, rather than
    all of them once before any is drawn again."""

    too_long: Annotated[str, Words("error", "drop", "truncate")]
    replacement: bool


@dataclass
class RolloutConfig(Section):
    """How responses are drawn. ``top_k``: 0 for all tokens. ``stop``: strings that end a response, besides the
    tokenizer's end of sequence. ``kv_cache_gib``: of each rank, null for what a step needs. ``compile``: through
    torch.compile. ``batch_invariant``: the bits of a response depend on no other that is decoded with it."""

    engine: Annotated[str, Words("native", "hf", "vllm")]
    temperature: Annotated[float, Limits(1e-3, 1e6)]
    top_p: Annotated[float, Limits(1e-3, 1)]
    top_k: Annotated[int, Limits(0, 10_000_000)]
    min_p: Annotated[float, Limits(0, 1)]
    stop: List[str]  # noqa: UP006
    max_prompt_tokens: Annotated[int, Limits(1, 100_000_000)]
    max_new_tokens: Annotated[int, Limits(1, 100_000_000)]
    kv_cache_gib: Annotated[Optional[float], Limits(0, 1e6)]  # noqa: UP045
    compile: bool
    batch_invariant: bool


@dataclass
class PlatformConfig(Section):
    """``peak_tflops``: dense bf16 peak of one device, for MFU; null: known by the device's name, or not at all."""

    name: Annotated[str, Words("cpu", "cuda")]
    deterministic: bool
    peak_tflops: Annotated[Optional[float], Limits(1e-6, 1e9)]  # noqa: UP045


@dataclass
class LaunchConfig(Section):
    """``nproc`` workers on each of ``nnodes`` nodes; :mod:`trainer.command.nodes` explains ``node_rank`` and
    ``rdzv_endpoint``. ``max_restarts``: how often a job whose worker fails goes on from its newest checkpoint.
    ``host_memory_gib``, ``gpu_memory_gib``: what the node and each GPU have; null for what they report."""

    nproc: Annotated[int, Limits(1, 1000)]
    nnodes: Annotated[int, Limits(1, 100_000)]
    node_rank: Annotated[Optional[int], Limits(0, 99_999), Mark.OUTSIDE]  # noqa: UP045
    rdzv_endpoint: Annotated[Optional[str], Mark.OUTSIDE]  # noqa: UP045
    max_restarts: Annotated[int, Limits(0, 10_000), Mark.OUTSIDE]
    threads_per_worker: Annotated[int, Limits(1, 1000), Mark.PER_NODE]
    host_memory_gib: Annotated[Optional[float], Limits(0, 1e9), Mark.OUTSIDE]  # noqa: UP045
    gpu_memory_gib: Annotated[Optional[float], Limits(0, 1e6), Mark.OUTSIDE]  # noqa: UP045


@dataclass
class LoggerConfig(Section):
    kind: Annotated[str, Words("none", "tensorboard", "wandb")]
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
    ``async_save``: the run goes on while a copy in host memory is written. ``checksums``: compute the SHA-256 of every
    file when a checkpoint is saved, and compare it when a run goes on from one."""

    every_steps: Annotated[Optional[int], Limits(1, 1_000_000_000)]  # noqa: UP045
    keep_last: Annotated[int, Limits(1, 1_000_000)]
    keep_best: bool
    async_save: bool
    checksums: Annotated[bool, Mark.OUTSIDE]


@dataclass
class Config(Section):
    """The whole run. ``task``, ``advantages``, ``policy_loss`` and ``mismatch`` are mappings with ``_target_``; its
    class (a dataclass) gives the types of the rest. ``roles`` has no critic where the advantage estimator needs none.
    ``reward`` names a function (response, example) -> float, or (response, example, info) -> float with a
    :class:`trainer.tasks.ResponseInfo`, that pays in training, where the task's verdict does not.

    ``resume``: where the run goes on from. ``auto``: its own directory's latest checkpoint, if there is one; a path: a
    run directory or a checkpoint; null: nowhere, it starts anew. ``objective``: see :mod:`trainer.config.objectives`.
    """

    seed: Annotated[int, SEEDS, Mark.SEED]
    task_name: str
    tags: List[str]  # noqa: UP006
    export_hf: bool
    model: ModelConfig
    optimizer: SharedOptimizerConfig
    roles: Dict[str, RoleConfig]  # noqa: UP006
    offload: OffloadConfig
    memory: MemoryConfig
    parallel: ParallelConfig
    training: TrainingConfig
    tokenizer: TokenizerConfig
    task: Annotated[Dict[str, Any], Mark.CORPUS, Within({"seed": Mark.SEED})]  # noqa: UP006
    data: DataConfig
    reward: Optional[str]  # noqa: UP045
    rollout: RolloutConfig
    advantages: Dict[str, Any]  # noqa: UP006
    policy_loss: Dict[str, Any]  # noqa: UP006
    mismatch: Dict[str, Any]  # noqa: UP006
    algo: AlgoConfig
    platform: PlatformConfig
    launch: LaunchConfig
    logger: LoggerConfig
    diagnostics: DiagnosticsConfig
    checkpoint: CheckpointConfig
    resume: Optional[str]  # noqa: UP045
    objective: Annotated[List[str], Mark.OUTSIDE]  # noqa: UP006

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

    @property
    def weight_copies(self) -> int:
        """Ranks that hold the same weights: data and context parallel ones. They sum their gradients and share the
        state of a distributed optimizer, and in a rollout each draws responses of its own."""
        return self.data_parallel_size * self.parallel.cp


@dataclass
class ComposedModelConfig(ModelConfig):
    rope_scaling: Any  # type: ignore[assignment]


@dataclass
class ComposedRoleConfig(RoleConfig):
    model: ComposedModelConfig
    optimizer: Any  # type: ignore[assignment]
    ddp: Any  # type: ignore[assignment]


@dataclass
class ComposedConfig(Config):
    """What Hydra composes: as :class:`Config`, with the roles of ``memory`` beside its settings (``memory.actor``).

    A section that may be null has no type yet: omegaconf cannot merge a mapping into a typed null.
    """

    model: ComposedModelConfig
    roles: Dict[str, ComposedRoleConfig]  # type: ignore[assignment]  # noqa: UP006
    memory: Dict[str, Any]  # type: ignore[assignment]  # noqa: UP006
