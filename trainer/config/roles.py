"""What a role is: the frozen description of it that everybody reads, so that nobody asks for its name."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.schema import Config, DdpConfig, ModelConfig, OptimizerConfig

REFERENCE = "ref"  # the weights tag of the reference model


@dataclass(frozen=True)
class RoleSpec:
    """One role of a run.

    Attributes:
        name: its key in ``roles``.
        has_value_head: it ends in a number per token, fp32, instead of logits.
        is_trained: it has gradients and an optimizer; otherwise its weights stay those of its folder.
        tags: versions of its weights that its weights backuper keeps beside its own, without the reference model's
            where nothing reads it; None: it has no backuper.
        folder: Hugging Face folder that its weights come from; None: random ones.
    """

    name: str
    has_value_head: bool
    is_trained: bool
    tags: tuple[str, ...] | None
    folder: str | None

    @property
    def has_backuper(self) -> bool:
        return self.tags is not None

    @property
    def is_judge(self) -> bool:
        """Its value of a whole response is what the response is paid."""
        return self.has_value_head and not self.is_trained


@dataclass(frozen=True)
class TrainedRole:
    """The settings of a role that is trained."""

    model: ModelConfig
    optimizer: OptimizerConfig
    ddp: DdpConfig


def role_spec(config: Config, role: str) -> RoleSpec:
    """The description of one of the config's roles."""
    settings = config.roles[role]
    tags = settings.tags
    if tags is not None and not config.algo.uses_reference:
        tags = [tag for tag in tags if tag != REFERENCE]
    return RoleSpec(
        name=role,
        has_value_head=settings.head == "value",
        is_trained=settings.trained,
        tags=None if tags is None else tuple(tags),
        folder=settings.model.path,
    )


def role_specs(config: Config) -> dict[str, RoleSpec]:
    """Role -> its description, in the order of the config."""
    return {role: role_spec(config, role) for role in config.roles}


def trained_role(config: Config, role: str) -> TrainedRole:
    """The settings of a role whose spec says that it is trained."""
    settings = config.roles[role]
    assert settings.optimizer is not None, role
    assert settings.ddp is not None, role
    return TrainedRole(settings.model, settings.optimizer, settings.ddp)


def trained_roles(config: Config) -> dict[str, TrainedRole]:
    """Role -> its settings, of those that are trained."""
    return {role: trained_role(config, role) for role, settings in config.roles.items() if settings.trained}


def optimizer_steps(config: Config, role: str) -> int:
    """Optimizer steps of a trained role in the whole run, the warm-up's left out: at first only the critic trains."""
    algo = config.algo
    waits = 0 if role_spec(config, role).has_value_head else algo.critic_warmup_steps
    return algo.epochs * algo.minibatches * (algo.num_steps - waits)


def drops_copy(source: str, *, sleeps: bool) -> bool:
    """Whether a ``disable_*_buffers_cpu_backup`` flag is set, where the policy decides: exactly when models sleep and
    the buffer's ``source`` is not the saver's copy."""
    return sleeps and source != "saver"
