"""Checkpoint folders: whole at every moment, found, kept, refused."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.helpers.checkpoints import save
from tests.helpers.composing import SMALL, config_of
from trainer.checkpoint import folder
from trainer.checkpoint.folder import Manifest
from trainer.command import jobs


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_what_was_saved_is_read(tmp_path):
    checkpoint = save(tmp_path, 3)
    assert folder.latest(tmp_path) == checkpoint
    manifest = folder.read(checkpoint)
    assert (manifest.step, manifest.kl_coef, manifest.record["reward"]) == (3, 0.1, 0.1 + 0.2)


def test_the_last_few_are_kept_in_the_order_of_their_steps(tmp_path):
    for step in (2, 4, 6, 8, 10):
        save(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["latest", "step_10", "step_8"]


def accuracy(step: int, value: float) -> dict[str, float]:
    return {"step": step, "heldout_accuracy": value}


def test_the_best_is_kept_beside_the_last_few(tmp_path):
    for step, value in enumerate((0.1, 0.5, 0.3, 0.5, 0.4)):
        save(tmp_path, step, keep_last=1, keep_best=True, record=accuracy(step, value))
    assert names(tmp_path) == ["best", "latest", "step_1", "step_4"]  # of equals the earlier
    assert folder.best(tmp_path) == tmp_path / "checkpoints" / "step_1"
    save(tmp_path, 5, keep_last=1, keep_best=True)  # a step that was not evaluated
    save(tmp_path, 6, keep_last=1, record=accuracy(6, 0.9))  # kept_best=false: named no more, but kept
    assert names(tmp_path) == ["best", "latest", "step_1", "step_6"]
    save(tmp_path, 7, keep_last=1, keep_best=True, record=accuracy(7, 0.6))
    assert names(tmp_path) == ["best", "latest", "step_7"]
    config = config_of(*SMALL, "algo.num_steps=9", f"resume={tmp_path}/checkpoints/best")
    with pytest.raises(ValueError, match="does not fit"):  # found, and saved without a config
        folder.starting_point(config, tmp_path / "new")


def test_a_best_that_is_gone_or_damaged_is_none(tmp_path):
    save(tmp_path, 1, keep_best=True, record=accuracy(1, 0.9))
    shutil.rmtree(tmp_path / "checkpoints" / "step_1")
    assert folder.best(tmp_path) is None
    second = save(tmp_path, 2, keep_best=True, record=accuracy(2, 0.1))
    assert folder.best(tmp_path) == second
    (second / "actor/__0_0.distcp").write_bytes(b"")
    third = save(tmp_path, 3, keep_best=True, record=accuracy(3, 0.0))
    assert folder.best(tmp_path) == third


def test_a_save_killed_before_any_of_its_file_operations_leaves_a_whole_latest(tmp_path):
    """A child dies right before its n-th rename, removal, fsync or write, for every n until it lives."""
    operations = ((os, "replace"), (shutil, "rmtree"), (os, "fsync"), (Path, "write_text"), (Path, "mkdir"))
    outcomes = []
    for n in range(1, 100):
        run = tmp_path / str(n)
        save(run, 1, keep_best=True, record=accuracy(1, 0.2))
        save(run, 2)
        child = os.fork()
        if child == 0:
            left = [n]

            def dying(original, left=left):
                def call(*arguments, **keywords):
                    left[0] -= 1
                    if left[0] == 0:
                        os._exit(9)
                    return original(*arguments, **keywords)

                return call

            for owner, name in operations:
                setattr(owner, name, dying(getattr(owner, name)))
            save(run, 3, keep_last=2, keep_best=True, record=accuracy(3, 0.3))
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0
        latest = folder.latest(run)
        assert latest is not None
        outcomes.append(folder.read(latest).step)
        assert folder.read(run / "checkpoints" / "step_2").step == 2
        best = folder.best(run)
        assert best is not None
        assert folder.read(best).step in (1, 3)
        save(run, 4, keep_last=2)  # the next life of the run is not in the way of the last
        assert folder.read(run / "checkpoints" / "step_4").step == 4
        assert not list((run / "checkpoints").glob("*.tmp"))
        if survived:
            break
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}
    assert len(outcomes) > 8


def test_a_damaged_checkpoint_is_refused_with_the_file_and_the_one_before_it(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step_4" / "actor/__0_0.distcp").write_bytes(b"01234")
    (checkpoints / "step_3" / "actor/__0_0.distcp").unlink()
    with pytest.raises(
        ValueError, match=r"step_4 cannot be used: actor/__0_0.distcp has 5 bytes instead of 10; .*step_2$"
    ):
        folder.starting_point(config_of(*SMALL), tmp_path)
    with pytest.raises(ValueError, match=r"actor/__0_0.distcp is missing; .*step_2$"):
        folder.read(checkpoints / "step_3")
    (checkpoints / "step_1" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json is damaged or of another version; no whole one is older"):
        folder.read(checkpoints / "step_1")


def test_resume_finds(tmp_path):
    config = config_of(*SMALL)
    auto, new = config_of(*SMALL, "resume=auto"), config_of(*SMALL, "resume=null")
    run, other = tmp_path / "run", tmp_path / "other"
    assert folder.starting_point(auto, run) is None
    assert folder.starting_point(new, run) is None
    first, second = (
        save(run, 1, config=config),
        save(run, 2, config=config, record={"step": 2, "heldout_accuracy": 1.0}),
    )
    assert folder.starting_point(auto, run) == second
    with pytest.raises(ValueError, match="resume=null starts over"):
        folder.starting_point(new, run)
    assert folder.starting_point(config_of(*SMALL, f"resume={run}"), other) == second
    assert folder.starting_point(config_of(*SMALL, f"resume={first}"), other) == first
    assert folder.starting_point(config_of(*SMALL, f"resume={first}"), run) == first
    own = save(other, 1, config=config)  # the same command, repeated
    assert folder.starting_point(config_of(*SMALL, f"resume={run}"), other) == own
    with pytest.raises(ValueError, match=r"no checkpoint there\. Give a run directory"):
        folder.starting_point(config_of(*SMALL, f"resume={tmp_path}"), tmp_path / "new")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.layers=1", r"roles.actor.model.layers=1 where 2 was saved; roles.critic.model.layers=1 where"),
        ("tokenizer.vocab_size=300", "tokenizer.vocab_size=300 where 320 was saved"),
        ("task.forms=digits", r"task.forms=digits where .* \(the tokenizer is trained on the task"),
        ("seed=2", "task.seed=2 where 1 was saved"),
        ("algo.num_steps=1", "already after step 2: use algo.num_steps=3 or more"),
    ],
)
def test_a_config_that_the_weights_do_not_fit_is_refused(override, named, tmp_path):
    checkpoint = save(tmp_path, 2, config=config_of(*SMALL, "algo.num_steps=4"))
    with pytest.raises(ValueError, match=named):
        folder.starting_point(config_of(*SMALL, override, f"resume={checkpoint}"), tmp_path / "new")


def test_what_weights_do_not_depend_on_may_change(tmp_path):
    checkpoint = save(tmp_path, 1, config=config_of(*SMALL))
    overrides = ("memory=rebuild", "launch.nproc=2", "algo.num_steps=9", "roles.actor.optimizer.lr=1e-3")
    config = config_of(*SMALL, *overrides, f"resume={checkpoint}")
    assert folder.starting_point(config, tmp_path / "new") == checkpoint


def test_a_directory_belongs_to_one_job_however_it_goes_on(tmp_path):
    run, config = tmp_path / "run", config_of(*SMALL)
    jobs.claim(run, config, None)
    jobs.write_result(run, {"heldout_accuracy": 0.5})
    for override in ("resume=auto", "resume=null", f"resume={run}/checkpoints/step_1"):
        assert jobs.finished(run, config_of(*SMALL, override)) == {"heldout_accuracy": 0.5}
    for override in (f"resume={tmp_path}/another", "seed=2"):
        with pytest.raises(ValueError, match="holds a run of another config"):
            jobs.finished(run, config_of(*SMALL, override))


def test_records_begin_with_those_of_the_run_that_goes_on(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    checkpoint = save(run, 1)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    config = config_of(*SMALL)
    jobs.claim(other, config, checkpoint)
    assert (other / "metrics.jsonl").read_text() == '{"step": 1}\n'
    (other / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    jobs.claim(other, config, checkpoint)
    assert len((other / "metrics.jsonl").read_text().splitlines()) == 2
    jobs.claim(other, config, None)
    assert not (other / "metrics.jsonl").exists()


def test_the_manifest_is_plain_json(tmp_path):
    checkpoint = save(tmp_path, 1, config=config_of(*SMALL))
    content = json.loads((checkpoint / "manifest.json").read_text())
    assert set(content) == {field.name for field in dataclasses.fields(Manifest)}
    assert content["config"]["checkpoint"] == {
        "every_steps": None,
        "keep_last": 2,
        "keep_best": False,
        "async_save": False,
    }
