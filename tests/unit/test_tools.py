"""Tools in processes of their own: results, what is raised, time-outs, deaths, and that no process is left behind."""

import os
import subprocess
import sys
import time

import pytest

from tests.helpers import odd_tools
from trainer.tasks import Tool, ToolResult


def is_alive(pid):
    """Whether there is a process of that number that is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid, *, seconds=10.0):
    end = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_alive(pid)


@pytest.fixture
def odd():
    tool = Tool("odd", odd_tools.odd, seconds=0.5)
    yield tool
    tool.close()


def test_a_call_goes_to_one_process_which_is_kept(odd):
    first = odd("pid")
    assert first == odd("pid")
    assert first.is_ok
    assert int(first.text) != os.getpid()
    assert odd("say näh").text == "näh"


def test_what_a_tool_raises_becomes_text_and_the_process_goes_on(odd):
    pid = odd("pid")
    assert odd("raise") == ToolResult("KeyError: 'what the tool raised'", "failed")
    assert odd("exit") == ToolResult("SystemExit: 3", "failed")
    assert odd("pid") == pid


def test_a_call_that_takes_too_long_is_given_up_and_the_next_one_works(odd):
    pid = odd("pid").text
    start = time.monotonic()
    assert odd("sleep") == ToolResult("odd took more than 0.5 s", "timed_out")
    assert 0.5 <= time.monotonic() - start < 5
    assert wait_until_gone(int(pid))
    assert odd("pid").text != pid


def test_a_tool_that_kills_its_process_has_failed_and_the_next_call_works(odd):
    pid = odd("pid").text
    assert odd("kill") == ToolResult("odd ended unexpectedly", "failed")
    assert odd("hard exit") == ToolResult("odd ended unexpectedly", "failed")
    again = odd("pid")
    assert again.is_ok
    assert again.text != pid


def test_what_a_tool_prints_is_no_answer_and_long_answers_are_cut(odd):
    assert odd("print") == ToolResult("printed")
    assert odd("long") == ToolResult("x" * 10_000)


def test_what_a_tool_has_started_ends_with_it(odd):
    child = int(odd("start").text)
    assert is_alive(child)
    assert odd("sleep").outcome == "timed_out"
    assert wait_until_gone(child)


@pytest.mark.parametrize("how", ["close", "forget"])
def test_a_process_ends_with_its_tool(how):
    tool = Tool("odd", odd_tools.odd, seconds=5.0)
    pid = int(tool("pid").text)
    if how == "close":
        tool.close()
    del tool
    assert wait_until_gone(pid)


@pytest.mark.parametrize("end", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
@pytest.mark.parametrize("is_busy", [False, True])
def test_no_process_outlives_the_one_that_made_it(end, is_busy):
    """However that ends, also while a call that never returns is on its way."""
    program = (
        "import threading, time\n"
        "from tests.helpers.odd_tools import odd\nfrom trainer.tasks import Tool\n"
        "tool = Tool('odd', odd, seconds=1.0)\n"
        "print(tool('pid').text, flush=True)\n"
        f"{'tool._process._channel.send_bytes(b`sleep`); time.sleep(0.2)' if is_busy else ''}\n{end}\n"
    ).replace("`", "'")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert wait_until_gone(int(done.stdout)), done.stderr


def nested():
    return lambda text: text


@pytest.mark.parametrize(
    ("function", "seconds", "message"),
    [
        (nested(), 1.0, "tool t: tests.unit.test_tools.nested.<locals>.<lambda> cannot be imported in another"),
        (odd_tools.odd, 0.0, "tool t: seconds=0.0 must be a finite number greater than 0"),
    ],
)
def test_what_cannot_work_is_refused(function, seconds, message):
    with pytest.raises(ValueError, match=message):
        Tool("t", function, seconds=seconds)


def test_a_process_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setenv("ODD_TOOLS_FAIL", "1")
    with pytest.raises(RuntimeError, match=r"process of tool odd \(tests.helpers.odd_tools.odd\) did not start"):
        Tool("odd", odd_tools.odd, seconds=1.0)("pid")
