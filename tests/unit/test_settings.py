"""Which settings matter for what: the schema's marks, by the key that sets a setting."""

from typing import Any

import pytest

from tests.helpers.composing import config_of
from trainer.common.limits import Limits, Words, check_value
from trainer.common.units import leaves
from trainer.config.identity import decisive, to_plain
from trainer.config.marks import Mark
from trainer.config.settings import is_marked, setting_of

SHAPES = (
    *("layers", "hidden_size", "ffn_size", "heads", "kv_heads", "head_size", "vocab_size", "rope_theta"),
    *("rope_scaling", "norm_eps", "qkv_bias", "qk_norm", "tie_embeddings"),
    *("num_experts", "num_experts_per_tok", "norm_topk_prob", "digest"),
)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return to_plain(config_of("platform=cpu"))


def keys_with(plain: dict[str, Any], mark: Mark) -> set[str]:
    return {key for key, _ in leaves(plain) if is_marked(key, mark)}


def test_what_has_which_mark(plain):
    outside = {f"launch.{key}" for key in ("node_rank", "rdzv_endpoint", "max_restarts")} | {"objective"}
    outside |= {"launch.host_memory_gib", "launch.gpu_memory_gib", "checkpoint.checksums", "tokenizer.path"}
    outside |= {"offload.reserve_gib"}
    models = ("model", "roles.actor.model", "roles.critic.model")
    outside |= {f"{model}.{key}" for model in models for key in ("path", "check_finite")}
    assert keys_with(plain, Mark.OUTSIDE) == outside == set(dict(leaves(plain))) - set(dict(leaves(decisive(plain))))
    assert keys_with(plain, Mark.PER_NODE) == {"launch.threads_per_worker"}
    assert keys_with(plain, Mark.SEED) == {"seed", "task.seed", "algo.shuffle_seed"}
    assert keys_with(plain, Mark.CORPUS) == {f"task.{key}" for key in plain["task"]}
    assert keys_with(plain, Mark.ARCHITECTURE) == {f"{model}.{key}" for model in models for key in SHAPES}
    others = {f"{model}.{key}" for model in models for key in ("max_length", "router_aux_loss_coef", "dtype")}
    others |= {f"tokenizer.{key}" for key in plain["tokenizer"] if key != "path"}
    assert keys_with(plain, Mark.WEIGHTS) == others


def test_marks_hold_for_what_lies_within_and_for_any_role():
    assert is_marked("roles.reward.model.rope_scaling.factor", Mark.ARCHITECTURE)
    assert is_marked("task.arguments.max_terms", Mark.CORPUS)
    assert not is_marked("task.arguments.seed", Mark.SEED)
    assert setting_of("memory.reward.optim_keeper").section is None
    assert setting_of("memory.piece_mib").said == (Limits(2**-10, 1_000_000),)
    for unknown in ("nothing", "nothing.of.this.kind", "algo.nothing", "seed.nothing"):
        assert setting_of(unknown).said == ()


@pytest.mark.parametrize(
    ("value", "said", "message"),
    [
        (0, [Limits(1, 9)], "x.y=0: must be between 1 and 9"),
        (10**400, [Limits(1, 1e6)], f"x.y={10**400}: must be between 1 and 1e+06"),
        (float("nan"), [], "x.y=nan: must be a finite number"),
        ([1.0, float("-inf")], [], "x.y.1=-inf: must be a finite number"),
        ("b", [Words("a", "c")], "x.y=b: must be one of a, c"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(value, said, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check_value("x.y", value, said)
    assert str(caught.value) == message
    check_value("x.y", None, said)
