"""The pieces that docs/extending.md shows, written out and run as they stand there."""

import re
import shlex

import pytest

from tests.helpers.commands import lasting_metrics, start
from tests.helpers.composing import CONF, SMALL, config_of
from tests.helpers.invariance_worker import run_matrix
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment
from trainer.plan import make_plan

TEXT = (CONF.parent / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"^```(?:python|yaml) (\S+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))
COMMANDS = [shlex.split(line) for block in re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
            for line in block.splitlines()]  # fmt: skip
SIZES = (*SMALL, "algo.responses_per_prompt=4")


def overrides_of(command):
    assert command[:3] == ["python", "-m", "trainer"]
    rest = command[3:]
    return tuple(rest[2:] if rest[0] == "--config-dir" else rest)


def name_of(command):
    return next((override for override in overrides_of(command) if override == "task=backwards"), command[-1])


def sizes_of(command):
    """An environment of several turns pays itself."""
    return (*SIZES, "reward=null") if name_of(command) == "task=backwards" else SIZES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("own_pieces")
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.fixture(scope="module")
def configs(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        search = f"hydra.searchpath=[file://{folder / 'mine'}]"
        yield {name_of(command): config_of(*sizes_of(command), search, *overrides_of(command)) for command in COMMANDS}


@pytest.fixture(scope="module")
def results(configs, tmp_path_factory):
    environment = worker_environment(platform="cpu", sleeps=True, threads_per_worker=1)
    log_dir = tmp_path_factory.mktemp("logs")
    return launch(run_matrix, (configs, None), nproc=1, log_dir=log_dir, environment=environment)


def test_every_piece_is_shown_in_few_lines():
    assert len(FILES) == 10
    most = {name: 30 if name == "my_environments.py" else 20 for name in FILES}
    assert all(len(content.splitlines()) < most[name] for name, content in FILES.items()), FILES
    assert len(COMMANDS) == 6


def test_every_command_of_the_page_trains_with_its_piece(configs, results):
    assert list(results) == [
        "reward=my_rewards.brief",
        "task.largest=199",
        "task=backwards",
        "advantages=median",
        "policy_loss=unclipped",
        "memory=actor_rebuilt",
    ]
    for name, result in results.items():
        assert [record["step"] for record in result["metrics"]] == [0, 1, 2], name
    rows = make_plan(configs["memory=actor_rebuilt"])
    assert [rows.row(role, "param").keeper for role in ("actor", "critic")] == ["main_params", "saver"]
    assert [rows.row(role, "optim").keeper for role in ("actor", "critic")] == ["arena", "saver"]
    assert configs["task.largest=199"].task == {"_target_": "my_tasks.Double", "largest": 199}
    assert "critic/loss" not in results["advantages=median"]["metrics"][-1]
    last = results["task=backwards"]["metrics"][-1]
    assert (last["episode/turns"], last["episode/turns_max"], last["episode/limited_fraction"]) == (3.0, 3.0, 0.0)


def test_own_pieces_are_judged_before_anything_starts(configs, folder):
    search = f"hydra.searchpath=[file://{folder / 'mine'}]"
    for overrides, message in (
        (["task=double", "task.largest=9"], "task.largest=9 holds nothing out"),
        (["task=backwards", "reward=null", "task.max_turns=2"], "task.max_turns=2: a number has three digits"),
        (["algo=grpo", "advantages=median", "algo.responses_per_prompt=2"], "at least 3"),
        (["algo=grpo", "advantages=median", "+advantages.shift=1"], "it takes scale"),
        (["advantages=median"], "MedianBaseline needs no critic, but roles has one"),
        (
            ["reward=my_rewards.long"],
            "reward=my_rewards.long cannot be imported: module 'my_rewards' has no",
        ),
        (["reward=brief"], "reward='brief' is no dotted path: use reward=package.module.function"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            config_of(*SIZES, search, *overrides)


def test_all_pieces_at_once_from_the_command_line(folder):
    """The reward is learned from (negative ones too), the accuracy is the task's."""
    own = [o for command in COMMANDS for o in overrides_of(command) if name_of(command) != "task=backwards"]
    sizes = (*SIZES, "algo.warmup_steps=60", "algo.warmup_lr=5e-3", "algo.warmup_batch_size=32")
    process = start(folder, "--config-dir", "mine", *sizes, *own, "task.largest=19", "hydra.run.dir=run")
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    first, *steps = lasting_metrics(folder / "run")
    assert 0 <= first["heldout_accuracy"] <= 1
    assert all(step["reward"] != 0 for step in steps)
