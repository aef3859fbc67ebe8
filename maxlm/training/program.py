"""A config turned into compiled functions on a mesh: the one place that says how step, state and batch are split."""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.config.schema import Config
from maxlm.data.batch import Batch
from maxlm.hardware.chips import chip_of
from maxlm.hardware.xla_flags import compiler_options
from maxlm.parallel import partition_spec
from maxlm.training.optimizer import build_optimizer
from maxlm.training.state import TrainState, init_state, state_shardings
from maxlm.training.step import build_eval_step, build_train_step


@dataclass(frozen=True)
class Program:
    """The step of `config` on `mesh`; nothing is compiled before it is asked for."""

    config: Config
    mesh: Mesh
    optimizer: optax.GradientTransformation

    @cached_property
    def state_shardings(self) -> TrainState:
        """A NamedSharding for every leaf of the state."""
        return state_shardings(self.config.model, self.optimizer, self.mesh)

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """Of every [batch, seq] array of a Batch."""
        shape = (self.config.train.global_batch, self.config.data.seq_len)
        return NamedSharding(self.mesh, partition_spec(("batch", "seq"), shape, self.mesh, "batch"))

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state: what a checkpoint is restored onto."""
        shapes = jax.eval_shape(lambda: init_state(self.config.model, self.optimizer, self.config.train.seed))
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, self.state_shardings)

    @cached_property
    def abstract_batch(self) -> Batch:
        shape = (self.config.train.global_batch, self.config.data.seq_len)
        integers, floats = (jax.ShapeDtypeStruct(shape, dtype, sharding=self.batch_sharding) for dtype in (jnp.int32, jnp.float32))
        return Batch(tokens_BS=integers, targets_BS=integers, weights_BS=floats, segment_ids_BS=integers, positions_BS=integers)

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """What XLA is told for this mesh."""
        device = self.mesh.devices.flat[0]
        chip = chip_of(device.device_kind)
        return compiler_options(chip.name if chip is not None else device.platform)

    def init(self) -> TrainState:
        """The first state, created where it will live."""
        with jax.set_mesh(self.mesh):
            return self._initialization()

    @cached_property
    def _initialization(self) -> jax.stages.Compiled:
        make = jax.jit(lambda: init_state(self.config.model, self.optimizer, self.config.train.seed), out_shardings=self.state_shardings)
        with jax.set_mesh(self.mesh):
            return make.lower().compile(compiler_options=self.compiler_options)

    @cached_property
    def step(self) -> jax.stages.Compiled:
        """The compiled update, (state, batch) -> (state, Metrics); its state is donated. The first read compiles it."""
        return self.lower().compile(compiler_options=self.compiler_options)

    def lower(self) -> jax.stages.Lowered:
        """The update, traced and lowered for this mesh without any array: what planning compiles."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        update = jax.jit(
            build_train_step(self.config, self.optimizer),
            in_shardings=(self.state_shardings, self.batch_sharding),
            out_shardings=(self.state_shardings, whole),
            donate_argnums=0,
        )
        with jax.set_mesh(self.mesh):
            return update.lower(self.abstract_state, self.abstract_batch)

    @cached_property
    def evaluate(self) -> jax.stages.Wrapped:
        """The jitted evaluation of one batch, (params, batch) -> LossSums."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(build_eval_step(self.config), in_shardings=(self.state_shardings.params, self.batch_sharding), out_shardings=whole)


def build_program(config: Config, mesh: Mesh) -> Program:
    """The training program of `config` on `mesh`."""
    return Program(config, mesh, build_optimizer(config))
