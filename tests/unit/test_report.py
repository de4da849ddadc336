"""trainer.report on a small synthetic run whose every number can be checked by hand."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from trainer.common.units import byte_unit, format_bytes, time_unit
from trainer.config.schema import LoggerConfig
from trainer.report import (
    MEMORY_FILE,
    METRICS_FILE,
    Logger,
    Progress,
    RunRecords,
    Table,
    figures,
    final_tables,
    open_loggers,
    plan_table,
    read_records,
    write_report,
)
from trainer.report.drawing import png_of
from trainer.report.memory import Sample, timeline

MIB, GIB = 2**20, 2**30
PARAMETERS = MIB  # per role, so that bytes per parameter are MiB
REGIONS = {  # (role, kind): (keeper, flag, MiB released, MiB backed up)
    ("actor", "param"): ("backuper", True, 2, 2),
    ("actor", "grad"): ("none", True, 4, 0),
    ("actor", "optim"): ("saver", None, 12, 12),
    ("critic", "param"): ("saver", False, 2, 2),
    ("critic", "grad"): ("none", True, 4, 0),
    ("critic", "optim"): ("saver", None, 12, 12),
}


def metrics_record(step: int) -> dict[str, object]:
    return {
        "step": step,
        "reward": 0.25 * step,
        "kl": 0.001 * step,
        "entropy": 2.0 - 0.1 * step,
        "critic/loss": math.nan if step == 2 else 0.5 / step,
        "seconds/rollout": 3.0,
        "seconds/train_actor": 1.0 if step == 1 else 0.5,
        "tokens_per_second/step": 1000.0 * step,
        "tokens_per_second/train_actor": 8000.0 if step == 1 else 20_000.0,
        "host_rss_bytes": 1200 * MIB,
        "asleep_released_bytes": 18 * MIB,
        "asleep_backup_bytes": 14 * MIB,
    }


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A warm-up and three steps: the critic sleeps while the actor rolls out and trains, then both sleep."""
    clock_seconds = 1000.0

    def turn(records: RunRecords, step: int, phase: str, role: str, state: str) -> None:
        for (owner, kind), (keeper, flag, released, backup) in REGIONS.items():
            if owner == role:
                region = {
                    "step": step,
                    "phase": phase,
                    "role": role,
                    "kind": kind,
                    "state": state,
                    "flag": flag,
                }
                sizes = {"released_bytes": released * MIB, "backup_bytes": backup * MIB}
                seconds = 9.0 if step == 0 else 0.25 if state == "asleep" else 0.125
                records.memory({**region, "keeper": keeper, **sizes, "seconds": seconds})

    def sample(records: RunRecords, step: int, phase: str, seconds: float) -> None:
        nonlocal clock_seconds
        clock_seconds += seconds
        host = {"rss_bytes": (1000 + 50 * step) * MIB, "pss_bytes": 900 * MIB, "time_seconds": clock_seconds}
        gpu = {"gpu_allocated_bytes": None, "gpu_used_bytes": None}
        records.memory({"step": step, "phase": phase, **host, **gpu})

    with RunRecords(tmp_path / "run") as records:
        counts = {"parameters/actor": PARAMETERS, "parameters/critic": PARAMETERS}
        records.metrics({"step": 0, "heldout_accuracy": 0.25, **counts})
        for role in ("actor", "critic"):
            turn(records, 0, "warm_up", role, "asleep")
        sample(records, 0, "warm_up", 10)
        for step in (1, 2, 3):
            turn(records, step, "rollout", "actor", "awake")
            sample(records, step, "rollout", 3)
            sample(records, step, "train_actor", 1 if step == 1 else 0.5)
            turn(records, step, "report", "actor", "asleep")
            sample(records, step, "report", 0)
            end = {"heldout_accuracy": 0.875, "weights_sha256/actor": "ab"} if step == 3 else {}
            records.metrics({**metrics_record(step), **end})
    return tmp_path / "run"


def test_records_keep_every_digit_and_write_null_for_what_json_cannot_say(tmp_path: Path) -> None:
    third = 0.1 + 0.2
    with RunRecords(tmp_path) as records:
        records.metrics({"step": 1, "loss": third, "nan": math.nan, "inf": -math.inf, "flag": True})
        records.metrics({"step": np.int64(2), "loss": torch.tensor(0.5), "nan": np.float32("nan")})
        on_disk = (tmp_path / METRICS_FILE).read_text()  # before closing: every line is flushed
    assert "NaN" not in on_disk
    assert "Infinity" not in on_disk
    assert [json.loads(line) for line in on_disk.splitlines()] == [
        {"step": 1, "loss": third, "nan": None, "inf": None, "flag": True},
        {"step": 2, "loss": 0.5, "nan": None},
    ]
    assert read_records(tmp_path / MEMORY_FILE) == []


