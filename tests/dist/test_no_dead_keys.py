"""Every setting under ``algo``, its pieces, ``rollout`` and ``optimizer`` reaches the numbers of a run, those under
``parallel`` none."""

import dataclasses

import pytest

from tests.helpers.composing import SMALL, config_of
from tests.helpers.invariance_worker import run_matrix
from trainer.algo.estimators import DecoupledGae, Gae, Grpo, ReinforcePlusPlus, Vapo
from trainer.algo.mismatch import ImportanceWeights
from trainer.algo.policy_losses import Cispo, Gspo, Ppo, Sapo
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment
from trainer.config.schema import (
    AlgoConfig,
    KlConfig,
    OverlongConfig,
    ParallelConfig,
    RolloutConfig,
    SharedOptimizerConfig,
)

# Two steps of a model that has learned enough to end some answers and get some right.
BASE = (
    *SMALL,
    *("offload=none", "model.dtype=fp32", "model.layers=1", "task.forms=digits", "rollout=hf"),
    "rollout.max_new_tokens=2",
    *("algo.warmup_steps=25", "algo.warmup_lr=5e-3", "algo.warmup_batch_size=16"),
)
WSD = ("optimizer.lr_schedule=wsd", "optimizer.lr_wsd_decay_steps=3")
REINFORCE = ("algo=reinforce_pp", "algo.whiten_advantages=false")
LARGE_STEPS = ("roles.actor.optimizer.lr=2e-2", "algo.epochs=2")

# Group -> its options, by the names that leaves have here -> their classes.
PIECES = {
    "advantages": {
        "gae": Gae,
        "decoupled_gae": DecoupledGae,
        "vapo": Vapo,
        "grpo": Grpo,
        "reinforce_pp": ReinforcePlusPlus,
    },
    "policy_loss": {"ppo": Ppo, "gspo": Gspo, "cispo": Cispo, "sapo": Sapo},
    "mismatch": {"mismatch": ImportanceWeights},
}

# leaf -> (another value, what must be set beside it for the leaf to matter)
FLIPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "algo.num_steps": ("1", ()),
    "algo.warmup_steps": ("29", ()),
    "algo.warmup_lr": ("4e-3", ()),
    "algo.warmup_batch_size": ("8", ()),
    "algo.warmup_questions": ("9", ()),
    "algo.prompts_per_step": ("16", ()),
    "algo.responses_per_prompt": ("4", ()),
    "algo.epochs": ("2", ()),
    "algo.minibatches": ("1", ()),
    "algo.shuffle_seed": ("7", ("algo.epochs=2",)),
    "algo.whiten_advantages": ("false", ()),
    "algo.centre_scores": ("false", ()),
    "algo.advantage_clip": ("0.1", ()),
    "algo.reward_clip": ("0.1", ()),
    "algo.dynamic_sampling_rounds": ("1", ()),
    "algo.target_kl": ("1e-9", LARGE_STEPS),
    "algo.overlong.penalty": ("0.5", ("algo.overlong.buffer=1",)),
    "algo.overlong.buffer": ("2", ("algo.overlong.buffer=1", "algo.overlong.penalty=0.5")),
    "algo.overlong.mask": ("true", ()),
    **{f"ppo.{name}": ("0.01", LARGE_STEPS) for name in ("clip_low", "clip_high", "log_ratio_clamp")},
    "ppo.dual_clip": ("1.01", LARGE_STEPS),
    **{f"gspo.{name}": ("1", (*LARGE_STEPS, "policy_loss=gspo")) for name in ("clip_low", "clip_high")},
    "gspo.log_ratio_clamp": ("1e-5", (*LARGE_STEPS, "policy_loss=gspo")),
    **{f"cispo.{name}": ("0.01", (*LARGE_STEPS, "policy_loss=cispo")) for name in ("clip_low", "clip_high")},
    "cispo.log_ratio_clamp": ("0.01", (*LARGE_STEPS, "policy_loss=cispo")),
    **{f"sapo.{name}": ("3", (*LARGE_STEPS, "policy_loss=sapo")) for name in ("tau_positive", "tau_negative")},
    "sapo.log_ratio_clamp": ("0.01", (*LARGE_STEPS, "policy_loss=sapo")),
    **{
        f"mismatch.{name}": (value, ("mismatch=token_truncated", "rollout.top_p=0.7", *beside))
        for name, value, *beside in (
            ("level", "sequence"),
            ("lower", "0.99"),
            ("upper", "1.0", "rollout.top_p=1"),
            ("outside", "mask", "mismatch.lower=0.9"),
            ("weigh", "false", "mismatch.outside=mask"),
            ("reject_below", "0.9"),
        )
    },
    "algo.value_clip": ("0.001", ("roles.critic.optimizer.lr=2e-2", "algo.epochs=2")),
    "algo.entropy_coef": ("0.1", ()),
    "algo.loss_aggregation": ("sequence_mean", ()),
    "algo.critic_loss_aggregation": ("sequence_mean", ()),
    "algo.loss_length": ("1", ("algo.loss_aggregation=fixed_length", "algo.entropy_coef=1")),
    "algo.critic_warmup_steps": ("1", ()),
    "algo.start_critic_from_actor": ("false", ()),
    "algo.heldout_prompts": ("1", ("algo.evaluation_samples=32",)),
    "algo.evaluation_samples": ("2", ()),
    "algo.evaluate_every": ("1", ()),
    "algo.kl.placement": ("loss", ("algo.kl.estimator=k2",)),
    "algo.kl.estimator": ("k3", ()),
    "algo.kl.coef": ("0.1", ()),
    "algo.kl.clamp": ("0.001", ()),
    "algo.kl.target": ("0.01", ()),
    "algo.kl.horizon": ("100", ("algo.kl.target=0.01",)),
    "gae.gamma": ("0.5", ()),
    "gae.lam": ("0.5", ()),
    "gae.bootstrap_truncated": ("true", ()),
    **{f"decoupled_gae.{name}": ("0.5", ("advantages=decoupled_gae",)) for name in ("gamma", "lam", "critic_lam")},
    "decoupled_gae.bootstrap_truncated": ("true", ("advantages=decoupled_gae",)),
    **{f"vapo.{name}": ("0.5", ("advantages=vapo",)) for name in ("gamma", "critic_lam")},
    "vapo.alpha": ("2", ("advantages=vapo",)),
    "vapo.bootstrap_truncated": ("true", ("advantages=vapo",)),
    "grpo.divide_by_std": ("false", ("algo=grpo", "algo.responses_per_prompt=4")),
    "reinforce_pp.gamma": ("0.5", REINFORCE),
    "reinforce_pp.group_baseline": ("true", REINFORCE),
    "optimizer.min_lr_ratio": ("0.5", ("optimizer.lr_schedule=linear",)),
    "optimizer.lr_schedule": ("linear", ()),
    "optimizer.lr_warmup_steps": ("3", ()),
    "optimizer.lr_wsd_decay_style": ("linear", WSD),
    "optimizer.lr_wsd_decay_steps": ("2", WSD),
    "optimizer.beta1": ("0.5", ()),
    "optimizer.beta2": ("0.5", ()),
    "optimizer.eps": ("1e-3", ()),
    "optimizer.weight_decay": ("0.1", ()),
    "optimizer.clip_grad": ("0.01", ()),
    "rollout.temperature": ("0.7", ()),
    "rollout.top_p": ("0.5", ()),
    "rollout.top_k": ("2", ()),
    "rollout.min_p": ("0.5", ()),
    "rollout.stop": ("['1']", ()),
    "rollout.engine": ("native", ()),
    "rollout.max_new_tokens": ("3", ()),
}
LAYOUT = ("tp", "pp", "vpp", "cp", "expert")
INVISIBLE = {
    "algo.old_log_probs": "where they come from changes no bit (tests/unit/test_needless_passes.py)",
    "algo.micro_batch_size": "splits the work of a rank; no split may change a mean (tests/unit/test_step.py)",
    "algo.micro_batch_tokens": "splits it in another way; compared in the same test",
    "rollout.max_prompt_tokens": "a limit: longer prompts are refused (tests/unit/test_rollout.py)",
    "rollout.kv_cache_gib": "how many rows are decoded at once changes none of them (tests/unit/test_native_engine.py)",
    "rollout.compile": "the same numbers, faster",
    **{f"parallel.{name}": "shared work gives the same numbers (tests/dist/test_parallel.py)" for name in LAYOUT},
    "rollout.batch_invariant": "the bits of a response do not depend on its batch (tests/unit/test_native_engine.py)",
}


