"""``python -m trainer.plan``: the tables, one for a sweep, what is refused, and a run that agrees with them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.commands import SHORT, Done, torpor

ROOT = Path(__file__).parents[2]
LLAMA_70B = (
    *("model.layers=80", "model.hidden_size=8192", "model.ffn_size=28672", "model.heads=64", "model.kv_heads=8"),
    *("launch.nproc=8", "platform=cuda", "offload=train", "plan.vocab_size=128256", "algo.micro_batch_size=8"),
)


def plan(directory: Path, *arguments: str) -> Done:
    """Run in ``directory``, which stays empty."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}
    command = [sys.executable, "-m", "trainer.plan", *arguments]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
    assert list(directory.iterdir()) == []
    return Done(done.returncode, done.stdout, done.stderr, directory)


def row(done: Done, *start: str) -> list[str]:
    """The cells after ``start`` of the only row that begins with them."""
    (cells,) = [line.split() for line in done.stdout.splitlines() if line.split()[: len(start)] == list(start)]
    return cells[len(start) :]


def test_llama_3_70b_is_planned_in_seconds(tmp_path):
    start = time.perf_counter()
    done = plan(tmp_path, *LLAMA_70B)
    assert time.perf_counter() - start < 30  # 2 s on an idle machine
    assert done.code == 0, done.stderr
    assert "actor 7.055e+10" in done.stdout
    # 70.55e9 * 2 B = 131.4 GiB of bf16; 70.55e9 * 12 B / 8 ranks = 98.6 GiB of optimizer state
    assert row(done, "actor", "param") == ["backuper", "131.42", "131.42", "131.42", "131.42", "2.00"]
    assert row(done, "actor", "optim") == ["arena", "98.56", "0.00", "98.56", "98.56", "1.50"]
    assert row(done, "actor", "weights/ref") == ["backuper", "0.00", "0.00", "131.42", "131.42", "2.00"]
    assert row(done, "critic", "grad") == ["none", "258.92", "0.00", "0.00", "0.00", "0.00"]


def test_a_sweep_prints_one_table_and_says_what_fits(tmp_path):
    done = plan(tmp_path, "-m", *LLAMA_70B, "memory=full,rebuild", "launch.host_memory_gib=4000")
    assert done.code == 0, done.stderr
    assert done.stdout.count("Asleep on the host") == 1
    assert row(done, "memory=full")[:2] == ["11.50", "7.50"]  # 2 + 4 + 1.5 + 2 * 2, 2 + 4 + 1.5
    assert row(done, "memory=full")[-1] == "no"
    assert row(done, "memory=rebuild")[:2] == ["3.50", "1.50"]  # 1.5 + 2 for ref, 1.5
    assert row(done, "memory=rebuild")[-1] == "yes"
    assert done.stderr == ""


def test_refused_configs_name_the_override_and_leave_the_others_in_the_table(tmp_path):
    done = plan(tmp_path, "-m", "plan.vocab_size=0,320")
    assert done.code == 2
    assert done.stderr == "error: plan.vocab_size=0: must be between 1 and 10000000\n"
    assert row(done, "plan.vocab_size=0") == ["-"] * 7
    assert row(done, "plan.vocab_size=320")[:2] == ["16.00", "14.00"]


def test_what_cannot_fit_is_refused_by_planner_and_trainer(tmp_path):
    limit = "launch.host_memory_gib=0.001"
    for done in (plan(tmp_path, limit), torpor(tmp_path / "run", *SHORT, limit)):
        assert done.code == 2
        assert "error: the plan does not fit: it needs 0.0" in done.stderr
        assert "No memory policy fits" in done.stderr
    assert done.jobs() == {} or not any((job / "metrics.jsonl").exists() for job in done.jobs().values())


def test_a_run_measures_what_was_predicted(tmp_path):
    done = torpor(tmp_path, *SHORT)
    assert done.code == 0, done.stderr
    (job,) = done.jobs().values()
    report = (job / "report.md").read_text()
    shown = next(line for line in report.split("## Predicted and measured")[1].splitlines() if "**all**" in line)
    freed, host = (float(cell.strip(" *%")) for cell in shown.split("|") if "%" in cell)
    assert abs(freed) < 2
    assert abs(host) < 2
    kinds = {(r["role"], r["kind"]) for r in map(json.loads, (job / "memory.jsonl").open()) if "role" in r}
    assert len(kinds) == 10  # four of each role, the reference, the engine: each has its row in the plan
    table = report.split("## Predicted and measured")[1].split("##")[0]
    assert all(f"| {role} | {kind} |" in table for role, kind in kinds)
