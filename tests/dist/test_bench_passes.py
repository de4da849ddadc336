"""The benchmark of forward and backward passes: both sides run, and a table that says which bars are met."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.composing import config_of
from trainer.bench.passes import BenchPassesConfig, check, passes_tables


def test_milliseconds_and_bars():
    def shapes(seconds, mfu):
        return {"8x4": {"forward_seconds": seconds / 3, "both_seconds": seconds, "mfu": mfu, "peak_gib": 1.5}}

    passes, bars = passes_tables({"torch": shapes(0.3, 0.3), "liger": shapes(0.15, 0.51), "plain": shapes(0.18, 0.4)})
    assert passes.columns == ("case", "8x4 fwd ms", "8x4 fwd+bwd ms", "8x4 MFU", "8x4 GiB")
    assert passes.rows[1] == ["liger", "50.0", "150.0", "51.0%", "1.5"]
    assert [tuple(row) for row in bars.rows] == [
        ("liger 8x4: MFU", ">= 50%", "51.0%", "yes"),
        ("liger 8x4: seconds of plain", "<= 0.8 x", "0.83 x", "NO"),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cases": ["fast"]}, "must be some of torch, liger, te, plain, plain_liger"),
        ({"shapes": ["64"]}, "64 must be rows x columns"),
        ({"shapes": ["0x4"]}, "0x4 must be rows x columns"),
    ],
)
def test_other_cases_and_shapes_are_refused(changes, message):
    bench = {"cases": ["torch"], "shapes": ["4x8"], "repeats": 1, "case_timeout_seconds": 60, **changes}
    with pytest.raises(ValueError, match=message):
        check(BenchPassesConfig(**bench), config_of("platform=cpu"))


def test_both_sides_run(tmp_path):
    command = [sys.executable, "-m", "trainer.bench.passes", "platform=cpu", "launch.threads_per_worker=1"]
    command += ["bench.cases=[torch,plain]", "bench.shapes=[2x16]", "bench.repeats=1", f"hydra.run.dir={tmp_path}"]
    command += ["platform.peak_tflops=0.1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "passes.json").read_text())
    for case in ("torch", "plain"):
        found = results[case]["shapes"]["2x16"]
        assert 0 < found["forward_seconds"] < found["both_seconds"]
        assert 0 < found["mfu"] < 1
    assert "torch 2x16: MFU" in done.stdout
