"""``python -m trainer.models.import_gguf FILE FOLDER``: a GGUF file as a folder for ``model.path``.

The file is read by transformers; quantised weights become plain ones. Needs ``pip install 'torpor[gguf]'``.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer.common.files import UnwritableFile
from trainer.config.hf_architecture import architecture_of
from trainer.models.hf_files import SHARD_BYTES, write_folder


def import_gguf(file: Path, folder: Path, *, dtype: torch.dtype) -> None:
    """Write the model in ``file`` to ``folder``: config, weights in ``dtype``, tokenizer with its chat template.

    Raises:
        ImportError: a package that transformers needs for it is not installed.
        ValueError: no such file, or a model that is not supported here.
        UnwritableFile: the disk refused.
    """
    lacking = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if lacking:
        raise ImportError(f"reading GGUF files needs {' and '.join(lacking)}: pip install 'torpor[gguf]'")
    if not file.is_file():
        raise ValueError(f"{file} is no file: give a .gguf file")
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    source |= {"trust_remote_code": False, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    config = AutoConfig.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
    if ends := end_token_ids_in(file):
        config.eos_token_id = ends[0] if len(ends) == 1 else ends
    config.architectures, config.dtype = [type(model).__name__], dtype
    # Not save_pretrained, which takes the plain weights for quantised ones and refuses.
    write_folder(model.named_parameters(), config=config, tokenizer=tokenizer, folder=folder, shard_bytes=SHARD_BYTES)
    architecture_of(str(folder))


def end_token_ids_in(file: Path) -> list[int]:
    """The tokens that end a response, a turn or a message (the format's eos, eot and eom), as far as the file names
    them; transformers reads the first alone."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    fields = (reader.get_field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(int(field.contents()) for field in fields if field is not None))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.models.import_gguf", description=__doc__)
    parser.add_argument("file", type=Path, help="a .gguf file")
    parser.add_argument("folder", type=Path, help="where to write the model")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the written weights")
    arguments = parser.parse_args()
    try:
        import_gguf(arguments.file, arguments.folder, dtype=getattr(torch, arguments.dtype))
    except (ImportError, ValueError, UnwritableFile) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, UnwritableFile) else 2)  # 2: refused, as wherever a command is
    print(f"model=hf model.path={arguments.folder}")


if __name__ == "__main__":
    main()
