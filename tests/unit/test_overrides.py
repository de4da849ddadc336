"""What is refused before Hydra composes, since Hydra would end on it with a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.overrides import check_overrides

ZEROS = "0" * 400


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("memory=null", "memory=null: must be the name of an option, of which conf/memory has disk, full, lean"),
        ("algo=1e400", "algo=1e400: must be the name of an option, of which conf/algo has grpo"),
        ("task={a:1}", "task={a:1}: must be the name of an option"),
        ("offload='${'", "offload='${': must be the name of an option"),
        ("logger=${seed}", "logger=${seed}: must be the name of an option"),
        ("memory=full,null", "memory=full,null: must be the name of an option"),
        ("+experiment=[grpo,1]", "+experiment=[grpo,1]: must be the name of an option"),
        ("model@roles.critic.model=3", "model@roles.critic.model=3: must be the name of an option"),
        (f"model={'x' * 5000}", f"model={'x' * 194}...: must be the name of an option"),
        (f"algo.dual_clip=1{ZEROS}", "algo.dual_clip: a number of more than 308 digits"),
        (f"optimizer={{lr:1{ZEROS * 20}}}", "optimizer: a number of more than 308 digits"),
    ],
)
def test_what_nothing_can_take_is_refused(argument, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check_overrides(["seed=1", argument])
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 500


def test_whatever_hydra_takes_or_refuses_by_itself_is_left_to_it():
    for arguments in (
        ["-m", "--cfg", "job", "--config-dir=3", "-p", "model"],
        ["memory=full,lean", "memory=[full]", "memory=choice(full,lean)", "memory=glob(*)", "rollout='native'"],
        ["debug=shuffle(none,profiler)", "model@roles.critic.model=small", "~role@roles.critic", "~task=jsonl"],
        ["hydra.run.dir=/a/b[1]", "algo.dual_clip=[", "nothing=null", "seed=null", f"seed=1{'0' * 300}", "tags=[1]"],
        ["experiment=mine/sums-2.1", "hydra/launcher=parallel"],
    ):
        check_overrides(arguments)


@pytest.mark.parametrize("module", ["trainer", "trainer.plan", "trainer.bench"])
def test_every_command_refuses_them_in_one_line(module, tmp_path):
    command = [sys.executable, "-m", module, "memory=null"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: memory=null: must be the name of an option")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
