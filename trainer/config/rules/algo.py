"""Which roles an algorithm has, and which of its settings mean something together."""

from __future__ import annotations

from trainer.algo.mismatch import Uncorrected
from trainer.config.pieces import make_correction, make_estimator, make_policy_loss, make_task
from trainer.config.roles import REFERENCE, optimizer_steps, role_specs, trained_roles
from trainer.config.schema import Config
from trainer.tasks.base import Task

WITHOUT_CRITIC = "algo=grpo, algo=rloo or algo=reinforce_pp"
LEARNERS = {"actor": ("vocabulary", [REFERENCE]), "critic": ("value", None)}  # role -> its head and tags
_ROLE_GROUPS = ("role@roles.{0}", "model@roles.{0}.model", "optimizer@roles.{0}.optimizer")


def check_pieces(config: Config) -> None:
    """What the config names with ``_target_`` judges its own settings."""
    make_estimator(config).validate()
    make_policy_loss(config).validate()
    make_correction(config).validate()


def check_roles(config: Config) -> None:
    estimator, specs = make_estimator(config), role_specs(config)
    unknown = [role for role, spec in specs.items() if role not in LEARNERS and not spec.is_judge]
    if unknown or "actor" not in specs:
        raise ValueError(
            f"roles are {', '.join(specs) or 'empty'}: they are roles.actor and, for some algorithms, roles.critic "
            "(role@roles.actor=actor role@roles.critic=critic). Every other one judges responses: trained=false and "
            "head=value, as role@roles.reward=reward has it"
        )
    has_critic, name = "critic" in config.roles, config.advantages["_target_"]
    if estimator.needs_critic and not has_critic:
        raise ValueError(
            f"advantages._target_={name} needs a critic, and roles has none: use algo=ppo, whose roles.critic comes "
            f"from role@roles.critic=critic, or advantages that need none ({WITHOUT_CRITIC})"
        )
    if has_critic and not estimator.needs_critic:
        without = " ".join(f"'~{group.format('critic')}'" for group in _ROLE_GROUPS)
        raise ValueError(
            f"advantages._target_={name} needs no critic, but roles has one, which would sleep and train for nothing: "
            f"use an algorithm without one ({WITHOUT_CRITIC}), or leave it out with {without}"
        )


def check_specs(config: Config) -> None:
    """The loop's own roles are what the loop takes them for, and each role has what its description needs."""
    for role, spec in role_specs(config).items():
        settings, name = config.roles[role], f"roles.{role}"
        if role in LEARNERS:
            head, tags = LEARNERS[role]
            if (settings.head, settings.trained, settings.tags) != (head, True, tags):
                given = f"head={settings.head}, trained={settings.trained}, tags={settings.tags}"
                raise ValueError(
                    f"{name} has {given}: the loop trains the {role} with head={head}, trained=true and "
                    f"tags={'null' if tags is None else tags}. Leave them to role@{name}={role}"
                )
        has_settings = [settings.optimizer is not None, settings.ddp is not None]
        if has_settings != [spec.is_trained] * 2:
            wanted = "needs both" if spec.is_trained else "takes neither: set both to null"
            raise ValueError(f"{name}.trained={settings.trained} {wanted} {name}.optimizer and {name}.ddp")
        if not spec.is_trained and spec.folder is None:
            raise ValueError(
                f"{name}.model.path=null with {name}.trained=false: random weights would stay so. Give a folder "
                f"(model@{name}.model=hf {name}.model.path=...)"
            )
        if not spec.is_trained and spec.tags:
            raise ValueError(
                f"{name}.tags={settings.tags} with {name}.trained=false: there is one version of its weights. Use [], "
                "or null for no weights backuper"
            )


def check_who_pays(config: Config) -> None:
    judges = [role for role, spec in role_specs(config).items() if spec.is_judge]
    if judges and config.reward is not None:
        raise ValueError(
            f"reward={config.reward} with roles.{judges[0]}, which judges responses: one of them pays. Use "
            "reward=null, or leave the role out"
        )


def check_critic_settings(config: Config) -> None:
    """Settings of the critic that would do nothing without one."""
    if "critic" in config.roles:
        return
    algo = config.algo
    for name, nothing in (("critic_warmup_steps", 0), ("value_clip", None), ("critic_loss_aggregation", "token_mean")):
        if getattr(algo, name) != nothing:
            raise ValueError(
                f"algo.{name}={getattr(algo, name)} means nothing without a critic: "
                f"use algo.{name}={'null' if nothing is None else nothing}, or algo=ppo"
            )
    if algo.start_critic_from_actor:
        raise ValueError(
            "algo.start_critic_from_actor=true means nothing without a critic: use algo.start_critic_from_actor=null, "
            "or algo=ppo"
        )


def check_critic_start(config: Config) -> None:
    if config.critic_starts_from_actor and config.roles["actor"].model != config.roles["critic"].model:
        raise ValueError(
            "algo.start_critic_from_actor=true needs the same roles.actor.model and roles.critic.model: make them "
            "equal, or use algo.start_critic_from_actor=null or false"
        )


def check_groups(config: Config) -> None:
    given, smallest = config.algo.responses_per_prompt, make_estimator(config).smallest_group
    if given < smallest:
        raise ValueError(
            f"algo.responses_per_prompt={given}: advantages._target_={config.advantages['_target_']} compares the "
            f"responses to one question, at least {smallest}. Use algo.responses_per_prompt={smallest} or more"
        )


def check_kl(config: Config) -> None:
    kl = config.algo.kl
    if kl.target is not None and kl.target <= 0:
        raise ValueError(f"algo.kl.target={kl.target}: must be greater than 0, or null for a fixed algo.kl.coef")
    if kl.placement == "loss" and kl.estimator == "k1":
        raise ValueError(
            "algo.kl.estimator=k1 with algo.kl.placement=loss: the expected gradient of k1 is zero (arXiv:2506.09477), "
            "so this loss would do nothing. Use algo.kl.estimator=k2, k3, k1+ or k3+, or algo.kl.placement=reward"
        )


def check_sampling(config: Config) -> None:
    algo, limit = config.algo, config.rollout.max_new_tokens
    if algo.overlong.penalty and not 1 <= algo.overlong.buffer <= limit:
        raise ValueError(
            f"algo.overlong.buffer={algo.overlong.buffer} with algo.overlong.penalty={algo.overlong.penalty}: the "
            f"penalty begins so many tokens before rollout.max_new_tokens={limit}, so from 1 to {limit}. Use "
            f"algo.overlong.buffer={max(1, limit // 4)}"
        )
    if not algo.dynamic_sampling_rounds:
        return
    if algo.responses_per_prompt < 2:
        raise ValueError(
            f"algo.dynamic_sampling_rounds={algo.dynamic_sampling_rounds} with algo.responses_per_prompt="
            f"{algo.responses_per_prompt}: one response has no spread. Use algo.responses_per_prompt=2 or more"
        )
    judges = [role for role, spec in role_specs(config).items() if spec.is_judge]
    if judges:
        raise ValueError(
            f"algo.dynamic_sampling_rounds={algo.dynamic_sampling_rounds} with roles.{judges[0]}, which pays after the "
            "rollout: use algo.dynamic_sampling_rounds=0"
        )


def check_turns(config: Config) -> None:
    """What is meant for a single response, with an environment that may answer it."""
    environment, target = make_task(config), config.task["_target_"]
    if isinstance(environment, Task):
        return
    if config.reward is not None:
        raise ValueError(
            f"reward={config.reward} with task._target_={target}, which pays for every turn of an episode itself: use "
            "reward=null, or a task of one turn"
        )
    if config.algo.overlong.penalty:
        raise ValueError(
            f"algo.overlong.penalty={config.algo.overlong.penalty:g} with task._target_={target}: it is for the length "
            "of one response, and episodes have several. Use algo.overlong.penalty=0"
        )
    if environment.max_turns < 1:
        raise ValueError(f"task.max_turns={environment.max_turns}: an episode has a response: use task.max_turns=1")


def check_old_log_probs(config: Config) -> None:
    algo = config.algo
    if algo.old_log_probs == "training" and algo.needs_log_probs_before_training:
        raise ValueError(
            f"algo.old_log_probs=training with algo.epochs={algo.epochs}, algo.minibatches={algo.minibatches}, "
            f"algo.kl.placement={algo.kl.placement} and algo.kl.coef={algo.kl.coef:g}: a later pass trains on the same "
            "responses, or the KL in the reward needs them before. Use algo.old_log_probs=auto or forward"
        )
    corrects = not isinstance(make_correction(config), Uncorrected)
    if corrects and algo.old_log_probs_come_from_training:
        raise ValueError(
            f"mismatch._target_={config.mismatch['_target_']} needs log-probs before training, and with "
            f"algo.old_log_probs={algo.old_log_probs} they come from the pass that trains: use "
            "algo.old_log_probs=forward, or mismatch=none"
        )


def check_schedules(config: Config) -> None:
    """A wsd schedule says how long it decays, and that fits between the warm-up and the end."""
    for role, trained in trained_roles(config).items():
        settings = trained.optimizer
        if settings.lr_schedule != "wsd":
            continue
        steps = optimizer_steps(config, role)
        most = max(1, steps - settings.lr_warmup_steps)
        if settings.lr_wsd_decay_steps is None or settings.lr_wsd_decay_steps > most:
            given = "null" if settings.lr_wsd_decay_steps is None else settings.lr_wsd_decay_steps
            raise ValueError(
                f"roles.{role}.optimizer.lr_wsd_decay_steps={given} with lr_schedule=wsd: of {steps} optimizer steps "
                f"(algo.epochs * algo.minibatches in each PPO step that trains the {role}) "
                f"{settings.lr_warmup_steps} warm up. Use a number up to {most}, such as "
                f"optimizer.lr_wsd_decay_steps={max(1, most // 5)}"
            )
