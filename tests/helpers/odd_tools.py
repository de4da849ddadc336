"""A tool that does what tools should not, importable by name in its process."""

import os
import signal
import subprocess
import sys
import time

if "ODD_TOOLS_FAIL" in os.environ:
    raise ImportError("as the test wants it")


def odd(text: str) -> object:
    """What ``text`` asks for."""
    if text == "pid":
        return os.getpid()
    if text == "raise":
        raise KeyError("what the tool raised")
    if text == "exit":
        sys.exit(3)
    if text == "hard exit":
        os._exit(3)
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "sleep":
        time.sleep(3600)
    if text == "start":
        return subprocess.Popen(["sleep", "3600"]).pid
    if text == "print":
        print("not an answer", flush=True)
        return "printed"
    if text == "long":
        return "x" * 100_000
    return text.removeprefix("say ")
