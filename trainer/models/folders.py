"""The weights of a role that come from a model folder, and such folders judged before anything is launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.common.safetensors_folder import SafetensorsFolder
from trainer.config.roles import RoleSpec, role_specs
from trainer.config.schema import Config, ModelConfig
from trainer.models.generation import generation_settings

if TYPE_CHECKING:
    from torch import Tensor


def weights_for(spec: RoleSpec, state: Mapping[str, Tensor], *, model: ModelConfig) -> Mapping[str, Tensor]:
    """The weights of a role's folder under Megatron's names; see :func:`trainer.models.hf_bridge.from_hf`.

    Raises:
        ValueError: as there; or a role that judges has no head to judge with.
    """
    from trainer.models.hf_bridge import from_hf, has_value_head  # imports transformers' models

    if spec.is_judge and not has_value_head(state):
        raise ValueError(
            "it has no value head (score.weight, as a sequence classifier with one label has it), and the role is not "
            "trained: give the folder of a reward model"
        )
    return from_hf(state, model=model, value_head=spec.has_value_head)


@contextmanager
def naming_folder(spec: RoleSpec) -> Iterator[None]:
    """A ValueError inside names the role and its folder."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"roles.{spec.name}.model.path={spec.folder}: {error}") from error


def check_folders(config: Config) -> None:
    """Judge the folders of all roles by their headers and small files, without reading a weight.

    Raises:
        ValueError: a folder does not hold its role's weights; names role, folder and tensor.
    """
    for role, spec in role_specs(config).items():
        if spec.folder is None:
            continue
        model = config.roles[role].model
        generation_settings(model)
        with naming_folder(spec):
            headers = SafetensorsFolder(Path(spec.folder)).headers()
            for _ in weights_for(spec, headers, model=model).values():
                pass  # each is judged when it is asked for
