"""A resumed run is the unbroken run, bit for bit, whatever policy saved it and however it was cut off."""

import dataclasses
import json
import math
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.checkpoint_worker import Case, run_cases
from tests.helpers.checkpoints import assert_same_tensors, checkpoint_of, files, whole_tensors
from tests.helpers.commands import lasting_metrics, start, torpor
from tests.helpers.composing import SMALL, config_of
from trainer.checkpoint import folder
from trainer.command.launch import WorkerError, launch
from trainer.command.launch_environment import worker_environment

# Everything that a resume could get wrong: schedules that move, an adaptive coefficient, a critic that starts earlier.
# The model has learned enough to get some answers right, so that gradients are not zero.
RUN = (
    *SMALL,
    *("seed=7", "task.forms=digits", "rollout.max_new_tokens=2", "data.too_long=truncate"),
    "reward=tests.helpers.rewards.spread",
    *("algo.warmup_steps=30", "algo.warmup_lr=5e-3", "algo.warmup_batch_size=16"),
    *("algo.num_steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=9"),
    *("optimizer.lr_schedule=linear", "optimizer.lr_warmup_steps=3", "roles.actor.optimizer.lr=1e-3"),
    *("algo.kl.target=0.01", "algo.kl.horizon=50", "algo.critic_warmup_steps=1", "algo.epochs=2"),
)
POLICIES = {
    "none": ("offload=none",),
    "lean": ("memory=lean",),
    "rebuild": ("memory=rebuild",),
    "sharded": ("memory=lean", "memory.tags=sharded"),
    "node": ("memory=lean", "memory.tags=node"),
    "async": ("memory=lean", "checkpoint.async_save=true"),
    "rebuild_saver": ("memory=rebuild", "memory.actor.optim_keeper=saver", "memory.critic.optim_keeper=saver"),
}
RESUMES = [
    ("lean", "lean"),
    ("rebuild", "rebuild"),
    ("lean", "rebuild"),
    ("rebuild", "none"),
    ("none", "rebuild_saver"),
]
RESUMES += [("sharded", "rebuild"), ("lean", "sharded"), ("async", "async"), ("sharded", "node"), ("node", "lean")]
PLAIN = ("roles.actor.ddp.use_distributed_optimizer=false", "roles.critic.ddp.use_distributed_optimizer=false")


def launch_cases(cases, *, nproc, log_dir):
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    return launch(run_cases, cases, nproc=nproc, log_dir=log_dir, environment=environment)


@pytest.mark.parametrize("nproc", [1, 2])
def test_resumed_is_unbroken(nproc, tmp_path):
    common = (*RUN, f"launch.nproc={nproc}")
    configs = {name: config_of(*common, *overrides) for name, overrides in POLICIES.items()}
    unbroken = [
        Case(name, configs[name], tmp_path / name) for name in ("none", "lean", "rebuild", "sharded", "node", "async")
    ]
    resumed = [
        Case(
            f"{saved}->{used}/{step}",
            configs[used],
            tmp_path / f"{saved}_{used}_{step}",
            checkpoint_of(tmp_path / saved, step),
        )
        for step, (saved, used) in zip((1, 1, 1, 2, 0, 2, 2, 1, 1, 2), RESUMES, strict=True)
    ]
    # No file of more than 100,000 bytes: both saves after step 1 fail, and the run goes on.
    full = Case("full", configs["lean"], tmp_path / "lean", checkpoint_of(tmp_path / "lean", 1), disk_bytes=100_000)
    best = ("checkpoint.keep_best=true", "checkpoint.keep_last=1", "checkpoint.async_save=true")
    evaluated = Case("best", config_of(*common, *best), tmp_path / "best")
    skipped = Case("skipped", configs["lean"], tmp_path / "skipped", fault="infinite_gradient")
    saved = checkpoint_of(skipped.directory, 1)
    after_skip = Case("after_skip", configs["rebuild"], tmp_path / "after_skip", saved)
    cases = [*unbroken, *resumed, full, evaluated, *([skipped, after_skip] if nproc == 2 else [])]
    results = launch_cases(cases, nproc=nproc, log_dir=tmp_path / "logs")

    expected = results["none"]["metrics"]
    assert [record["step"] for record in expected] == [0, 1, 2, 3]
    assert all(record["critic/grad_norm"] > 0 for record in expected[1:])
    assert all(record["actor/grad_norm"] > 0 for record in expected[2:])
    assert len({record["kl_coef"] for record in expected[1:]}) == 2  # it rests while only the critic trains
    assert len({record["critic/lr"] for record in expected[1:]}) == 3
    for case in (*unbroken, *resumed):
        first = int(case.name[-1]) + 1 if case.resume_from else 0
        assert json.dumps(results[case.name]["metrics"]) == json.dumps(expected[first:]), case.name
        assert_same_tensors(checkpoint_of(case.directory, 3), checkpoint_of(tmp_path / "none", 3))
        if case.config.memory.tags == "full":  # ranks that share the tags write other parts of them
            assert files(checkpoint_of(case.directory, 3)) == files(checkpoint_of(tmp_path / "none", 3)), case.name
        assert results[case.name]["notes"] == []

    accuracies = [record["heldout_accuracy"] for record in results["best"]["metrics"]]
    often, seldom = (
        [{key: value for key, value in record.items() if not key.startswith("heldout_")} for record in records]
        for records in (results["best"]["metrics"], expected)
    )
    assert often == seldom  # evaluating changes nothing
    assert accuracies[::3] == [expected[0]["heldout_accuracy"], expected[3]["heldout_accuracy"]]
    kept = folder.best(tmp_path / "best")
    assert kept == checkpoint_of(tmp_path / "best", accuracies.index(max(accuracies)))
    assert {kept.name, "step_3"} == {path.name for path in (tmp_path / "best" / "checkpoints").glob("step_*")}

    if nproc == 2:
        assert results["after_skip"]["metrics"] == results["skipped"]["metrics"][2:]
        assert files(checkpoint_of(after_skip.directory, 3)) == files(checkpoint_of(skipped.directory, 3))
        check_skipped_step(tmp_path, results["skipped"]["metrics"], expected)

    assert results["full"]["metrics"] == expected[2:]
    assert [note[:24] for note in results["full"]["notes"]] == ["no checkpoint of step 2:", "no checkpoint of step 3:"]
    assert list((tmp_path / "lean" / "checkpoints").glob("*.tmp")) == []
    assert folder.read(checkpoint_of(tmp_path / "lean", 3)).step == 3


