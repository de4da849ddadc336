"""The command line end to end: real runs of seconds, what they leave, and how they end when something is wrong."""

import json
import re

import pytest

from tests.helpers.commands import SHORT, Done, lasting_metrics, start, torpor
from tests.helpers.composing import config_of
from trainer.config.identity import to_plain
from trainer.report.records import MEMORY_FILE, read_records


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Done, Done]:
    """A single run, with a task file by a relative path and hydra.job.chdir, and a sweep, both at once."""
    root = tmp_path_factory.mktemp("pair")
    single = root / "single"
    single.mkdir()
    (single / "sums.jsonl").write_text("".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(40)))
    sweep = root / "sweep"
    sweep.mkdir()
    (sweep / "sums.jsonl").write_text((single / "sums.jsonl").read_text())
    task = ("task=jsonl", "task.path=sums.jsonl")
    # Job 1 of the sweep is refused: 8 prompts times 2 responses are no multiple of 5.
    commands = [
        start(single, *SHORT, *task, "seed=2", "hydra.job.chdir=true"),
        start(sweep, "-m", *SHORT, *task, "seed=1,2", "algo.micro_batch_size=5,8"),
    ]
    outputs = [command.communicate(timeout=300) for command in commands]
    return tuple(
        Done(command.returncode, *output, directory)
        for command, output, directory in zip(commands, outputs, (single, sweep), strict=True)
    )  # type: ignore[return-value]


