"""Compose the real configuration in tests, as the command line does."""

from hydra import compose, initialize_config_module

from trainer.config import compose as configuration
from trainer.config.schema import Config
from trainer.plan.footprint import Footprint, footprint
from trainer.rollout.engines import planned_bytes

# Seconds-long runs of everything: small enough for a test, real at every point.
SMALL = (
    "platform=cpu",
    "launch.threads_per_worker=1",
    "model.layers=2",
    "model.hidden_size=64",
    "model.ffn_size=128",
    "algo.num_steps=2",
    "algo.warmup_steps=2",
    "algo.warmup_batch_size=8",
    "algo.prompts_per_step=8",
    "algo.responses_per_prompt=2",
    "algo.minibatches=2",
    "algo.micro_batch_size=4",
    "algo.heldout_prompts=8",
    "rollout.max_new_tokens=4",
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
