"""Every option composes; a value reaches what it should; configs are typed, frozen, picklable and hashed whole."""

import dataclasses
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import LlamaConfig

from tests.helpers.composing import CONF, GROUPS, choices_and_config_of, composed, config_of
from trainer.config.identity import config_hash, to_plain
from trainer.config.marks import Mark
from trainer.config.schema import Config, MemoryConfig
from trainer.config.settings import is_marked

OPTIONS = [(group, option) for group, options in GROUPS.items() for option in options]

# Options that need more than their name, and those that are for one role only.
NEEDS = {
    ("task", "jsonl"): ["task.path={jsonl}"],
    ("task", "reasoning_gym"): ["task.dataset=chain_sum"],
    ("model", "hf"): ["model.path={checkpoint}"],
    ("memory", "disk"): [f"memory.disk.path={CONF}"],
    **{("advantages", name): [f"algo={name}"] for name in ("grpo", "rloo", "reinforce_pp")},
    ("experiment", "smollm2"): ["model.path={checkpoint}"],
    ("experiment", "reward_model"): ["roles.reward.model.path={checkpoint}"],
    ("role", "reward"): [
        *("+model@roles.reward.model=hf", "roles.reward.model.path={checkpoint}"),
        "+memory.reward={{restore_params_from: saver, restore_grads_from: none, optim_keeper: none}}",
    ],
}
ROLE_OPTIONS = {
    ("model", "shared"): "model@roles.actor.model=shared",
    ("optimizer", "shared"): "optimizer@roles.actor.optimizer=shared",
    ("role", "actor"): "role@roles.actor=actor",
    ("role", "critic"): "role@roles.critic=critic",
    ("role", "reward"): "+role@roles.reward=reward",
}


def _size(option: str) -> tuple[int, int]:
    own = yaml.safe_load((CONF / "model" / f"{option}.yaml").read_text())
    return own["layers"], own["hidden_size"]


TINY, SMALL_MODEL = _size("tiny"), _size("small")


@pytest.fixture
def jsonl(tmp_path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(20)))
    return path


def leaves(value, prefix="") -> list[tuple[str, object]]:
    """(dotted path, value) of everything that is no mapping."""
    if isinstance(value, dict) and value:
        return [leaf for key, child in value.items() for leaf in leaves(child, f"{prefix}.{key}" if prefix else key)]
    return [(prefix, value)]


def test_every_group_is_in_the_defaults_list_and_in_the_help():
    text = (CONF / "train.yaml").read_text()
    defaults = yaml.safe_load(text)["defaults"]
    fixed = [entry for entry in defaults if "override" in str(entry)]
    assert fixed == [{"override hydra/job_logging": "stdout"}]  # an override wins over an experiment's
    defaults = [entry for entry in defaults if entry not in fixed]
    groups = {key.partition("@")[0] for entry in defaults if isinstance(entry, dict) for key in entry}
    assert groups == set(GROUPS)
    lines = yaml.safe_load((CONF / "help.yaml").read_text())["template"].splitlines()
    assert set(GROUPS) <= {line.split()[0] for line in lines if line.startswith("  ")}


def choices_in(group: str, name: str) -> dict[str, str]:
    """What the defaults list of an option says of other groups."""
    content = yaml.safe_load((CONF / group / f"{name}.yaml").read_text()) or {}
    wanted = {}
    for entry in content.get("defaults", []):
        if isinstance(entry, dict):
            for key, value in entry.items():
                choice, _, package = key.removeprefix("override ").removeprefix("/").partition("@_global_.")
                wanted[f"{choice}@{package}" if package not in ("", choice) else choice] = value
    return wanted


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_validates_and_its_values_arrive(group, option, jsonl, tmp_path):
    override = ROLE_OPTIONS.get((group, option), f"{group}={option}")
    if option == "reasoning_gym" or option == "chain_sum":
        pytest.importorskip("reasoning_gym")
    if option == "vllm" and find_spec("vllm") is None:
        pytest.skip("needs vllm")
    LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2).save_pretrained(tmp_path)
    needs = [need.format(jsonl=jsonl, checkpoint=tmp_path) for need in NEEDS.get((group, option), [])]
    chosen, config = choices_and_config_of(override, *needs)

    setting = override.removeprefix("+").partition("=")[0]
    assert chosen[setting] == option
    wanted = choices_in(group, option) if group in ("experiment", "debug", "algo") else {}
    assert {key: chosen[key] for key in wanted} == wanted
    loaded = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{option}.yaml"))
    content = {path: value for path, value in leaves(loaded) if path}
    content.pop("defaults", None)
    content = {path: value for path, value in content.items() if not path.startswith("hydra.")}
    if group not in ("debug", "experiment"):  # whose package is the whole config
        package = setting.partition("@")[2] or group
        content = {f"{package}.{path}": value for path, value in content.items()}
    found = dict(leaves(to_plain(config)))
    for path, value in content.items():
        if "${" not in str(value) and value not in ("???", "auto"):  # which becomes a decision
            assert found[path] == value, path


