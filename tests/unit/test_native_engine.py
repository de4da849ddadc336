"""rollout=native: what a response may depend on, how rows and pages are shared out, and what cannot be decoded."""

import dataclasses
from collections import Counter

import pytest
import torch

from tests.helpers.engines import EOS, MODEL, ROLLOUT, VOCABULARY, Native, chain_weights, random_weights
from tests.helpers.megatron_world import one_rank_world
from tests.helpers.roles import make_role
from trainer.memory.saver import NullSaver, make_saver
from trainer.rollout.native.cache import KvCache, cache_of
from trainer.rollout.native.engine import NativeEngine
from trainer.rollout.native.experts import Experts
from trainer.rollout.native.sampling import Sampling, draw, uniforms
from trainer.rollout.native.scheduler import Scheduler

PROMPTS = [[10 + i, *range(20, 20 + 9 * (i % 5))] for i in range(7)] + [[5, 6, 7]] * 3
LONG = {"max_prompt_tokens": 40, "max_new_tokens": 12}


@pytest.fixture
def make_engine(tokenizer):
    with one_rank_world():

        def make(*, model=MODEL, rows=None, saver=None, **rollout):
            settings = dataclasses.replace(ROLLOUT, engine="native", **rollout)
            engine = Native(
                dataclasses.replace(model, max_length=64),
                settings,
                tokenizer=tokenizer,
                saver=saver or NullSaver(),
                observer=lambda record: None,
                rows=rows,
            )
            engine.wake_up(random_weights(engine).items())
            return engine

        yield make


def rows_of(responses):
    return [row[mask].tolist() for row, mask in zip(responses.tokens, responses.response_mask, strict=True)]


# ---- what a response may depend on -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_tokens_do_not_depend_on_how_many_rows_are_decoded_at_once(make_engine, rows):
    """With few slots rows enter and leave all the time, and pages are used again."""
    limits = [1, 12, 5, 2, 12, 7, 3, 12, 1, 4]
    expected = make_engine(**LONG).generate(PROMPTS, seed=4, limits=limits)
    assert len({len(row) for row in rows_of(expected)}) > 4
    found = make_engine(rows=rows, **LONG).generate(PROMPTS, seed=4, limits=limits)
    assert rows_of(found) == rows_of(expected)
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=0)


def test_draws_belong_to_the_number_of_a_response(make_engine):
    engine = make_engine(**LONG)
    whole = rows_of(engine.generate(PROMPTS, seed=4))
    assert len({tuple(row) for row in whole[-3:]}) == 3  # equal prompts
    for first, count in ((0, 4), (4, 6)):
        numbers = range(first, first + count)
        part = engine.generate(PROMPTS[first : first + count], seed=4, numbers=numbers)
        assert rows_of(part) == whole[first : first + count]
    backwards = engine.generate(PROMPTS[::-1], seed=4, numbers=range(len(PROMPTS))[::-1])
    assert rows_of(backwards)[::-1] == whole


@pytest.mark.parametrize("change", [{}, {"num_experts": 4, "num_experts_per_tok": 2}, {"dtype": "bf16"}])
def test_bits_do_not_depend_on_other_rows_where_that_is_asked_for(make_engine, change):
    engine = make_engine(model=dataclasses.replace(MODEL, **change), batch_invariant=True, **LONG)
    whole = engine.generate(PROMPTS, seed=4)
    for index in (0, 4, 8):
        alone = engine.generate([PROMPTS[index]], seed=4, numbers=[index])
        length = int(alone.response_mask.sum()) + len(PROMPTS[index])
        assert torch.equal(alone.tokens[0, :length], whole.tokens[index, :length])
        assert torch.equal(alone.log_probs[0, :length], whole.log_probs[index, :length])


def test_limits_end_responses(make_engine):
    engine = make_engine(**LONG)
    limits = [1, 2, 3, 12, 12, 5, 4, 3, 2, 1]
    lengths = [len(row) for row in rows_of(engine.generate(PROMPTS, seed=4, limits=limits))]
    assert all(length <= limit for length, limit in zip(lengths, limits, strict=True))
    assert lengths[:3] == [1, 2, 3]


def test_log_probs_under_the_distribution_that_tokens_are_drawn_from(make_engine):
    """Of probabilities 9, 4, 2, 1 (sixteenths) top-p 0.7 keeps 9 and 4."""
    engine = make_engine(top_p=0.7, max_new_tokens=1)
    shares = {60: 9 / 16, 61: 4 / 16, 62: 2 / 16, 63: 1 / 16}
    logits = {token: 60 + torch.tensor(share).log().item() for token, share in shares.items()}
    engine.wake_up(chain_weights(engine, {50: logits}).items())
    found = engine.generate([[50]] * 50, seed=1)
    for token, of_all, of_kept in ((60, 9 / 16, 9 / 13), (61, 4 / 16, 4 / 13)):
        drawn = found.tokens[:, 1] == token
        assert drawn.any()
        assert found.log_probs[:, 1][drawn].exp().tolist() == pytest.approx([of_all] * int(drawn.sum()), rel=1e-4)
        kept = found.drawn_log_probs[:, 1][drawn].exp()
        assert kept.tolist() == pytest.approx([of_kept] * int(drawn.sum()), rel=1e-4)


