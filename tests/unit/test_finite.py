"""When training stops being any."""

import pytest

from trainer.training.finite import NotFinite, require_progress


def test_one_step_without_an_optimizer_step_is_a_spike_and_two_are_the_end():
    good, bad = ({"step": step, "actor/skipped_steps": skipped} for step, skipped in ((3, 1.0), (4, 2.0)))
    again = bad | {"step": 5}
    for records in ((good, bad), (bad, good), (bad, {"step": 5}), ({"step": 0}, bad)):  # the actor may wait
        require_progress(records, "actor", optimizer_steps=2)
    require_progress((bad, again), "critic", optimizer_steps=2)
    with pytest.raises(NotFinite, match=r"steps 4, 5, train_actor: every optimizer step was skipped"):
        require_progress((bad, again), "actor", optimizer_steps=2)
