"""trainer.models.import_gguf: what it says when it cannot, and the tokens that end a response."""

import importlib.util

import pytest
import torch

from trainer.models.import_gguf import end_token_ids_in, import_gguf


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


@pytest.mark.parametrize(
    ("written", "found"), [({}, []), ({"eos": 5}, [5]), ({"eos": 5, "eot": 7, "eom": 5}, [5, 7]), ({"eot": 7}, [7])]
)
def test_every_end_that_the_file_names_ends_a_response(written, found, tmp_path):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    for name, token_id in written.items():
        getattr(writer, f"add_{name}_token_id")(token_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert end_token_ids_in(tmp_path / "model.gguf") == found
