"""eager_fusions: a worker's imports do without torch's compiler, and torch.compile is as before."""

import subprocess
import sys

import pytest

import patches

IMPORTS = """
import sys, torch
import patches
before = torch.compile
if {applies}:
    patches.apply("eager_fusions")
import trainer.loop
assert torch.compile is before
print(any(name.startswith("torch._inductor") for name in sys.modules), "transformers.models" in sys.modules)
"""


@pytest.mark.parametrize(("applies", "is_imported"), [(True, "False"), (False, "True")])
def test_the_compiler_is_imported_without_it_alone(applies, is_imported):
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS.format(applies=applies)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [is_imported, "False"]  # no model of transformers either, which take half a second


def test_later_imports_are_left_as_they_are_too():
    from megatron.core import jit

    original = jit.jit_fuser
    patches.apply("eager_fusions")
    try:
        assert jit.jit_fuser(len) is len
        assert jit.jit_fuser(dynamic=True)(len) is len
    finally:
        patches.revert("eager_fusions")
    assert jit.jit_fuser is original