def test_an_experiment_file_of_the_user_overrides_groups_of_everything(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n"
        "  - override /memory: rebuild\n"
        "  - override /model: small\n"
        "  - override /model@roles.critic.model: tiny\n"
        "algo: {num_steps: 7}\n"
    )
    overrides = ["experiment=mine", f"hydra.searchpath=[file://{tmp_path}]"]
    chosen, config = choices_and_config_of(*overrides)
    assert (chosen["memory"], chosen["model"], chosen["model@roles.critic.model"]) == ("rebuild", "small", "tiny")
    assert config.memory.roles["critic"].restore_params_from == "main_params"
    assert config.algo.num_steps == 7
    assert (config.roles["actor"].model.layers, config.roles["critic"].model.layers) == (SMALL_MODEL[0], TINY[0])


@pytest.mark.parametrize(
    ("overrides", "actor", "critic"),
    [
        ([], TINY, TINY),
        (["model=small"], SMALL_MODEL, SMALL_MODEL),
        (["model.layers=3"], (3, TINY[1]), (3, TINY[1])),
        (["model@roles.critic.model=small"], TINY, SMALL_MODEL),
        (["roles.critic.model.layers=8"], TINY, (8, TINY[1])),
        (["model=small", "roles.actor.model.layers=2"], (2, SMALL_MODEL[1]), SMALL_MODEL),
        (["model.layers=3", "model@roles.critic.model=small"], (3, TINY[1]), SMALL_MODEL),
    ],
)
def test_which_roles_a_model_override_reaches(overrides, actor, critic):
    roles = config_of(*overrides).roles
    assert (roles["actor"].model.layers, roles["actor"].model.hidden_size) == actor
    assert (roles["critic"].model.layers, roles["critic"].model.hidden_size) == critic


@pytest.mark.parametrize(
    ("overrides", "actor", "critic"),
    [
        ([], (0.9, 0.1), (0.9, 0.2)),
        (["optimizer.beta1=0.5"], (0.5, 0.1), (0.5, 0.2)),
        (["roles.critic.optimizer.beta1=0.5"], (0.9, 0.1), (0.5, 0.2)),
        (["optimizer.beta1=0.5", "optimizer@roles.critic.optimizer=adamw"], (0.5, 0.1), (0.9, 0.2)),
        (["roles.actor.optimizer.lr='1e-5'"], (0.9, 1e-5), (0.9, 0.2)),  # a quoted number is a number
    ],
)
def test_which_roles_an_optimizer_override_reaches(overrides, actor, critic):
    roles = config_of("roles.actor.optimizer.lr=0.1", "roles.critic.optimizer.lr=0.2", *overrides).roles
    assert (roles["actor"].optimizer.beta1, roles["actor"].optimizer.lr) == actor
    assert (roles["critic"].optimizer.beta1, roles["critic"].optimizer.lr) == critic


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=jsonl"], r"no value given for task.path: add task.path=\.\.\."),
        (["+task.foo=1"], "task.foo is not a setting of .*ArithmeticTask; it takes max_operand, operations"),
        (["task._target_=nowhere.Task"], "task._target_=nowhere.Task cannot be imported"),
        (
            ["task._target_=builtins.dict"],
            "task._target_=builtins.dict is no dataclass derived from trainer.tasks.Task",
        ),
    ],
)
def test_what_the_user_can_get_wrong_is_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        config_of(*overrides)