def check_skipped_step(directory: Path, records: list[dict], expected: list[dict]) -> None:
    """The first of the critic's two optimizer steps of step 1 was skipped on both ranks since one had an infinite
    gradient: it is counted, no number is infinite, the learning rates are those of the run without it."""
    assert [record.keys() for record in records] == [record.keys() for record in expected]
    assert [record["critic/skipped_steps"] for record in records[1:]] == [1.0, 0.0, 0.0]
    assert all(math.isfinite(x) for record in records for x in record.values() if isinstance(x, float))
    for name in ("actor/lr", "critic/lr"):
        assert [record[name] for record in records[1:]] == [record[name] for record in expected[1:]]
    with_skip, without = (folder.read(checkpoint_of(directory / name, 3)) for name in ("skipped", "none"))
    assert with_skip.schedule_steps == without.schedule_steps
    assert with_skip.optimizer_steps == without.optimizer_steps | {"critic": without.optimizer_steps["critic"] - 1}
    assert records[-1]["weights_sha256/critic"] != expected[-1]["weights_sha256/critic"]


def test_a_step_that_is_not_finite_ends_the_run_with_the_last_good_step_saved(tmp_path):
    """Step 1 was not to be saved; the checkpoint is that of a run which saves it."""
    every, last = (config_of(*RUN, f"checkpoint.every_steps={steps}") for steps in (1, 3))
    launch_cases([Case("whole", every, tmp_path / "whole")], nproc=1, log_dir=tmp_path / "logs")
    expected = (
        "step 2, train_critic: the loss of every minibatch is NaN or infinite. "
        "The first that is not finite: the loss of micro-batch 1 of "
    )
    with pytest.raises(WorkerError, match=expected):
        launch_cases([Case("nan", last, tmp_path / "nan", fault="nan_returns")], nproc=1, log_dir=tmp_path / "logs2")
    assert {path.name for path in (tmp_path / "nan" / "checkpoints").glob("step_*")} == {"step_0", "step_1"}
    assert folder.latest(tmp_path / "nan") == checkpoint_of(tmp_path / "nan", 1)
    assert files(checkpoint_of(tmp_path / "nan", 1)) == files(checkpoint_of(tmp_path / "whole", 1))
    saved, wanted = (folder.read(checkpoint_of(tmp_path / name, 1)) for name in ("nan", "whole"))
    assert (saved.schedule_steps, saved.kl_coef) == (wanted.schedule_steps, wanted.kl_coef)


