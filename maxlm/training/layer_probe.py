"""Figures of every layer that the training step does not compute: activations, entropy of attention, norms of weights.

A program of its own, which computes a forward pass of one sequence of each device, now and then. So the step itself, its memory and its
flash kernels stay as they are, and no bit of the state depends on it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from maxlm.base.metric import Metric
from maxlm.config.schema import HealthConfig, ModelConfig
from maxlm.config.sections.mesh import BATCH_AXES
from maxlm.kernels.attention.xla import attention_entropy
from maxlm.memory.spaces import on_device
from maxlm.models import BlockContext, Parameters, bind, cast_matrices
from maxlm.models.decoder import Block
from maxlm.parallel import constrain
from maxlm.training.by_size import BySize
from maxlm.training.gradients import cast_frozen
from maxlm.training.layer_figures import RATIO, layer_names, squares
from maxlm.training.program import Program
from maxlm.training.reader import Reader
from maxlm.training.step import Metrics, TrainState

ACTIVATION, ENTROPY, WEIGHT, UPDATE = "layer_activation", "layer_entropy", "layer_weight", "layer_update"

QUERIES = 128  # of a sequence, evenly over it, of which the entropy is computed

# B batch, S sequence, D width, H heads, Q queries; L layers, G layers and parameters outside of them


class BlockFigures(NamedTuple):
    """Root mean square of the output of one block, and mean entropy of its attention in nats. Padding is left out."""

    activation: Float[Array, ""]
    entropy: Float[Array, ""]


def probe_metrics(config: ModelConfig) -> tuple[Metric, ...]:
    """Declarations of the figures, in records of the steps that have them."""
    layers = tuple(f"layer {depth}" for depth in range(config.n_layers))
    return (
        Metric(ACTIVATION, "Root mean square of each layer's output", entries=layers),
        Metric(ENTROPY, "Entropy of attention, mean over heads", "nats", entries=layers),
        Metric(WEIGHT, "Norm of the weights of each layer", entries=layer_names(config)),
        Metric(UPDATE, "Norm of the update of each layer", entries=layer_names(config)),
    )


class LayerProbe:
    """Call it with the state and the batch of the next update. One program for each size of a batch."""

    def __init__(self, program: Program, every: int) -> None:
        self._program, self._every = program, every
        self._sized = BySize(lambda size: self.lower(size).compile(compiler_options=program.compiler_options))
        self.prepare, self.recorded = self._sized.prepare, probe_metrics(program.config.model)

    @classmethod
    def from_config(cls, health: HealthConfig, program: Program) -> Self | None:
        """None where no layers are looked at."""
        return None if health.layers is None or not health.activations_every else cls(program, health.activations_every)

    def due(self, step: int) -> bool:
        """True if update `step` is one to look at."""
        return step % self._every == 0

    def __call__(self, state: TrainState, batch: Any) -> dict[str, Array]:
        """Figures of `state` by the names of their metrics, on the devices; `UpdateNorms` completes them on the host."""
        figures: dict[str, Array] = self._sized(self._program.placement.readable(state).params, state.model_state, batch)
        return figures

    def lower(self, size: int) -> jax.stages.Lowered:
        """The program for batches of `size` sequences, traced and lowered without any array."""
        program = self._program.of_size(size)
        state, shardings = jax.eval_shape(program.placement.readable, program.abstract_state), program.state_shardings
        split = jax.tree.map(on_device, shardings.params), shardings.model_state, program.batch_sharding
        whole = NamedSharding(program.mesh, PartitionSpec())

        def layer_probe(params: Parameters, model_state: Parameters, batch: Any) -> dict[str, Array]:
            forward = cast_frozen(program.config.model, program.config.precision.compute, partial(_forward, program))
            figures = forward(params, model_state, batch)
            return {ACTIVATION: figures.activation, ENTROPY: figures.entropy, WEIGHT: jnp.sqrt(squares(program.config.model, params))}

        with jax.set_mesh(program.mesh):
            return jax.jit(layer_probe, in_shardings=split, out_shardings=whole).lower(
                state.params, state.model_state, program.abstract_batch
            )


class UpdateNorms(Reader):
    """Complete the figures of the probe, and put each update that has them on record."""

    @classmethod
    def from_config(cls, health: HealthConfig) -> Self | None:
        return None if health.layers is None else cls()

    def must_record(self, metrics: Metrics) -> bool:
        return WEIGHT in metrics.values

    def record(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Add the norm of what the update changed in each layer."""
        return {**values, UPDATE: values[RATIO] * values[WEIGHT]} if WEIGHT in values else dict(values)


