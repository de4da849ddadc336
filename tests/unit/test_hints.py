"""What a refused key is answered with."""

import dataclasses
import shlex
import tomllib
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException

from tests.helpers.composing import composed, config_of
from trainer.config.hints import EXTRAS, hint_for, hint_for_flags, known_keys
from trainer.config.schema import Config

ROOT = Path(__file__).parents[2]


def hint_of(*overrides: str) -> str | None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (Hydra's or omegaconf's)
        config_of(*overrides)
    return hint_for(caught.value)


@pytest.mark.parametrize("plus", ["", "+", "++"])
@pytest.mark.parametrize(
    ("key", "first"),
    [
        ("algo.micro_batchsize", "algo.micro_batch_size"),
        ("algo.epoch", "algo.epochs"),
        ("launch.nprocs", "launch.nproc"),
        ("roles.actor.ddp.disable_param_buffer_cpu_backup", "roles.actor.ddp.disable_param_buffers_cpu_backup"),
        ("roles.critic.model.layer", "roles.critic.model.layers"),
        ("rolout", "rollout"),
    ],
)
def test_a_misspelt_key_gets_the_nearest(plus, key, first):
    hint = hint_of(f"{plus}{key}=1")
    assert hint is not None
    assert hint.startswith(f"did you mean {first}")
    assert hint.count(" or ") <= 2


def test_a_key_in_the_wrong_section_is_found():
    hint = hint_of("algo.lr=1")
    assert hint is not None
    assert "roles.actor.optimizer.lr" in hint
    assert "roles.critic.optimizer.lr" in hint


@pytest.mark.parametrize(
    "key", ["disable_weights_backuper", "enable_weights_backuper", "roles.actor.disable_weights_backuper"]
)
@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_the_switch_of_the_backuper_says_what_replaced_it(plus, key):
    hint = hint_of(f"{plus}{key}=true")
    assert hint is not None
    assert "no switch for the weights backuper any more" in hint
    assert "memory=rebuild" in hint


@pytest.mark.parametrize("key", ["roles.actor.optimizer.", "optimizer.", "roles.critic.ddp.", ""])
@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_why_main_params_cannot_live_inside_the_optimizer(plus, key):
    hint = hint_of(f"{plus}{key}use_precision_aware_optimizer=true")
    assert hint is not None
    assert hint.startswith("not supported: with it main params live inside the optimizer in another precision")
    assert "cannot be rebuilt bit for bit" in hint
    assert hint_for_flags(["--use-precision-aware-optimizer"]) == hint


@pytest.mark.parametrize("argument", ["--disable-weights-backuper", "--enable_weights_backuper=0", "--offload-train"])
def test_flags_in_the_style_of_argparse(argument):
    hint = hint_for_flags(["seed=1", argument])
    assert hint is not None
    assert "memory=rebuild" in hint or "offload=train" in hint
    assert hint_for_flags(["seed=1", "memory=lean", "--multirun"]) is None


@pytest.mark.parametrize(
    ("argument", "setting"), [("--seed", "seed"), ("--num-steps=3", "algo.num_steps"), ("--nproc", "launch.nproc")]
)
def test_a_setting_with_dashes(argument, setting):
    assert hint_for_flags([argument, "3"]) == f"settings have no dashes: {setting}=<value>"


def test_a_flag_between_settings():
    assert "before all settings" in (hint_for_flags(["seed=1", "-m", "memory=lean,full"]) or "")
    assert hint_for_flags(["-m", "seed=1", "memory=lean,full"]) is None
    assert hint_for_flags(["memory=lean,full", "-m"]) is None


def test_a_setting_without_its_value():
    with pytest.raises(OverrideParseException) as caught:
        OverridesParser.create().parse_overrides(["algo.epochs"])
    assert "one word, <name>=<value>" in (hint_for(caught.value) or "")


def test_settings_that_there_is_nothing_like_show_where_to_look():
    for section, override in {"job -p task": "task.foo=1", "job -p algo": "algo.zzzzzz=1"}.items():
        hint = hint_of(override)
        assert hint is not None
        assert f"--cfg {section}," in hint
    assert "--cfg hydra -p hydra.sweep," in (hint_of("hydra.sweep.dri=x") or "")


@pytest.mark.parametrize("override", ["roles.actor.optimizer.lr=abc", "roles.actor.ddp=null", "memory=leam"])
def test_no_hint_where_the_key_is_right(override):
    assert hint_of(override) is None


def test_the_option_for_roles_at_the_top_level():
    hint = hint_of("model=shared")
    assert hint is not None
    assert "model@roles.critic.model=shared" in hint


def test_known_keys_are_the_schema():
    keys = set(known_keys())
    assert {field.name for field in dataclasses.fields(Config)} <= keys
    assert {"algo.kl.coef", "roles.actor.ddp.nccl_ub", "memory.critic.restore_grads_from"} <= keys
    for key in ("algo.kl.coef", "roles.critic.optimizer.lr"):
        composed(f"{key}=1")
        with pytest.raises(ConfigCompositionException):
            composed(f"{key}_=1")


@pytest.mark.parametrize("missing", EXTRAS)
def test_a_preset_whose_launcher_is_not_installed_names_the_extra(missing, tmp_path):
    """Hydra's own message about an option that exists nowhere, with the name of one that may be installed here."""
    group, _, option = missing.rpartition("/")
    (tmp_path / group).mkdir(parents=True)
    (tmp_path / group / "preset.yaml").write_text("defaults: [nowhere]\n")
    (tmp_path / "main.yaml").write_text("{}")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        for chosen in ("preset", "nowhere"):
            with pytest.raises(MissingConfigException) as caught:
                compose("main", overrides=[f"{group}={chosen}"])
            message = str(caught.value).replace("nowhere", option)
            assert hint_for(MissingConfigException(message, missing)) == f"pip install 'torpor[{EXTRAS[missing]}]'"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert EXTRAS[missing] in extras


@pytest.mark.parametrize(
    "path", ["/data/lr=1", "/data/a,b", "/data/a[1]", "/data/{x}", "/data/(old)", "/data/#1", "~/data", "/data/größe"]
)
@pytest.mark.parametrize("key", ["task.path", "+model.path"])
def test_a_path_that_needs_quotes_is_answered_with_what_a_shell_takes(key, path):
    if path == "/data/a,b":  # Hydra takes it for a sweep and says so itself, without the shell's quotes
        error = ConfigCompositionException(f"Ambiguous value for argument '{key}={path}'\n1. To use it as a list, use")
    else:
        with pytest.raises(OverrideParseException) as caught:
            OverridesParser.create().parse_overrides([f"{key}={path}"])
        error = caught.value
    hint = hint_for(error)
    assert hint is not None
    (word,) = shlex.split(hint.partition(" need the shell's: ")[2])
    (override,) = OverridesParser.create().parse_overrides([word])
    assert override.value() == path


@pytest.mark.parametrize("override", ["task.path='/a'b", "tags=[a=b]", "tags={a"])
def test_what_is_quoted_or_no_text_gets_no_advice_to_quote(override):
    with pytest.raises(OverrideParseException) as caught:
        OverridesParser.create().parse_overrides([override])
    assert hint_for(caught.value) is None
