"""A run or an imported model on disk: its config, its tokenizer, its weights. The one way to open one."""

import logging
import shutil
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from maxlm.base.transient import first_line, is_storage_error
from maxlm.checkpoint import Checkpoints
from maxlm.checkpoint.errors import UnreachableError
from maxlm.cluster import agree
from maxlm.config import Config, UserError
from maxlm.config.loader import RUN_CONFIG, load_saved
from maxlm.config.sections.train import TrainConfig
from maxlm.config.table import averages, build
from maxlm.data.tokenizer import Tokenizer, open_tokenizer
from maxlm.models import abstract_model_state, abstract_parameters, model_state_specs, parameter_specs
from maxlm.models.adapted_matrix import merged
from maxlm.models.adapters import Stored, leaf, put, stored
from maxlm.models.parameters import Parameters
from maxlm.models.stack import Names
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training.rollback import Journal
from maxlm.training.state_paths import Name, path_of
from maxlm.training.stored_form import StoredForm

CONFIG, CHECKPOINTS, TOKENIZER = RUN_CONFIG, "checkpoints", "tokenizer"
PUBLISHED = "published"  # files of the published model that a run goes back to, as they were imported
_log = logging.getLogger(__name__)
RAW = "raw"  # kind of weights: as the optimizer left them; others are averages (`table.averages`)


class Weights(NamedTuple):
    """Parameters and model state of a checkpoint."""

    step: int
    params: Parameters
    model_state: Parameters


