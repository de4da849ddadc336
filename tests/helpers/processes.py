"""Processes of a job: wait for them, find its workers, find a free port."""

import random
import socket
import subprocess
import time
from collections.abc import Callable

import psutil


def wait_until(condition: Callable[[], object], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workers_of(process: subprocess.Popen) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def free_port(count: int = 2) -> int:
    """The first of ``count`` free ports in a row (a job that restarts meets at the next one), below those from which
    the system gives out ports to whoever asks."""
    for _ in range(100):
        first = random.randrange(15_000, 32_000)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")
