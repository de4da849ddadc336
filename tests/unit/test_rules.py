"""Rules of the config: what is refused, and that the override which a message suggests is accepted."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests.helpers.composing import composed, config_of, error_of, suggested
from trainer.common.limits import Limits, Words
from trainer.common.units import leaves
from trainer.config import compose as configuration
from trainer.config.hints import known_keys
from trainer.config.identity import to_plain
from trainer.config.rules.limits import check_values
from trainer.config.schema import GRAD_FLAG, PARAM_FLAG, Config, MemoryConfig, RopeScalingConfig
from trainer.config.settings import setting_of
from trainer.plan import make_plan

# Sizes that the messages below speak of; a later override on a command line wins.
SIZES = (
    "algo.prompts_per_step=32",
    "algo.responses_per_prompt=4",
    "algo.minibatches=2",
    "algo.micro_batch_size=64",
    "algo.warmup_batch_size=64",
    "rollout.max_prompt_tokens=32",
    "rollout.max_new_tokens=8",
    "model.hidden_size=128",
    "model.heads=4",
    "model.kv_heads=2",
    "model.max_length=128",
)
SOURCES = {"param": ("saver", "backuper", "main_params"), "grad": ("saver", "none")}
FLAG = {"param": PARAM_FLAG, "grad": GRAD_FLAG}


@pytest.fixture(scope="module")
def base():
    return composed("platform=cpu")


def with_values(base, **values: object) -> Config:
    """The config of a command line that sets these values (``__`` for a dot); faster than composing anew."""
    changed = base.copy()
    for key, value in values.items():
        OmegaConf.update(changed, key.replace("__", "."), value)
    return configuration.to_config(changed)


# Flag table. Every case is one of: "set", "unset" (fine), "redundant" (fine, shown), or an error that must match.
def expected(*, sleeps: bool, role: str, kind: str, source: str, flag: bool | None) -> str:
    if flag and not sleeps:
        return f"roles.{role}.ddp.{FLAG[kind]}=true with offload=none: nothing sleeps"
    if source == "backuper" and role == "critic":
        return "memory.critic.restore_params_from=backuper: the critic has no weights backuper.*=saver .*=main_params"
    if not sleeps:
        return "unset"
    if source == "saver":
        policy = {"param": "memory=rebuild", "grad": "memory=no_grads"}[kind]
        return f"{FLAG[kind]}=true but memory.{role}.restore_{kind}s_from=saver.*garbage.*{policy}" if flag else "unset"
    return "redundant" if flag is False else "set"


@pytest.mark.parametrize("flag", [None, True, False], ids=["default", "true", "false"])
@pytest.mark.parametrize("sleeps", [True, False], ids=["train", "none"])
@pytest.mark.parametrize(("kind", "source"), [(kind, source) for kind in SOURCES for source in SOURCES[kind]])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_flag_table(base, role, kind, source, sleeps, flag):
    values: dict[str, object] = {"offload__train": sleeps, f"memory__{role}__restore_{kind}s_from": source}
    if flag is not None:
        values[f"roles__{role}__ddp__{FLAG[kind]}"] = flag
    verdict = expected(sleeps=sleeps, role=role, kind=kind, source=source, flag=flag)
    if verdict not in ("set", "unset", "redundant"):
        with pytest.raises(ValueError, match=verdict):
            with_values(base, **values)
        return
    config = with_values(base, **values)
    assert getattr(config.roles[role].ddp, FLAG[kind]) is (verdict == "set")
    row = make_plan(config).row(role, kind)
    assert row.flag is (verdict == "set")
    assert row.saver_backup is (sleeps and verdict != "set")
    assert row.note.startswith("redundant") is (verdict == "redundant")
    other = "critic" if role == "actor" else "actor"
    assert config.roles[other].ddp.disable_grad_buffers_cpu_backup is sleeps  # untouched


@pytest.mark.parametrize(
    ("overrides", "policy"),
    [
        (["memory=full", f"roles.actor.ddp.{PARAM_FLAG}=true"], "memory=lean"),
        (["memory=full", f"roles.actor.ddp.{PARAM_FLAG}=true"], "memory=rebuild"),
        (["memory=lean", f"roles.critic.ddp.{PARAM_FLAG}=true"], "memory=rebuild"),
        (["memory=full", f"roles.critic.ddp.{GRAD_FLAG}=true"], "memory=no_grads"),
    ],
)
def test_the_policy_that_is_suggested_for_a_set_flag_works(overrides, policy):
    assert policy in error_of(*overrides)
    config_of(*overrides, policy)
    assert ("memory=lean" in error_of(*overrides)) == ("actor" in overrides[1])


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_role_file_of_the_user_cannot_make_a_role_wake_up_with_garbage(role, tmp_path):
    (tmp_path / "role").mkdir()
    (tmp_path / "role" / "leaky.yaml").write_text(f"defaults: [{role}, _self_]\nddp: {{{PARAM_FLAG}: true}}\n")
    leaky = (f"hydra.searchpath=[file://{tmp_path}]", f"role@roles.{role}=leaky")
    message = error_of(*leaky, "memory=full")
    assert f"roles.{role}.ddp.{PARAM_FLAG}=true but memory.{role}.restore_params_from=saver" in message
    assert "memory=rebuild" in message
    assert "nothing sleeps" in error_of(*leaky, "memory=rebuild", "offload=none")
    config = config_of(*leaky, "memory=rebuild")
    assert config.roles[role].ddp.disable_param_buffers_cpu_backup
    assert make_plan(config).row(role, "param").keeper == "main_params"


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_param_flag_needs_the_distributed_optimizer_only_when_it_is_set_explicitly(role):
    off = f"roles.{role}.ddp.use_distributed_optimizer=false"
    message = error_of(off, f"roles.{role}.ddp.{PARAM_FLAG}=true")
    assert f"roles.{role}.ddp.{PARAM_FLAG}=true needs roles.{role}.ddp.use_distributed_optimizer=true" in message
    assert make_plan(config_of(off)).row(role, "param").flag is None
    assert make_plan(config_of(off, f"roles.{role}.ddp.{PARAM_FLAG}=false")).row(role, "param").flag is None


def test_main_params_need_the_distributed_optimizer():
    off = "roles.critic.ddp.use_distributed_optimizer=false"
    message = error_of("memory=rebuild", off)
    assert "memory.critic.restore_params_from=main_params needs" in message
    assert "only the distributed optimizer has a parameter buffer, which is dropped and filled again" in message
    assert suggested(message) == ["memory=lean"]
    config_of("memory=lean", off)
    config_of("memory=rebuild", off, "offload=none")


def test_shared_tags_need_the_distributed_optimizer():
    off = "roles.actor.ddp.use_distributed_optimizer=false"
    message = error_of("memory.tags=sharded", off)
    assert "memory.tags=sharded" in message
    assert "only the distributed optimizer has" in message
    fixes = ["roles.actor.ddp.use_distributed_optimizer=true", "memory.tags=node", "memory.tags=full"]
    assert suggested(message) == fixes
    for fix in fixes:
        config_of("memory.tags=sharded", off, fix)
    config_of("memory.tags=sharded", off.replace("actor", "critic"))
    assert "must be one of full, sharded, node" in error_of("memory.tags=half")


def test_a_copy_of_a_node_is_that_of_equally_many_ranks_everywhere():
    """Ranks 0 and 2 hold the one half, rank 1 the other; on the second node it is the other way round."""
    nodes = ("launch.nnodes=2", "launch.node_rank=0", "launch.rdzv_endpoint=a:1")
    uneven = ("memory.tags=node", "parallel.tp=2", "launch.nproc=3", *nodes, "algo.prompts_per_step=12")
    uneven = (*uneven, "algo.micro_batch_size=1", "algo.warmup_batch_size=66")
    message = error_of(*uneven)
    assert "memory.tags=node with launch.nproc=3 and launch.nnodes=2" in message
    assert suggested(message) == ["memory.tags=full"]
    config_of(*uneven, "memory.tags=full")
    config_of("memory.tags=node")
    config_of("memory.tags=node", "parallel.tp=2", "launch.nproc=2")


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(
    "extra", [[], [f"roles.actor.ddp.{GRAD_FLAG}=true"], ["memory=full"], ["offload=none", "offload.train=true"]]
)
def test_nccl_ub_does_not_go_with_sleep(role, extra):
    given = f"roles.{role}.ddp.nccl_ub=true"
    message = error_of(given, *extra)
    assert given in message
    assert "torch_memory_saver cannot pause" in message
    assert suggested(message) == ["offload=none", f"roles.{role}.ddp.nccl_ub=false"]
    config_of(*extra, f"roles.{role}.ddp.nccl_ub=false")
    if not extra:
        assert config_of("offload=none", given).roles[role].ddp.nccl_ub


def test_nccl_ub_with_a_flag_and_without_sleep_names_the_flag():
    message = error_of("offload=none", "roles.actor.ddp.nccl_ub=true", f"roles.actor.ddp.{GRAD_FLAG}=true")
    assert f"roles.actor.ddp.{GRAD_FLAG}=true with offload=none" in message
    assert "leave the flag out" in message


@pytest.mark.parametrize("missing", ["use_distributed_optimizer", "overlap_grad_reduce"])
def test_overlap_param_gather(missing):
    wanted = ["roles.actor.ddp.overlap_param_gather=true", "roles.actor.ddp.overlap_grad_reduce=true"]
    message = error_of(*wanted, f"roles.actor.ddp.{missing}=false")
    assert f"roles.actor.ddp.{missing}=true" in message
    assert config_of(*wanted).roles["actor"].ddp.overlap_param_gather


@pytest.mark.parametrize(
    ("overrides", "numbers", "suggestions"),
    [
        (
            ["launch.nproc=3", "algo.micro_batch_size=1", "algo.warmup_batch_size=3"],
            ["=32", "size 3"],
            ["algo.prompts_per_step=33"],
        ),
        # 32 * 4 = 128 = 2 * 2 * 32; 64 a minibatch and rank
        (
            ["algo.micro_batch_size=48"],
            ["32 * 4 = 128", "1 * 2 * 48 = 96"],
            ["algo.prompts_per_step=48", "algo.micro_batch_size=32"],
        ),
        (["algo.minibatches=3"], ["1 * 3 * 64 = 192"], ["algo.prompts_per_step=48"]),
        (
            ["algo.prompts_per_step=5", "algo.responses_per_prompt=2", "algo.minibatches=4", "algo.micro_batch_size=1"],
            ["5 * 2 = 10", "1 * 4 * 1 = 4"],
            ["algo.prompts_per_step=6"],
        ),
        (
            ["launch.nproc=2", "algo.micro_batch_size=64"],
            ["2 * 2 * 64 = 256"],
            ["algo.prompts_per_step=64", "algo.micro_batch_size=32"],
        ),
        (
            ["launch.nproc=2", "algo.micro_batch_size=32", "algo.warmup_batch_size=7"],
            ["=7", "size 2"],
            ["algo.warmup_batch_size=8"],
        ),
        (["rollout.max_new_tokens=100"], ["32 + 100 = 132", "=128"], ["model.max_length=132"]),
        (
            ["rollout.max_new_tokens=100", "model.max_length=132", "roles.critic.model.max_length=64"],
            ["= 132", "roles.critic.model.max_length=64"],
            ["roles.critic.model.max_length=132"],
        ),
        (["model.kv_heads=3"], ["heads=4", "kv_heads=3"], ["model.kv_heads=1"]),
        (["model.heads=3"], ["hidden_size=128", "2 * 3"], ["model.hidden_size=132"]),
        (
            ["roles.actor.model.hidden_size=130"],
            ["roles.actor.model.hidden_size=130"],
            ["roles.actor.model.hidden_size=136"],
        ),
        (["tokenizer.vocab_size=100"], ["tokenizer.vocab_size=100"], ["tokenizer.vocab_size=259"]),
        (
            ["algo.kl.placement=loss"],
            ["algo.kl.estimator=k1", "2506.09477"],
            ["algo.kl.estimator=k2", "algo.kl.placement=reward"],
        ),
        (
            ["algo.start_critic_from_actor=true", "roles.critic.model.layers=8"],
            ["roles.critic.model"],
            ["algo.start_critic_from_actor=null"],
        ),
    ],
)
def test_messages_give_the_numbers_and_a_way_out(overrides, numbers, suggestions):
    message = error_of(*SIZES, *overrides)
    for number in numbers:
        assert number in message
    assert suggested(message) == suggestions
    for suggestion in suggestions:
        key = suggestion.partition("=")[0]
        kept = [override for override in overrides if override.partition("=")[0] != key]
        if overrides == ["model.heads=3"]:  # kv_heads=2 is the next complaint
            kept.append("model.kv_heads=1")
        config_of(*SIZES, *kept, suggestion)


def test_an_actor_is_needed():
    groups = ("role@roles.{}", "model@roles.{}.model", "optimizer@roles.{}.optimizer")
    message = error_of(*("~" + group.format("actor") for group in groups))
    assert "role@roles.actor=actor" in message


def declared(kind: type) -> dict[str, Any]:
    """What the schema says of every setting that says a ``kind``, by key."""
    said = {key: [rule for rule in setting_of(key).said if isinstance(rule, kind)] for key in known_keys()}
    return {key: rules[0] for key, rules in said.items() if rules}


def replaced(section: Any, key: str, value: Any) -> Any:
    """The config with another value of one setting, unchecked."""
    if not key:
        return value
    first, _, rest = key.partition(".")
    if isinstance(section, dict):
        return section | {first: replaced(section[first], rest, value)}
    if isinstance(section, MemoryConfig) and first in section.roles:
        return dataclasses.replace(section, roles=replaced(section.roles, key, value))
    return dataclasses.replace(section, **{first: replaced(getattr(section, first), rest, value)})


def refused_value(config: Config, key: str, value: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the callers look at the message)
        check_values(replaced(config, key, value))
    return str(caught.value)


def test_every_word_is_checked_wherever_it_can_be_set(base):
    words, config = declared(Words), configuration.to_config(base)
    assert {"model.dtype", "roles.actor.model.dtype", "roles.critic.model.dtype", "roles.actor.head"} < set(words)
    for key, rule in words.items():
        assert refused_value(config, key, "nonsense") == f"{key}=nonsense: must be one of {', '.join(rule.allowed)}"


def test_every_limit_is_checked_at_both_ends(base):
    scaling = RopeScalingConfig(8, 1, 4, 64)
    config = configuration.to_config(base)
    for name in ("model", "roles.actor.model", "roles.critic.model"):
        config = replaced(config, f"{name}.rope_scaling", scaling)
    check_values(config)
    limits = declared(Limits)
    assert {"model.layers", "roles.critic.model.layers", "algo.kl.clamp", "model.rope_scaling.factor"} < set(limits)
    for key, rule in limits.items():
        for value in (rule.smallest, rule.largest):
            check_values(replaced(config, key, value))
        for value in (rule.smallest - abs(rule.smallest) / 2 - 1, rule.largest * 2):
            message = refused_value(config, key, value)
            assert message.startswith(f"{key}={value}: must be ")
            assert f"between {_number(rule.smallest)} and {_number(rule.largest)}" in message


def _number(limit: float) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def test_every_number_of_the_schema_has_limits():
    limits = declared(Limits)
    for key in known_keys():
        section, _, name = key.rpartition(".")
        within = setting_of(section).section if section else Config
        kind = typing.get_type_hints(within)[name]
        if {int, float} & {kind, *typing.get_args(kind)} and key != "diagnostics.profile_steps":  # any of the steps
            assert key in limits


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.vocab_size=1000000000000", "model.vocab_size=1000000000000: must be between 1 and 10000000"),
        ("tokenizer.vocab_size=1000000000000", "tokenizer.vocab_size=1000000000000: must be between 1 and"),
        ("algo.micro_batch_size=1000000000000", "algo.micro_batch_size=1000000000000: must be between 1 and"),
        ("model.layers=1000000000000", "model.layers=1000000000000: must be between 1 and 1000"),
        ("optimizer.eps=0", "optimizer.eps=0.0: must be between 1e-20 and 1"),
        ("policy_loss.dual_clip=nan", "policy_loss.dual_clip=nan: must be a finite number"),
        ("policy_loss.log_ratio_clamp=100", "policy_loss.log_ratio_clamp=100.0: must be between 0 and 80"),
        ("launch.threads_per_worker=1000000000000", "launch.threads_per_worker=1000000000000: must be between 1 and"),
        ("launch.nproc=1000000000000", "launch.nproc=1000000000000: must be between 1 and 1000"),
        ("task.heldout_fraction=inf", "task.heldout_fraction=inf: must be a finite number"),
    ],
)
def test_no_number_is_too_large_or_too_small_to_work_with(override, message):
    assert error_of(override).startswith(message)


def test_a_section_that_holds_null_can_be_given_on_the_command_line():
    scaling = "{factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_length: 64}"
    for config in (config_of(f"model.rope_scaling={scaling}"), config_of(f"+model.rope_scaling={scaling}")):
        assert config.roles["critic"].model.rope_scaling == config.model.rope_scaling == RopeScalingConfig(8, 1, 4, 64)
    config = config_of(f"roles.critic.model.rope_scaling={scaling}")
    assert config.model.rope_scaling is None
    assert config.roles["critic"].model.rope_scaling == RopeScalingConfig(8, 1, 4, 64)
    message = error_of("+model.rope_scaling.factor=8")
    assert "no value given for " in message
    assert "model.rope_scaling.low_freq_factor" in message
    wrong = scaling.replace("4", "1")
    assert "low_freq_factor=1.0 is not below high_freq_factor=1.0" in error_of(f"model.rope_scaling={wrong}")
    too_large = scaling.replace("8", "1e9")
    assert error_of(f"model.rope_scaling={too_large}").startswith("model.rope_scaling.factor=1000000000.0: must be")
    optimizer = "{lr: 1e-4, min_lr_ratio: 0.1}"
    assert "no value given for roles.critic.optimizer.beta1" in error_of(
        "roles.critic.optimizer=null", f"roles.critic.optimizer={optimizer}"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["roles=${seed}"], "roles=1: must be a section with settings"),
        (["roles.critic.model=${seed}"], "roles.critic.model=1: must be a section with settings"),
        (["roles.actor.ddp=${seed}"], "roles.actor.ddp=1: must be a section with settings"),
        (["roles.critic=${seed}"], "roles.critic=1: must be a section with settings"),
        (["diagnostics.profile_steps=${roles}"], "diagnostics.profile_steps"),
        (["task.operations=${roles}"], "task.operations.actor"),
        (["algo.micro_batch_tokens={}"], "algo.micro_batch_tokens={}: must be a whole number between 1 and"),
        (["roles.critic.model.rope_scaling=[1]"], "roles.critic.model.rope_scaling=[1]: Invalid type"),
        ([f"model.path={'x' * 5000}"], "model.path=xxx"),
        ([f"tokenizer.path={'x' * 5000}"], "tokenizer.path=xxx"),
        (["memory=disk", f"memory.disk.path={'x' * 5000}"], "memory.actor.optim_keeper=disk with memory.disk.path=xxx"),
        (["task=jsonl", f"task.path={'x' * 5000}"], "task.path=xxx"),
        (
            ["task=reasoning_gym", "task.dataset=chain_sum", "task.train_size=10000000000"],
            "task.train_size=10000000000:",
        ),
    ],
)
def test_values_that_are_no_setting_at_all_are_named(overrides, message):
    assert error_of(*overrides).startswith(message)


def test_unknown_words_in_a_section_that_may_be_null_are_refused():
    with pytest.raises(OmegaConfBaseException, match="wavelength"):
        config_of("model.rope_scaling={wavelength: 8}")
    with pytest.raises(OmegaConfBaseException, match="abc"):
        config_of("+model.rope_scaling.factor=abc")


def test_every_fractional_number_is_finite(base):
    """Those that are null by default too, and those of a task, an estimator and a list."""
    config = configuration.to_config(base)
    names = [name for name, value in leaves(to_plain(config)) if isinstance(value, float)]
    names += ["algo.kl.target", "policy_loss.dual_clip", "launch.gpu_memory_gib", "platform.peak_tflops"]
    assert {"algo.value_clip", "task.heldout_fraction", "advantages.lam", "model.norm_eps"} < set(names)
    for name in names:
        for value in ("nan", "inf", "-inf"):
            assert refused_value(config, name, float(value)) == f"{name}={value}: must be a finite number"


def test_a_number_deep_in_a_tasks_arguments_is_finite():
    chosen = ("task=reasoning_gym", "task.dataset=chain_sum", "+task.arguments={a: {b: [1, inf]}}")
    assert error_of(*chosen) == "task.arguments.a.b.1=inf: must be a finite number"


@pytest.mark.parametrize("value", ["nan", "-1e-9"])
def test_learning_rates_are_numbers(value):
    assert error_of(f"roles.actor.optimizer.lr={value}").startswith("roles.actor.optimizer.lr=")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy_loss.dual_clip=1.0", "policy_loss.dual_clip=1.0: must be greater than 1, or null"),
        ("algo.kl.target=0", "algo.kl.target=0.0: must be greater than 0, or null"),
        ("tokenizer.path=no/such/folder", "tokenizer.path=no/such/folder is no folder"),
        ("memory.actor.restore_grads_from=backuper", "must be one of saver, none"),
        ("memory.critic.restore_params_from=none", "must be one of saver, backuper, main_params"),
        ("task.forms=roman", "task.forms"),
        ("task.heldout_fraction=1.5", "task.heldout_fraction=1.5"),
    ],
)
def test_values_with_rules_of_their_own(override, message):
    assert message in error_of(override)


# ---- keepers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, r"actor.optim_keeper=disk with memory.disk.path=null: give it a folder"),
        ("/no/such/folder", "there is no such folder"),
        ("/dev/shm", r"lies in host memory \(tmpfs\)"),
    ],
)
def test_a_disk_keeper_needs_a_folder_on_a_disk(path, message):
    given = "memory.disk.path=" + ("null" if path is None else path)
    with pytest.raises(ValueError, match=message):
        config_of("memory=disk", given)
    config_of("memory=disk", given, "offload=none")  # nothing sleeps
    config_of("memory=disk", f"memory.disk.path={Path(__file__).parent}")


@pytest.mark.parametrize(
    "overrides",
    [
        ("memory=packed",),
        ("memory=lean", "memory.critic.optim_keeper=saver"),
        ("memory=lean", "platform.deterministic=true"),
    ],
)
def test_rounded_moments_need_a_keeper_and_no_promise_of_bits(overrides):
    config_of("memory=lean", "memory.optim_format=bf16")
    config_of(*overrides)
    message = error_of(*overrides, "memory.optim_format=bf16")
    assert "memory.optim_format=bf16" in message
    config_of(*overrides, "memory.optim_format=bf16", "offload=none")
    assert suggested(message)
    for fix in suggested(message):
        if fix in ("memory.optim_format=fp32", "platform.deterministic=false"):
            config_of(*overrides, *([] if "fp32" in fix else ["memory.optim_format=bf16"]), fix)
