"""`maxlm.build`: the functions of a config for a training loop of one's own, on a mesh of devices."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from maxlm.api.data import Data, batch_reader
from maxlm.api.errors import plain_errors
from maxlm.api.model import Model
from maxlm.api.process import quiet_process
from maxlm.base.errors import UserError
from maxlm.base.metric import records
from maxlm.config.schema import Config
from maxlm.config.sections.mesh import AXES
from maxlm.models import Parameters
from maxlm.parallel import build_mesh
from maxlm.training.loop import evaluated_sums
from maxlm.training.program import Program as Compiled, build_program
from maxlm.training.step import Metrics, TrainState


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A config as functions on a mesh. Each is compiled at its first call.

    A batch is a `maxlm.Batch` of arrays [rows, data.seq_len], of numpy or on devices, or an array of ids [rows, data.seq_len + 1].
    """

    config: Config
    mesh: Mesh
    _compiled: Compiled

    @plain_errors
    def init(self) -> TrainState:
        """The first state, drawn from `train.seed`: parameters, optimizer state and counters, each array where it will live."""
        with quiet_process():
            return self._compiled.init()

    @plain_errors
    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One update: (the new state, its metrics). The old state is donated: its arrays are gone afterwards.

        `metrics.loss`, `metrics.grad_norm` and the others are arrays on devices; `float()` waits for them.
        """
        with jax.set_mesh(self.mesh):
            done: tuple[TrainState, Metrics] = self._compiled.step(state, self.shard(batch))
        return done

    @plain_errors
    def loss(self, parameters: Parameters, batch: Any, model_state: Parameters | None = None) -> Float[Array, ""]:
        """The number that training differentiates, a mean over the batch with z-loss and routers' losses. `jax.grad(program.loss)` and
        `jax.jit` work on it.

        Args:
            parameters: `state.params`, or `model.parameters`.
            batch: as for `step`; inside `jax.jit` a `maxlm.Batch` of arrays.
            model_state: `state.model_state`, for a model that has one.
        """
        inside = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(batch))
        batch = batch if inside else self.shard(batch)
        return self._loss(parameters, {} if model_state is None else model_state, batch)

    @plain_errors
    def evaluate(self, state: TrainState, batches: Iterable[Any]) -> dict[str, float]:
        """Means of the objective's figures over all `batches`, by name: "loss" first, in nats a token. Nothing is dropped or drawn."""
        read = self._compiled.evaluated(state)
        drawn = iter(batches)
        if (first := next(drawn, None)) is None:
            raise UserError("there are no batches to evaluate: give one at least.")
        sums = evaluated_sums(self._compiled, read, map(self.shard, itertools.chain([first], drawn)))
        means = [metric for metric in self._compiled.objective.metrics if metric.reduce == "mean"]
        return records({name: np.asarray(value) for name, value in sums.values(means).items()})

    def batches(self, split: str = "train", start: int = 0) -> Iterator[Any]:
        """Batches of the config's token stores from number `start` on: "train" without end, "eval" the held-out ones once."""
        return Data.open(self.config, split).batches(start)

    @plain_errors
    def shard(self, batch: Any) -> Any:
        """`batch` on the devices of the mesh, split as the step reads it. Raises UserError for another shape, and ids out of range."""
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch)) and not isinstance(batch, jax.Array):
            return jax.device_put(batch, self._compiled.batch_sharding)
        made = self._read(batch)
        rows, wanted = len(made[0]), self.config.train.global_batch
        if rows != wanted and rows not in self._sizes:
            raise UserError(f"the batch has {rows:,} rows, and train.global_batch says {wanted:,}.")
        put = lambda array, sharding: jax.make_array_from_callback(array.shape, sharding, array.__getitem__)  # noqa: E731
        return jax.tree.map(put, made, self._compiled.batch_sharding)

    def model(self, state: TrainState) -> Model:
        """The model of a state, as it is evaluated: an average where the optimizer keeps one. Without a tokenizer it reads ids. The next
        `step` donates the arrays, so use it before.
        """
        read = self._compiled.evaluated(state)
        return Model(self.config, self.mesh, read.params, read.model_state, step=int(state.step))

    @cached_property
    def _loss(self) -> Any:
        objective, mesh = self._compiled.objective, self.mesh.abstract_mesh

        def mean_loss(parameters: Parameters, model_state: Parameters, batch: Any) -> Array:
            with jax.sharding.use_abstract_mesh(mesh):
                total, _ = objective.loss(parameters, model_state, batch)
                return total / jax.numpy.maximum(objective.denominator(batch), 1)

        return jax.jit(mean_loss)

    @cached_property
    def _read(self) -> Callable[[Any], Any]:
        return batch_reader(self.config)

    @cached_property
    def _sizes(self) -> set[int]:
        sizes = self.config.batch_sizes
        return set(sizes.from_number(0)) if sizes.vary else set()

    def __repr__(self) -> str:
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items() if size > 1) or "one device"
        return f"Program({self.config.run.name!r}, {mesh})"


@plain_errors
def build(config: Config, mesh: Mesh | None = None) -> Program:
    """The functions of `config` on `mesh`; None: over all devices, as its section `mesh` says. Nothing is compiled yet.

    Raises UserError: the mesh does not match the devices or the model.
    """
    with quiet_process():
        if mesh is not None and tuple(mesh.axis_names) != AXES:
            raise UserError(f"the mesh has the axes {', '.join(mesh.axis_names)}: build one with {', '.join(AXES)}, in this order.")
        mesh = build_mesh(config) if mesh is None else mesh
        return Program(config, mesh, build_program(config, mesh))
