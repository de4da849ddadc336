"""Episodes of several turns: who says what, what is masked and paid, where limits end them, how they are credited."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.helpers.interviews import Interview, ScriptedEngine
from tests.helpers.recording import recorded
from tests.helpers.roles import (
    VOCAB_SIZE,
    credited,
    fresh_saver,
    loss_of,
    make_batch,
    make_role,
    small_config,
)
from trainer import loop, worker
from trainer.common.seeds import seed_for
from trainer.data.rewards import Payer
from trainer.measure import metrics
from trainer.measure.phases import Phases
from trainer.training import step
from trainer.training.drawing import draw
from trainer.training.episodes import Tally, play
from trainer.training.micro_batches import Split

pytestmark = pytest.mark.usefixtures("saver")
GAME = ("task=guess_number", "reward=null", "task.largest_range=12", "rollout.max_prompt_tokens=60")


def built(*overrides, max_turns=3):
    """A run whose environment is an interview."""
    fresh_saver()
    run = worker.build(small_config(*GAME, *overrides), Phases(lambda record: None, gpu=False))
    run.prompts.environment = Interview(max_turns=max_turns)
    return run


def played(run, engine, examples, **options):
    return play(run.config, run.prompts, engine, examples, **{"seed": 5, "payer": Payer.REWARD} | options)


# ---- by hand ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted():
    """Three episodes of 1, 3 and 2 turns, the last with a response that was cut off in between; and what was asked."""
    run = built()
    examples = [run.prompts.environment.train[n] for n in (0, 2, 1)]
    engine = ScriptedEngine([[[10, 2], [11, 2], [12]], [[21, 2], [22, 23, 2]], [[31, 2]]], run.prompts.tokenizer)
    return run, engine, played(run, engine, examples, numbers=[7, 8, 9])


def encoded(run, *texts):
    return [token for text in texts for token in run.prompts.tokenizer(text)["input_ids"]]


def test_what_was_said_is_the_next_prompt_as_it_was_drawn(scripted):
    run, engine, _ = scripted
    first, second, third = (call["prompts"] for call in engine.calls)
    assert first == [encoded(run, "q1"), encoded(run, "q3"), encoded(run, "q2")]
    assert second == [[*encoded(run, "q3"), 11, 2, *encoded(run, "+1")], [*encoded(run, "q2"), 12, *encoded(run, "+1")]]
    assert third == [[*second[0], 21, 2, *encoded(run, "+2")]]
    assert [call["numbers"] for call in engine.calls] == [[7, 8, 9], [8, 9], [8]]
    assert [call["seed"] for call in engine.calls] == [5, seed_for(5, "turn", step=1), seed_for(5, "turn", step=2)]


def test_masks_have_holes_where_the_environment_spoke(scripted):
    run, engine, episodes = scripted
    drawn, size = episodes.responses, len(encoded(run, "q1"))
    answer = len(encoded(run, "+1"))
    assert size == answer == 2
    whole = [*engine.calls[2]["prompts"][0], 31, 2]
    assert drawn.tokens[1].tolist() == whole
    assert drawn.response_mask.int().tolist() == [
        [0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1],
        [0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0],
    ]
    assert drawn.log_probs.tolist() == [
        [0, 0, -11, -12, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, -11, -12, 0, 0, -21, -22, 0, 0, -31, -32],
        [0, 0, -11, 0, 0, -21, -22, -23, 0, 0, 0, 0],
    ]
    assert torch.equal(drawn.drawn_log_probs, torch.where(drawn.response_mask, drawn.log_probs - 0.5, 0))
    pad = run.prompts.pad
    assert drawn.tokens[0].tolist() == [*encoded(run, "q1"), 10, 2, *[pad] * 8]
    assert drawn.tokens[2].tolist() == [*encoded(run, "q2"), 12, *encoded(run, "+1"), 22, 23, 2, *[pad] * 4]
    assert not drawn.truncated.any()
    assert drawn.texts == run.prompts.tokenizer.batch_decode([[10], [31], [22, 23]])


def test_every_turn_is_paid_on_its_last_token(scripted):
    _, _, episodes = scripted
    assert episodes.rewards == [1.0, 7.0, 3.0]
    paid = torch.zeros(3, 12)
    paid[1, 3], paid[1, 7], paid[2, 2] = 1.0, 2.0, 1.0  # the rest of each is for the last turn
    assert torch.equal(episodes.turn_rewards, paid)
    batch = episodes.batch(weights_step=4)
    assert (batch.scores.tolist(), batch.weights_step) == ([1.0, 7.0, 3.0], 4)
    assert torch.equal(batch.turn_rewards, paid[:, 1:])
    assert batch.lengths().tolist() == [4, 12, 8]
    assert episodes.tally == Tally(episodes=3, turns=6, most_turns=3, limited=0, calls=6, failures=0, timeouts=2)


def test_metrics_of_episodes_by_hand(scripted):
    found = metrics.of_episodes(scripted[2].tally + Tally(episodes=1, turns=4, most_turns=4, limited=1, failures=3))
    assert found == {
        "episode/turns": 2.5,
        "episode/turns_max": 4.0,
        "episode/limited_fraction": 0.25,
        "tools/calls": 6.0,
        "tools/failures": 3.0,
        "tools/timeouts": 2.0,
    }


def test_the_limit_of_turns_ends_an_episode_which_is_paid_so_far():
    run = built(max_turns=2)
    examples = [run.prompts.environment.train[n] for n in (3, 1)]
    engine = ScriptedEngine([[[10, 2], [11, 2]], [[20, 2], [21, 2]]], run.prompts.tokenizer)
    episodes = played(run, engine, examples)
    assert episodes.rewards == [3.0, 3.0]
    assert episodes.responses.truncated.tolist() == [True, False]
    assert (episodes.tally.limited, episodes.tally.most_turns) == (1, 2)
    assert episodes.turn_rewards.sum() == 2.0


@pytest.mark.parametrize(("limit", "turns"), [(5, 1), (6, 2), (9, 2), (10, 3)])
def test_the_limit_of_tokens_ends_an_episode(limit, turns):
    """Question, response, answer: 2 + 2 + 2 tokens before the second response, 10 before the third."""
    run = built(f"rollout.max_prompt_tokens={limit}", max_turns=8)
    engine = ScriptedEngine([[[10, 2]], [[20, 2]], [[30, 2]], [[40, 2]]], run.prompts.tokenizer)
    episodes = played(run, engine, [run.prompts.environment.train[7]])
    assert len(engine.calls) == episodes.tally.turns == turns
    assert episodes.tally.limited == 1
    assert episodes.responses.truncated.tolist() == [True]
    assert episodes.rewards == [2.0**turns - 1]
    assert episodes.responses.tokens.shape[1] <= limit + run.config.rollout.max_new_tokens


def test_a_judge_pays_for_the_whole_episode_later():
    run = built()
    engine = ScriptedEngine([[[10, 2]], [[20, 2]]], run.prompts.tokenizer)
    episodes = played(run, engine, [run.prompts.environment.train[1]], payer=Payer.JUDGE)
    assert (episodes.rewards, episodes.tally.turns) == ([0.0], 2)
    assert not episodes.turn_rewards.any()


# ---- real engines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_turn_is_what_a_fresh_call_on_the_whole_text_gives(engine, greedy):
    run = built(f"rollout={engine}", "model.dtype=fp32", "model.init_std=0.3", max_turns=4)
    examples = run.prompts.environment.train[:4]
    run.engine.sync(run.actor)
    with run.engine.awake():
        episodes = played(run, run.engine, examples, greedy=greedy, numbers=range(10, 14))
        again = played(run, run.engine, examples, greedy=greedy, numbers=range(10, 14))
        assert torch.equal(episodes.responses.tokens, again.responses.tokens)
        drawn = episodes.responses
        assert [len(starts(mask)) for mask in drawn.response_mask] == [1, 2, 3, 4]
        for turn in range(4):
            rows = range(turn, 4)  # those that have so many turns
            begins = [starts(drawn.response_mask[row])[turn] for row in rows]
            fresh = run.engine.generate(
                [drawn.tokens[row, :begin].tolist() for row, begin in zip(rows, begins, strict=True)],
                seed=seed_for(5, "turn", step=turn) if turn else 5,
                numbers=[10 + row for row in rows],
                greedy=greedy,
            )
            for place, (row, begin) in enumerate(zip(rows, begins, strict=True)):
                end = begin + int(fresh.response_mask[place].sum())
                assert drawn.response_mask[row, begin:end].all()
                assert torch.equal(fresh.tokens[place, :end], drawn.tokens[row, :end])
                assert torch.equal(fresh.log_probs[place, begin:end], drawn.log_probs[row, begin:end])


def starts(mask):
    """Columns at which responses begin."""
    return (mask & ~torch.nn.functional.pad(mask, (1, 0))[:-1]).nonzero().squeeze(1).tolist()


def test_dynamic_sampling_replaces_flat_groups_of_episodes():
    """Interviews pay all alike, so that every group is flat; the tally counts all rounds."""
    run = built("algo.dynamic_sampling_rounds=2", "algo.prompts_per_step=4", max_turns=3)
    drawn = draw(run.config, run.prompts, run.engine, step=1, is_judged=False)
    assert (drawn.rounds, drawn.flat_groups, drawn.tally.episodes) == (3, 12, 24)
    assert len(drawn.batch) == 8
    assert drawn.tally.calls == drawn.tally.turns


def test_a_run_of_games_reports_its_turns_and_evaluates_them():
    outputs, records = recorded()
    fresh_saver()
    run = worker.build(
        small_config(*GAME, "algo.evaluation_samples=2", "algo.warmup_steps=30", "algo.warmup_lr=5e-3"),
        Phases(lambda record: None, gpu=False),
    )
    loop.train(run, outputs)
    first, *steps = records
    assert 0 <= first["heldout_accuracy"] <= first["heldout_pass@2"] + 1
    for record in steps:
        assert 1 < record["episode/turns"] <= record["episode/turns_max"] <= 5
        assert 0 <= record["episode/limited_fraction"] < 1
        assert record["truncated_fraction"] >= record["episode/limited_fraction"]
        assert record["tools/calls"] == 0
        assert record["rollout_log_prob_gap"] < 0.05
    assert any(record["reward"] > 0 for record in steps)
    page = (Path(__file__).parents[2] / "docs" / "records.md").read_text()
    assert [key for key in steps[0] if key.startswith(("episode/", "tools/")) and f"`{key}`" not in page] == []


# ---- credit ----------------------------------------------------------------------------------------------------------

PLAIN = ("algo.whiten_advantages=false", "algo.centre_scores=false")


def with_holes(mask, *, scores, turn_rewards):
    """A batch of 1 + len(mask) columns with this response mask."""
    batch = make_batch([len(row) - 1 for row in mask], prompt=1)
    mask = torch.tensor(mask, dtype=torch.bool)
    return dataclasses.replace(
        batch,
        tokens=batch.tokens[:, : mask.shape[1] + 1],
        response_mask=mask,
        scores=torch.tensor(scores),
        turn_rewards=torch.tensor(turn_rewards),
        **{
            name: tensor[:, : mask.shape[1]].where(mask, 0.0)
            for name, tensor in batch.tensors().items()
            if tensor.dim() == 2 and name not in ("tokens", "response_mask", "turn_rewards")
        },
    )


def test_advantages_of_turns_by_hand():
    """Two turns, paid 1 and 2: response tokens at columns 0, 1 and 4; gamma 0.5, lambda 1, V 0.5, 1 and 3.

    Returns are discounted by response tokens: 2; 1 + 0.5 * 2 = 2; 0.5 * 2 = 1. Less V: -1, 1, 0.5.
    """
    batch = with_holes([[1, 1, 0, 0, 1, 0]], scores=[3.0], turn_rewards=[[0.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    values = torch.tensor([[0.5, 1.0, 7.0, 8.0, 3.0, 9.0, 9.0]])
    found = credited(batch, values, *PLAIN, "advantages.gamma=0.5", "advantages.lam=1")
    assert found.returns.tolist() == [[1.0, 2.0, 0.0, 0.0, 2.0, 0.0]]
    assert found.advantages.tolist() == [[0.5, 1.0, 0.0, 0.0, -1.0, 0.0]]


def test_rewards_to_go_and_group_advantages_by_hand():
    """REINFORCE++ sees single turns, GRPO whole episodes: of scores 3 and 1, 1 and -1 over their deviation sqrt(2)."""
    batch = with_holes([[1, 0, 1, 0], [1, 0, 0, 0]], scores=[3.0, 1.0], turn_rewards=[[1.0, 0.0, 0.0, 0.0], [0.0] * 4])
    found = credited(batch, None, "algo=reinforce_pp", *PLAIN, "advantages.gamma=0.5")
    assert found.advantages.tolist() == [[2.0, 0.0, 2.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    found = credited(batch, None, "algo=grpo", *PLAIN)
    expected = torch.tensor([[1.0, 0.0, 1.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]) / 2**0.5
    torch.testing.assert_close(found.advantages, expected)


def test_clipping_and_centring_are_of_the_whole_score():
    batch = with_holes([[1, 0, 1, 0], [1, 0, 0, 0]], scores=[3.0, 1.0], turn_rewards=[[1.0, 0.0, 0.0, 0.0], [0.0] * 4])
    how = ("algo=reinforce_pp", "algo.whiten_advantages=false", "advantages.gamma=1")
    clipped = credited(batch, None, *how, "algo.reward_clip=2")
    assert clipped.advantages.tolist() == [[2.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    centred = credited(batch, None, *how, "algo.centre_scores=true")
    assert centred.advantages.tolist() == [[1.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "split", [Split(1), Split(1, 32), Split(1, 32, break_even=50.0)], ids=["1", "tokens", "packed"]
)
def test_no_split_changes_log_probs_or_losses_of_masks_with_holes(split):
    mask = [[1, 1, 0, 0, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]]
    batch = with_holes(mask, scores=[1.0] * 4, turn_rewards=[[0.0] * 8] * 4)
    role = make_role("actor", "model.dtype=fp32", "roles.actor.optimizer.lr=0")
    found = {}
    for name, how in (("whole", Split(4)), ("split", split)):
        found[name] = step.log_probs(role, batch, temperature=1.0, vocab_size=VOCAB_SIZE, split=how)[0]
        assert not found[name][~batch.response_mask].any()
        found[f"{name} loss"] = torch.tensor(
            step.train_minibatch(role, batch, loss_of(role), split=how)["loss_sum"] / batch.response_mask.sum()
        )
    torch.testing.assert_close(found["split"], found["whole"], atol=1e-5, rtol=0)
    torch.testing.assert_close(found["split loss"], found["whole loss"])
