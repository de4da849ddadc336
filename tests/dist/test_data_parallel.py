"""Two data-parallel ranks compute what one computes, and hold the same weights at every moment."""

import pytest
import torch

from tests.helpers.data_parallel_worker import run_checks
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Number of ranks -> what rank 0 returned."""
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    log_dir = tmp_path_factory.mktemp("data_parallel")
    return {
        ranks: launch(run_checks, None, nproc=ranks, log_dir=log_dir / str(ranks), environment=environment)
        for ranks in (1, 2)
    }


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "fixed_length"])
def test_lengths_of_1_to_200_give_the_same_gradients_however_they_are_split(results, name, mode):
    expected_sums, expected = results[1]["gradients_of_uneven_lengths"][name, mode, 4]
    assert expected_sums["loss_count"] == {"token_mean": 254}.get(mode, 4)
    for ranks in (1, 2):
        for split in (*(1, 2, 4)[: 4 // ranks], "by_length", "packed"):
            sums, actual = results[ranks]["gradients_of_uneven_lengths"][name, mode, split]
            assert sums == pytest.approx(expected_sums, rel=1e-4, abs=1e-5)
            for left, right in zip(actual, expected, strict=True):
                assert right.abs().max() > 0
                torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6 * right.abs().max().item())


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_run_equally_many_micro_batches_by_length_and_start_at_ratio_one(results, ranks):
    found = results[ranks]["by_length_with_overlap"]
    # Padded lengths of the rows that train: 8, 8, 56, 208 on one rank; 8, 8 and 8, 16 on two.
    assert found["counts"] == {1: [2], 2: [1, 1]}[ranks]
    assert found["ppo_kl"] == 0.0
    assert found["grad_norm"] > 0


def test_sequences_change_ranks_within_their_minibatch_and_come_back(results):
    one, two = (results[ranks]["sequences_that_change_ranks"] for ranks in (1, 2))
    assert one["after"] == one["before"]
    # Three tokens of prompt more. One rank has 183, 203, 6, 5 and the other 93, 4, 10, 7; the first halves train first.
    assert two["before"] == [[183, 203, 6, 5], [93, 4, 10, 7]]
    assert two["after"] == [[203, 4, 5, 10], [183, 93, 6, 7]]
    assert one["is_back"] == [True]
    assert two["is_back"] == [True, True]
    assert [*two["log_probs"][0], *two["log_probs"][1]] == pytest.approx(one["log_probs"][0], rel=1e-5)


@pytest.mark.parametrize("case", ["even", "rank_without_tokens"])
def test_metrics_of_the_first_step_do_not_depend_on_the_number_of_ranks(results, case):
    one, two = (results[ranks]["metrics_of_one_step"][case] for ranks in (1, 2))
    assert one["actor/ppo_kl_first"] == two["actor/ppo_kl_first"] == 0.0
    assert one["trained_advantage_std"] == pytest.approx(1.0)
    assert one["actor/grad_norm"] > 0
    assert two == pytest.approx(one, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("algo", ["grpo", "rloo", "reinforce_pp"])
def test_advantages_without_a_critic_do_not_depend_on_the_number_of_ranks(results, algo):
    one, two = (results[ranks]["advantages_without_a_critic"][algo] for ranks in (1, 2))
    torch.testing.assert_close(two, one)
    assert one[0].abs().sum() > 0
    assert not one[2].any()  # empty
    assert one[3].any() == (algo == "reinforce_pp")  # alone in its group


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_holds_the_same_weights_after_load_wake_up_and_step(results, ranks):
    histories = results[ranks]["weights_after_every_change"]
    for (policy, name), history in histories.items():
        built, loaded, trained, woken, trained_again = history
        assert woken == trained, (policy, name)
        assert len({built, loaded, trained, trained_again}) == 4, (policy, name)
        assert history == histories["full", name], (policy, name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_gathered_in_several_buckets_survive_sleep(results, ranks):
    cases = results[ranks]["overlap_in_several_buckets"]
    assert cases["plain"][0] == [1]
    for case in (
        "overlap",
        "overlap_lean",
        "overlap_rebuild",
        "overlap_sharded",
        "overlap_node",
        "overlap_rebuild_reversed",
    ):
        (buckets,), losses, weights = cases[case]
        assert buckets >= 3
        assert losses == cases["plain"][1], case
        assert weights == cases["plain"][2], case


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tags", ["sharded", "node"])
def test_a_shared_tag_answers_as_a_whole_one_and_takes_a_rank_its_share_of_memory(results, ranks, tags):
    (whole, whole_bytes), (shared, shared_bytes) = (results[ranks]["shared_tags"][each] for each in ("full", tags))
    assert whole.keys() == shared.keys() == {"actor", "ref", "half", "half again"}
    for tag in whole:
        assert list(shared[tag]) == list(whole[tag])
        for name, tensor in whole[tag].items():
            assert torch.equal(shared[tag][name], tensor), (tag, name)
            assert (shared[tag][name].shape, shared[tag][name].dtype) == (tensor.shape, tensor.dtype)
        on_ranks = [found[tag] for found in shared_bytes]
        if ranks == 1:
            assert on_ranks == [whole_bytes[0][tag]]
        assert sum(on_ranks) == pytest.approx(whole_bytes[0][tag], rel=0.05)
        assert max(on_ranks) < 0.6 * whole_bytes[0][tag] or ranks == 1
