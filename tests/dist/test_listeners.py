"""Who can reach a run: on one node this host alone; and what a stranger leaves in the store does nothing."""

import socket

import pytest

from tests.helpers.commands import SHORT, start
from tests.helpers.network import Seen, answers, look_at, other_addresses, plant, use_the_network, wait_for_a_step
from tests.helpers.processes import free_port

LONG = (*SHORT, "algo.num_steps=40")


@pytest.fixture(scope="module")
def one_node(tmp_path_factory) -> Seen:
    directory = tmp_path_factory.mktemp("one_node")
    with pytest.MonkeyPatch.context() as patch:
        use_the_network(patch)
        process = start(directory, *LONG, "launch.nproc=2", "hydra.run.dir=run")
    return look_at(process, directory)


def test_one_node_listens_to_itself_alone(one_node):
    """The store of torch elastic in the parent, and gloo in both workers."""
    assert len(one_node.of_parent) == 1
    assert len(one_node.of_workers) == 2
    for group in (one_node.of_parent, *one_node.of_workers):
        assert group
        assert {address for address, _ in group} <= {"127.0.0.1", "::1"}
    assert one_node.reached == []


def test_a_value_that_a_stranger_planted_neither_runs_nor_ends_the_job(one_node):
    assert len(one_node.planted) > 5
    assert not one_node.stranger_ran
    assert one_node.code == 0, one_node.stderr


def test_nor_does_it_with_several_nodes(tmp_path):
    """Whose store has to listen on the network."""
    port = free_port()
    two = ("launch.nnodes=2", f"launch.rdzv_endpoint=127.0.0.1:{port}", "hydra.run.dir=two")
    nodes = [start(tmp_path, *LONG, *two, f"launch.node_rank={rank}") for rank in (0, 1)]
    wait_for_a_step(nodes[0], tmp_path / "two")
    assert plant(port, tmp_path / "touched")
    assert [node.poll() for node in nodes] == [None, None]
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert not (tmp_path / "touched").exists()


def test_a_socket_of_every_address_would_have_been_reached():
    with socket.create_server(("", 0)) as server:
        assert all(answers(address, server.getsockname()[1]) for address in other_addresses())
