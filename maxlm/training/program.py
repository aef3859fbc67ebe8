"""A config turned into compiled functions on a mesh: chooses how an update is made, and how state and batch are split."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.config.rules import check_chip
from maxlm.config.schema import Config
from maxlm.hardware.chips import chip_of
from maxlm.hardware.xla_flags import compiler_options
from maxlm.memory.creation import create
from maxlm.memory.spaces import on_device
from maxlm.models import init_model_state, init_parameters
from maxlm.models.parameters import Parameters
from maxlm.objectives import ArraySpec, Objective, Sums, build_objective
from maxlm.parallel import partition_spec
from maxlm.telemetry.balance import ROUTING_METRICS
from maxlm.telemetry.compilations import because
from maxlm.telemetry.metric import Metric
from maxlm.training.compression import CompressedSums
from maxlm.training.diloco import LocalUpdates
from maxlm.training.ema import MovingAverage
from maxlm.training.gradients import build_gradients, cast_frozen
from maxlm.training.hosted_layers import layer_scan
from maxlm.training.layer_figures import LayerFiguresOfUpdates
from maxlm.training.layer_probe import LayerProbe, probe_metrics
from maxlm.training.loss_scale import LossScaling
from maxlm.training.noise_scale import NOISE_SCALE, PART_METRICS, PartNorms
from maxlm.training.nvme_step import NvmeStep
from maxlm.training.offloaded import Offloading, StreamedUpdate
from maxlm.training.optimizer import build_optimizer
from maxlm.training.schedule_free import NAME as SCHEDULE_FREE, averaged
from maxlm.training.spike_guard import SpikeGuard
from maxlm.training.split_masters import SplitMasters
from maxlm.training.state_paths import path_of
from maxlm.training.step import GradFn, TrainState, Transform, Update, build_train_step

# In the order in which they see the gradient; parameters are written in the reverse order.
TRANSFORMS: tuple[type[Transform], ...] = (
    LossScaling,
    PartNorms,
    SplitMasters,
    LayerFiguresOfUpdates,
    SpikeGuard,
    CompressedSums,
    MovingAverage,
)


class RampedStep:
    """The step of a run whose batches grow (`train.batch_ramp`): call it with a batch of any size. It compiles at most nine."""

    def __init__(self, compiled: Callable[[int], jax.stages.Compiled], largest: int) -> None:
        """`compiled` compiles the update of batches of a size. The `largest` is compiled at once: it needs the most memory."""
        self._compile = compiled
        self._largest, self._compiled = largest, {largest: compiled(largest)}

    def __call__(self, state: Any, batch: Any) -> Any:
        size = len(batch.tokens_BS)
        self.prepare((size,))
        return self._compiled[size](state, batch)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Compile the updates of these sizes, those that are not yet."""
        for size in sizes:
            if size not in self._compiled:
                with because(f"batches of {size:,} sequences, of which there were none before in this attempt"):
                    self._compiled[size] = self._compile(size)

    def memory_analysis(self) -> Any:
        """XLA's figures of the largest program."""
        return self._compiled[self._largest].memory_analysis()


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
        declared = tuple(metric for metric in self.update.metrics if metric not in PART_METRICS)
        declared += () if self.config.train.noise_scale is None else (NOISE_SCALE,)
        declared += probe_metrics(self.config.model) if self.layer_probe is not None else ()
        return declared + (ROUTING_METRICS if self.config.model.moe is not None else ())

    @cached_property
    def gradients(self) -> GradFn:
        """The gradients of a batch."""
        return build_gradients(self.objective, self.mesh.shape)

    @cached_property
    def update(self) -> Update:
        """The update: from one gradient of the whole batch, or by workers with local updates (`diloco`), and its transforms."""
        chosen = [one for kind in TRANSFORMS if (one := kind.from_config(self.config, self.mesh)) is not None]
        kind = Update if self.config.diloco is None else LocalUpdates
        return kind(self.config, self.objective, self.optimizer, self.gradients, chosen)

    @cached_property
    def state_shardings(self) -> TrainState:
        """A NamedSharding for every leaf of the state."""
        shardings = self.update.shardings(self.mesh)
        return shardings if self.config.memory.offload_state is None else Offloading(self.config).shardings(shardings)

    @cached_property
    def streamed(self) -> StreamedUpdate | None:
        """The update of a state in several tiers of memory (`memory.offload_state`)."""
        return None if self.config.memory.offload_state is None else StreamedUpdate(self.update, self.abstract_state)

    @cached_property
    def nvme(self) -> NvmeStep | None:
        """The step of a state of which parts are in files."""
        settings = self.config.memory.offload_state
        if self.streamed is None or settings is None or not settings.on_nvme:
            return None
        return NvmeStep(self.streamed, self.abstract_state, self.mesh, self.compiler_options)

    def adopt(self, state: TrainState) -> TrainState:
        """A state that lies on `state_shardings`, with what belongs in files written there. The same state, if nothing does."""
        return state if self.nvme is None else jax.tree_util.tree_map_with_path(self._keep, state)

    def _keep(self, path: tuple[Any, ...], leaf: jax.Array) -> Any:
        return leaf if self.nvme is None else self.nvme.keep(path_of(path), leaf)

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
        return compiler_options_of(self.mesh, traced=self.config.run.profile is not None)

    def init(self) -> TrainState:
        """The first state, created where it will live."""
        with jax.set_mesh(self.mesh):
            return self._initialization() if self.streamed is None else create(self._first_state, self.state_shardings, keep=self._keep)

    def begin_with(self, params: Parameters, model_state: Parameters) -> TrainState:
        """The first state with these parameters and this model state, which lie on `state_shardings`; they are donated."""
        with jax.set_mesh(self.mesh):
            if self.streamed is not None:
                return create(self.update.init, self.state_shardings, params, model_state, keep=self._keep)
            options = self.compiler_options
            made = jax.jit(self.update.init, out_shardings=self.state_shardings, donate_argnums=(0, 1), compiler_options=options)
            return made(params, model_state)

    @cached_property
    def _initialization(self) -> jax.stages.Compiled:
        make = jax.jit(self._first_state, out_shardings=self.state_shardings)
        with jax.set_mesh(self.mesh):
            return make.lower().compile(compiler_options=self.compiler_options)

    def of_size(self, size: int) -> "Program":
        """The program of batches of `size` sequences, which has the same state and schedule. This one, if all batches are alike."""
        train = self.objective.config.train
        if not train.batch_ramp:
            return self
        parts = self.config.microbatches_of(size, self.mesh.shape)
        assert parts is not None, "the rules of train.batch_ramp check every size"
        own = train.model_copy(update={"global_batch": size, "microbatches": parts, "batch_ramp": None})
        return replace(self, objective=build_objective(self.objective.config.model_copy(update={"train": own})))

    def compile_from(self, step: int) -> None:
        """Compile all that batches from number `step` on need, so that training does not wait for it later."""
        if isinstance(self.step, RampedStep):
            self.step.prepare(self.config.batch_sizes.from_number(step))
        if self.layer_probe is not None:
            self.layer_probe.prepare(self.config.batch_sizes.from_number(step))

    @cached_property
    def step(self) -> jax.stages.Compiled | NvmeStep | RampedStep:
        """The compiled update, (state, batch) -> (state, Metrics); its state is donated. The first read compiles it."""
        train = self.objective.config.train
        if train.batch_ramp:
            return RampedStep(lambda size: self.of_size(size).compiled(), train.global_batch)
        compiled = self.compiled()
        return compiled if self.nvme is None else self.nvme.with_gradients(compiled)

    def compiled(self) -> jax.stages.Compiled:
        """The update that `lower` describes, compiled."""
        return self.lower().compile(compiler_options=self.compiler_options)

    def lower(self) -> jax.stages.Lowered:
        """The update, traced and lowered for this mesh without any array; of a state in files its gradients."""
        if self.nvme is not None:
            with jax.set_mesh(self.mesh):
                return self.nvme.lower(build_train_step(self.update, self.nvme.gradient), self.abstract_batch)
        update = jax.jit(
            build_train_step(self.update, self.streamed),
            in_shardings=(self.state_shardings, self.batch_sharding),
            out_shardings=(self.state_shardings, NamedSharding(self.mesh, PartitionSpec())),
            donate_argnums=0,
        )
        with jax.set_mesh(self.mesh):
            return update.lower(self.abstract_state, self.abstract_batch)

    def readable(self, state: TrainState) -> TrainState:
        """The state with parameters that programs of the model can read: on the device. The same state, if they are there."""
        return state if self.streamed is None else self.streamed.readable(state)

    def evaluated(self, state: TrainState) -> TrainState:
        """The state that is evaluated, `readable`: with schedule-free AdamW its parameters are the averaged point."""
        if self.config.optimizer.name != SCHEDULE_FREE:
            return self.readable(state)
        return replace(state, params=self._averaged(state.params, state.opt_state[-1].z))

    @cached_property
    def layer_probe(self) -> LayerProbe | None:
        """Looks at layers now and then (`health.activations_every`)."""
        health = self.config.health
        return None if health is None or health.layers is None or not health.activations_every else LayerProbe(self)

    @cached_property
    def _averaged(self) -> Any:
        return jax.jit(partial(averaged, self.config.optimizer.beta1), out_shardings=self.state_shardings.params)

    @cached_property
    def evaluate(self) -> jax.stages.Wrapped:
        """The jitted evaluation of one held-out batch, (params, model state, batch) -> Sums; of a `readable` state."""
        state, whole = self.state_shardings, NamedSharding(self.mesh, PartitionSpec())

        def figures(params: Parameters, model_state: Parameters, batch: Any) -> Sums:
            scan = layer_scan(self.config, {}) if self.config.memory.layers_on_host else None
            return cast_frozen(self.config.model, self.config.precision.compute, self.objective.loss)(
                params, model_state, batch, scan=scan, training=False
            )[1]

        params = jax.tree.map(on_device, state.params) if self.streamed is None else self.streamed.computed_shardings
        split = params, state.model_state, self.batch_sharding
        return jax.jit(figures, in_shardings=split, out_shardings=whole, compiler_options=self.compiler_options)


def compiler_options_of(mesh: Mesh, *, traced: bool = False) -> dict[str, str | bool]:
    """XLA's options for the devices of `mesh`; `traced`: for a profile."""
    device = mesh.devices.flat[0]
    chip = chip_of(device.device_kind)
    return compiler_options(chip.name if chip is not None else device.platform, traced=traced)


def build_program(config: Config, mesh: Mesh) -> Program:
    """The training program of `config` on `mesh`. Raises ConfigError for a number format that the chip is slow at."""
    if (chip := chip_of(mesh.devices.flat[0].device_kind)) is not None:
        check_chip(config, chip)
    memory = config.memory
    if memory.layers_on_host:  # layer_stream.py keeps the layers' inputs
        memory = memory.model_copy(update={"offload": ()})
    return Program(config, mesh, build_optimizer(config), build_objective(config.model_copy(update={"memory": memory})))
