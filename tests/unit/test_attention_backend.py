"""Which core attention a model gets, and what is said where Transformer Engine is wanted and absent."""

import sys
from importlib.machinery import ModuleSpec

import pytest

from tests.composing import config_of
from tests.megatron_world import one_rank_world
from trainer.config.rules import model as model_rules
from trainer.megatron.build import build_gpt
from trainer.megatron.layers import CausalAttention, core_attention
from trainer.plan.layout import WHOLE


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A package that can be found (and not imported): what find_spec sees of an installed Transformer Engine."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise ImportError('no CUDA')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.delitem(sys.modules, "transformer_engine")
    assert isinstance(model_rules.find_spec("transformer_engine"), ModuleSpec)


def backends(*overrides):
    return {name: role.model.attention_backend for name, role in config_of(*overrides).roles.items()}


def test_torch_attends_where_transformer_engine_is_absent():
    assert backends("platform=cpu") == backends("platform=cuda") == {"actor": "sdpa", "critic": "sdpa"}


def test_transformer_engine_attends_where_it_is_installed_and_there_are_gpus(installed):
    assert backends("platform=cuda") == {"actor": "te", "critic": "te"}
    assert backends("platform=cpu") == {"actor": "sdpa", "critic": "sdpa"}
    assert backends("platform=cuda", "model.attention_backend=sdpa") == {"actor": "sdpa", "critic": "sdpa"}
    one = backends("platform=cuda", "roles.critic.model.attention_backend=sdpa")
    assert one == {"actor": "te", "critic": "sdpa"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["platform=cuda"], "roles.actor.model.attention_backend=te, but Transformer Engine is not installed: pip"),
        (["platform=cpu"], "attention_backend=te with platform.name=cpu: Transformer Engine needs a GPU"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        config_of(*overrides, "model.attention_backend=te")
    with pytest.raises(ValueError, match="attention_backend=flash: must be one of sdpa, te"):
        config_of(*overrides, "model.attention_backend=flash")


def test_an_installation_that_does_not_work_is_named_when_the_model_is_built():
    with one_rank_world():
        with pytest.raises(ValueError, match=r"transformer_engine cannot be imported .* model.attention_backend=sdpa"):
            core_attention("te")
        model = config_of("platform=cpu").model
        gpt = build_gpt(model, vocab_size=64, parallel=WHOLE, seed=1, value_head=False)
        attention = gpt.decoder.layers[0].self_attention.core_attention  # type: ignore[union-attr, index]
        assert isinstance(attention, CausalAttention)
