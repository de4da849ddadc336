"""Are a Hugging Face folder's logits the same here, and those of a folder that is exported again?

    python -m tests.scripts.hf_logits FOLDER [--dtype fp32]

Builds the actor of ``model=hf model.path=FOLDER`` on the CPU, as a run does, and compares its logits with those of
transformers' model from the same folder on texts in the folder's own tokens; then exports it and compares again.
Exits with 1 if a logit differs by more than rounding, or one weight of the exported folder by anything.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.composing import config_of
from tests.helpers.roles import one_thread_world
from trainer.common.safetensors_folder import SafetensorsFolder
from trainer.megatron.sharding import whole_tensors
from trainer.memory.arena import HostArenas
from trainer.memory.saver import make_saver
from trainer.models.hf_bridge import from_hf
from trainer.models.hf_files import save_hf
from trainer.plan import make_plan
from trainer.roles.role import Role
from trainer.tasks.tokenizer import vocabulary_size

TEXTS = (
    "What is 17 + 25? The sum is 42.",
    "The reference model keeps the policy close to where it started, which is why its log-probs are needed.",
    "def add(left, right):\n    return left + right\n",
)
ROUNDING = {"fp32": 1e-3, "bf16": 0.25}  # of logits that reach 30


def actor_of(folder: Path, dtype: str) -> Role:
    """The awake actor of a run that starts from ``folder``."""
    config = config_of(
        *("platform=cpu", "offload=none", "launch.threads_per_worker=1"),
        *("model=hf", f"model.path={folder}", f"model.dtype={dtype}", f"tokenizer.path={folder}"),
    )
    model = config.roles["actor"].model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    role = Role(
        "actor",
        config,
        plan=make_plan(config),
        saver=make_saver(config),
        vocab_size=model.embedding_rows(vocabulary_size(tokenizer)),
        seed=1,
        observer=lambda record: None,
        arenas=HostArenas(pinned=False),
    )
    role.load_whole_weights(from_hf(SafetensorsFolder(folder), model=model))
    return role


@torch.no_grad()
def compare(name: str, left: Any, right: Any, tokens: list[Tensor]) -> float:
    """Print and return the largest difference between two models' logits; ``left`` and ``right``: tokens -> logits."""
    pairs = [(left(ids).float(), right(ids).float()) for ids in tokens]
    largest = max((a - b).abs().max().item() for a, b in pairs)
    same = sum((a.argmax(-1) == b.argmax(-1)).sum().item() for a, b in pairs) / sum(ids.numel() for ids in tokens)
    spread = torch.cat([a.flatten() for a, _ in pairs]).std().item()
    print(
        f"{name}: logits differ by {largest:.3g} at most (standard deviation {spread:.3g}), same best token {same:.1%}"
    )
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=tuple(ROUNDING), default="fp32")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.folder)
    tokens = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[given.dtype]
    theirs = AutoModelForCausalLM.from_pretrained(given.folder, dtype=dtype).eval()
    with one_thread_world(), tempfile.TemporaryDirectory() as exported:
        role = actor_of(given.folder, given.dtype)
        gpt = role.model.chunks[0].module

        def ours(ids: Tensor) -> Tensor:
            return gpt(ids, torch.arange(ids.shape[1])[None], None)

        imported = compare("import", ours, lambda ids: theirs(ids).logits, tokens)
        model = role.config.model
        save_hf(whole_tensors(role.model.chunks), model=model, tokenizer=tokenizer, folder=Path(exported))
        again = AutoModelForCausalLM.from_pretrained(exported, dtype=dtype).eval()
        compare("export", lambda ids: again(ids).logits, lambda ids: theirs(ids).logits, tokens)
        before, after = theirs.state_dict(), again.state_dict()
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        print(f"export: {len(before)} tensors, {len(changed)} of them changed")
    sys.exit(int(bool(changed) or imported > ROUNDING[given.dtype]))


if __name__ == "__main__":
    main()