# An odd number of embedding rows, one more than there are tokens; tied ones lie on two pipeline stages.
SHARED = ("algo.num_steps=2", "offload=none", "model.layers=4", "model.tie_embeddings=true", "model.vocab_size=263")
LAYOUTS = {
    "dp": (),
    "tp": ("parallel.tp=2",),
    "pp": ("parallel.pp=2",),
    "vpp": ("parallel.pp=2", "parallel.vpp=2"),
    "cp": ("parallel.cp=2",),
    "plain": PLAIN,
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_another_layout_and_another_optimizer_hold_the_same(dtype, tmp_path):
    """From data to tensor to pipeline parallel ranks to interleaved chunks to context parallel ranks to another
    optimizer and back, and to a single rank."""
    common = (*RUN, *SHARED, f"model.dtype={dtype}")
    shared = {name: config_of(*common, "launch.nproc=2", *layout) for name, layout in LAYOUTS.items()}
    two = Case("two", shared["dp"], tmp_path / "two")
    saved = last = checkpoint_of(two.directory, 2)
    chain = []
    for name in ("tp", "pp", "vpp", "cp", "plain", "dp"):
        chain.append(Case(name, shared[name], tmp_path / name, last, copy_only=True))
        last = checkpoint_of(tmp_path / name, 2)
    launch_cases([two, *chain], nproc=2, log_dir=tmp_path / "logs2")
    one = Case("one", config_of(*common), tmp_path / "one", checkpoint_of(tmp_path / "vpp", 2), copy_only=True)
    plain = Case("plain", config_of(*common, *PLAIN), tmp_path / "plain", saved, copy_only=True)
    launch_cases([one, plain], nproc=1, log_dir=tmp_path / "logs1")

    head = [tensor for key, tensor in whole_tensors(saved).items() if "output_layer" in key]
    assert len(head) == 4
    assert all(tensor.any() for tensor in head)
    assert files(last) == files(saved)
    for case in (*chain, one, plain):
        copied = checkpoint_of(case.directory, 2)
        assert_same_tensors(copied, saved)
        assert folder.read(copied).optimizer_steps == folder.read(saved).optimizer_steps == {"actor": 4, "critic": 8}


def test_resumed_is_unbroken_where_ranks_share_the_model(tmp_path):
    """The second rank's shares and parts too; tags shared and saving in the background."""
    cases = []
    for name in ("tp", "vpp", "cp"):
        config = config_of(*RUN, *SHARED, "algo.warmup_steps=4", "offload=train", "launch.nproc=2", *LAYOUTS[name])
        cases.append(Case(name, config, tmp_path / name))
        memory = dataclasses.replace(config.memory, tags="sharded")
        background = dataclasses.replace(config.checkpoint, async_save=True)
        other = dataclasses.replace(config, memory=memory, checkpoint=background)
        cases.append(Case(f"{name}_on", other, tmp_path / f"{name}_on", checkpoint_of(tmp_path / name, 1)))
    results = launch_cases(cases, nproc=2, log_dir=tmp_path / "logs")
    for unbroken, resumed in zip(cases[::2], cases[1::2], strict=True):
        assert json.dumps(results[resumed.name]["metrics"]) == json.dumps(results[unbroken.name]["metrics"][2:])
        assert_same_tensors(checkpoint_of(resumed.directory, 2), checkpoint_of(unbroken.directory, 2))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The directory of a run of RUN that nothing happened to."""
    directory = tmp_path_factory.mktemp("unbroken")
    done = torpor(directory, *RUN, "hydra.run.dir=run")
    assert done.code == 0, done.stderr
    return directory / "run"


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_run_that_is_killed_while_saving_goes_on(async_save, unbroken, tmp_path):
    """SIGKILL at the first sight of an unfinished checkpoint, twice, then the same command to its end."""
    directory = tmp_path / "broken"
    command = (*RUN, "checkpoint.keep_last=2", f"checkpoint.async_save={async_save}", "hydra.run.dir=run")
    for step in (1, 2):
        process = start(directory, *command)
        saving = directory / "run" / "checkpoints" / f"step_{step}.tmp"
        while process.poll() is None and not saving.exists():
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (directory / "run" / "result.json").exists()
        assert not checkpoint_of(directory / "run", step + 1).exists()
    done = torpor(directory, *command)
    assert done.code == 0, done.stderr
    assert "goes on from" in done.stdout
    assert lasting_metrics(directory / "run") == lasting_metrics(unbroken)
    for step in (2, 3):
        assert files(checkpoint_of(directory / "run", step)) == files(checkpoint_of(unbroken, step))
    names = {path.name for path in (directory / "run" / "checkpoints").iterdir()}
    assert names == {"latest", "step_2", "step_3"}
    assert folder.latest(directory / "run") == checkpoint_of(directory / "run", 3)
    memory = [json.loads(line) for line in (directory / "run" / "memory.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in memory]
    assert steps == sorted(steps)
    for phase in ("rollout", "train_actor"):
        ended = [r["step"] for r in memory if r["phase"] == phase and "rss_bytes" in r]
        assert ended == sorted(set(ended)), phase
