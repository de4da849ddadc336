"""Launchers that cannot meet say so in one line, soon, and without torch's C++ frames."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from tests.helpers import launch_targets
from tests.helpers.processes import free_port
from trainer.command import rendezvous
from trainer.command.launch import WorkerError, launch
from trainer.command.nodes import Nodes

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def meet(nodes: Nodes) -> rendezvous._Rendezvous:
    settings = rendezvous.settings(nodes)
    return rendezvous._Rendezvous(
        RendezvousParameters("torpor", "", settings["run_id"], nodes.count, nodes.count, **settings["rdzv_configs"])
    )


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    monkeypatch.setattr(rendezvous, "SECONDS_TO_MEET", 1)
    monkeypatch.setattr(rendezvous, "_SECONDS_TO_REACH_ONESELF", 1)
    monkeypatch.setattr(rendezvous, "_SECONDS_OF_SILENCE", 0.2)


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_port_that_somebody_has(host, tmp_path, capfd):
    with socket.create_server((host, 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WorkerError) as caught:
            launch(
                launch_targets.describe_start,
                {},
                nproc=1,
                log_dir=tmp_path,
                environment=ENVIRONMENT,
                nodes=Nodes(2, 0, endpoint),
            )
    assert str(caught.value) == (
        f"the launchers of this job did not meet at {endpoint}: cannot listen there: Address already in use: give all "
        "nodes another free port of node 0 in launch.rdzv_endpoint"
    )
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("host", "reason"), [("127.0.0.1", "Connection refused"), ("nowhere.invalid", "Name or service not known")]
)
def test_a_node_0_that_is_not_there(host, reason, capfd):
    port = free_port()
    with pytest.raises(rendezvous.MeetingError) as caught:
        meet(Nodes(2, 1, f"{host}:{port}"))
    what = f"an answer of node 0 at {host}:{port} ({reason})"
    assert str(caught.value) == f"node 1 waited 1 s for {what}: launch.rdzv_endpoint must name the host of node 0"
    assert capfd.readouterr().err == f"node 1 waits for {what}\n"


def test_an_endpoint_on_another_host_than_node_0():
    message = r"^node 0 waited 1 s for an answer of node 0 at nowhere\.invalid:\d+ \(.*\): launch.rdzv_endpoint must"
    with pytest.raises(rendezvous.MeetingError, match=message):
        meet(Nodes(2, 0, f"nowhere.invalid:{free_port()}"))


def test_nodes_that_do_not_come_are_named(capfd):
    with pytest.raises(rendezvous.MeetingError, match=r"^node 0 waited 1 s for node 1, 2 of 3$"):
        meet(Nodes(3, 0, f"127.0.0.1:{free_port()}"))
    assert capfd.readouterr().err == "node 0 waits for node 1, 2 of 3\n"


def test_two_nodes_share_one_store():
    endpoint = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as threads:
        handlers = threads.map(meet, [Nodes(2, 1, endpoint), Nodes(2, 0, endpoint)])
    second, first = (handler.next_rendezvous() for handler in handlers)
    first.store.set("key", "value")
    assert second.store.get("key") == b"value"
    assert [(info.rank, info.world_size) for info in (first, second)] == [(0, 2), (1, 2)]


def test_one_node_has_a_store_of_its_own():
    first, second = meet(Nodes()).next_rendezvous(), meet(Nodes()).next_rendezvous()
    ports = {info.bootstrap_store_info.master_port for info in (first, second)}
    assert len(ports) == 2
    assert TCPStore("127.0.0.1", ports.pop(), is_master=False).num_keys() >= 0


def test_a_host_without_loopback_is_refused(monkeypatch):
    monkeypatch.setattr(rendezvous.psutil, "net_if_addrs", dict)
    with pytest.raises(ValueError, match=r"no network interface of this host has the address 127\.0\.0\.1"):
        rendezvous.loopback_environment()