# ---- sampling --------------------------------------------------------------------------------------------------------


def test_uniform_numbers_are_splitmix64():
    """Its published first output for the state 0 is 0xE220A8397B1DCDAF."""
    from trainer.rollout.native.sampling import _GOLDEN, _mixed

    assert _mixed(torch.tensor(_GOLDEN)).item() % 2**64 == 0xE220A8397B1DCDAF
    found = uniforms(3, torch.arange(200), columns=500)
    assert found.min() >= 0
    assert found.max() < 1
    assert found.mean().item() == pytest.approx(0.5, abs=0.005)
    assert len(found.unique()) > 0.99 * found.numel()
    assert torch.equal(uniforms(3, torch.tensor([7]), columns=9)[0], found[7, :9])
    assert not torch.equal(uniforms(4, torch.tensor([7]), columns=9)[0], found[7, :9])


@pytest.mark.parametrize("vocabulary", [5, 256, 1000])
def test_every_token_is_drawn_as_often_as_it_is_probable(vocabulary):
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * 2
    logits[3] = -torch.inf
    grid = (torch.arange(20_000) + 0.5) / 20_000
    drawn = draw(logits.expand(len(grid), -1), grid, Sampling(1.0, 0, 1.0, 0.0, greedy=False))
    counts = torch.bincount(drawn.tokens, minlength=vocabulary) / len(grid)
    torch.testing.assert_close(counts, logits.softmax(-1), atol=2e-4, rtol=0)
    assert counts[3] == 0
    torch.testing.assert_close(drawn.log_probs, logits.log_softmax(-1)[drawn.tokens])


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_the_ends_of_the_interval_draw_tokens_that_are_possible(uniform):
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [7, 300]] = torch.tensor([1.0, 2.0])
    drawn = draw(logits, torch.tensor([uniform]), Sampling(0.7, 0, 1.0, 0.0, greedy=False))
    assert drawn.tokens.item() == (7 if uniform == 0 else 300)


# ---- rows and pages --------------------------------------------------------------------------------------------------

CACHE = KvCache(rows=4, row_tokens=24, response_tokens=8, page_tokens=4, pages=1 + 20, token_bytes=8, table_bytes=0)


def test_a_group_enters_together_and_shares_the_full_pages_of_its_prompt():
    scheduler = Scheduler.of([range(10)] * 3, [0, 1, 2], [8] * 3, cache=CACHE)
    prompts, entries = scheduler.enter(most_tokens=100)
    assert [list(prompt) for prompt in prompts] == [list(range(10))]
    assert len({entry.slot for entry in entries}) == 3
    pages = [entry.pages for entry in entries]
    assert pages[0][:2] == pages[1][:2] == pages[2][:2]  # 8 of 10 tokens
    own = [page for row in pages for page in row[2:]]
    assert len(own) == len(set(own)) == 3 * 3  # 2 tokens of the prompt and 8 new ones
    assert 0 not in {*own, *pages[0]}
    assert len(scheduler._free_pages) == 20 - 2 - 9
    scheduler.leave([entries[0].slot])
    assert len(scheduler._free_pages) == 20 - 2 - 6  # two rows still read the prompt
    scheduler.leave([entry.slot for entry in entries[1:]])
    assert sorted(scheduler._free_pages) == list(range(1, 21))
    assert sorted(scheduler._free_slots) == [0, 1, 2, 3]


def test_rows_wait_for_slots_and_for_pages():
    prompts = [[index] * 16 for index in range(6)]
    scheduler = Scheduler.of(prompts, range(6), [8] * 6, cache=CACHE)
    computed, entries = scheduler.enter(most_tokens=100)
    assert len(computed) == 3  # 6 of 20 pages each
    assert scheduler.enter(most_tokens=100) == ([], [])
    scheduler.leave([entries[1].slot])
    computed, _ = scheduler.enter(most_tokens=100)
    assert [prompt[0] for prompt in computed] == [3]


def test_a_pass_takes_no_more_tokens_than_it_may_but_always_one_prompt():
    scheduler = Scheduler.of([[1] * 6, [2] * 6, [3] * 6], range(3), [8] * 3, cache=CACHE)
    assert [len(scheduler.enter(most_tokens=most)[0]) for most in (4, 12)] == [1, 2]


