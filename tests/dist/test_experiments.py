"""Every experiment and debug preset runs; a sweep that an experiment asks for ends with its comparison page."""

import gzip
import json
import math

import pytest
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.helpers.commands import start
from tests.helpers.composing import CONF, GROUPS, SMALL, config_of
from tests.helpers.invariance_worker import run_matrix
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment

ELSEWHERE = ("none", "smollm2", "reward_model")  # tests/dist/test_smollm2.py, tests/unit/test_reward_model.py
EXPERIMENTS = [name for name in GROUPS["experiment"] if name not in ELSEWHERE]
BROKEN = """
from dataclasses import dataclass
from trainer.algo.policy_losses import Ppo

@dataclass(frozen=True)
class Broken(Ppo):
    def compute(self, log_probs, tokens):
        return log_probs * float("nan") * tokens.response_mask, {}
"""


def jobs_of(experiment):
    """The overrides of each job of ``python -m trainer experiment=...``."""
    content = yaml.safe_load((CONF / "experiment" / f"{experiment}.yaml").read_text())
    swept = content.get("hydra", {}).get("sweeper", {}).get("params", {})
    overrides = [f"experiment={experiment}", *(f"{key}={values}" for key, values in swept.items())]
    return [
        tuple(job) for job in BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), None)[0]
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Overrides of each job of each experiment -> its metrics, smaller than they are, all in one worker."""
    at_once = "algo.critic_warmup_steps=0"  # vapo's are more than all steps here
    configs = {job: config_of(*SMALL, *job, at_once) for name in EXPERIMENTS for job in jobs_of(name)}
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    log_dir = tmp_path_factory.mktemp("experiments")
    found = launch(run_matrix, (configs, None), nproc=1, log_dir=log_dir, environment=environment)
    return {job: found[job]["metrics"] for job in configs}


@pytest.mark.parametrize(
    ("experiment", "jobs"),
    [
        ("host_memory", 4),
        ("actor_critic_ratio", 4),
        ("kl_in_reward_vs_loss", 4),
        ("grpo", 1),
        ("dapo", 4),
        ("gspo", 4),
        ("vapo", 6),
        ("mismatch", 6),
    ],
)
def test_every_job_of_an_experiment_trains(results, experiment, jobs):
    records = [results[job] for job in jobs_of(experiment)]
    assert len(records) == jobs
    for record in records:
        assert [step["step"] for step in record] == [0, 1, 2]
        assert all(math.isfinite(step["actor/grad_norm"]) for step in record[1:])


def test_the_experiments_differ_in_what_they_are_about(results):
    memory = {"host_memory", "actor_critic_ratio", "sleeping_moments"}
    assert set(EXPERIMENTS) == memory | {"kl_in_reward_vs_loss", "grpo", "dapo", "gspo", "vapo", "mismatch"}
    rounds = {job: max(step["sampling/rounds"] for step in results[job][1:]) for job in jobs_of("dapo")}
    assert {most == 1 for job, most in rounds.items() if "algo.dynamic_sampling_rounds=0" in job} == {True}
    assert any(most > 1 for job, most in rounds.items() if "algo.dynamic_sampling_rounds=3" in job)
    for name in ("gspo", "vapo", "mismatch"):
        weights = [results[job][-1]["weights_sha256/actor"] for job in jobs_of(name)]
        assert len(set(weights)) == len(weights), name
    policies = [results[job][-1]["weights_sha256/actor"] for job in jobs_of("host_memory")]
    assert len(set(policies)) == 1  # a policy changes where bytes lie, and no bit of the result
    sizes = {(record[0]["parameters/actor"], record[0]["parameters/critic"])
             for record in map(results.get, jobs_of("actor_critic_ratio"))}  # fmt: skip
    (small, large) = sorted(critic for _, critic in sizes)
    assert large > 10 * small
    sides = [results[job][-1] for job in jobs_of("kl_in_reward_vs_loss")]
    assert len({side["weights_sha256/actor"] for side in sides}) == 4
    (grpo,) = map(results.get, jobs_of("grpo"))
    assert not [key for record in grpo for key in record if "critic" in key or "value" in key]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Name -> (directory, exit code, stdout, stderr) of three commands, all at once."""
    root = tmp_path_factory.mktemp("commands")
    (root / "anomaly").mkdir()
    (root / "anomaly" / "broken.py").write_text(BROKEN)
    arguments = {
        "sweep": ("experiment=host_memory", "hydra.sweeper.params.memory='full,rebuild'"),
        "profiler": ("debug=profiler", "diagnostics.detect_anomaly=true", "hydra.run.dir=run"),
        "anomaly": ("debug=anomaly", "algo=rloo", "policy_loss._target_=broken.Broken"),
    }
    started = {name: start(root / name, *SMALL, *some) for name, some in arguments.items()}
    return {
        name: (root / name, *process.communicate(timeout=300), process.returncode) for name, process in started.items()
    }


def test_one_command_goes_from_the_experiment_to_the_comparison_page(commands):
    directory, stdout, stderr, code = commands["sweep"]
    assert code == 0, stderr
    (page,) = directory.rglob("comparison.html")
    assert f"comparison: {page}" in stdout
    assert "2 runs: 2 finished" in page.read_text()
    assert all(f"memory={policy}" in page.read_text() for policy in ("full", "rebuild"))


def test_the_profiler_leaves_a_trace_with_the_phases_of_its_step(commands):
    directory, stdout, stderr, code = commands["profiler"]
    assert code == 0, stderr  # with anomaly detection on: a healthy run has no NaN in any backward pass
    (trace,) = directory.rglob("*.json.gz")
    assert trace.relative_to(directory).as_posix() == "run/traces/step_2_rank_0.json.gz"
    assert f"trace of step 2: {trace}" in stdout
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"rollout", "values", "train_actor", "train_critic", "aten::mm"} <= names
    assert "evaluate" not in names


def test_anomaly_detection_names_the_operation_that_gave_nan(commands):
    directory, _, stderr, code = commands["anomaly"]
    assert code == 1
    assert "Backward0' returned nan values in its" in stderr
    (traceback,) = directory.rglob("rank_0.traceback")
    assert "train_minibatch" in traceback.read_text()
