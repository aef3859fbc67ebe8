"""Logits of whole sequences, as training computes them: without caches, in the precision of the config. Also as a module of flax.nnx."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from maxlm.config import UserError
from maxlm.config.schema import Config
from maxlm.config.sections.mesh import ContextAttention
from maxlm.config.sections.precision import PrecisionConfig
from maxlm.kernels.linear_cross_entropy import logits
from maxlm.models import Decoder, Parameters, bind, model_state_specs, parameter_specs
from maxlm.models.parameters import is_matrix
from maxlm.parallel import mesh_axes, partition_spec
from maxlm.parallel.context import in_sequence

# B batch, S sequence, V vocabulary


def sequence_logits(
    model: Decoder,
    precision: PrecisionConfig,
    strategy: ContextAttention,
    tokens_BS: Int[Array, "B S"],
    positions_BS: Int[Array, "B S"],
    segment_ids_BS: Int[Array, "B S"],
) -> Float[Array, "B S V"]:
    """Logits of every token, float32. `model` has float32 parameters, of which the matrices are cast to `precision.compute`."""
    model = jax.tree.map(partial(_cast, precision.compute), model, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    inputs = (in_sequence(x_BS, strategy, back=True) for x_BS in (tokens_BS, positions_BS, segment_ids_BS))
    with jax.default_matmul_precision(precision.float32_matmul):
        output = model(*inputs, strategy=strategy, precision=precision)
        return in_sequence(logits(output.x_BSD, model.unembedding_VD, model.config.logits_softcap), strategy)


def _cast(compute: str, leaf: Any) -> Any:
    """A matrix in the dtype `compute`; scales, biases, and variables that a user has added stay as they are."""
    axes = leaf.get_metadata().get("axes") if isinstance(leaf, nnx.Variable) else None
    return leaf.replace(leaf[...].astype(compute)) if axes is not None and is_matrix(axes) else leaf


class Forward:
    """Compiled logits of the model of `config` on `mesh`; a program for each shape of the tokens."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self._config = config.model_copy(update={"model": config.model.dropless})  # dropped choices depend on the other tokens of a row
        self._mesh, model = mesh, self._config.model
        self._multiples = _multiples(mesh)
        precision, strategy = config.precision, config.mesh.context_attention

        def run(params: Parameters, model_state: Parameters, *inputs: Array) -> Array:
            return sequence_logits(bind(model, params, model_state), precision, strategy, *inputs)

        self._run = jax.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, params: Parameters, model_state: Parameters, tokens_BS: np.ndarray) -> Float[Array, "B S V"]:
        """Logits of the tokens, each row a document by itself. Raises UserError for ids beyond the vocabulary, and for no tokens."""
        vocab_size, (rows, length) = self._config.model.vocab_size, tokens_BS.shape
        if not tokens_BS.size:
            raise UserError("there are no tokens: give at least one.")
        if not 0 <= int(tokens_BS.min()) <= int(tokens_BS.max()) < vocab_size:
            raise UserError(f"the tokens are ids from {tokens_BS.min()} to {tokens_BS.max()}, and the model's vocabulary has {vocab_size}.")
        most = self._config.model.max_seq_len
        if most is not None and length > most:
            raise UserError(f"{length:,} tokens are above model.learned_positions.max_seq_len = {most:,}: give fewer.")
        room = [(0, -size % multiple) for size, multiple in zip((rows, length), self._multiples, strict=True)]
        shape = (rows + room[0][1], length + room[1][1])
        positions_BS = np.arange(shape[1], dtype=np.int32)[None].repeat(shape[0], 0)
        arrays = np.pad(tokens_BS.astype(np.int32), room), positions_BS, np.pad(np.ones((rows, length), np.int32), room)
        split = NamedSharding(self._mesh, partition_spec(("batch", "seq"), shape, self._mesh, "batch"))
        with jax.set_mesh(self._mesh):
            inputs = (jax.make_array_from_callback(shape, split, array.__getitem__) for array in arrays)
            return self._run(params, model_state, *inputs)[:rows, :length]


def _multiples(mesh: Mesh) -> tuple[int, int]:
    """Numbers that divide the rows, and the length, of arrays that the mesh splits evenly."""
    parts = math.prod(mesh.shape.get(axis, 1) for axis in ("context", "tensor", "stage"))
    return math.prod(mesh.shape[axis] for axis in mesh_axes("batch", mesh)), math.lcm(2 * mesh.shape.get("context", 1), parts)


def default_inputs(tokens_BS: Int[Array, "B S"]) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """Positions and segment ids of rows that are a document each."""
    return jnp.broadcast_to(jnp.arange(tokens_BS.shape[1], dtype=jnp.int32), tokens_BS.shape), jnp.ones(tokens_BS.shape, jnp.int32)


class LanguageModule(nnx.Module):
    """Tokens to logits. `nnx.split`, `nnx.merge`, `nnx.state`, `nnx.grad`, `nnx.jit` and `nnx.display` work on it as on any module.

    Every variable has the metadata `axes` (logical axes, without the axes of stacked layers) and `out_sharding` (mesh axes of each dim), so
    that `nnx.get_partition_spec` and `nnx.get_named_sharding` are right. Blocks that are alike are one `Block` with stacked variables.
    """

    def __init__(self, config: Config, mesh: Mesh, params: Parameters, model_state: Parameters) -> None:
        model = config.model.dropless
        self.decoder = bind(model, params, model_state)
        specs = jax.tree.leaves(
            bind(model, parameter_specs(model, mesh), model_state_specs(model, mesh)), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
        variables = jax.tree.leaves(self.decoder, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        for variable, spec in zip(variables, specs, strict=True):
            variable.set_metadata(out_sharding=(*spec, *[None] * (variable.ndim - len(spec))))
        self.multiples = _multiples(mesh)
        self.mesh, self.precision, self.strategy = mesh.abstract_mesh, config.precision, config.mesh.context_attention

    def __call__(
        self, tokens_BS: Int[Array, "B S"], positions_BS: Int[Array, "B S"] | None = None, segment_ids_BS: Int[Array, "B S"] | None = None
    ) -> Float[Array, "B S V"]:
        """Logits in float32. Positions count from 0 in each row, and each row is one document, if they are not given."""
        positions, segments = default_inputs(tokens_BS)
        given = tokens_BS, positions if positions_BS is None else positions_BS, segments if segment_ids_BS is None else segment_ids_BS
        rows, length = tokens_BS.shape
        room = [(0, -size % multiple) for size, multiple in zip((rows, length), self.multiples, strict=True)]
        inputs = [jnp.pad(array, room) for array in given]  # with segment 0, which is padding
        return _logits(self.decoder, self.mesh, self.precision, self.strategy, *inputs)[:rows, :length]


@partial(jax.jit, static_argnums=(1, 2, 3))  # also of a call outside of `jax.jit`: parts of the forward pass are maps over some mesh axes
def _logits(decoder: Decoder, mesh: AbstractMesh, precision: PrecisionConfig, strategy: ContextAttention, *inputs: Array) -> Array:
    with jax.sharding.use_abstract_mesh(mesh):
        return sequence_logits(decoder, precision, strategy, *inputs)