def overrides_of(leaf):
    value, context = FLIPS[leaf]
    section, field = leaf.split(".", 1)
    group = next((group for group, pieces in PIECES.items() if section in pieces), section)
    key = f"{group}.{field}"
    kept = [override for override in context if override.partition("=")[0] != key]
    return (*kept, f"{key}={value}")


def leaves():
    sections = {"algo": AlgoConfig, "algo.kl": KlConfig, "rollout": RolloutConfig, "optimizer": SharedOptimizerConfig}
    sections |= {"algo.overlong": OverlongConfig, "parallel": ParallelConfig}
    sections |= {name: piece for pieces in PIECES.values() for name, piece in pieces.items()}
    return {
        f"{section}.{field.name}"
        for section, schema in sections.items()
        for field in dataclasses.fields(schema)
        if f"{section}.{field.name}" not in sections
    }


def test_every_leaf_of_the_schema_is_listed_once():
    assert set(FLIPS) | set(INVISIBLE) == leaves()
    assert not set(FLIPS) & set(INVISIBLE)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Overrides beyond BASE -> the metrics of that run, all in one worker."""
    wanted = {context for _, context in FLIPS.values()}
    wanted |= {overrides_of(leaf) for leaf in FLIPS}
    configs = {overrides: config_of(*BASE, *overrides) for overrides in sorted(wanted)}
    environment = worker_environment(platform="cpu", sleeps=False, threads_per_worker=1)
    log_dir = tmp_path_factory.mktemp("dead_keys")
    results = launch(run_matrix, (configs, None), nproc=1, log_dir=log_dir, environment=environment)
    return {overrides: results[overrides]["metrics"] for overrides in configs}


def test_the_base_run_is_no_degenerate_case(records):
    last = records[()][-1]
    assert 0 < last["truncated_fraction"] < 1
    assert last["reward_std"] > 0
    assert last["kl"] != 0
    assert last["value_std"] > 0


# What changes no weight: how the held-out accuracy is taken.
OF_EVALUATION = {"algo.heldout_prompts", "algo.evaluation_samples", "algo.evaluate_every"}


def digests(metrics):
    return {key: value for key, value in metrics[-1].items() if key.startswith("weights_sha256/")}


def heldout(metrics):
    return [{key: value for key, value in record.items() if key.startswith("heldout_")} for record in metrics]


@pytest.mark.parametrize("leaf", FLIPS)
def test_another_value_gives_other_weights(records, leaf):
    """Other records would not be enough: a learning rate is reported whether or not it is used."""
    changed, base = records[overrides_of(leaf)], records[FLIPS[leaf][1]]
    if leaf in OF_EVALUATION:
        assert heldout(changed) != heldout(base)
        assert digests(changed) == digests(base)
    else:
        assert digests(changed) != digests(base)
