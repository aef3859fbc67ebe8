"""A run or an imported model on disk: its config, its tokenizer, its weights. The one way to open one."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.checkpoint import Checkpoints
from maxlm.config import Config, UserError, load
from maxlm.data.tokenizer import Tokenizer, open_tokenizer
from maxlm.models import abstract_model_state, abstract_parameters, model_state_specs, parameter_specs
from maxlm.models.parameters import Parameters

CONFIG, CHECKPOINTS, TOKENIZER = "config.yml", "checkpoints", "tokenizer"


class Weights(NamedTuple):
    """Parameters and model state of a checkpoint."""

    step: int
    params: Parameters
    model_state: Parameters


@dataclass(frozen=True)
class SavedRun:
    """The folder of a run, or of a model that `maxlm import` has made."""

    directory: Path
    config: Config

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """Its checkpoints, to read only."""
        return Checkpoints(self.config.checkpoint.dir or self.directory / CHECKPOINTS, self.config.checkpoint, {})

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Its copy of the tokenizer, if it has one."""
        folder = self.directory / TOKENIZER
        return open_tokenizer(str(folder)) if folder.is_dir() else None

    def weights(self, mesh: Mesh, step: int | None = None) -> Weights:
        """The weights of the newest checkpoint, or that of `step`, in float32 and split over `mesh` as in training.

        Raises UserError if there is no such checkpoint, or if `mesh` does not divide a dim.
        """
        model = self.config.model
        kinds = {"params": (abstract_parameters(model), parameter_specs(model, mesh))}
        kinds["model_state"] = abstract_model_state(model), model_state_specs(model, mesh)

        def wanted(spec: PartitionSpec, shape: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

        def split(shapes: Parameters, specs: Parameters) -> Any:
            return jax.tree.map(wanted, specs, shapes, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))

        restored = self.checkpoints.restore_entries({name: split(*pair) for name, pair in kinds.items()}, step)
        return Weights(restored.step, restored.state["params"], restored.state["model_state"])


def open_run(directory: Path) -> SavedRun:
    """Open the folder of a run. The size of its mesh is not checked. Raises UserError if it is none."""
    if not (directory / CONFIG).is_file():
        raise UserError(f"{directory} is not a run directory: it has no {CONFIG}; give the folder that `maxlm train` printed.")
    return SavedRun(directory, load(str((directory / CONFIG).absolute()), any_mesh=True).config)
