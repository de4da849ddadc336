"""What a run needs around its models: nodes, task, tokenizer, diagnostics."""

from __future__ import annotations

import os
import re

from trainer.config.pieces import make_task
from trainer.config.schema import Config
from trainer.tasks.tokenizer import check_vocab_size, tokenizer_digest
from trainer.tasks.verifiers import import_function

_LAST_PORT = 65535


def check_nodes(config: Config) -> None:
    """What needs no look at the environment; the rest is in :func:`trainer.command.nodes.find_nodes`."""
    nnodes, rank, endpoint = config.launch.nnodes, config.launch.node_rank, config.launch.rdzv_endpoint
    if rank is not None and not rank < nnodes:
        raise ValueError(
            f"launch.node_rank={rank} with launch.nnodes={nnodes}: must be between 0 and {nnodes - 1}, another one on "
            "every node"
        )
    if endpoint is not None and not re.fullmatch(r".+:[1-9]\d{0,4}", endpoint):
        raise ValueError(f"launch.rdzv_endpoint={endpoint}: must be <host of node 0>:<free port there>")
    last = 0 if endpoint is None else int(endpoint.rpartition(":")[2]) + config.launch.max_restarts
    if last > _LAST_PORT:
        raise ValueError(
            f"launch.rdzv_endpoint={endpoint} with launch.max_restarts={config.launch.max_restarts}: a restart uses "
            f"the next port, and {_LAST_PORT} is the last one. Use a port of at most {_LAST_PORT} - launch.max_restarts"
        )


def check_profile_steps(config: Config) -> None:
    absent = [step for step in config.diagnostics.profile_steps if not 1 <= step <= config.algo.num_steps]
    if absent:
        raise ValueError(
            f"diagnostics.profile_steps={config.diagnostics.profile_steps}: step {absent[0]} is none of the "
            f"algo.num_steps={config.algo.num_steps} steps of this run"
        )


def check_task(config: Config) -> None:
    """Build the task and let it judge its own settings; find the reward function."""
    make_task(config).validate()
    if config.reward is not None:
        import_function(config.reward, setting="reward")


def check_tokenizer(config: Config) -> None:
    checkpoint = config.roles["actor"].model.path
    if config.tokenizer.path is None:
        if checkpoint is not None:
            raise ValueError(
                f"tokenizer.path=null with roles.actor.model.path={checkpoint}: the checkpoint knows nothing of a "
                f"tokenizer trained on the task. Use tokenizer.path={checkpoint}"
            )
        if config.tokenizer.chat_template:
            raise ValueError(
                "tokenizer.chat_template=true with tokenizer.path=null: a tokenizer trained on the task has no chat "
                "template. Use tokenizer.chat_template=false, or a folder whose tokenizer has one"
            )
        check_vocab_size(config.tokenizer.vocab_size)
    elif not os.path.isdir(config.tokenizer.path):
        raise ValueError(
            f"tokenizer.path={config.tokenizer.path} is no folder (relative paths start at the directory of the "
            "command): give a Hugging Face tokenizer folder, or tokenizer.path=null to train one on the task"
        )
    if config.tokenizer.digest != tokenizer_digest(config.tokenizer.path):
        raise ValueError(
            f"tokenizer.digest={config.tokenizer.digest} is not that of tokenizer.path={config.tokenizer.path}: leave "
            "it out, it follows from the folder"
        )