def _forward(program: Program, params: Parameters, model_state: Parameters, batch: Any) -> BlockFigures:
    """Figures of every layer [L] in depth order, from the first sequence of each device."""
    config, objective = program.config, program.objective
    batch = objective.inputs(first_rows(dict(program.mesh.shape), batch), training=False)
    model = bind(config.model, cast_matrices(config.model, config.precision.compute, params), model_state)
    with jax.default_matmul_precision(config.precision.float32_matmul):
        x_BSD = model.embed(batch.tokens_BS, batch.positions_BS)
        layer = partial(_measured_layer, batch.positions_BS)
        reports: Any = model.run(x_BSD, objective.context(model, batch), layer=layer).routing
    return reports


def first_rows(sizes: Mapping[str, int], batch: Any) -> Any:
    """The first row of each device's share of the batch; no row moves."""
    shares = int(np.prod([sizes.get(axis, 1) for axis in BATCH_AXES]))

    def first(array: Array) -> Array:
        rows = array.reshape(shares, array.shape[0] // shares, *array.shape[1:])[:, 0]
        return constrain(rows, "batch", *("seq",) * (array.ndim == 2), *(None,) * (array.ndim - 2))

    return jax.tree.map(first, batch)


def _measured_layer(
    positions_BS: Array, context: BlockContext, x_BSD: Array, inputs: tuple[Block, None]
) -> tuple[Array, tuple[Float[Array, ""], BlockFigures]]:
    """One block and its figures, in the place of `run_layer`."""
    attention = inputs[0].attention
    attend: Callable[..., Any] = attention.attend
    entropies: list[Array] = []

    def measured(q_BSHK: Array, k_BSGK: Array, v_BSGV: Array, *rest: Any) -> Any:
        entropies.append(_entropy(attention, q_BSHK, k_BSGK, context, positions_BS))
        return attend(q_BSHK, k_BSGK, v_BSGV, *rest)

    vars(attention)["attend"] = measured  # of this object alone, which lives as long as the trace
    y_BSD, _, _ = inputs[0](x_BSD, context)
    del vars(attention)["attend"]
    valid_BS1 = (context.segment_ids_BS != 0)[..., None]
    square = jnp.sum(jnp.square(y_BSD.astype(jnp.float32)) * valid_BS1) / (jnp.maximum(jnp.sum(valid_BS1), 1) * y_BSD.shape[-1])
    return y_BSD, (jnp.float32(0), BlockFigures(jnp.sqrt(square), entropies[0]))


def _entropy(attention: Any, q_BSHK: Array, k_BSGK: Array, context: BlockContext, positions_BS: Array) -> Float[Array, ""]:
    """Mean over heads and at most `QUERIES` queries of each sequence."""
    length = q_BSHK.shape[1]
    chosen_Q = np.unique(np.linspace(0, length - 1, min(length, QUERIES)).astype(np.int32))
    at = context.segment_ids_BS, positions_BS
    of_queries = context.segment_ids_BS[:, chosen_Q], positions_BS[:, chosen_Q]
    entropy_BQH = attention_entropy(
        q_BSHK[:, chosen_Q],
        k_BSGK,
        of_queries,
        at,
        prefix_BT=context.prefix_BS,
        scale=attention.scale,
        mask=replace(attention.mask, form=context.form),
        softcap=attention.softcap,
        sinks_H=None if attention.sinks_H is None else attention.sinks_H[...],
    )
    valid_BQ1 = (of_queries[0] != 0)[..., None]
    return jnp.sum(entropy_BQH * valid_BQ1) / (jnp.maximum(jnp.sum(valid_BQ1), 1) * entropy_BQH.shape[-1])