def test_a_run_leaves_one_directory_that_says_what_ran(pair):
    done, _ = pair
    assert done.code == 0, done.stderr
    (job,) = done.jobs().values()
    assert job.relative_to(done.directory).parts[0] == "outputs"
    overrides = (*SHORT, "task=jsonl", f"task.path={done.directory}/sums.jsonl", "seed=2")
    expected = to_plain(config_of(*overrides))
    expected["task"]["path"] = "sums.jsonl"
    assert json.loads((job / "config.json").read_text()) == expected
    left = {path.name for path in job.iterdir()}
    assert {"config.json", "result.json", "metrics.jsonl", "memory.jsonl", "report.md", "logs", ".hydra"} <= left
    assert [record["step"] for record in lasting_metrics(job)] == [0, 1]
    last = json.loads((job / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads((job / "result.json").read_text()) == {
        "heldout_accuracy": last["heldout_accuracy"],
        "heldout_accuracy_se": last["heldout_accuracy_se"],
        "host_bytes": last["asleep_backup_bytes"],
    }
    assert last["asleep_backup_bytes"] > 0
    assert "platform: cpu (stand-in for CUDA)   workers: 1   config: " in done.stdout
    assert sorted(path.name for path in done.directory.iterdir()) == ["outputs", "sums.jsonl"]


def test_a_run_says_that_the_critic_has_a_value_head_of_its_own(pair):
    done, _ = pair
    assert done.stdout.count("the critic starts from the warmed-up actor; only its value head is new\n") == 1


def test_a_forward_pass_wakes_parameters_only_and_goes_straight_to_its_weights(pair):
    """Under memory=lean: the actor's parameters come back from a weights tag, the critic's from the saver's copy."""
    (job,) = pair[0].jobs().values()
    events: dict[str, list[tuple[str, str, str]]] = {}
    for record in read_records(job / MEMORY_FILE):
        if record["step"] == 1 and record.get("state") in ("awake", "restored") and record["role"] != "engine":
            events.setdefault(record["phase"], []).append((record["role"], record["kind"], record["state"]))
    actor = [("actor", "param", "awake"), ("actor", "rest", "awake"), ("actor", "param", "restored")]
    assert (
        {phase: events[phase] for phase in ("rollout", "ref_log_probs", "log_probs", "values")}
        == {
            "rollout": actor,  # whose parameters are sampled from
            "ref_log_probs": actor,
            "log_probs": actor[-1:],  # from one wake-up to the next the reference's weights make room
            "values": [("critic", "param", "awake"), ("critic", "rest", "awake")],
        }
    )
    woken = {kind for _, kind, state in events["train_critic"] if state == "awake"}
    assert woken == {"param", "grad", "optim", "rest"}


def test_a_failing_job_does_not_stop_the_sweep_and_is_shown(pair):
    _, sweep = pair
    assert sweep.code == 2
    jobs = sweep.jobs()
    assert set(jobs) == {"0", "1", "2", "3"}
    assert [(jobs[n] / "result.json").exists() for n in "0123"] == [False, True, False, True]
    message = "error: algo.prompts_per_step * algo.responses_per_prompt = 8 * 2 = 16 is no multiple of"
    assert sweep.stderr.count(message) == 2  # once for each of the two jobs
    table = re.findall(r"^\s+(\d)\s+(.*micro_batch_size=\d.*?)\s{2,}(finished|refused)", sweep.stdout, re.MULTILINE)
    assert [(job, state) for job, _, state in table] == [
        ("0", "refused"),
        ("1", "finished"),
        ("2", "refused"),
        ("3", "finished"),
    ]
    assert sweep.stdout.count("\n  log: ") == 2
    log = jobs["0"] / "failure.txt"
    assert f"job 0 refused: {message.removeprefix('error: ')}" in sweep.stdout
    assert f"\n  log: {log}\n" in sweep.stdout
    assert log.read_text().startswith(message.removeprefix("error: "))
    assert "error: 2 of 4 jobs did not finish" in sweep.stderr
    page = jobs["0"].parent / "comparison.html"
    assert f"comparison: {page}" in sweep.stdout
    assert "4 runs: 2 failed, 2 finished" in page.read_text()


def test_a_job_of_a_sweep_is_the_job_alone(pair):
    """Job 3 came after two others in one process; the single run changed its directory."""
    single, sweep = pair
    (alone,) = single.jobs().values()
    first, third = sweep.jobs()["1"], sweep.jobs()["3"]
    assert lasting_metrics(third) == lasting_metrics(alone)
    assert (third / "config.json").read_text() == (alone / "config.json").read_text()
    assert lasting_metrics(first) != lasting_metrics(alone)  # another seed
    assert "weights_sha256/actor" in lasting_metrics(alone)[-1]


def test_a_sweep_again_skips_what_has_finished_and_overwrites_nothing(pair):
    _, sweep = pair
    directory = sweep.jobs()["1"].parent
    before = (directory / "3" / "metrics.jsonl").read_text()
    task = ("task=jsonl", "task.path=sums.jsonl", f"hydra.sweep.dir={directory}")

    again = torpor(sweep.directory, "-m", *SHORT, *task, "seed=1,2", "algo.micro_batch_size=5,8")
    assert again.code == 2  # the two bad jobs are still bad
    assert again.stdout.count("finished already: ") == 2
    assert (directory / "3" / "metrics.jsonl").read_text() == before

    other = torpor(sweep.directory, "-m", *SHORT, *task, "seed=3,4", "algo.micro_batch_size=5,8")
    assert other.code == 2
    assert other.stderr.count("holds a run of another config, which this one would overwrite") == 2
    assert "hydra.sweep.dir" in other.stderr
    assert (directory / "3" / "metrics.jsonl").read_text() == before


def test_a_worker_exception_is_shown_once(tmp_path):
    (tmp_path / "my_rewards.py").write_text(
        "import os\n"
        "def only_in_the_parent(response, example):\n"
        "    if 'RANK' in os.environ:\n"
        "        raise LookupError('no such bear')\n"
        "    return 1\n"
    )
    done = torpor(tmp_path, *SHORT, "reward=my_rewards.only_in_the_parent")
    assert done.code == 1
    assert (done.stdout + done.stderr).count("no such bear") == 1
    assert "error: rank 0 of 1 failed (exit code 1): LookupError: no such bear" in done.stderr
    assert "Traceback" not in done.stderr
    (job,) = done.jobs().values()
    assert not (job / "result.json").exists()
    assert "Traceback" in (job / "logs" / "rank_0.traceback").read_text()


def test_a_task_that_cannot_be_read_is_refused_before_workers_start(tmp_path):
    """The second line of the file is bad; the parent reads it for the tokenizer, whose size the plan needs."""
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\nnonsense\n')
    done = torpor(tmp_path, *SHORT, "task=jsonl", "task.path=bad.jsonl")
    assert done.code == 2
    assert done.stderr.startswith("error: bad.jsonl, line 2 is not JSON")
    assert not [job for job in done.jobs().values() if (job / "logs").exists()]


@pytest.mark.parametrize(
    "task",
    [
        ("task._target_=tests.helpers.odd_tasks.ThroughASet",),
        ("task=reasoning_gym", "task.dataset=isomorphic_strings", "task.heldout_size=8", "data.too_long=truncate"),
    ],
)
def test_pythons_hash_seed_changes_no_question(tmp_path, task):
    """Both tasks go through sets of texts."""
    commands = [start(tmp_path / seed, *SHORT, *task, "hydra.run.dir=run", PYTHONHASHSEED=seed) for seed in ("1", "2")]
    for command in commands:
        _, stderr = command.communicate(timeout=300)
        assert command.returncode == 0, stderr
    runs = [tmp_path / seed / "run" for seed in ("1", "2")]
    assert lasting_metrics(runs[0]) == lasting_metrics(runs[1])
    said = [re.findall(r"questions: .* PYTHONHASHSEED=0\)", (run / "report.md").read_text()) for run in runs]
    assert len(said[0]) == 1
    assert said[0] == said[1]


def test_questions_that_were_not_measured_are_not_asked(tmp_path):
    done = torpor(tmp_path, *SHORT, "task._target_=tests.helpers.odd_tasks.RankDependent")
    assert done.code == 1
    assert "ValueError: rank 0 holds other questions than the launching process has measured: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["launch.nproc=0"], ["error: launch.nproc=0: must be between 1 and 1000"]),
        (["task=jsonl"], ["error: no value given for task.path: add task.path=... to the command"]),
        (
            ["platform=cuda"],
            ["error: launch.nproc=1 with platform=cuda needs a GPU for each worker, and 0 are visible: use"],
        ),
        (["resume=nowhere"], ["error: resume=nowhere: no checkpoint there. Give a run directory with"]),
        (["rollout.max_prompt_tokens=1"], ["error: training question 0: the prompt has "]),
        (["reward=math.dist"], ["error: reward=math.dist or the task cannot judge the response "]),
        (["+algo.epoch=2"], ["error: algo.epoch: Key 'epoch' not in 'AlgoConfig'", "hint: did you mean algo.epochs"]),
    ],
)
def test_bad_input_is_one_clean_error_before_anything_is_launched(tmp_path, arguments, lines):
    done = torpor(tmp_path, *arguments)
    assert done.code == 2
    assert done.stdout == ""
    written = done.stderr.splitlines()
    assert len(written) == len(lines)
    assert all(line.startswith(start) for line, start in zip(written, lines, strict=True))
    (job,) = done.jobs().values()
    assert not (job / "logs").exists()
    assert not (job / "config.json").exists()


