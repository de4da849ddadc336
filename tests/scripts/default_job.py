"""What the default job learns: RL beside no update at all and beside as many more supervised steps, over seeds.

    python tests/scripts/default_job.py --seeds 1,2,3,4,5 [overrides]

For each seed (two or more) one run of the job as it is, whose accuracy at step 0 is that of no update, and one whose
warm-up is longer by as many steps as RL makes optimizer steps. Prints the table for BENCHMARKS.md: held-out accuracy in
percent, mean and standard error over seeds, and the differences with theirs. Minutes per seed, so no
part of the test suite. Exit code 0: RL beats both by three standard errors, and the critic explains more than a tenth
of the variance.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
MEGATRON = importlib.metadata.version("megatron-core")


def processor():
    """Its name and number, and the instructions that torch uses."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    fields = {key.strip(): value.strip() for key, _, value in lines}
    named = [fields[key] for key in ("model name", "cpu family", "model") if key in fields]
    return f"{' / '.join(named)} ({torch.backends.cpu.get_cpu_capability()})"


def records_of(directory, *overrides):
    """metrics.jsonl of ``python -m trainer`` in ``directory``."""
    command = [sys.executable, "-m", "trainer", f"hydra.run.dir={directory}", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def of_seed(root, seed, overrides):
    """(accuracy without an update, after more supervised steps, after RL, mean explained variance of the last half)."""
    run = root / f"seed_{seed}"
    records = records_of(run, f"seed={seed}", *overrides)
    algo = json.loads((run / "config.json").read_text())["algo"]
    more = algo["num_steps"] * algo["epochs"] * algo["minibatches"]
    longer = f"algo.warmup_steps={algo['warmup_steps'] + more}"
    (supervised,) = records_of(root / f"supervised_{seed}", f"seed={seed}", *overrides, longer, "algo.num_steps=0")
    explained = [record["critic/explained_variance"] for record in records[len(records) // 2 :]]
    accuracies = [record["heldout_accuracy"] for record in (records[0], supervised, records[-1])]
    return [*(100 * accuracy for accuracy in accuracies), statistics.fmean(explained)]


def mean_and_error(values):
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    print(f"{processor()}, Python {platform.python_version()}, torch {torch.__version__}, megatron-core {MEGATRON}")
    print(
        "| seed | no update | more supervised steps | RL | explained variance |\n| ---: | ---: | ---: | ---: | ---: |"
    )
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for seed in map(int, arguments.seeds.split(",")):
            rows.append(of_seed(Path(root), seed, arguments.overrides))
            print(f"| {seed} | {' | '.join(f'{x:.1f}' for x in rows[-1][:3])} | {rows[-1][3]:.2f} |", flush=True)
    columns = list(zip(*rows, strict=True))
    means = [f"{mean:.1f} ± {error:.1f}" for mean, error in map(mean_and_error, columns[:3])]
    print(f"| mean | {' | '.join(means)} | {statistics.fmean(columns[3]):.2f} |")
    holds = statistics.fmean(columns[3]) > 0.1
    for name, column in (("no update", 0), ("more supervised steps", 1)):
        mean, error = mean_and_error([row[2] - row[column] for row in rows])
        print(f"RL less {name}: {mean:+.1f} ± {error:.1f} points")
        holds &= mean >= 3 * error > 0
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