def test_nested_records_are_our_own_bug(tmp_path: Path) -> None:
    with RunRecords(tmp_path) as records, pytest.raises(AssertionError, match="loss"):
        records.metrics({"step": 1, "loss": {"actor": 0.5}})


def test_a_line_that_a_killed_run_left_unfinished_is_dropped(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_records(tmp_path / METRICS_FILE) == [{"step": 1}]
    with RunRecords(tmp_path) as records:
        records.metrics({"step": 2})
    assert (tmp_path / METRICS_FILE).read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_resumed_run_drops_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    with RunRecords(tmp_path) as records:
        for step in (0, 1, 2, 3):
            records.metrics({"step": step, "reward": 0.1 * step})
            records.memory({"step": step, "phase": "rollout"})
    unbroken = (tmp_path / METRICS_FILE).read_text()
    with RunRecords(tmp_path, resumed_after=1) as records:
        assert [r["step"] for r in read_records(tmp_path / MEMORY_FILE)] == [0, 1]
        for step in (2, 3):
            records.metrics({"step": step, "reward": 0.1 * step})
    assert (tmp_path / METRICS_FILE).read_text() == unbroken
    assert {path.name for path in tmp_path.iterdir()} == {METRICS_FILE, MEMORY_FILE}


def test_units_fit_the_number() -> None:
    assert [format_bytes(b) for b in (0, 7, 1536, 1023 * 2**10, 12.5 * MIB, 1300 * MIB)] == [
        "0 B",
        "7 B",
        "1.50 KiB",
        "1023 KiB",
        "12.5 MiB",
        "1.27 GiB",
    ]
    assert byte_unit(512 * MIB) == ("MiB", MIB)
    assert [time_unit(seconds)[0] for seconds in (0, 299, 300, 18000)] == [
        "seconds",
        "seconds",
        "minutes",
        "hours",
    ]


def test_progress_without_a_terminal_prints_one_plain_line_per_step() -> None:
    output = io.StringIO()
    console = Console(file=output, width=40, _environ={"FORCE_COLOR": "1"})
    with Progress(120, console=console) as progress:
        for step in range(1, 51):
            progress.warm_up(step, total=50, loss=3 / step)
        for step in (1, 2):
            progress.step({**metrics_record(step), "critic/loss": None if step == 2 else 0.5})
    lines = output.getvalue().splitlines()
    assert "\x1b" not in output.getvalue()
    assert [line.split() for line in lines[:10]] == [
        ["warm-up", f"{step}/50", "loss", f"{3 / step:.4f}"] for step in range(5, 51, 5)
    ]
    header, first, second = lines[10:]
    assert len(header) == len(first) == len(second)
    assert " ".join(header.split()) == "step reward KL value loss entropy s/step tok/s host RSS asleep backup"
    assert " ".join(first.split()) == "1/120 0.250 0.001 0.5 1.900 4.00 1.00k 1.17 GiB 18.0 MiB 14.0 MiB"
    assert " ".join(second.split()) == "2/120 0.500 0.002 - 1.800 3.50 2.00k 1.17 GiB 18.0 MiB 14.0 MiB"


def test_progress_without_a_critic_has_no_column_for_its_loss() -> None:
    output = io.StringIO()
    with Progress(120, console=Console(file=output, width=40, _environ={})) as progress:
        progress.step({**metrics_record(1), "critic/loss": None})
    header, first = output.getvalue().splitlines()
    assert " ".join(header.split()) == "step reward KL entropy s/step tok/s host RSS asleep backup"
    assert len(first.split()) == len(header.split()) - 1 + 3  # "host RSS" is one column; three sizes have units


def test_without_a_reference_there_is_no_column_and_no_figure_of_the_kl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    records = [{**metrics_record(step), "actor/grad_norm": 0.5 / step} for step in (1, 2, 3)]
    for record in records:
        del record["kl"]
    with Progress(120, console=Console(file=output, width=40, _environ={})) as progress:
        progress.step(records[0])
    header = output.getvalue().splitlines()[0]
    assert " ".join(header.split()) == "step reward value loss entropy s/step tok/s host RSS asleep backup"
    titles: list[str] = []
    monkeypatch.setattr(figures, "png_of", lambda figure: b"".join(_noted(titles, figure)))
    assert figures.draw_training(records, tmp_path / "training.png")
    assert "Gradient norm of the actor" in titles
    assert "KL to the reference" not in titles


def _noted(titles: list[str], figure: Figure) -> list[bytes]:
    titles += [axes.get_title(loc="left") for axes in figure.axes]
    return [png_of(figure)]


def test_progress_on_a_terminal_shows_the_latest_steps_over_a_bar() -> None:
    output = io.StringIO()
    output.isatty = lambda: True
    console = Console(file=output, width=80, _environ={"TERM": "xterm"})
    with Progress(12, console=console) as progress:
        progress.warm_up(50, total=50, loss=0.5)
        for step in range(1, 11):
            progress.step(metrics_record(step))
    frame = Console(width=80, file=io.StringIO(), _environ={})
    frame.print(progress._render())
    shown = frame.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    assert "\x1b[?25h" in output.getvalue()  # the cursor is back
    assert [line.split()[0] for line in shown[2:-2]] == [str(step) for step in range(3, 11)]
    assert " ".join(shown[2].split()) == "3 0.750 0.003 0.167 1.700 3.50 3.00k 1.17 GiB 18.0 MiB 14.0 MiB"
    assert "loss 0.5000" in shown[-2]
    assert "10/12" in shown[-1]


def test_final_tables_equal_hand_computed_numbers(run_directory: Path) -> None:
    metrics, memory = (read_records(run_directory / name) for name in (METRICS_FILE, MEMORY_FILE))
    accuracy, asleep, phases = final_tables(metrics, memory)
    assert accuracy.rows == [("after the warm-up", "0", "25.00%"), ("at the end", "3", "87.50%")]
    assert accuracy.totals == [("gained", "", "+62.50 points")]

    assert asleep.columns[4:6] == ("freed", "backed up")
    assert asleep.title.startswith("Memory while asleep: MiB freed and backed up")
    assert asleep.rows == [  # the median leaves out the 9 s of the first sleep; the critic slept only once
        ("actor", "param", "backuper", "set", "2.00", "2.00", "2.00", "0.250", "0.125"),
        ("actor", "grad", "none", "set", "4.00", "0.00", "0.00", "0.250", "0.125"),
        ("actor", "optim", "saver", "n/a", "12.00", "12.00", "12.00", "0.250", "0.125"),
        ("critic", "param", "saver", "unset", "2.00", "2.00", "2.00", "9.000", "-"),
        ("critic", "grad", "none", "set", "4.00", "0.00", "0.00", "9.000", "-"),
        ("critic", "optim", "saver", "n/a", "12.00", "12.00", "12.00", "9.000", "-"),
    ]
    assert asleep.totals == [
        ("actor", "all", "", "", "18.00", "14.00", "14.00", "", ""),
        ("critic", "all", "", "", "18.00", "14.00", "14.00", "", ""),
        ("all", "all", "", "", "36.00", "28.00", "", "", ""),
    ]

    assert phases.rows == [
        ("rollout", "3.000", "9.00", "81.8%", "-"),
        ("train_actor", "0.667", "2.00", "18.2%", "14.0k"),  # 8000 a second for 1 s, 20000 for 0.5 s twice
    ]
    assert phases.totals == [("step", "3.667", "11.00", "100.0%", "1.95k")]


def moment(name: str, **gib: float) -> dict[str, object]:
    return {"step": 0, "phase": "report", "moment": name, **{f"{key}_bytes": int(v * GIB) for key, v in gib.items()}}


def test_the_ledger_adds_up_owners_and_shows_what_they_leave_unexplained() -> None:
    slept = [
        {"role": "actor", "kind": kind, "state": "asleep", "keeper": keeper, "seconds": 0.1, "flag": None}
        | {"step": 0, "phase": "build", "released_bytes": int(freed * GIB), "backup_bytes": int(kept * GIB)}
        for kind, keeper, freed, kept in (("param", "saver", 2, 2), ("grad", "none", 4, 0), ("optim", "arena", 12, 12))
    ]
    plan = [plan_row("actor", kind, "", None, "", 0, int(kept * GIB)) for kind, kept in (("param", 1.5), ("optim", 12))]
    before = moment("baseline", pss=1, gpu_used=0.5, gpu_reserved=0)
    after = moment("asleep", pss=16, gpu_used=1.5, gpu_reserved=18.25)
    memory = [before, *slept, after]
    (table,) = (t for t in final_tables([], memory, plan=plan) if t.title.startswith("Who holds what while everything"))
    assert table.columns == ("owner", "what", "host", "of it slack", "GPU")
    assert table.rows == [
        ("process", "before anything was built", "1.000", "", "0.500"),
        ("saver", "actor param", "2.000", "0.500", ""),
        ("arena", "actor optim", "12.000", "0.000", ""),
        ("torch", "blocks outside the regions", "0.000", "", "0.250"),
    ]
    assert table.totals == [
        ("sum", "", "15.000", "", "0.750"),
        ("measured", "PSS, GPU memory in use", "16.000", "", "1.500"),
        ("unexplained", "6.2% of the host's", "1.000", "", "0.750"),
    ]
    assert timeline(memory) == []
    assert not any(t.title.startswith("Who holds") for t in final_tables([], [before, *slept], plan=plan))


def test_the_last_sleep_of_a_region_counts(run_directory: Path) -> None:
    memory = read_records(run_directory / MEMORY_FILE)
    grown = {**memory[0], "step": 4, "released_bytes": 3 * MIB, "backup_bytes": MIB}
    table = next(t for t in final_tables([], [*memory, grown]) if t.title.startswith("Memory while asleep"))
    assert table.rows[0][:7] == (
        "actor",
        "param",
        "backuper",
        "set",
        "3.00",
        "1.00",
        "-",
    )  # parameters unknown


def test_a_run_that_broke_off_early_gets_the_tables_it_has_numbers_for() -> None:
    assert final_tables([], []) == []
    (only,) = final_tables([{"step": 0, "heldout_accuracy": 0.5}], [])
    assert only.rows == [("after the warm-up", "0", "50.00%")]
    assert only.totals == []


def test_plan_table_says_not_applicable_and_reads_the_same_in_rich_and_markdown() -> None:
    rows = [
        plan_row("actor", "param", "backuper", True, "a|b", 2 * MIB, MIB),
        plan_row("critic", "optim", "saver", None, "", 12 * MIB, 12 * MIB),
    ]
    table = plan_table(rows)
    console = Console(file=io.StringIO(), width=120, _environ={})
    console.print(table)
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    flag = "(flag: disable_*_buffers_cpu_backup; n/a: not applicable)"
    assert table.title == f"Who keeps what while it sleeps: MiB per rank {flag}"
    for row in table.rows:
        assert any(all(cell in line for cell in row) for line in shown.splitlines())
    assert table.markdown().splitlines() == [
        "| role | buffer | keeper | flag | note | freed | on host |",
        "| :--- | :--- | :--- | :--- | :--- | ---: | ---: |",
        "| actor | param | backuper | set | a\\|b | 2.00 | 1.00 |",
        "| critic | optim | saver | n/a |  | 12.00 | 12.00 |",
        "| **all** | **all** |  |  |  | **14.00** | **13.00** |",
    ]


def plan_row(role: str, kind: str, keeper: str, flag: bool | None, note: str, released: int, backup: int) -> dict:
    keys = ("role", "kind", "keeper", "flag", "note", "released_bytes", "backup_bytes")
    return dict(zip(keys, (role, kind, keeper, flag, note, released, backup), strict=True))


def test_the_prediction_stands_beside_what_was_measured(run_directory: Path) -> None:
    memory = read_records(run_directory / MEMORY_FILE)
    plan = [
        plan_row("actor", "param", "backuper", True, "", 2 * MIB, 2 * MIB),
        plan_row("actor", "grad", "none", True, "", 5 * MIB, 0),
        plan_row("actor", "rest", "saver", None, "", 32, 32),  # never slept: not shown
    ]
    (table,) = [t for t in final_tables([], memory, plan=plan) if t.title.startswith("Predicted")]
    assert table.rows == [
        ("actor", "param", "2.00", "2.00", "+0.0%", "2.00", "2.00", "+0.0%"),
        ("actor", "grad", "5.00", "4.00", "-20.0%", "0.00", "0.00", "-"),
    ]
    assert table.totals == [("all", "all", "7.00", "6.00", "-14.3%", "2.00", "2.00", "+0.0%")]


def test_markdown_aligns_numbers_right_and_sets_totals_bold() -> None:
    table = Table(title="t", columns=("phase", "s"), rows=[("a", "1")], totals=[("all", "")])
    assert table.markdown().splitlines()[1:] == ["| :--- | ---: |", "| a | 1 |", "| **all** |  |"]


def write_and_read_report(directory: Path) -> str:
    return write_report(
        directory,
        config={"seed": 1, "roles": {"critic": {"path": None}}},
        summary={"platform": "cpu (stand-in for CUDA)"},
        plan=[plan_row("actor", "grad", "none", True, "zeroed before use", 4 * MIB, 0)],
    ).read_text()


def test_report_has_figures_by_relative_path_tables_and_config(run_directory: Path) -> None:
    report = write_and_read_report(run_directory)
    assert report.startswith("# run\n\n- platform: cpu (stand-in for CUDA)\n")
    for figure in ("memory.png", "training.png"):
        assert f"]({figure})" in report
        pixels = imread(run_directory / figure)
        assert min(pixels.shape[:2]) > 600
        assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50  # not blank
    assert "| **critic** | **all** |  |  | **18.00** | **14.00** | **14.00** |" in report
    assert "| actor | grad | none | set | zeroed before use | 4.00 | 0.00 |" in report
    assert "seed=1\nroles.critic.path=null\n" in report
    assert str(run_directory) not in report
    assert write_and_read_report(run_directory) == report  # may be written again


def test_memory_figure_shows_what_slept_while_each_phase_worked(run_directory: Path) -> None:
    samples = timeline(read_records(run_directory / MEMORY_FILE))
    shown = [(s.phase, s.end_seconds, s.released_bytes / MIB, s.backup_bytes / MIB) for s in samples[:5]]
    assert shown == [
        ("warm_up", 0, 0, 0),
        ("rollout", 3, 18, 14),
        ("train_actor", 4, 18, 14),
        ("report", 4, 18, 14),  # put the actor to sleep at its end
        ("rollout", 7, 18, 14),
    ]


def test_what_sleeps_in_each_of_many_steps_is_drawn_from_the_least_to_the_most() -> None:
    def axes_of(steps: int) -> Axes:
        samples = [
            Sample(step, phase, 2.0 * step + awake, None, None, None, None, 5.0 + awake, 0.0)
            for step in range(steps)
            for phase, awake in (("rollout", 0), ("report", 1))
        ]
        axes = Figure().subplots()
        released = figures._Series("released", "black", lambda sample: sample.released_bytes, holds_for_phase=True)
        figures._draw_bytes(axes, samples, (released,), size=1)
        return axes

    (band,) = axes_of(70).collections
    corners = band.get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == (5, 6)
    assert corners[:, 0].max() == 2 * 69 + 1
    assert not axes_of(7).collections


def test_report_of_a_run_without_steps_has_no_figures(tmp_path: Path) -> None:
    with RunRecords(tmp_path / "run") as records:
        records.metrics({"step": 0, "heldout_accuracy": 0.5})
    report = write_and_read_report(tmp_path / "run")
    assert "| after the warm-up | 0 | 50.00% |" in report
    assert ".png" not in report
    assert not list((tmp_path / "run").glob("*.png"))


def test_tensorboard_files_read_back(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with open_loggers(LoggerConfig(kind="tensorboard", project=""), tmp_path) as logger:
        for step in (1, 2, 3):
            logger.log({**metrics_record(step), "weights_sha256/actor": "ab", "nothing": None})
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [e.step for e in events.Scalars("critic/loss")] == [1, 3]  # NaN at step 2
    assert not {"step", "nothing", "weights_sha256/actor"} & set(events.Tags()["scalars"])


def test_no_logger_writes_nothing(tmp_path: Path) -> None:
    with open_loggers(LoggerConfig(kind="none", project=""), tmp_path) as logger:
        logger.log(metrics_record(1))
    assert list(tmp_path.iterdir()) == []


def test_missing_wandb_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'torpor\[wandb\]'"):
        open_loggers(LoggerConfig(kind="wandb", project="p"), tmp_path)


def test_unknown_logger_names_the_override(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'tensorbord'.*logger=none\|tensorboard\|wandb"):
        open_loggers(LoggerConfig(kind="tensorbord", project=""), tmp_path)


def test_importing_the_package_imports_neither_torch_nor_matplotlib() -> None:
    code = "import sys, trainer.report; print([m for m in ('torch', 'matplotlib', 'wandb') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_a_figure_that_fails_costs_only_the_figures(run_directory: Path) -> None:
    """Here matplotlib refuses to be imported."""
    code = (
        "import sys; from pathlib import Path; from trainer.report import write_report\n"
        "print(write_report(Path(sys.argv[1]), config={}, summary={}).read_text())"
    )
    command, environment = [sys.executable, "-c", code, str(run_directory)], os.environ | {"MPLBACKEND": "banana"}
    report = subprocess.check_output(command, env=environment, text=True)
    assert "No more figures: ValueError: " in report
    assert "'banana' is not a valid value" in report
    assert "| actor | param |" in report


def test_a_logger_that_cannot_be_closed_does_not_fail_a_finished_run(capsys: pytest.CaptureFixture[str]) -> None:
    class Unreachable(Logger):
        def close(self, *, failed: bool = False) -> None:
            raise ConnectionError("no route to host")

    with Unreachable():
        pass
    assert capsys.readouterr().err == "the logger could not be closed: ConnectionError: no route to host\n"