@dataclass(frozen=True)
class SavedRun:
    """The folder of a run, or of a model that `maxlm import` has made. `trained`: its config as it was trained, perhaps with adapters."""

    directory: Path
    trained: Config

    @cached_property
    def config(self) -> Config:
        """Its config, with a model that has the parameters of `weights`: adapters are merged into them."""
        return self.trained.model_copy(update={"model": self.trained.model.merged})

    @property
    def holds_parameters(self) -> bool:
        """True if a checkpoint has the parameters as they are, and nothing that they are computed from."""
        return self.trained.model.lora is None and not self._forms

    @cached_property
    def _forms(self) -> list[StoredForm]:
        return build(self.trained, "stored", device_mesh=None)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """Its checkpoints, to read only."""
        return Checkpoints(self.trained.checkpoint.dir or self.directory / CHECKPOINTS, self.trained.checkpoint, {})

    @cached_property
    def unfit(self) -> dict[int, str]:
        """Step -> reason, of its checkpoints that it would not continue from itself, as this process sees them; the log names the newest.
        Raises UserError: UnreachableError if they cannot be read now.
        """
        try:
            journal = Journal.seen_here(RunDirectory(self.directory, primary=False).roll_backs)
            found = journal.unfit(self.checkpoints, healthy_only=self.trained.health is not None, here=True)
        except Exception as error:
            if not is_storage_error(error):
                raise
            raise UnreachableError(f"{self.directory} cannot be read: {first_line(error)}; try again when the cause is gone.") from error
        newest = max((step for step in self.checkpoints.steps() if step not in found), default=-1)
        for step in sorted(step for step in found if step > newest):
            _log.warning("%s: checkpoint %d is passed over unless it is named: %s", self.directory, step, found[step])
        return found

    @property
    def untrained(self) -> bool:
        """True for a model as it was imported."""
        return RunDirectory(self.directory, primary=False).model.is_file() and self.checkpoints.steps() == [0]

    def steps(self) -> list[int]:
        """Steps of the checkpoints that it would continue from itself, oldest first."""
        return [step for step in self.checkpoints.steps() if step not in self.unfit]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Its copy of the tokenizer, if it has one."""
        folder = self.directory / TOKENIZER
        return open_tokenizer(str(folder)) if folder.is_dir() else None

    def text_tokenizer(self) -> Tokenizer:
        """Its copy of the tokenizer. Raises UserError if it has none."""
        if self.tokenizer is None:
            raise UserError(f"{self.directory.name} has no tokenizer, without which no text can be read: it needs a tokenizer.json.")
        return self.tokenizer

    def weights(self, mesh: Mesh, step: int | None = None, kind: str = RAW) -> Weights:
        """The weights of the newest checkpoint of `steps`, or of the checkpoint of `step`, in float32 and split over `mesh` as in training.

        Raises UserError if there is no such checkpoint, or if `mesh` does not divide a dim.
        """
        model = self.config.model
        kinds = {"params": (abstract_parameters(model), parameter_specs(model, mesh))}
        kinds["model_state"] = abstract_model_state(model), model_state_specs(model, mesh)

        def wanted(spec: PartitionSpec, shape: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

        def split(shapes: Parameters, specs: Parameters) -> Any:
            return jax.tree.map(wanted, specs, shapes, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))

        return self.restore({name: split(*pair) for name, pair in kinds.items()}, step, kind)

    def restore(self, wanted: dict[str, Parameters], step: int | None = None, kind: str = RAW) -> Weights:
        """The leaves of `params` and `model_state` that `wanted` names, with shape and sharding, as `weights`. Adapters are merged into
        them in float32, one matrix at a time. `kind`: the parameters, or an average of them.
        """
        self.check_kind(kind)
        places = {key: place for key, place in stored(self.trained.model).items() if _has(wanted.get(key[0], {}), key[1])}
        root, shapes = _root(kind), abstract_parameters(self.trained.model)
        asked: Parameters = {}
        for (entry, name), place in places.items():
            target = leaf(wanted[entry], name)
            put(asked, (*(root if place.entry == "params" else (place.entry,)), *place.name), target)
            for part in (place.a, place.b):
                if part is not None:
                    shape = leaf(shapes, part)
                    put(asked, (*root, *part), jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=_whole(target.sharding)))
        number, state = self._restore(asked, step)
        found: dict[str, Parameters] = {"params": {}, "model_state": {}}
        for (entry, name), place in places.items():
            put(found[entry], name, _merged(state, root, place))
        return Weights(number, found["params"], found["model_state"])

    def adapters(self, step: int | None = None, kind: str = RAW) -> Parameters:
        """The adapters of a checkpoint on the host, not merged: with `model.lora` all parameters that were trained."""
        self.check_kind(kind)
        here = SingleDeviceSharding(jax.devices("cpu")[0])
        found: Parameters = leaf(self._restore(self._parameters(kind, here), step)[1], _root(kind))
        return found

    def sources(self, kind: str) -> set[str]:
        """Names of the leaves of a checkpoint that weights of this kind are computed from, apart from the model state."""
        asked = self._asked(self._parameters(kind, None))
        return {".".join(path_of(path)) for path, _ in jax.tree_util.tree_flatten_with_path(asked)[0]}

    def _parameters(self, kind: str, sharding: Sharding | None) -> Parameters:
        """Abstract parameters of this kind, as an entry of a state."""
        entries: Parameters = {}
        shapes = abstract_parameters(self.trained.model)
        put(entries, _root(kind), jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes))
        return entries

    def _asked(self, entries: Parameters) -> Parameters:
        return reduce(lambda asked, form: form.asked(asked), self._forms, entries)

    def _restore(self, entries: Parameters, step: int | None) -> tuple[int, Parameters]:
        """(step of the checkpoint, the wanted entries of its state)."""
        restored = self.checkpoints.restore_entries(self._asked(entries), step, self._passed_over(step))
        return restored.step, reduce(lambda found, form: form.restored(found), reversed(self._forms), restored.state)

    def _passed_over(self, step: int | None) -> dict[int, str]:
        """Checkpoints that are not read, by what process 0 sees: the run may go on meanwhile. A person who names a step has chosen."""
        if step is not None:
            return {}
        seen = agree.on_process_0(lambda: list(self.unfit.items()), f"reading {self.directory}")
        return dict(seen)

    def check_kind(self, kind: str) -> None:
        """Raise UserError if this run keeps no such weights."""
        if kind not in (RAW, *averages(self.trained)):
            raise UserError(
                f"{self.directory} holds no moving average of its weights (it was trained without `{kind}`): ask for raw weights."
            )


def _root(kind: str) -> Name:
    """Path in a state of weights of this kind."""
    return ("params",) if kind == RAW else ("extra", kind)


def _merged(state: Parameters, root: Names, place: Stored) -> jax.Array:
    base: jax.Array = leaf(state, (*(root if place.entry == "params" else (place.entry,)), *place.name))
    if place.a is None or place.b is None:
        return base
    a, b = (leaf(state, (*root, *part)) for part in (place.a, place.b))
    add = partial(merged, scale=place.scale, stacked=place.stacked)
    summed: jax.Array = jax.jit(add, out_shardings=base.sharding, donate_argnums=0)(base, a, b)
    return summed


def _whole(sharding: Sharding) -> Sharding:
    """Adapters lie whole on every device that holds a part of the matrix."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _has(tree: Parameters, name: Names) -> bool:
    try:
        leaf(tree, name)
    except KeyError:
        return False
    return True


def source_tokenizer(train: TrainConfig) -> Path | None:
    """The tokenizer of the run or the model that a run begins as; None if its config names none."""
    source = train.branch_from or train.start_from
    return None if source is None else Path(source.path) / TOKENIZER


def copy_published(source: Path | None, folder: Path, *, goes_on: bool) -> None:
    """Copy the files of the published model that the run or model in `source` goes back to into the run's `folder`, for its export.

    `goes_on`: the run has a checkpoint of its own, so what it keeps stays where the source is gone.
    """
    if source is not None and (source / PUBLISHED).is_dir():
        if (source / PUBLISHED).resolve() != (folder / PUBLISHED).resolve():
            shutil.rmtree(folder / PUBLISHED, ignore_errors=True)
            shutil.copytree(source / PUBLISHED, folder / PUBLISHED)
    elif not goes_on:
        shutil.rmtree(folder / PUBLISHED, ignore_errors=True)


def open_run(directory: Path) -> SavedRun:
    """Open the folder of a run. The size of its mesh is not checked. Raises UserError if it is none."""
    if not (directory / CONFIG).is_file():
        raise UserError(f"{directory} is not a run directory: it has no {CONFIG}; give the folder that `maxlm train` printed.")
    return SavedRun(directory, load_saved(directory))
