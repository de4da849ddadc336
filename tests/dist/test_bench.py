"""The benchmark: its arithmetic by hand, and a small one through the front door."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.bench import cases
from trainer.bench.cases import BenchConfig
from trainer.bench.keeper_bars import keeper_bars
from trainer.bench.swap_table import swap_table
from trainer.bench.table import bench_table, summarize

TINY = (
    "platform=cpu",
    "launch.threads_per_worker=1",
    "model.layers=2",
    "model.hidden_size=64",
    "model.ffn_size=128",
    "bench.vocab_size=4096",
    "bench.cycles=2",
    "bench.roofline_mib=16",
)


def bench(*overrides):
    command = [sys.executable, "-m", "trainer.bench", *TINY, *overrides]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)


def cycle(sleep, wake):
    events = [{"role": "actor", "backup_bytes": 100}, {"role": "actor", "backup_bytes": 40}]
    return {
        "sleep_seconds": {"actor": sleep, "critic": 1.0},
        "wake_seconds": {"actor": wake, "critic": 2.0},
        "sleep_events": [*events, {"role": "critic", "backup_bytes": 60}],
        "memory_asleep": {"pss_bytes": 1220, "gpu_used_bytes": 2**30},
    }


def test_a_summary_is_what_the_hand_computes():
    record = {
        "case": "lean",
        "parameters": {"actor": 10, "critic": 5},
        "build_seconds": 3.0,
        "memory_baseline": {"pss_bytes": 1000},
        "cycles": [cycle(9.0, 8.0), cycle(3.0, 2.0), cycle(5.0, 6.0), cycle(4.0, 3.0)],
        "roofline": {"to_host": 100.0, "to_device": 50.0},
        "bits_kept": True,
    }
    summary = summarize(record)
    assert summary["host_bytes_per_parameter"] == {"actor": 14.0, "critic": 12.0}
    assert summary["measured_host_bytes"] == 220
    assert summary["unexplained_share"] == pytest.approx(0.1)  # 20 of 200
    assert summary["sleep_seconds_first"]["actor"] == 9.0
    assert summary["sleep_seconds_steady"]["actor"] == 4.0
    assert summary["wake_seconds_steady"]["actor"] == 3.0
    assert summary["sleep_bytes_per_second"] == 200 / 5
    assert summary["sleep_share_of_roofline"] == pytest.approx(0.4)
    assert summary["wake_share_of_roofline"] == pytest.approx(0.8)  # 200 / 5 / 50
    assert summary["cycle_seconds"] == 10.0
    assert summary["floor_seconds"] == 6.0
    row = bench_table([{**record, "summary": summary}]).rows[0]
    assert row[:4] == ("lean", "14.00 / 12.00", "0.00 (+10.0%)", "1.00")
    assert row[-3:] == ("10.000", "6.000", "yes")


def test_cases_and_overrides_are_checked():
    bench_config = BenchConfig(cases=["lean"], cycles=1, vocab_size=64, roofline_mib=1, case_timeout_seconds=60)
    cases.check(bench_config, ["memory.poison=true"])
    with pytest.raises(ValueError, match=r"memory=full.*bench\.cases"):
        cases.check(bench_config, ["memory=full"])
    with pytest.raises(ValueError, match=r"bench\.cases=\['lien'\]: must be some of full"):
        cases.check(BenchConfig(cases=["lien"], cycles=1, vocab_size=64, roofline_mib=1, case_timeout_seconds=60), [])


def test_a_bench_measures_policies_and_peers(tmp_path):
    done = bench("bench.cases=[rebuild,megatron,slime]", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    records = {r["case"]: r for r in map(json.loads, (tmp_path / "bench.jsonl").read_text().splitlines())}
    assert records["megatron"]["error"] == "needs a GPU"
    rebuild, slime = records["rebuild"]["summary"], records["slime"]["summary"]
    assert records["rebuild"]["bits_kept"]
    assert records["slime"]["bits_kept"]
    assert rebuild["host_bytes_per_parameter"]["actor"] == pytest.approx(12, rel=0.02)
    # The saver copies whole pages; what the first step left behind lies in them too.
    assert 14 <= slime["host_bytes_per_parameter"]["actor"] < 18
    assert rebuild["floor_seconds"] < rebuild["cycle_seconds"]
    report = (tmp_path / "bench.md").read_text()
    assert "| rebuild | 12.0" in report
    planned = next(line.split("|")[3:-1] for line in report.splitlines() if line.startswith("| rebuild | critic | "))
    assert [abs(float(planned[column].strip(" %"))) < 2 for column in (2, 5)] == [True, True]  # pages are whole
    assert "| slime | critic |" not in report  # nobody plans a peer


def test_a_hand_over_is_shown_beside_the_copies_one_after_the_other():
    def hand_over(going, coming, seconds, out, back):
        return {"from": going, "to": coming, "seconds": seconds, "to_host_bytes": out, "to_device_bytes": back}

    first, later = (hand_over("actor", "critic", seconds, 2**31, 2**30) for seconds in (9.0, 3.0))
    others = [hand_over("critic", "actor", seconds, 2**30, 2**31) for seconds in (9.0, 2.0, 1.0, 3.0)]
    record = {"case": "swap", "hand_overs": [first, *others, later], "bits_kept": True}
    rates = {"to_host": 2**30, "to_device": 2**29}
    table = swap_table([record | {"roofline": rates}, record | {"roofline": None}])
    assert table.rows[0] == (
        *("swap", "actor", "critic", "2.00", "1.00", "3.000", "2.000", "2.000", "0.75 x", "<= 0.68 x: NO", "yes"),
    )
    assert table.rows[1][5:10] == ("2.000", "1.000", "4.000", "0.40 x", "<= 0.68 x: yes")
    assert table.rows[2][5:10] == ("3.000", "-", "-", "-", "<= 0.68 x: -")
    assert swap_table([{"case": "lean", "error": "failed"}]) is None


def test_a_bench_hands_the_device_from_role_to_role(tmp_path):
    """Each goes with all that has to be kept of it: 12 bytes of optimizer state, and 2 of parameters under ``lean``."""
    both_alike = ("model.tie_embeddings=true", "memory.piece_mib=0.25")  # else the actor's head leaves room for more
    done = bench("bench.cases=[swap,swap_rebuild]", *both_alike, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    records = {r["case"]: r for r in map(json.loads, (tmp_path / "bench.jsonl").read_text().splitlines())}
    for case, kept in (("swap", 14), ("swap_rebuild", 12)):
        record = records[case]
        assert record["bits_kept"]
        assert len(record["hand_overs"]) == 4
        for one in record["hand_overs"]:
            copied = (one["to_host_bytes"], one["to_device_bytes"])
            parameters = [record["parameters"][one[key]] for key in ("from", "to")]
            assert copied == pytest.approx([kept * count for count in parameters], rel=0.03)
    report = (tmp_path / "bench.md").read_text()
    assert "# Handing the GPU over" in report
    assert "| swap_rebuild | critic | actor | " in report


def test_keepers_are_measured_by_their_bars():
    def of(actor_bytes, seconds, share=None):
        host, both = {"actor": actor_bytes, "critic": 10.0}, {"actor": seconds, "critic": 1.0}
        times = {"sleep_seconds_steady": both, "wake_seconds_steady": both}
        rates = {"sleep_share_of_roofline": share, "wake_share_of_roofline": share}
        return {"summary": {"host_bytes_per_parameter": host, **times, **rates}}

    rebuild, packed = ({"case": name} | of(10.6, s) for name, s in (("rebuild", 3.0), ("packed", 5.0)))
    disk = {"case": "disk"} | of(0.1, 9.0, share=0.9)
    found = {bar.name: (bar.measured, bar.is_met) for bar in keeper_bars([rebuild, packed, disk])}
    assert found == {
        "packed: host B/param of the actor": ("10.60", False),
        "packed: host B/param of the critic": ("10.00", True),
        "packed: seconds of rebuild's sleep": ("1.50 x", False),
        "packed: seconds of rebuild's wake": ("1.50 x", False),
        "disk: host B/param of the actor": ("0.10", True),
        "disk: host B/param of the critic": ("10.00", False),
        "disk: rate of a plain disk, sleep": ("90.0%", True),
        "disk: rate of a plain disk, wake": ("90.0%", True),
    }
    assert {bar.is_met for bar in keeper_bars([packed]) if "rebuild" in bar.name} == {None}
    assert keeper_bars([rebuild, {"case": "disk", "error": "failed"}]) == []


def test_a_disk_is_measured_beside_itself(tmp_path):
    folder = Path(__file__).parent  # /tmp may lie in memory
    done = bench("bench.cases=[packed,disk]", f"memory.disk.path={folder}", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    packed, disk = map(json.loads, (tmp_path / "bench.jsonl").read_text().splitlines())
    parameters = sum(disk["parameters"].values())
    assert disk["disk_bytes"] == pytest.approx(12 * parameters, rel=0.02)
    assert disk["roofline"] != packed["roofline"]
    assert disk["roofline"].keys() == {"to_host", "to_device"}
    assert packed["summary"]["host_bytes"]["actor"] < 12 * packed["parameters"]["actor"]
    seconds = sum(disk["summary"]["sleep_seconds_steady"].values())
    assert disk["summary"]["sleep_bytes_per_second"] == pytest.approx(disk["disk_bytes"] / seconds)
    assert "disk: rate of a plain disk, wake" in (tmp_path / "bench.md").read_text()


def test_a_disk_case_without_a_folder_is_refused(tmp_path):
    done = bench("bench.cases=[disk]", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 2
    assert "memory.disk.path" in done.stderr


def test_a_failing_case_says_why_and_fails_the_command(tmp_path):
    done = bench("bench.cases=[lean]", "bench.case_timeout_seconds=1", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 1
    assert "Timeout" in done.stdout + done.stderr
    assert "lean failed: rank 0" in done.stdout
    assert "| lean | failed |" in (tmp_path / "bench.md").read_text()
