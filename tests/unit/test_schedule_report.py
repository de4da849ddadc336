"""How a schedule is shown: states and copies by phase, what a step copies beside what was measured, and the figure."""

import pytest

from tests.helpers.composing import SMALL, config_of
from trainer.plan import make_plan
from trainer.plan.schedule_rows import default_rates, predicted_seconds, schedule_rows
from trainer.plan.step_schedule import make_schedule
from trainer.report.schedule import draw_schedule, moves_table, schedule_table
from trainer.rollout.engines import planned_bytes

MIB = 2**20


@pytest.fixture(scope="module")
def scheduled():
    config = config_of(*SMALL, "offload=auto")
    engine = planned_bytes(config, vocab_size=320)
    return make_plan(config), make_schedule(config, vocab_size=320, engine=engine, room=2 * MIB)


def test_the_table_has_every_region_and_phase_and_what_is_copied(scheduled):
    table = schedule_table(schedule_rows(scheduled[1]))
    assert list(table.columns[2:]) == [phase.name for phase in scheduled[1].phases]
    cells = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert cells.keys() == {region.name for region in scheduled[1].regions}
    size = cells["actor/optim"]["size"]
    assert cells["actor/optim"]["rollout"] == f"goes out {size}+"
    assert cells["actor/optim"]["train_actor"] == f"used in {size}*"
    assert cells["critic/grad"]["rollout"] == "asleep"
    assert "room: 2.00 MiB" in table.title
    awake = dict(zip(table.columns, table.totals[0], strict=True))
    assert float(awake["train_actor"]) == pytest.approx(scheduled[1].awake_bytes("train_actor") / MIB, abs=0.01)


def test_copies_are_shown_beside_those_that_were_measured(scheduled):
    plan, schedule = scheduled
    out, back = (schedule.moved_bytes(to_host=to_host) for to_host in (True, False))
    rates = {"bus_gb_per_s": 1e-3, "disk_gb_per_s": 1.0}
    seconds = predicted_seconds(schedule, plan, **rates)
    assert sum(seconds.values()) == pytest.approx((out + back) / 1e6)
    beside = sum(move.size_bytes for move in schedule.moves if move.beside)
    assert seconds["beside"] == pytest.approx(beside / 1e6)
    assert default_rates().keys() == rates.keys()

    def step(number, moved, **more):
        moves = {"moved_to_host_bytes": moved, "moved_to_device_bytes": 2 * moved, "moving_seconds": 0.25}
        return {"step": number, **moves, **more}

    metrics = [step(1, 9 * MIB), step(2, MIB), step(3, 9 * MIB, heldout_accuracy=0.5)]
    rows = {row[0]: row[1:] for row in moves_table(schedule_rows(schedule), seconds=seconds, metrics=metrics).rows}
    assert rows["to the host, MiB"] == (f"{out / MIB:.2f}", "1.00")
    assert rows["back, MiB"] == (f"{back / MIB:.2f}", "2.00")
    assert rows["seconds between phases"] == (f"{seconds['exposed']:.3f}", "0.25")


def test_the_figure_is_drawn(scheduled, tmp_path):
    draw_schedule(schedule_rows(scheduled[1]), tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
