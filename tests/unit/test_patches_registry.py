"""The registry applies once, puts back exactly what was there, and refuses what upstream does not have."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

import patches
from patches.__main__ import main, state_of
from patches.registry import Patch


def patch_of(replacements, probe=lambda: ("OK", "applies")) -> Patch:
    return Patch(name="p", target="t", why="w", replacements=lambda: replacements, probe=probe)


def test_apply_is_idempotent_and_revert_restores_the_same_objects():
    original = object()
    owner = SimpleNamespace(value=original)
    patch = patch_of([(owner, "value", 1), (owner, "value", 2)])
    patch.apply()
    patch.apply()
    assert (owner.value, patch.applied) == (2, True)
    patch.revert()
    patch.revert()
    assert owner.value is original
    assert not patch.applied


def test_reverting_an_inherited_attribute_uncovers_it_again():
    class Base:
        def name(self):
            return "base"

    class Derived(Base): ...

    patch = patch_of([(Derived, "name", lambda self: "patched")])
    patch.apply()
    assert (Derived().name(), Base().name()) == ("patched", "base")
    patch.revert()
    assert Derived().name() == "base"
    assert "name" not in vars(Derived)


def test_a_name_that_upstream_lacks_is_refused_before_anything_changes():
    owner = SimpleNamespace(value=1)
    with pytest.raises(RuntimeError, match=r"SimpleNamespace\.gone"):
        patch_of([(owner, "value", 2), (owner, "gone", 3)]).apply()
    assert vars(owner) == {"value": 1}


def test_apply_reports_one_line_per_patch_and_an_unknown_name_is_an_error():
    lines = patches.apply("cpu_saver")
    assert patches.applied() == ("cpu_saver",)
    assert lines == [
        "cpu_saver: sleep and wake-up in host memory, for machines without a GPU "
        "(torch_memory_saver.torch_memory_saver._impl)"
    ]
    patches.revert()
    assert patches.applied() == ()
    with pytest.raises(ValueError, match="no patch is called 'typo'; there are eager_fusions, ddp_buffer_backup,"):
        patches.apply("typo")


def test_patches_come_after_those_they_name_and_go_in_the_opposite_order():
    try:
        patches.apply("ddp_buffer_backup", "cpu_saver", "cpu_platform")
        assert patches.applied() == ("cpu_saver", "cpu_platform", "ddp_buffer_backup")
        patches.revert("cpu_platform", "cpu_saver")
        assert patches.applied() == ("ddp_buffer_backup",)
        with pytest.raises(RuntimeError, match="cpu_platform must be applied before ddp_buffer_backup"):
            patches.apply("cpu_platform")
    finally:
        patches.revert()
    assert patches.applied() == ()


def test_every_patch_documents_its_target_and_its_end():
    for name in patches.NAMES:
        module = sys.modules[patches.get(name).replacements.__module__]
        lines = (module.__doc__ or "").splitlines()
        headings = [line.split(":")[0] for line in lines if not line.startswith(" ") and ": " in line]
        assert headings == ["Target", "Why", "How", "Upstream", "Remove when"], name
        assert patches.get(name).name == name


def test_a_probe_that_raises_means_changed():
    def probe():
        raise AttributeError("module has no attribute 'gone'")

    assert state_of(patch_of([], probe)) == ("CHANGED", "AttributeError: module has no attribute 'gone'")


@pytest.mark.parametrize(("state", "code"), [("OK", 0), ("UPSTREAMED", 0), ("CHANGED", 1)])
def test_the_exit_code_is_one_if_any_patch_changed(monkeypatch, capsys, state, code):
    states = dict.fromkeys(patches.NAMES, "OK") | {"fused_adamw": state}
    monkeypatch.setattr(patches, "get", lambda name: patch_of([], lambda: (states[name], "detail")))
    assert main() == code
    versions, *lines = capsys.readouterr().out.splitlines()
    assert all(name in versions for name in ("torch ", "megatron-core ", "torch_memory_saver "))
    assert [line.split()[:2] for line in lines] == [list(pair) for pair in states.items()]


def test_every_patch_holds_with_the_installed_versions():
    result = subprocess.run([sys.executable, "-m", "patches"], capture_output=True, text=True, timeout=300, check=False)
    lines = result.stdout.splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [[name, "OK"] for name in patches.NAMES], result.stdout
    assert result.returncode == 0