def test_a_group_that_is_larger_than_the_cache_enters_in_parts():
    scheduler = Scheduler.of([[1, 2]] * 9, range(9), [8] * 9, cache=CACHE)
    assert [len(group.requests) for group in scheduler.waiting] == [4, 4, 1]


def test_a_cache_too_small_for_one_row_is_refused():
    """One token of 2 layers, 2 heads of 16, keys and values, fp32, takes 512 bytes; 4 pages of 16 tokens are a row."""
    settings = {"row_tokens": 52, "response_tokens": 12, "rows": 9, "page_tokens": 16}
    assert cache_of(MODEL, **settings, cache_bytes=5 * 16 * 512).rows == 1
    assert cache_of(MODEL, **settings, cache_bytes=10 * 16 * 512).rows == 2
    assert cache_of(MODEL, **settings).rows == 9
    with pytest.raises(ValueError, match=r"holds 48 tokens, and one row .* = 52 needs .* raise rollout\.kv_cache_gib"):
        cache_of(MODEL, **settings, cache_bytes=4 * 16 * 512)


# ---- what cannot be decoded, and sleep -------------------------------------------------------------------------------


def test_nan_names_the_prompt(make_engine):
    engine = make_engine()
    engine.wake_up(random_weights(engine).items())
    with torch.no_grad():
        engine._actor.model.tensors()["embedding.word_embeddings.weight"][201] = torch.nan
    with pytest.raises(RuntimeError, match=r"response 1 are NaN .* \[40, 201, 41\]"):
        engine.generate([[10, 11], [40, 201, 41], [12]], seed=1)
    engine.wake_up(random_weights(engine).items())
    assert len(engine.generate([[10, 11]], seed=1).texts) == 1  # nothing of it is left


def test_all_rows_may_end_at_once(make_engine):
    engine = make_engine()
    engine.wake_up(chain_weights(engine, {50: {EOS: 50}}).items())
    responses = engine.generate([[50]] * 5, seed=1)
    assert rows_of(responses) == [[EOS]] * 5
    assert not responses.truncated.any()


def test_the_actor_is_awake_with_its_own_weights_and_only_inside(tokenizer):
    records = []
    with one_rank_world():
        role = make_role("actor", "memory=lean", vocab_size=VOCABULARY, events=records)
        role.copy_to_tag("ref")
        model, settings = role.config.model, dataclasses.replace(ROLLOUT, engine="native")
        cache = cache_of(model, row_tokens=13, response_tokens=6, rows=2, page_tokens=16)
        saver = make_saver(role_config())
        engine = NativeEngine(
            role, model, settings, cache=cache, tokenizer=tokenizer, saver=saver, observer=records.append
        )
        engine.sleep()
        role.sleep()
        with engine.awake():
            first = engine.generate([[10, 11]], seed=1)
            assert role.active_tag == "actor"
        assert role.active_tag is None
        with pytest.raises(RuntimeError, match="asleep"):
            engine.wake_up()
        role.wake_up(kinds={"param"}, tag="ref")
        with pytest.raises(RuntimeError, match="holds the weights of 'ref'"):
            engine.wake_up()
        role.sleep()
        with engine.awake():
            assert torch.equal(engine.generate([[10, 11]], seed=1).log_probs, first.log_probs)
    of_engine = [(r["kind"], r["state"]) for r in records if r["role"] == "engine"]
    assert Counter(of_engine) == {("kv", "asleep"): 3, ("kv", "awake"): 2}
    assert all(r["keeper"] == "none" and not r["backup_bytes"] for r in records if r["role"] == "engine")


def role_config():
    from tests.helpers.roles import small_config

    return small_config("memory=lean")


def test_experts_that_lie_in_megatrons_buffer_are_one_product():
    """Every expert on every token, weighed with the router's weights: the same as each expert on its own tokens."""
    with one_rank_world():
        role = make_role("actor", "offload=none", "model.num_experts=4", "model.num_experts_per_tok=2")
        layer = role.model.chunks[0].module.decoder.layers[0].mlp
        experts = Experts(layer, dtype=torch.bfloat16)
        assert experts._fc1 is not None
        assert experts._fc2 is not None
        assert experts._fc1[0].shape == (4, 256, 64)
        assert experts._fc1[0].data_ptr() >= role.model.chunks[0].buffers[0].param_data.data_ptr()
        tokens = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        with torch.no_grad():
            one, other = (experts(tokens, has_fixed_shapes=fixed) for fixed in (True, False))
    assert one.float().std() > 1e-4
    torch.testing.assert_close(one, other, atol=1e-4, rtol=0.02)
