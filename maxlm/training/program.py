"""A config turned into compiled functions on a mesh: chooses how an update is made, and how state and batch are split."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import chain
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.base.errors import UserError
from maxlm.base.metric import Metric
from maxlm.config.rules import check_chip
from maxlm.config.schema import Config
from maxlm.config.table import build
from maxlm.hardware.chips import chip_of
from maxlm.hardware.xla_flags import options_of_device
from maxlm.models import init_model_state, init_parameters
from maxlm.models.parameters import Parameters
from maxlm.objectives import ArraySpec, Objective, Sums, build_objective
from maxlm.parallel import partition_spec
from maxlm.training.by_size import BySize
from maxlm.training.gradients import build_gradients, cast_frozen
from maxlm.training.optimizer import build_optimizer, learning_rate
from maxlm.training.placement import Placement
from maxlm.training.reader import Reader
from maxlm.training.step import GradFn, TrainState, Update
from maxlm.training.stored_form import StoredForm
from maxlm.training.transform import in_order


@dataclass(frozen=True)
class Program:
    """The step of `config` on `mesh`; nothing is compiled before it is asked for."""

    config: Config
    mesh: Mesh
    optimizer: optax.GradientTransformation
    objective: Objective

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Declarations of the figures of an update that not every record holds."""
        readers: list[Reader] = build(self.config, "readers", levels={})
        parts = (*(one.recorded for one in (*self.update.transforms, *self.probes)), *(one.metrics for one in readers))
        return (*self.objective.metrics, *chain(*parts))

    @cached_property
    def gradients(self) -> GradFn:
        """The gradients of a batch."""
        return build_gradients(self.objective, self.mesh.shape)

    @cached_property
    def update(self) -> Update:
        """The update with its transforms: from one gradient of the whole batch, or as a section combines whole updates."""
        transforms = in_order(build(self.config, "transforms", device_mesh=self.mesh))
        parts = self.objective, self.optimizer, learning_rate(self.config), self.gradients, transforms
        return self._only(Update, "update", parts=parts) or Update(*parts)

    @cached_property
    def placement(self) -> Placement:
        """Where the state lives."""
        return self._only(Placement, "placement", program=self) or Placement(self)

    def _only(self, plain: type, kind: str, **given: Any) -> Any:
        """The implementation of this kind that replaces the `plain` one; None if there is none. Raises UserError if there are several."""
        found = build(self.config, kind, **given)
        if len(found) > 1:
            names = " and ".join(type(one).__name__ for one in found)
            raise UserError(f"{names} replace {plain.__name__}, each for a section of the config: remove all of these sections but one.")
        return next(iter(found), None)

    @cached_property
    def probes(self) -> list[Any]:
        """Programs apart from the step, which look at the model now and then."""
        return build(self.config, "probes", program=self)

    @cached_property
    def _forms(self) -> list[StoredForm]:
        return build(self.config, "stored", device_mesh=self.mesh)

    @cached_property
    def state_shardings(self) -> TrainState:
        """A NamedSharding for every leaf of the state."""
        return self.placement.shardings(self.update.shardings(self.mesh))

    @cached_property
    def batch_sharding(self) -> Any:
        """A NamedSharding for every array of a batch."""
        return self._of_batch(lambda spec: NamedSharding(self.mesh, partition_spec(spec.axes, spec.shape, self.mesh, "batch")))

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state: what a checkpoint is restored onto."""
        shapes = jax.eval_shape(self._first_state)
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, self.state_shardings)

    @cached_property
    def abstract_batch(self) -> Any:
        """Shapes, dtypes and shardings of a batch."""
        shapes = self._of_batch(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype))
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, self.batch_sharding)

    def _of_batch(self, function: Callable[[ArraySpec], Any]) -> Any:
        return jax.tree.map(function, self.objective.batch_spec(), is_leaf=lambda leaf: isinstance(leaf, ArraySpec))

    def _first_state(self) -> TrainState:
        model, seed = self.config.model, self.config.train.seed
        return self.update.init(init_parameters(model, seed), init_model_state(model, seed))

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """XLA's options for the devices of this mesh."""
        return options_of_device(self.mesh.devices.flat[0], traced=self.config.run.profile is not None)

    def init(self) -> TrainState:
        """The first state, created where it will live."""
        with jax.set_mesh(self.mesh):
            return self.placement.create(self._first_state)

    def begin_with(self, params: Parameters, model_state: Parameters) -> TrainState:
        """The first state with these parameters and this model state, which lie on `state_shardings`; they are donated."""
        with jax.set_mesh(self.mesh):
            return self.placement.create(self.update.init, params, model_state)

    def of_size(self, size: int) -> "Program":
        """The program of batches of `size` sequences, which has the same state and schedule. This one, if all batches are alike."""
        own = self.objective.config.with_batches_of(size, self.mesh.shape)
        return self if own is None else replace(self, objective=build_objective(own))

    def compile_from(self, step: int) -> None:
        """Compile all that batches from number `step` on need, so that training does not wait for it later."""
        sized = [self.step] if isinstance(self.step, BySize) else []
        for one in (*sized, *self.probes):
            one.prepare(self.config.batch_sizes.from_number(step))

    @cached_property
    def step(self) -> Any:
        """The compiled update, (state, batch) -> (state, Metrics); its state is donated. The first read compiles it."""
        sizes = self.objective.config.batch_sizes
        if sizes.vary:
            return BySize(lambda size: self.of_size(size).compiled(), sizes.largest)
        return self.placement.step(self.compiled())

    def compiled(self) -> jax.stages.Compiled:
        """The update that `lower` describes, compiled."""
        return self.lower().compile(compiler_options=self.compiler_options)

    def lower(self) -> jax.stages.Lowered:
        """The update, traced and lowered for this mesh without any array; of a state in files its gradients."""
        with jax.set_mesh(self.mesh):
            return self.placement.lower()

    def evaluated(self, state: TrainState) -> TrainState:
        """The state that is evaluated, with parameters on the device; a stored form may replace them, for example by an average."""
        state = self.placement.readable(state)
        return replace(state, params=reduce(lambda params, form: form.evaluated(params, state.opt_state), self._forms, state.params))

    @cached_property
    def evaluate(self) -> jax.stages.Wrapped:
        """The jitted evaluation of one held-out batch, (params, model state, batch) -> Sums; of a state that is readable."""

        def figures(params: Parameters, model_state: Parameters, batch: Any) -> Sums:
            loss = cast_frozen(self.config.model, self.config.precision.compute, self.objective.loss)
            return loss(params, model_state, batch, scan=self.placement.scan, training=False)[1]

        split = self.placement.read_shardings(), self.state_shardings.model_state, self.batch_sharding
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(figures, in_shardings=split, out_shardings=whole, compiler_options=self.compiler_options)


def build_program(config: Config, mesh: Mesh) -> Program:
    """The training program of `config` on `mesh`. Raises ConfigError for a number format that the chip is slow at."""
    if (chip := chip_of(mesh.devices.flat[0].device_kind)) is not None:
        check_chip(config, chip)
    return Program(config, mesh, build_optimizer(config), build_objective(config))
