"""The comparison of synthetic run directories whose every number can be checked by hand; broken ones among them."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from matplotlib.image import imread

from trainer import __main__ as command_line
from trainer.report.compare import find_runs, read_runs
from trainer.report.compare_groups import group_runs, joined_label, pareto_front
from trainer.report.compare_page import comparison_tables, csv_rows, write_comparison
from trainer.report.memory import OWNERS, host_bytes_by_owner

ROOT = Path(__file__).parents[2]
PARAMETERS = 1000  # per role
REGIONS = {  # memory= -> (role, kind): (keeper, flag, bytes released, bytes backed up)
    "lean": {
        ("actor", "param"): ("backuper", True, 2000, 2000),
        ("actor", "grad"): ("none", True, 4000, 0),
        ("actor", "optim"): ("arena", None, 12000, 12000),
        ("actor", "weights/ref"): ("backuper", None, 0, 2000),
        ("critic", "param"): ("saver", False, 2000, 2000),
        ("critic", "optim"): ("arena", None, 12000, 12000),
        ("engine", "weights"): ("none", None, 2000, 0),
    },
    "full": {
        ("actor", "param"): ("saver", False, 2000, 2000),
        ("actor", "grad"): ("saver", False, 4000, 4000),
        ("actor", "optim"): ("saver", None, 12000, 12000),
        ("actor", "weights/actor"): ("backuper", None, 0, 2000),
        ("actor", "weights/ref"): ("backuper", None, 0, 2000),
        ("critic", "param"): ("saver", False, 2000, 2000),
        ("critic", "optim"): ("saver", None, 12000, 12000),
    },
}


def lines(*records: dict) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def make_run(directory: Path, *, memory: str = "lean", seed: int = 1, lr: float = 0.1, finished: bool = True) -> Path:
    """Two steps of 1 and 3 seconds; rewards seed/8 and seed/4; accuracy from 0.25 to 0.5."""
    (directory / ".hydra").mkdir(parents=True)
    policy = {"restore": {"lean": "backuper", "full": "saver"}[memory]}
    config = {"seed": seed, "memory": policy, "roles": {"actor": {"lr": lr}, "critic": {"lr": 0.5}}}
    config |= {"task": {"seed": seed}, "platform": {"name": "cpu"}}
    (directory / "config.json").write_text(json.dumps(config))
    choices = {"hydra": {"runtime": {"choices": {"memory": memory, "task": "sums", "hydra/output": "default"}}}}
    (directory / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(choices))
    overrides = [f"memory={memory}", f"seed={seed}", f"roles.actor.lr={lr}"]
    (directory / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    counts = {"parameters/actor": PARAMETERS, "parameters/critic": PARAMETERS}
    (directory / "metrics.jsonl").write_text(
        lines(
            {"step": 0, "heldout_accuracy": 0.25, **counts, "seconds/build": 99.0},
            {"step": 1, "reward": seed / 8, "seconds/rollout": 0.5, "seconds/train": 0.5},
            {"step": 2, "reward": seed / 4, "seconds/rollout": 3.0, "heldout_accuracy": 0.5}
            | {"weights_sha256/actor": f"{seed} {lr}"},
        )
    )
    (directory / "memory.jsonl").write_text(lines(*memory_records(memory)))
    if finished:
        (directory / "result.json").write_text('{"heldout_accuracy": 0.5}')
    return directory


def memory_records(memory: str) -> list[dict]:
    """Each region sleeps for 8, 1, 1 seconds and wakes in 0.5; weights tags take no time."""
    records = []
    for step in (0, 1, 2):
        for (role, kind), (keeper, flag, released, backup) in REGIONS[memory].items():
            sizes = {"released_bytes": released, "backup_bytes": backup}
            region = {"step": step, "phase": "rollout", "role": role, "kind": kind, "keeper": keeper, "flag": flag}
            tag = kind.startswith("weights/")
            seconds = 0.0 if tag else 8.0 if step == 0 else 1.0
            records.append({**region, **sizes, "state": "asleep", "seconds": seconds})
            if not tag:
                records.append({**region, **sizes, "state": "awake", "seconds": 0.5})
        host = {"rss_bytes": 10**6, "pss_bytes": 10**6, "gpu_allocated_bytes": None, "gpu_used_bytes": None}
        records.append({"step": step, "phase": "rollout", "time_seconds": 100.0 + step, **host})
    return records


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """memory=full,lean seed=1,2, in this order."""
    for number, (memory, seed) in enumerate([("full", 1), ("full", 2), ("lean", 1), ("lean", 2)]):
        make_run(tmp_path / "sweep" / str(number), memory=memory, seed=seed)
    return tmp_path / "sweep"


def test_every_byte_on_the_host_has_an_owner():
    assert OWNERS == ("saver", "arena", "backuper, own tag", "backuper, other tags")
    owned = {name: host_bytes_by_owner(memory_records(name)) for name in REGIONS}
    values = {name: {role: list(owners.values()) for role, owners in roles.items()} for name, roles in owned.items()}
    assert values == {
        "lean": {"actor": [0, 12000, 2000, 2000], "critic": [2000, 12000, 0, 0]},  # no engine: it keeps nothing
        "full": {"actor": [18000, 0, 2000, 2000], "critic": [14000, 0, 0, 0]},
    }


def test_a_copy_of_the_saver_beside_the_backupers_is_told_apart():
    record = {"role": "actor", "kind": "param", "state": "asleep", "keeper": "backuper", "flag": False}
    kept = host_bytes_by_owner([record | {"released_bytes": 2048, "backup_bytes": 4000}])
    assert list(kept["actor"].values()) == [2048, 0, 1952, 0]


def test_tables_equal_hand_computed_numbers(sweep: Path):
    runs = read_runs([sweep])
    table, owners, settings = comparison_tables(runs, group_runs(runs))
    assert table.columns[1:] == ("settings", "seed", "state", "reward", "before", "after", "s/step", "B/param")
    assert table.rows == [
        ("0", "memory=full", "1", "finished", "0.250", "25.0%", "50.0%", "2.000", "22.0/14.0"),
        ("1", "memory=full", "2", "finished", "0.500", "25.0%", "50.0%", "2.000", "22.0/14.0"),
        ("2", "memory=lean", "1", "finished", "0.250", "25.0%", "50.0%", "2.000", "16.0/14.0"),
        ("3", "memory=lean", "2", "finished", "0.500", "25.0%", "50.0%", "2.000", "16.0/14.0"),
    ]
    assert owners.rows[2] == ("memory=lean", "actor", "0.00", "11.72", "1.95", "1.95", "15.62", "16.00")  # KiB
    assert settings.rows == [
        ("seed", "1: 0, 2; 2: 1, 3"),
        ("memory.restore", "saver: 0, 1; backuper: 2, 3"),
        ("task.seed", "1: 0, 2; 2: 1, 3"),
    ]


def test_csv_has_one_line_per_run_with_every_digit(sweep: Path):
    write_comparison([sweep], output=sweep)
    rows = list(csv.DictReader(io.StringIO((sweep / "comparison.csv").read_text())))
    assert [row["run"] for row in rows] == ["0", "1", "2", "3"]
    last = rows[3]
    assert {key: last[key] for key in ("memory", "seed", "memory.restore", "state", "note")} == {
        "memory": "lean",
        "seed": "2",
        "memory.restore": "backuper",
        "state": "finished",
        "note": "",
    }
    numbers = {key: float(value) for key, value in last.items() if "/" in key or key.endswith("seconds")}
    assert numbers == {
        "step_seconds": 2.0,
        "sleep_seconds": 6.0,  # six regions, the median of 8, 1 and 1 seconds each
        "wake_seconds": 3.0,
        "actor/bytes_per_parameter": 16.0,
        "critic/bytes_per_parameter": 14.0,
        "actor/host_bytes/saver": 0.0,
        "actor/host_bytes/arena": 12000.0,
        "actor/host_bytes/backuper, own tag": 2000.0,
        "actor/host_bytes/backuper, other tags": 2000.0,
        "critic/host_bytes/saver": 2000.0,
        "critic/host_bytes/arena": 12000.0,
        "critic/host_bytes/backuper, own tag": 0.0,
        "critic/host_bytes/backuper, other tags": 0.0,
    }
    assert (float(last["reward"]), last["heldout_accuracy_before"], last["heldout_accuracy_after"]) == (
        0.5,
        "0.25",
        "0.5",
    )


def test_runs_that_differ_only_in_the_seed_are_one_group_with_a_band(sweep: Path):
    full, lean = group_runs(read_runs([sweep]))
    assert (full.label, lean.label) == ("memory=full", "memory=lean")
    assert lean.curves(lambda run: run.rewards) == {1: [0.125, 0.25], 2: [0.25, 0.5]}
    assert lean.median(lambda run: run.rewards[2]) == 0.375
    assert joined_label([full, lean]) == "memory=full,lean"


def test_labels_say_what_differs_by_the_shortest_name_that_is_unique(tmp_path: Path):
    make_run(tmp_path / "a", memory="lean", lr=0.1)
    make_run(tmp_path / "b", memory="full", lr=0.2)
    groups = group_runs(read_runs([tmp_path]))
    assert [group.label for group in groups] == ["memory=lean actor.lr=0.1", "memory=full actor.lr=0.2"]
    assert joined_label(groups) == "memory=lean actor.lr=0.1 | memory=full actor.lr=0.2"  # not all combinations
    for name in ("a", "b"):  # without Hydra's records, what tells apart the values that differ
        for path in (tmp_path / name / ".hydra").iterdir():
            path.unlink()
        (tmp_path / name / ".hydra").rmdir()
    assert [group.label for group in group_runs(read_runs([tmp_path]))] == ["restore=backuper", "restore=saver"]


def test_groups_that_follow_from_what_was_asked_for_are_not_told(tmp_path: Path):
    """As a sweep over algo has them, whose options choose an estimator and the critic; its shuffle seed is a seed."""
    for seed, algo, credit, critic in (
        (1, "ppo", "gae", "critic"),
        (1, "grpo", "grpo", None),
        (2, "grpo", "grpo", None),
    ):
        run = make_run(tmp_path / f"{algo}{seed}", seed=seed)
        config = json.loads((run / "config.json").read_text()) | {"advantages": {"_target_": credit}}
        config["algo"] = {"shuffle_seed": seed, "value_clip": 0.2 if critic else None}
        (run / "config.json").write_text(json.dumps(config))
        choices = {"memory": "lean", "role@roles.critic": critic, "advantages": credit, "algo": algo}
        (run / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))
        (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([f"algo={algo}", f"seed={seed}"]))
    groups = group_runs(read_runs([tmp_path]))
    assert [(group.label, len(group.runs)) for group in groups] == [("algo=grpo", 2), ("algo=ppo", 1)]


def test_broken_runs_are_listed_and_the_rest_is_compared(sweep: Path):
    cut = make_run(sweep / "4", seed=3, finished=False)
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # a killed run's last line
    failed = make_run(sweep / "5", seed=4, finished=False)
    (failed / "logs").mkdir()
    (failed / "logs" / "rank_0.traceback").write_text("ValueError: no such file\n\nTraceback ...")
    (sweep / "6" / ".hydra").mkdir(parents=True)  # refused before its workers started
    garbage = make_run(sweep / "10", seed=5)
    (garbage / "memory.jsonl").write_text('{"step": 1, "state": "asleep"}\n')
    (garbage / "metrics.jsonl").write_text("not json\n[]\n")
    odd = make_run(sweep / "11", seed=6)
    (odd / "result.json").write_text("{")
    (odd / "config.json").write_bytes(b"\xff\xfe")
    runs = {run.name: run for run in read_runs([sweep])}
    assert list(runs) == ["0", "1", "2", "3", "4", "5", "6", "10", "11"]
    assert [runs[name].state for name in ("4", "5", "6", "10", "11")] == [
        "unfinished",
        "failed",
        "failed",
        "finished",
        "unfinished",
    ]
    assert runs["4"].note == "no result.json: cut off, or still running"
    assert runs["4"].rewards == {1: 0.375, 2: 0.75}
    assert runs["5"].note == "ValueError: no such file"
    assert runs["6"].note == "no config.json: refused before its workers started"
    assert "metrics.jsonl, line 1 is not JSON" in runs["10"].note
    assert "memory.jsonl cannot be read (KeyError" in runs["10"].note
    assert re.search("config.json cannot be read .*result.json cannot be read", runs["11"].note)
    comparison = write_comparison([sweep], output=sweep)
    assert comparison.facts[0] == "9 runs: 5 finished, 2 unfinished, 2 failed"
    assert [row[0] for row in comparison.tables[-1].rows] == ["4", "5", "6", "10", "11"]
    assert len(csv_rows(list(runs.values()))) == 10


def test_the_page_needs_no_other_file_and_escapes_what_it_shows(sweep: Path):
    (sweep / "1" / "result.json").unlink()
    (sweep / "1" / "logs").mkdir()
    (sweep / "1" / "logs" / "rank_0.traceback").write_text("ValueError: <script> & co\n")
    comparison = write_comparison([sweep], output=sweep)
    page = comparison.page.read_text()
    assert "<script>" not in page
    assert "ValueError: &lt;script&gt; &amp; co" in page
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) == 4
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in re.sub(r'src="[^"]*"', "", page)
    markdown = (sweep / "comparison.md").read_text()
    for name in ("owners", "phases", "seconds", "learning"):
        assert f"](comparison_{name}.png)" in markdown
        assert min(imread(sweep / f"comparison_{name}.png").shape[:2]) > 300
    assert "equal bit for bit at the end (SHA-256 of weights and optimizer state): 0 = 2; 1 = 3" in page


def test_equal_runs_have_no_label_and_a_run_without_numbers_no_figures(tmp_path: Path):
    make_run(tmp_path / "one" / "a")
    make_run(tmp_path / "one" / "b")
    assert [group.label for group in group_runs(read_runs([tmp_path / "one"]))] == ["all runs"]
    (tmp_path / "none" / ".hydra").mkdir(parents=True)
    write_comparison([tmp_path / "none"], output=tmp_path / "out")
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == ["comparison.csv", "comparison.html", "comparison.md"]


def test_what_lies_in_a_run_is_no_run_and_none_is_read_twice(sweep: Path):
    (sweep / "0" / "tensorboard" / ".hydra").mkdir(parents=True)
    assert [path.name for path in find_runs(sweep)] == ["0", "1", "2", "3"]
    assert [run.name for run in read_runs([sweep, sweep / "1"])] == ["0", "1", "2", "3"]
    assert [run.name for run in read_runs([sweep / "1"])] == ["1"]


def test_pareto_front():
    points = [(1.0, 5.0), (2.0, 2.0), (3.0, 2.0), (2.5, 4.0), (4.0, 1.0), (1.0, 5.0)]
    assert pareto_front(points) == [0, 5, 1, 4]


def report(*arguments: Path | str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "trainer.report", *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "160"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_the_command_prints_tables_and_where_the_page_is(sweep: Path):
    done = report(sweep)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"comparison: {sweep / 'comparison.html'}" in done.stdout
    assert "memory=lean" in done.stdout
    assert re.search(r"platform: cpu \(stand-in for CUDA", done.stdout)


def test_an_empty_directory_is_a_clear_error(tmp_path: Path):
    done = report(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path} holds no run: name directories of runs or sweeps")
    assert report(tmp_path / "absent").stderr.startswith(f"error: {tmp_path / 'absent'} is no directory")
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_ends_with_its_comparison(sweep: Path, capsys: pytest.CaptureFixture):
    assert command_line._end_of_sweep(sweep, 0) == 0
    assert f"comparison: {sweep / 'comparison.html'}" in capsys.readouterr().out


def test_an_error_of_the_comparison_does_not_hide_the_sweeps_result(sweep: Path, capsys: pytest.CaptureFixture):
    (sweep / "comparison.html").mkdir()  # cannot be written
    assert command_line._end_of_sweep(sweep, 0) == 0
    shown = capsys.readouterr()
    assert shown.out.count("finished") == 4
    assert shown.err.startswith("the comparison could not be written: UnwritableFile: ")


def test_a_benchmark_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "bench" / ".hydra").mkdir(parents=True)
    (tmp_path / "bench" / "bench.jsonl").write_text("{}\n")
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    assert find_runs(tmp_path) == [tmp_path / "run"]
