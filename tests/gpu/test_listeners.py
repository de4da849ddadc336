"""NCCL too stays on this host, with as many GPUs as there are, up to two."""

import os
import subprocess
import sys

import torch

from tests.helpers.commands import ROOT
from tests.helpers.network import look_at, use_the_network


def test_workers_on_gpus_listen_to_themselves_alone(tmp_path, monkeypatch):
    use_the_network(monkeypatch)
    nproc = min(2, torch.cuda.device_count())
    settings = ("debug=one_step", "platform=cuda", "algo.num_steps=200", f"launch.nproc={nproc}", "hydra.run.dir=run")
    command, pipe = [sys.executable, "-m", "trainer", *settings], subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True)
    seen = look_at(process, tmp_path)
    assert all(group for group in seen.of_workers)
    assert {address for group in (seen.of_parent, *seen.of_workers) for address, _ in group} <= {"127.0.0.1", "::1"}
    assert seen.reached == []
    assert not seen.stranger_ran
    assert seen.code == 0, seen.stderr
