"""Where launchers and workers meet: a store whose values nobody unpickles; on one node it listens on 127.0.0.1 alone.

Torch elastic's own choice for one node (``c10d``) listens on every address and unpickles its state from the store once
a second, so whoever reaches the host could run code with the job's rights. Several nodes meet at a port of node 0,
which has to listen on the network; elastic keeps JSON in that store, and the network must be trusted.

Torch's store is only asked to connect where somebody answers: it reports each attempt with kilobytes of C++ frames.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from trainer.command.nodes import Nodes

LOOPBACK = "127.0.0.1"
SECONDS_TO_MEET = 1200  # longer than collectives wait, after which workers of other nodes notice a failure at last
_SECONDS_TO_REACH_ONESELF, _SECONDS_OF_SILENCE, _SECONDS_BETWEEN_LOOKS = 10, 10, 0.2
_BACKEND = "torpor"  # the name in elastic's registry
_RUN = "torpor"


class MeetingError(RuntimeError):
    """Launchers cannot meet; says why in one line."""


def settings(nodes: Nodes) -> dict[str, Any]:
    """What :class:`torch.distributed.launcher.api.LaunchConfig` needs to know about the meeting."""
    rendezvous_handler_registry.register(_BACKEND, _Rendezvous)
    return {"rdzv_backend": _BACKEND, "run_id": _RUN, "rdzv_configs": {"nodes": nodes, "timeout": SECONDS_TO_MEET}}


class _Rendezvous(StaticTCPRendezvous):
    """Node 0 holds the store; every node knows how many there are and which it is."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        nodes: Nodes = parameters.config["nodes"]
        host, port, listener = LOOPBACK, 0, None
        if nodes.endpoint is not None:
            host, _, text = nodes.endpoint.rpartition(":")
            port = int(text)
        if nodes.rank == 0:
            listener = _listen(port, everywhere=nodes.endpoint is not None)
            port = listener.getsockname()[1]
        _wait(
            lambda: _refusal(host, port),
            who=f"node {nodes.rank}",
            seconds=SECONDS_TO_MEET if nodes.rank else _SECONDS_TO_REACH_ONESELF,
            advice=": launch.rdzv_endpoint must name the host of node 0",
        )
        super().__init__(host, port, nodes.rank, nodes.count, parameters.run_id, SECONDS_TO_MEET)
        self._store = TCPStore(
            host,
            port,
            is_master=listener is not None,
            timeout=timedelta(seconds=SECONDS_TO_MEET),
            wait_for_workers=False,  # it would wait deaf to Ctrl-C
            master_listen_fd=None if listener is None else listener.detach(),  # it would listen on every address
        )
        self._store.set(f"present/{nodes.rank}", "")
        _wait(lambda: _absent(self._store, nodes.count), who=f"node {nodes.rank}", seconds=SECONDS_TO_MEET)

    def get_backend(self) -> str:
        return _BACKEND


def _listen(port: int, *, everywhere: bool) -> socket.socket:
    """A socket that listens on 127.0.0.1 or on every address; ``port`` 0: at a free one."""
    both = everywhere and socket.has_dualstack_ipv6()
    address = ("" if everywhere else LOOPBACK, port)
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        advice = ": give all nodes another free port of node 0 in launch.rdzv_endpoint" if everywhere else ""
        raise MeetingError(f"cannot listen there: {os.strerror(error.errno or 0)}{advice}") from error


def _wait(missing: Callable[[], str | None], *, who: str, seconds: float, advice: str = "") -> None:
    """Ask until nothing is ``missing`` any more."""
    begin, said = time.monotonic(), False
    while (what := missing()) is not None:
        waited = time.monotonic() - begin
        if waited > seconds:
            raise MeetingError(f"{who} waited {seconds} s for {what}{advice}")
        if waited > _SECONDS_OF_SILENCE and not said:
            said = True
            print(f"{who} waits for {what}", file=sys.stderr, flush=True)
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _refusal(host: str, port: int) -> str | None:
    """Why nobody answers at node 0's port; None where somebody does."""
    try:
        socket.create_connection((host, port), timeout=_SECONDS_TO_REACH_ONESELF).close()
    except OSError as error:
        return f"an answer of node 0 at {host}:{port} ({error.strerror or error})"
    return None


def _absent(store: Any, count: int) -> str | None:
    absent = [str(rank) for rank in range(count) if not store.check([f"present/{rank}"])]
    return f"node {', '.join(absent)} of {count}" if absent else None


def loopback_environment() -> dict[str, str]:
    """What keeps gloo and NCCL off the network, where workers would listen for each other. The "=" of NCCL's: exactly
    this interface, not all whose names begin so.

    Raises:
        ValueError: the host has no loopback interface, or it is down.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    raise ValueError(
        f"no network interface of this host has the address {LOOPBACK}, at which the workers of one node meet: bring "
        "the loopback interface up (ip link set lo up)"
    )
