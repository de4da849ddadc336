"""A sweep's processes end with it: joblib's, which run jobs for ``hydra/launcher=parallel``, outlive a killed parent.

Simplification: they look every second whether it is still there. The kernel's own signal (``PR_SET_PDEATHSIG``) would
come when the *thread* that started them ends, and joblib starts some from threads that do. What they have started ends
with them, see :mod:`trainer.command.launch`. Left alone are submitit's processes, which are meant to outlive the
terminal, and jobs that the sweep runs in its own process.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback

if TYPE_CHECKING:
    from omegaconf import DictConfig

_SECONDS_BETWEEN_LOOKS = 1.0


class EndWithSweep(Callback):
    """Hydra callback, in the sweep's own process: joblib's processes are to begin with :func:`end_with_parent`."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if "joblib" not in config.hydra.launcher._target_:
            return
        from joblib import parallel  # an extra

        backend = functools.partial(parallel.LokyBackend, initializer=end_with_parent)
        parallel.register_parallel_backend("loky", backend)  # the one that Hydra's launcher asks for


def end_with_parent() -> None:
    """From now on this process of :mod:`multiprocessing` is killed soon after the one that started it has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="parent").start()
