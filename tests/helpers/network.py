"""Who can reach a run: its listeners, and an attack on the store that torch elastic meets at."""

import base64
import os
import pickle
import socket
import subprocess
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from tests.helpers.processes import wait_until, workers_of
from trainer.report import read_records


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


def other_addresses() -> list[str]:
    """Addresses of this host at which a socket that is bound to 127.0.0.1 does not answer."""
    found = [a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family == socket.AF_INET]
    return ["127.0.0.2", *(address for address in found if address != "127.0.0.1")]


def other_interface() -> str | None:
    """One that faces the network; None on a host without."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and not a.address.startswith("127.") for a in addresses):
            return name
    return None


def listeners(process: psutil.Process) -> list[tuple[str, int]]:
    """(address, port) of every TCP socket at which the process takes connections."""
    connections = psutil.net_connections(kind="tcp")
    return [tuple(c.laddr) for c in connections if c.pid == process.pid and c.status == psutil.CONN_LISTEN]


def answers(address: str, port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(5)
        return client.connect_ex((address, port)) == 0


def plant(port: int, touched: Path) -> list[str]:
    """In the store at ``port`` replace every value by a pickle, also the state that elastic's ``c10d`` rendezvous would
    keep there, in base64 -> the keys that were there."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
    found, pickled = store.list_keys(), pickle.dumps(Touch(touched))
    states = {"torch.rendezvous.torpor", *(key for key in found if "torch.rendezvous." in key)}
    for key in {*found, *states}:
        store.set(key, base64.b64encode(pickled) if key in states else pickled)
    return found


def wait_for_a_step(process: subprocess.Popen, run: Path) -> None:
    path = run / "metrics.jsonl"
    wait_until(lambda: path.exists() and any(record["step"] > 0 for record in read_records(path)), process)


@dataclass(frozen=True)
class Seen:
    """What was found while two workers trained, and how the run ended after a stranger had written to its store."""

    of_parent: list[tuple[str, int]]
    of_workers: list[list[tuple[str, int]]]
    reached: list[tuple[str, int]]
    planted: list[str]
    code: int
    stderr: str
    stranger_ran: bool


def look_at(process: subprocess.Popen, directory: Path) -> Seen:
    """What the run ``directory``/run shows of itself once it trains; then its store is attacked."""
    wait_for_a_step(process, directory / "run")
    of_parent = listeners(psutil.Process(process.pid))
    of_workers = [listeners(worker) for worker in workers_of(process)]
    ports = [port for group in (of_parent, *of_workers) for _, port in group]
    reached = [(address, port) for address in other_addresses() for port in ports if answers(address, port)]
    planted = [key for _, port in of_parent for key in plant(port, directory / "touched")]
    assert process.poll() is None, "the run was over before the store was attacked"
    _, stderr = process.communicate(timeout=120)
    ran = (directory / "touched").exists()
    return Seen(of_parent, of_workers, reached, planted, process.returncode, stderr, ran)


def use_the_network(patch: pytest.MonkeyPatch) -> None:
    """As somebody who has several nodes tells gloo and NCCL to."""
    if (interface := other_interface()) is not None:
        patch.setenv("GLOO_SOCKET_IFNAME", interface)
        patch.setenv("NCCL_SOCKET_IFNAME", interface)
