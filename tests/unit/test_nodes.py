"""Which node this is: from the config, or from what Slurm says."""

import dataclasses

import pytest

from tests.helpers.composing import SMALL, config_of, footprint_of
from trainer.command.nodes import Nodes, find_nodes, first_host
from trainer.megatron.node_settings import differences

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-09,12]-ib,login1",
}


def test_one_node_needs_nothing_and_asks_nobody():
    assert find_nodes(config_of(*SMALL).launch, SLURM) == Nodes(1, 0, None)


def test_the_config_says_which_node_this_is():
    launch = config_of(*SMALL, "launch.nnodes=2", "launch.node_rank=1", "launch.rdzv_endpoint=10.0.0.1:29500").launch
    assert find_nodes(launch, {}) == Nodes(2, 1, "10.0.0.1:29500")
    assert find_nodes(launch, SLURM | {"SLURM_NODEID": "0"}) == Nodes(2, 1, "10.0.0.1:29500")


def test_slurm_says_what_the_config_leaves_open():
    launch = config_of(*SMALL, "launch.nnodes=2").launch
    assert find_nodes(launch, SLURM) == Nodes(2, 1, f"gpu07-ib:{15_000 + 16 * 4711 % 15_000}")
    named = dataclasses.replace(launch, rdzv_endpoint="head:1234")
    assert find_nodes(named, SLURM) == Nodes(2, 1, "head:1234")


def test_a_restart_meets_at_the_next_port():
    assert Nodes(2, 1, "head:1234").at_restart(2) == Nodes(2, 1, "head:1236")
    assert Nodes().at_restart(1) == Nodes()


def test_slurm_with_another_number_of_nodes_is_refused():
    launch = config_of(*SMALL, "algo.prompts_per_step=12", "algo.warmup_batch_size=9", "launch.nnodes=3").launch
    with pytest.raises(ValueError, match=r"launch\.nnodes=3, but Slurm's job 4711 has 2 nodes: use launch\.nnodes=2"):
        find_nodes(launch, SLURM)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ((), "launch.node_rank and launch.rdzv_endpoint"),
        (("launch.node_rank=0",), "launch.rdzv_endpoint"),
        (("launch.rdzv_endpoint=a:1",), "launch.node_rank"),
    ],
)
def test_outside_of_slurm_the_config_must_say_it(given, missing):
    launch = config_of(*SMALL, "launch.nnodes=2", *given).launch
    with pytest.raises(ValueError, match=rf"launch\.nnodes=2 without {missing}: outside of Slurm give .*<0 to 1>"):
        find_nodes(launch, {})


@pytest.mark.parametrize(
    ("node_list", "host"),
    [("a", "a"), ("a1,a2", "a1"), ("n[3]", "n3"), ("n[03-11],m1", "n03"), ("r[1,4]c[2-3]-x", "r1c2-x")],
)
def test_the_first_host_of_a_node_list(node_list, host):
    assert first_host(node_list) == host


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("launch.nnodes=2", "launch.node_rank=2"),
            r"node_rank=2 with launch\.nnodes=2: must be between 0 and 1",
        ),
        (("launch.node_rank=-1",), r"launch\.node_rank=-1: must be between 0 and"),
        (("launch.nnodes=0",), r"launch\.nnodes=0: must be between 1 and"),
        (("launch.rdzv_endpoint=host:65536",), r"launch\.rdzv_endpoint=host:65536 .*: a restart uses the next port"),
        (("launch.rdzv_endpoint=host:65530", "launch.max_restarts=6"), r"host:65530 with launch\.max_restarts=6"),
        (("launch.rdzv_endpoint=somewhere",), r"launch\.rdzv_endpoint=somewhere: must be <host of node 0>:<free port"),
        (
            ("launch.nnodes=2", "algo.prompts_per_step=9"),
            r"algo\.prompts_per_step=9 is no multiple of the data-parallel size 2 \(launch\.nnodes \* launch\.nproc",
        ),
        (("launch.max_restarts=-1",), r"launch\.max_restarts=-1: must be between 0 and"),
    ],
)
def test_what_can_never_run_is_refused_when_it_is_composed(overrides, message):
    with pytest.raises(ValueError, match=message):
        config_of(*SMALL, *overrides)


def test_the_plan_of_a_node_has_the_nodes_share_of_the_ranks():
    """Two nodes with two workers each: the optimizer state is split by four, and a node holds two of the shares."""
    small = (*SMALL, "algo.micro_batch_size=2")
    one = footprint_of(config_of(*small, "launch.nproc=4"), vocab_size=320)
    two = footprint_of(config_of(*small, "launch.nproc=2", "launch.nnodes=2"), vocab_size=320)
    assert (one.ranks, two.ranks) == (4, 2)
    assert one.holdings == two.holdings
    assert two.node_host_peak_bytes * 2 == one.node_host_peak_bytes


def test_what_nodes_have_different_is_named_with_who_has_it():
    same = {"seed": 1, "model.path": None, "offload.train": True}
    assert differences({0: same, 1: dict(same)}) == []
    second, third, fourth = same | {"seed": 2, "model.path": "m"}, same | {"seed": 2}, same | {"x": 1}
    assert differences({2: third, 0: same, 1: second, 3: fourth}) == [
        "seed=1 on nodes 0 and 3, seed=2 on nodes 1 and 2",
        "model.path=null on nodes 0, 2 and 3, model.path=m on node 1",
        "no x on nodes 0, 1 and 2, x=1 on node 3",
    ]
