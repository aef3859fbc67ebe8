"""A config turned into compiled functions on a mesh: chooses how an update is made, and how state and batch are split."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.config.rules import check_chip
from maxlm.config.schema import Config, ModelConfig
from maxlm.hardware.chips import chip_of
from maxlm.hardware.xla_flags import compiler_options
from maxlm.memory.creation import create
from maxlm.memory.spaces import on_device
from maxlm.models import abstract_parameters, init_model_state, init_parameters, model_state_specs, parameter_specs
from maxlm.models.parameters import Parameters
from maxlm.objectives import ArraySpec, Objective, Sums, build_objective
from maxlm.parallel import partition_spec
from maxlm.telemetry.balance import ROUTING_METRICS
from maxlm.telemetry.metric import Metric
from maxlm.training import pipelined
from maxlm.training.compression import AXIS, CompressedSums
from maxlm.training.diloco import LocalUpdates
from maxlm.training.ema import EmaUpdates
from maxlm.training.gradients import accumulated, cast_frozen, compresses, reduced_once, reduction_axes, with_layers_gathered
from maxlm.training.hosted_layers import layer_scan, with_hosted_layers
from maxlm.training.layer_figures import with_gradient_norms
from maxlm.training.layer_probe import LayerProbe, probe_metrics
from maxlm.training.loss_scale import ScaledUpdates
from maxlm.training.noise_scale import NOISE_SCALE, PART_METRICS, with_part_norms
from maxlm.training.nvme_step import NvmeStep
from maxlm.training.offloaded import GradientUpdates, Offloading, StreamedStep
from maxlm.training.optimizer import build_optimizer
from maxlm.training.ramped_step import RampedStep
from maxlm.training.schedule_free import NAME as SCHEDULE_FREE, averaged
from maxlm.training.small_states import path_of
from maxlm.training.spike_guard import WatchedUpdates
from maxlm.training.split_masters import HalvesOnly, SplitMasters, difference_dtype
from maxlm.training.state_paths import keys_of
from maxlm.training.step import GradFn, TrainState, Updater, build_train_step, in_one_pass


@dataclass(frozen=True)
class Program:
    """The step of `config` on `mesh`; nothing is compiled before it is asked for."""

    config: Config
    mesh: Mesh
    optimizer: optax.GradientTransformation
    objective: Objective

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Declarations of all that an update reports beside what every record holds."""
        declared = tuple(metric for metric in self.updater.metrics if metric not in PART_METRICS)
        declared += () if self.config.train.noise_scale is None else (NOISE_SCALE,)
        declared += probe_metrics(self.config.model) if self.layer_probe is not None else ()
        return declared + (ROUTING_METRICS if self.config.model.moe is not None else ())

    @cached_property
    def gradients(self) -> GradFn:
        """The gradients of a batch: how they are computed and reduced is chosen here, once.

        computed   by a pipeline (`mesh.stage`); microbatch after microbatch (`train.microbatches`); in one pass
        reduced    once an update (`reduction_axes`), over `data` by the updater where it is compressed; as layers are done, with whole
                   weights (ZeRO stage 2); by the partitioner
        """
        config, objective, sizes = self.objective.config, self.objective, self.mesh.shape
        axes = reduction_axes(config, sizes)
        loss = partial(with_hosted_layers(objective.loss) if config.memory.layers_on_host else objective.loss, summed=axes)
        measured = (lambda grad_fn: grad_fn) if config.train.noise_scale is None else with_part_norms
        grad_fn: GradFn = measured(partial(in_one_pass, loss))
        if sizes.get("stage", 1) > 1:
            grad_fn = partial(pipelined.gradients, objective, axes)
        elif config.train.microbatches > 1:
            grad_fn = partial(accumulated, config.train.microbatches, grad_fn)
        elif config.mesh.zero == 2:
            grad_fn = measured(partial(in_one_pass, with_layers_gathered(config, loss)))
        apart = AXIS if compresses(config) else None
        return cast_frozen(config, reduced_once(config, grad_fn, axes, apart=apart) if axes else grad_fn)

    @cached_property
    def updater(self) -> Updater:
        """The update: from one gradient of the whole batch, with a moving average (`ema`), or by workers with local updates (`diloco`);
        watched, if `health` asks for it; of a scaled loss in float16; and with master weights in two parts, if `optimizer.state` asks.
        """
        config, health, gradients = self.config, self.config.health, self.gradients
        kind = LocalUpdates if config.diloco is not None else EmaUpdates if config.ema is not None else Updater
        kind = GradientUpdates if config.memory.offload_state is not None else kind
        compressed = None if config.compression is None else CompressedSums(config, self.mesh)
        watches = health is not None and (health.layers is not None or health.spike == "skip")

        def build(gradients: GradFn) -> Updater:
            update = kind(config, self.objective, self.optimizer, gradients, compressed)
            update.metrics += () if config.train.noise_scale is None else PART_METRICS
            return WatchedUpdates(update, health) if health is not None and watches else update

        def watched(gradients: GradFn) -> GradFn:
            layers = health is not None and health.layers is not None
            return with_gradient_norms(config.model, gradients) if layers else gradients

        if config.precision.scaling is not None:
            return ScaledUpdates(config, config.precision.scaling, lambda unscaled: build(watched(unscaled)), gradients)
        gradients = watched(gradients)
        in_two = SplitMasters if config.memory.offload_state is None else HalvesOnly
        return build(gradients) if difference_dtype(config) is None else in_two(config, build, gradients)

    @cached_property
    def state_shardings(self) -> TrainState:
        """A NamedSharding for every leaf of the state."""
        shardings = self.updater.shardings(state_shardings(self.config.model, self.optimizer, self.mesh), self.mesh)
        return shardings if self.config.memory.offload_state is None else Offloading(self.config).shardings(shardings)

    @cached_property
    def streamed(self) -> StreamedStep | None:
        """The step around the plain one, for a state in several tiers of memory (`memory.offload_state`)."""
        return None if self.config.memory.offload_state is None else StreamedStep(self.config, self.abstract_state)

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
        return leaf if self.nvme is None else self.nvme.keep(keys_of(path), leaf)

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
        return self.updater.init(init_state(self.config.model, self.optimizer, self.config.train.seed))

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

        def make(params: Parameters, model_state: Parameters) -> TrainState:
            zero = jnp.zeros((), jnp.int32)
            return self.updater.init(TrainState(zero, zero, params, self.optimizer.init(params), model_state))

        with jax.set_mesh(self.mesh):
            if self.streamed is not None:
                return create(make, self.state_shardings, params, model_state, keep=self._keep)
            made = jax.jit(make, out_shardings=self.state_shardings, donate_argnums=(0, 1), compiler_options=self.compiler_options)
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
        whole = NamedSharding(self.mesh, PartitionSpec())
        train_step = build_train_step(self.config, self.objective, self.updater)
        if self.nvme is not None:
            with jax.set_mesh(self.mesh):
                return self.nvme.lower(train_step, self.abstract_batch)
        update = jax.jit(
            train_step if self.streamed is None else self.streamed.wrap(train_step),
            in_shardings=(self.state_shardings, self.batch_sharding),
            out_shardings=(self.state_shardings, whole),
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
            return cast_frozen(self.config, self.objective.loss)(params, model_state, batch, scan=scan, training=False)[1]

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


def init_state(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first update: a pure function of the seed."""
    params = init_parameters(config, seed)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, zero, params, optimizer.init(params), init_model_state(config, seed))


def state_shardings(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A TrainState with a NamedSharding for every leaf: what the optimizer keeps under the name of a parameter is split as it is."""
    abstract = abstract_parameters(config)
    shardings, state_shardings = (
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        for specs in (parameter_specs(config, mesh), model_state_specs(config, mesh))
    )
    whole = NamedSharding(mesh, PartitionSpec())
    by_name = {path_of(path): sharding for path, sharding in jax.tree_util.tree_flatten_with_path(shardings)[0]}

    def of_moment(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        keys = path_of(path)
        own = next((by_name[keys[start:]] for start in range(len(keys)) if keys[start:] in by_name), None)
        return whole if own is None else _of_parts(own, leaf.shape)

    opt_state = jax.tree_util.tree_map_with_path(of_moment, jax.eval_shape(optimizer.init, abstract))
    return TrainState(whole, whole, shardings, opt_state, state_shardings)


def _of_parts(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """`sharding` of a parameter, for an array with the same dims, some of them shorter (scales, row means): split as far as they go."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in sharding.spec]
    sizes = [[math.prod(sharding.mesh.shape[axis] for axis in axes[:n]) for n in range(len(axes) + 1)] for axes in entries]
    fitting = [max(n for n, parts in enumerate(each) if size % parts == 0) for each, size in zip(sizes, shape, strict=False)]
    kept = [axes[:n] for axes, n in zip(entries, fitting, strict=True)]
    return sharding if kept == entries else NamedSharding(sharding.mesh, PartitionSpec(*(axes or None for axes in kept)))