def test_removed_settings_are_explained_wherever_they_are_written(tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "old.yaml").write_text("# @package _global_\ndisable_weights_backuper: true\n")
    for arguments, code in [
        (["--disable-weights-backuper"], 2),
        (["-m", "seed=1,2", "enable_weights_backuper=false"], 2),
        (["--config-dir", "mine", "experiment=old"], 2),
    ]:
        done = torpor(tmp_path, *arguments)
        assert done.code == code
        assert done.stderr.count("hint: there is no switch for the weights backuper any more") == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert done.jobs() == {}


def test_an_empty_sweep_is_an_error(tmp_path):
    done = torpor(tmp_path, "-m", "seed=glob(*)")
    assert done.code == 2
    assert "error: the sweep has no jobs" in done.stderr


def test_help_and_parts_of_the_config(tmp_path):
    shown = torpor(tmp_path, "--help").stdout
    assert len(shown.splitlines()) < 60
    assert "memory: disk, full" in shown  # the options themselves, from Hydra
    assert "python -m trainer -m memory=full,lean,rebuild" in shown
    part = torpor(tmp_path, "memory=rebuild", "--cfg", "job", "--resolve", "-p", "roles")
    assert part.code == 0
    assert "$" not in part.stdout
    assert part.stdout.count("disable_param_buffers_cpu_backup: true") == 2
    assert list(tmp_path.iterdir()) == []
