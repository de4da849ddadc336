"""The planner's bytes are those of the real buffers, with one and with two data-parallel ranks."""

import mmap

import pytest

from tests.helpers.footprint_worker import CASES, ENGINE_CASES, SHARED_CASES, run_cases
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment

PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module", params=[1, 2])
def results(request, tmp_path_factory):
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    log_dir = tmp_path_factory.mktemp("footprint")
    return launch(run_cases, None, nproc=request.param, log_dir=log_dir, environment=environment)


def found_in(results, case, name):
    if (case, name) not in results:
        assert case in SHARED_CASES
        pytest.skip("ranks that share the model are more than one")
    return results[case, name]


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("case", [*CASES, *SHARED_CASES])
def test_every_tensor_of_a_role_is_counted_exactly(results, case, name):
    """On every pipeline stage."""
    found = found_in(results, case, name)
    assert found["measured"] == found["predicted"]
    if case.startswith(("pp", "vpp")):
        first, last = found["measured"]
        assert first["parameter_count"] != last["parameter_count"] or "tied" in case


@pytest.mark.parametrize("engine", ["hf", "native"])
@pytest.mark.parametrize("case", ENGINE_CASES)
def test_an_engine_is_counted_exactly(results, case, engine):
    found = results[case, engine]
    assert found["measured"] == found["predicted"]


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("case", [case for case in (*CASES, *SHARED_CASES) if "buckets" not in case])
def test_regions_and_host_copies_are_those_foreseen_but_for_whole_pages(results, case, name):
    found = found_in(results, case, name)
    events, holdings = (sorted(found[key], key=lambda entry: entry[0]) for key in ("events", "holdings"))
    assert [event[:3] for event in events] == [holding[:3] for holding in holdings]  # kind, keeper, flag
    for event, holding in zip(events, holdings, strict=True):
        for measured, predicted in zip(event[3:], holding[3:], strict=True):
            assert predicted <= measured < predicted + 4 * PAGE, (event, holding)  # a buffer per dtype and chunk


def test_the_cases_with_buckets_have_several(results):
    assert results["buckets", "actor"]["buckets"] >= 3
    assert results["lean", "actor"]["buckets"] == 1
