"""trainer.models.import_gguf: what it says when it cannot; reading the files is transformers' part."""

import importlib.util

import pytest
import torch

from trainer.models.import_gguf import import_gguf


@pytest.mark.parametrize(
    ("installed", "error", "message"),
    [
        ((), ImportError, r"needs gguf and accelerate: pip install 'torpor\[gguf\]'"),
        (("gguf",), ImportError, r"needs accelerate: pip install"),
        (("gguf", "accelerate"), ValueError, r"model\.gguf is no file"),
    ],
)
def test_what_is_missing_is_named(installed, error, message, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    with pytest.raises(error, match=message):
        import_gguf(tmp_path / "model.gguf", tmp_path / "out", dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []
