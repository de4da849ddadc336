"""Compose the real configuration in tests, as the command line does."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import open_dict, read_write

import conf
from trainer.config import compose as configuration
from trainer.config.schema import Config
from trainer.plan.footprint import Footprint, footprint
from trainer.rollout.engines import planned_bytes

CONF = Path(conf.__path__[0])
# Group of our own -> its options. The presets of Hydra's own groups are in tests/unit/test_sweeping.py.
GROUPS = {
    path.name: sorted(option.stem for option in path.glob("*.yaml"))
    for path in CONF.iterdir()
    if path.is_dir() and path.name not in ("__pycache__", "hydra")
}

# Seconds-long runs of everything: small enough for a test, real at every point.
SMALL = (
    "platform=cpu",
    "launch.threads_per_worker=1",
    "task=arithmetic",
    "reward=tests.helpers.rewards.spread",
    "model.layers=2",
    "model.hidden_size=64",
    "model.ffn_size=128",
    "algo.num_steps=2",
    "algo.warmup_steps=2",
    "algo.warmup_batch_size=8",
    "algo.warmup_questions=null",
    "optimizer.lr_schedule=constant",
    "optimizer.lr_warmup_steps=0",
    "algo.prompts_per_step=8",
    "algo.responses_per_prompt=2",
    "algo.minibatches=2",
    "algo.micro_batch_size=4",
    "algo.heldout_prompts=8",
    "rollout.max_new_tokens=4",
    "rollout.temperature=1.0",
)


def composed(*overrides: str):
    """The DictConfig of ``python -m trainer <overrides>``."""
    configuration.register()
    with initialize_config_module("conf", version_base="1.3"):
        return compose("train", overrides=list(overrides))


def config_of(*overrides: str) -> Config:
    """The validated Config of ``python -m trainer <overrides>``."""
    return configuration.to_config(composed(*overrides))


def footprint_of(config: Config, *, vocab_size: int, stage: int | None = None) -> Footprint:
    """The planned bytes of a run, its engine's among them."""
    engine = planned_bytes(config, vocab_size=vocab_size)
    return footprint(config, vocab_size=vocab_size, engine=engine, stage=stage)


def choices_and_config_of(*overrides: str) -> tuple[dict[str, str], Config]:
    """The option that each group of the command came to, and its validated Config, composed once."""
    configuration.register()
    with initialize_config_module("conf", version_base="1.3"):
        composed = compose("train", overrides=list(overrides), return_hydra_config=True)
    choices = dict(composed.hydra.runtime.choices)
    with read_write(composed), open_dict(composed):
        del composed["hydra"]  # as Hydra does for the job
    return choices, configuration.to_config(composed)


def error_of(*overrides: str) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the callers look at the message)
        config_of(*overrides)
    return str(caught.value)


def suggested(message: str) -> list[str]:
    """The ``key=value`` overrides after the word "use"."""
    return re.findall(r"[a-z_.]+=[\w.]+", re.split(r"\b[uU]se\b", message)[-1])
