"""Which of the job's nodes this is, and where they meet: from the config, or from Slurm's environment.

Every node runs the same command, and its launcher starts the workers of that node. Simplifies torch elastic's dynamic
rendezvous: the number of nodes is fixed, each knows its rank, and the endpoint lies on node 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.schema import LaunchConfig

_FIRST_PORT, _PORTS = 15_000, 15_000  # below the range from which systems give ports to whoever asks
_PORTS_PER_JOB = 16  # for restarts


@dataclass(frozen=True)
class Nodes:
    """``count`` nodes of which this is number ``rank``; they meet at ``endpoint``, host:port of node 0."""

    count: int = 1
    rank: int = 0
    endpoint: str | None = None  # one node needs none

    def at_restart(self, number: int) -> Nodes:
        """They meet at the next port: at the old one a node that restarts early would still find the old launch."""
        if self.endpoint is None:
            return self
        host, _, port = self.endpoint.rpartition(":")
        return replace(self, endpoint=f"{host}:{int(port) + number}")


def find_nodes(launch: LaunchConfig, environment: Mapping[str, str]) -> Nodes:
    """The nodes of the job. What ``launch`` leaves open (null) comes from Slurm's variables, with submitit or without.

    Raises:
        ValueError: Slurm's job has another number of nodes, or nobody says which node this is or where they meet.
    """
    if launch.nnodes == 1:
        return Nodes()
    rank, endpoint = launch.node_rank, launch.rdzv_endpoint
    if "SLURM_JOB_ID" in environment and "SLURM_NODEID" in environment:
        given = int(environment["SLURM_JOB_NUM_NODES"])
        if given != launch.nnodes:
            raise ValueError(
                f"launch.nnodes={launch.nnodes}, but Slurm's job {environment['SLURM_JOB_ID']} has {given} nodes: "
                f"use launch.nnodes={given}, or as many nodes in the job (hydra/launcher=slurm asks for launch.nnodes)"
            )
        rank = int(environment["SLURM_NODEID"]) if rank is None else rank
        endpoint = _slurm_endpoint(environment) if endpoint is None else endpoint
    if rank is None or endpoint is None:
        missing = [f"launch.{key}" for key, x in (("node_rank", rank), ("rdzv_endpoint", endpoint)) if x is None]
        raise ValueError(
            f"launch.nnodes={launch.nnodes} without {' and '.join(missing)}: outside of Slurm give each node's command "
            f"launch.node_rank=<0 to {launch.nnodes - 1}> and launch.rdzv_endpoint=<host of node 0>:<free port>"
        )
    return Nodes(launch.nnodes, rank, endpoint)


def _slurm_endpoint(environment: Mapping[str, str]) -> str:
    """The job's first host and a port that follows from the job's number, so that all nodes know it."""
    port = _FIRST_PORT + _PORTS_PER_JOB * int(environment["SLURM_JOB_ID"]) % _PORTS
    return f"{first_host(environment['SLURM_JOB_NODELIST'])}:{port}"


def first_host(node_list: str) -> str:
    """First name of a node list as Slurm writes it: ``gpu[07-09,12]-ib,login1`` -> ``gpu07-ib``."""
    first = re.split(r",(?![^\[]*\])", node_list)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
