"""Where the workers of one node meet: a store that listens on 127.0.0.1 alone, and whose values nobody unpickles.

Torch elastic's own choice for one node (``c10d``) listens on every address and unpickles its state from the store once
a second, so whoever reaches the host could run code with the job's rights. Several nodes meet through elastic's
``static`` rendezvous, which keeps JSON in its store; that one has to listen on the network, which must be trusted.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import psutil
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

LOOPBACK = "127.0.0.1"
ONE_NODE = "loopback"  # the name in elastic's registry


class _LoopbackRendezvous(StaticTCPRendezvous):
    """One node, which meets itself at a free port of the loopback interface."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        seconds = parameters.config["timeout"]
        with socket.socket() as listener:
            listener.bind((LOOPBACK, 0))
            port = listener.getsockname()[1]
            super().__init__(LOOPBACK, port, rank=0, world_size=1, run_id=parameters.run_id, timeout=seconds)
            self._store = TCPStore(
                LOOPBACK,
                port,
                world_size=1,
                is_master=True,
                timeout=timedelta(seconds=seconds),
                master_listen_fd=listener.detach(),  # without it the store listens on every address
            )

    def get_backend(self) -> str:
        return ONE_NODE


def register() -> None:
    """Make :data:`ONE_NODE` a backend that torch elastic knows."""
    rendezvous_handler_registry.register(ONE_NODE, _LoopbackRendezvous)


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