def test_what_is_suggested_for_a_missing_value_works(jsonl):
    assert config_of("task=jsonl", f"task.path={jsonl}").task["path"] == str(jsonl)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("+algo.micro_batchsize=3", "algo.micro_batchsize"),  # `+` gets by Hydra's own check
        ("++algo.micro_batchsize=3", "algo.micro_batchsize"),
        ("+roles.actor.ddp.foo=1", "roles.actor.ddp.foo"),
        ("+memory.actor.foo=1", "memory.actor.foo"),
        ("task.max_operand=abc", "task.max_operand"),
        ("roles.actor.optimizer.lr=abc", "roles.actor.optimizer.lr"),
        ("roles.critic.optimizer.beta1=[1]", "roles.critic.optimizer.beta1"),
        ("roles.actor.ddp.nccl_ub=abc", "roles.actor.ddp.nccl_ub"),
    ],
)
def test_unknown_keys_and_wrong_types_are_refused_by_full_name(override, key):
    with pytest.raises(OmegaConfBaseException) as caught:
        config_of(override)
    assert caught.value.full_key == key


@pytest.mark.parametrize("override", ["roles.actor.tags=abc", "algo.num_steps=1.5", "algo.foo=1"])
def test_hydra_itself_refuses_what_the_schema_does(override):
    with pytest.raises(Exception, match=override.partition("=")[0].replace(".", r"\.")):
        composed(override)


def sections(config: Config):
    yield config
    for value in vars(config).values():
        for child in value.values() if isinstance(value, dict) else [value]:
            if dataclasses.is_dataclass(child):
                yield from sections(child)


def test_sections_are_immutable_and_pickle():
    config = config_of("tags=[a,b]")
    assert pickle.loads(pickle.dumps(config)) == config
    seen = set()
    for section in sections(config):
        seen.add(type(section).__name__)
        name = dataclasses.fields(section)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(section, name, 1)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(section, name)
    assert {"Config", "DdpConfig", "KlConfig", "RestoreConfig", "ModelConfig", "AlgoConfig"} <= seen


def flipped(config: Config, path: str) -> Config:
    """The config with the leaf at ``path`` changed to another value of its kind; nothing is validated."""
    first, _, rest = path.partition(".")
    if isinstance(config, MemoryConfig) and first in config.roles:
        first, rest = "roles", path
    if isinstance(config, dict):
        return {**config, first: flipped(config[first], rest) if rest else other(config[first])}
    value = getattr(config, first)
    return dataclasses.replace(config, **{first: flipped(value, rest) if rest else other(value)})


def other(value):
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case list() | tuple():
            return [*value, "x"]
        case None:
            return 1.5
    raise AssertionError(value)


def test_the_hash_sees_every_leaf_that_decides():
    config = config_of()
    hashes = {"": config_hash(config)}
    for path, _ in leaves(to_plain(config)):
        changed = flipped(config, path)
        assert to_plain(changed) != to_plain(config), path
        if is_marked(path, Mark.OUTSIDE):
            assert config_hash(changed) == hashes[""], path
        else:
            hashes[path] = config_hash(changed)
    assert len(hashes) > 90
    assert len(set(hashes.values())) == len(hashes)


def test_the_hash_is_the_same_in_another_process():
    command = (
        "from tests.helpers.composing import config_of; from trainer.config.identity import config_hash; "
        "print(config_hash(config_of()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=CONF.parent, capture_output=True, text=True, env={"PYTHONHASHSEED": "5"}
    )
    assert done.stdout.strip() == config_hash(config_of()), done.stderr
    assert len(config_hash(config_of())) == 16


def test_only_what_starts_from_random_weights_is_sampled_hotter():
    assert config_of().rollout.temperature == 2
    assert composed("model=hf", "model.path=somewhere").rollout.temperature == 1


def test_platform_and_threads_resolve_to_values():
    config = config_of("launch.nproc=1000", "algo.prompts_per_step=1000", "algo.micro_batch_size=2",
                       "algo.warmup_batch_size=1000")  # fmt: skip
    assert config.launch.threads_per_worker == 1
    assert config_of("platform=cpu").memory.poison is True
    assert config_of("platform=cuda").memory.poison is False


@pytest.mark.parametrize(("gpus", "name"), [(0, "cpu"), (1, "cuda")])
def test_the_platform_is_cuda_where_a_gpu_is_visible(monkeypatch, gpus, name):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for overrides in ((), ("platform=auto",)):
        config = config_of(*overrides)
        assert config.platform.name == name
        assert config.memory.poison is (name == "cpu")
