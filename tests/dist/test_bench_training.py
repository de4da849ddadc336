"""The training benchmark: two ways to do the same work give the same numbers, and a table that compares them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.composing import config_of
from trainer.bench.training import BenchTrainingConfig, case_of, check, training_tables

SMALL = (
    *("platform=cpu", "launch.threads_per_worker=1", "model.dtype=fp32", "model.hidden_size=64", "model.ffn_size=128"),
    *("model.layers=1", "model.qkv_bias=true", "rollout.max_new_tokens=12", "rollout.max_prompt_tokens=40"),
    *("algo.prompts_per_step=16", "algo.minibatches=2", "algo.epochs=2", "algo.micro_batch_tokens=128"),
    *("task=jsonl", "task.verifier=tests.dist.test_bench_training.odd_length"),
)


def odd_length(response, example):
    """A verifier that pays a random actor for about every other response."""
    return float(len(response) % 2)


def settings(cases, steps, rooms=()):
    return BenchTrainingConfig(cases=cases, rooms_gib=list(rooms), steps=steps, case_timeout_seconds=60)


def record(*steps, peak=None):
    return {"steps": list(steps), "gpu_peak_allocated_bytes": peak}


def step(seconds, rate, mfu, wall):
    numbers = dict.fromkeys(("response_tokens", "reward", "kl", "entropy"), 1.0)
    numbers |= {f"{role}/{name}": 0.5 for role in ("actor", "critic") for name in ("loss", "grad_norm")}
    rates = {"tokens_per_second/values": rate, "mfu/values": mfu, "tokens_per_second/step": 10.0, "mfu/step": 0.1}
    return {**numbers, "seconds/values": seconds, **rates, "wall_seconds": wall}


def test_times_are_medians_without_the_first_step():
    slow = record(step(9.0, 1.0, 0.1, 9.5), *(step(s, 1000 * s, s / 10, 2 * s) for s in (1.0, 2.0, 4.0)), peak=2**31)
    plain = record(step(9.0, 1.0, 0.1, 9.5), step(0.5, 8000.0, 0.4, 0.75))
    times, numbers = training_tables({"lean": slow, "plain": plain})
    assert times.columns == ("phase", "lean s", "lean tok/s", "lean MFU", "plain s", "plain tok/s", "plain MFU")
    assert times.rows == [["values", "2.000", "2.00k", "20.0%", "0.500", "8.00k", "40.0%"]]
    assert times.totals == [["step", "4.000", "10.0", "10.0%", "0.750", "10.0", "10.0%"]]
    assert numbers.rows[0] == ("response_tokens", "1", "1")
    assert numbers.rows[-1] == ("GPU GiB at most", "2.0", "-")


def test_bars_are_those_of_what_is_resident_beside_its_peers():
    def measured(seconds, peak=None):
        return record(step(9.0, 1.0, 0.1, 9.5), step(seconds, 1.0, 0.1, 1.0), peak=peak)

    records = {"resident": measured(0.84, 2**31), "plain": measured(1.0), "plain_liger": measured(0.8, 2**31)}
    _, _, bars = training_tables(records)
    rows = {row[0]: tuple(row[1:]) for row in bars.rows}
    assert rows["values: seconds of plain"] == ("<= 0.8 x", "0.84 x", "NO")
    assert rows["values: seconds of plain_liger"] == ("<= 1.05 x", "1.05 x", "yes")
    assert rows["train_actor: seconds of plain"] == ("<= 0.8 x", "-", "-")
    assert rows["GPU memory of plain_liger"] == ("<= 1.05 x", "1.00 x", "yes")


@pytest.mark.parametrize(
    ("cases", "steps", "overrides", "message"),
    [
        (["plain"], 2, [], "the first not plain"),
        (["plain_liger", "lean"], 2, [], "the first not plain or plain_liger"),
        (["lean", "fast"], 2, [], "must be some of lean, resident, auto, plain"),
        (["lean"], 1, [], "bench.steps=1: must be at least 2"),
        (["lean"], 2, ["algo.micro_batch_tokens=auto", "launch.gpu_memory_gib=9"], "give a number of tokens"),
        (["lean"], 2, ["launch.nproc=2"], "launch.nproc=2: the plain loop has one worker"),
        (["lean"], 2, ["roles.critic.model.layers=1"], "leave roles.critic.model as the actor's"),
        (["lean"], 2, ["optimizer.lr_schedule=linear"], "use roles.actor.optimizer.lr_schedule=constant"),
    ],
)
def test_what_both_sides_cannot_do_alike_is_refused(cases, steps, overrides, message):
    with pytest.raises(ValueError, match=message):
        check(settings(cases, steps), config_of(*overrides))


def test_room_is_a_size():
    with pytest.raises(ValueError, match=r"bench\.rooms_gib=\[8\.0, -1\.0\]: must be GiB of GPU memory"):
        check(settings(["lean"], 2, [8.0, -1.0]), config_of())
    assert settings(["lean", "auto"], 2, [24.0, 0.5]).names == ["lean", "auto", "auto@24", "auto@0.5"]
    assert case_of("auto@0.5")[1] == ("offload=auto", "launch.gpu_memory_gib=0.5")


def test_seconds_that_sleeping_adds_are_those_beyond_the_step_in_which_nothing_sleeps():
    def measured(wall):
        return record(step(9.0, 1.0, 0.1, 9.5), step(1.0, 1.0, 0.1, wall))

    walls = {"lean": 3.0, "resident": 1.0, "auto": 1.01, "auto@24": 2.5, "plain": 0.5}
    times, _, bars = training_tables({name: measured(wall) for name, wall in walls.items()})
    assert times.totals[1][::3] == ["beyond resident", "-", "-", "-", "-", "-"]
    assert times.totals[1][1::3] == ["2.000", "-", "0.010", "1.500", "-"]
    rows = {row[0]: tuple(row[1:]) for row in bars.rows}
    assert rows["auto: seconds of resident's step"] == ("<= 1.02 x", "1.01 x", "yes")
    assert rows["auto@24: seconds that lean adds to a step"] == ("<= 0.5 x", "0.75 x", "NO")


def test_both_loops_do_the_same_work(tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"prompt": "{" 1 +" * (n % 8)} {n} =", "answer": "1"}}\n' for n in range(40)))
    command = [sys.executable, "-m", "trainer.bench.training", *SMALL, f"task.path={questions}"]
    command += [
        "bench.steps=2",
        *("bench.cases=[lean,resident,packed,plain]", "bench.rooms_gib=[0.0018]"),
        "rollout=hf",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "run" / "training.json").read_text())
    lean, packed, plain = (results[name]["steps"][0] for name in ("lean", "packed", "plain"))
    assert lean["reward_std"] > 0
    assert lean["actor/grad_norm"] > 0
    assert lean["critic/loss"] > 0
    assert lean["actor/ppo_kl"] != 0  # several optimizer steps in one
    varying = ("seconds/", "tokens_per_second", "wall_", "host_", "asleep_", "moved_", "moving_", "kl_coef", "actor/lr")
    varying = (*varying, "critic/lr", "sampling/", "flat_group")
    shared = {key for key in lean if not key.startswith(varying)}
    assert shared == {key for key in plain if not key.startswith(varying)}
    for key in shared:  # Adam's first steps are the signs of gradients, however small: rounding shows
        assert plain[key] == pytest.approx(lean[key], rel=2e-2, abs=1e-5), key
        assert packed[key] == pytest.approx(lean[key], rel=2e-2, abs=1e-5), key
    for key in ("reward", "entropy", "response_tokens", "advantage_std", "return_mean"):
        assert plain[key] == pytest.approx(lean[key], rel=1e-5), key
    assert plain["tokens_per_second/train_actor"] > 0
    table = (tmp_path / "run" / "training.md").read_text()
    assert "| train_actor |" in table
    assert "beyond resident" in table.partition("Seconds and rates")[0]
    moved = [[step["moved_to_host_bytes"] for step in results[name]["steps"]] for name in ("resident", "auto@0.0018")]
    assert moved[0] == [0, 0]
    assert min(moved[1]) > 5 * 10**5
    first = results["auto@0.0018"]["steps"][0]
    assert {key: first[key] for key in shared} == {key: lean[key] for key in shared}
