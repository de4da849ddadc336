"""What lies in a checkpoint, for tests that compare checkpoints."""

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from trainer.checkpoint import folder
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.writing import write_bytes
from trainer.config.identity import to_plain


def files(checkpoint: Path) -> dict[str, bytes]:
    """Name -> content of every file that holds or describes tensors."""
    paths = (path for pattern in ("*/*.distcp", "*/.metadata") for path in sorted(checkpoint.glob(pattern)))
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in paths}


def whole_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """``<role>/<kind>/<name>`` -> the whole model's tensor, read by torch.distributed.checkpoint alone."""
    found = {}
    for path in sorted(checkpoint.glob("*/.metadata")):
        saved = dcp.FileSystemReader(path.parent).read_metadata().state_dict_metadata
        tensors = {key: torch.full(meta.size, 77, dtype=meta.properties.dtype) for key, meta in saved.items()}
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(path.parent), no_dist=True)
        found |= {f"{path.parent.name}/{key}": tensor for key, tensor in tensors.items()}
    return found


def assert_same_tensors(one: Path, other: Path) -> None:
    """Both checkpoints hold the same tensors, bit for bit, however they are cut."""
    found, expected = whole_tensors(one), whole_tensors(other)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def checkpoint_of(directory: Path, step: int) -> Path:
    return directory / "checkpoints" / f"step_{step}"


ROLES = ("actor", "critic")
DATA = b"0123456789"


def save(
    run: Path,
    step: int,
    *,
    keep_last: int = 9,
    keep_best: bool = False,
    config=None,
    record=None,
    roles=ROLES,
    actor_tags=("ref",),
    questions="abc",
) -> Path:
    """A checkpoint with a file of ten bytes for every role, and an empty description."""
    temporary = folder.begin(run / "checkpoints", step)
    contents = {f"{role}/{name}": text for role in roles for name, text in (("__0_0.distcp", DATA), (".metadata", b""))}
    saved = write_bytes(temporary, contents, checksums=True)
    manifest = Manifest(
        step=step,
        kl_coef=0.1,
        schedule_steps=dict.fromkeys(roles, step),
        optimizer_steps=dict.fromkeys(roles, step),
        tags={"actor": list(actor_tags), "critic": []},
        record=record or {"step": step, "reward": 0.1 + 0.2},
        config=to_plain(config) if config else {},
        questions=questions,
        files=saved,
    )
    return folder.commit(temporary, manifest, keep_last=keep_last, keep_best=keep_best)
