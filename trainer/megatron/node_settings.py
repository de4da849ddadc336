"""Several nodes compose the job's config each for itself: what decides must have come out the same on all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from torch import distributed

from trainer.common.units import format_setting, leaves
from trainer.config.identity import decisive, to_plain
from trainer.config.marks import Mark
from trainer.config.schema import Config
from trainer.config.settings import is_marked

_MOST_NAMED = 5

Settings = Mapping[str, Any]  # by dotted key


def require_same(config: Config, store: distributed.Store) -> None:
    """Compare what decides through the store where all ranks meet, before process groups, which nodes of different
    platforms would wait for in vain.

    Raises:
        ValueError: on every rank alike, if nodes differ; names the settings, their values and the nodes.
    """
    own = {key: value for key, value in leaves(decisive(to_plain(config))) if not is_marked(key, Mark.PER_NODE)}
    store = distributed.PrefixStore("settings", store)
    if os.environ["LOCAL_RANK"] == "0":
        store.set(os.environ["GROUP_RANK"], json.dumps(own))
    different = differences({node: json.loads(store.get(str(node))) for node in range(config.launch.nnodes)})
    if different:
        more = len(different) - _MOST_NAMED
        named = "; ".join(different[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(
            f"the nodes of this job have different settings: {named}. Give all nodes the same command, but for "
            "launch.node_rank; what a machine decides by itself (platform=auto, model.kernels=auto, "
            "model.attention_backend) can be set"
        )


def differences(by_node: Mapping[int, Settings]) -> list[str]:
    """Each setting that is not the same on all nodes: ``seed=1 on node 0, seed=2 on nodes 1 and 2``."""
    keys = dict.fromkeys(key for settings in by_node.values() for key in settings)
    lines = []
    for key in keys:
        nodes_with: dict[str, list[str]] = {}
        for node, settings in sorted(by_node.items()):
            text = f"{key}={format_setting(settings[key])}" if key in settings else f"no {key}"
            nodes_with.setdefault(text, []).append(str(node))
        if len(nodes_with) > 1:
            lines.append(", ".join(f"{text} on {_nodes(numbers)}" for text, numbers in nodes_with.items()))
    return lines


def _nodes(numbers: list[str]) -> str:
    return f"node {numbers[0]}" if len(numbers) == 1 else f"nodes {', '.join(numbers[:-1])} and {numbers[-1]}"
