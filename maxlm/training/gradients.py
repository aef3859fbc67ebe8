"""Gradients of a batch: microbatch after microbatch, and reduced over the devices no more often than they must be.

Where weights are whole on every device of an axis (`data`; `fsdp` as well below ZeRO stage 3, Rajbhandari 2020, arXiv 1910.02054), each
device adds up the gradients of its own microbatches, and they are reduced once an update. Everywhere else XLA's partitioner gathers weights
and scatters gradients layer by layer.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from maxlm.config.schema import Config
from maxlm.data.batch import Batch
from maxlm.kernels.collectives import scatter_sum
from maxlm.models import parameter_axes
from maxlm.models.parameters import Parameters, cast_matrices
from maxlm.models.stack import split_layers
from maxlm.parallel import RULES, constrain, mesh_axes
from maxlm.training import pipelined
from maxlm.training.loss import LossSums, loss_sums

Axes = tuple[str | None, ...]


def accumulate(config: Config, params: Parameters, batch: Batch, model_state: Parameters | None = None) -> tuple[LossSums, Parameters]:
    """Sums and mean gradient of the batch. The mean is over the tokens of all microbatches."""
    total_tokens = jnp.maximum(jnp.sum(batch.weights_BS), 1)
    local = _whole_over(config, jax.sharding.get_abstract_mesh())
    if not local:
        return _microbatches(config, params, model_state, batch, total_tokens, _gather_layers if config.mesh.zero == 2 else None)
    axes = parameter_axes(config.model)

    def share(params: Parameters, model_state: Parameters | None, batch: Batch, total_tokens: jax.Array) -> tuple[LossSums, Parameters]:
        """Of one device along `local`."""
        sums, grads = _microbatches(config, params, model_state, batch, total_tokens, summed=local)
        return jax.lax.psum(sums, local), _map(partial(_reduce, local=local), axes, grads)

    compute = cast_matrices(params, axes, jnp.dtype(config.precision.compute))
    specs = _map(lambda names: P(*("fsdp" if _scatters(name, local) else None for name in names)), axes)
    rows = P(tuple(axis for axis in mesh_axes("batch", jax.sharding.get_abstract_mesh()) if axis in local))
    run = jax.shard_map(share, in_specs=(P(), P(), rows, P()), out_specs=(P(), specs), axis_names=set(local), check_vma=False)
    sums, grads = run(compute, model_state, batch, total_tokens)
    return sums, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


def _whole_over(config: Config, mesh: AbstractMesh) -> tuple[str, ...]:
    """The axes over which gradients are reduced once an update, by hand: weights are whole along them, and there is more than one
    microbatch to wait for; below ZeRO stage 2 gradients stay whole anyway, and so they do on the stages of a pipeline.
    """
    axes = ("data",) if config.mesh.zero == 3 else ("data", "fsdp")
    waits = config.train.microbatches > 1 or config.mesh.zero == 1 or pipelined.stages() > 1
    return tuple(axis for axis in axes if waits and mesh.shape.get(axis, 1) > 1 and axis not in mesh.manual_axes)


def _microbatches(
    config: Config,
    params: Parameters,
    model_state: Parameters | None,
    batch: Batch,
    total_tokens: Float[Array, ""],
    prepare: Callable[[Config, Parameters], Parameters] | None = None,
    summed: tuple[str, ...] = (),
) -> tuple[LossSums, Parameters]:
    """Sums and gradient of the batch, divided by `total_tokens`; the loss is of `prepare(params)`. `summed`: as in `Forward`."""

    def part_loss(params: Parameters, part: Batch) -> tuple[Float[Array, ""], LossSums]:
        total, sums = loss_sums(config, prepare(config, params) if prepare else params, part, model_state, summed=summed)
        return total / total_tokens, sums

    gradient = jax.grad(part_loss, has_aux=True)
    microbatches = config.train.microbatches
    # Microbatch m takes rows m, m + M, ...: every shard keeps its own rows, and nothing moves between devices.
    parts = jax.tree.map(lambda a: jnp.moveaxis(a.reshape(-1, microbatches, *a.shape[1:]), 1, 0), batch)
    if pipelined.stages() > 1:
        return pipelined.gradients(config, params, model_state or {}, parts, total_tokens, summed)
    if microbatches == 1:
        grads, sums = gradient(params, batch)
        return sums, grads

    def body(carry: tuple[LossSums, Parameters], part: Batch) -> tuple[tuple[LossSums, Parameters], None]:
        grads, sums = gradient(params, part)
        return jax.tree.map(jnp.add, carry, (sums, grads)), None

    _, sums = jax.eval_shape(gradient, params, jax.tree.map(lambda a: a[0], parts))
    zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), sums), jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), params)
    (sums, grads), _ = jax.lax.scan(body, zero, parts)
    return sums, grads


def _scatters(name: str | None, local: tuple[str, ...]) -> bool:
    """Whether a reduction over `local` leaves each device its part of the dim of that logical axis."""
    return "fsdp" in local and name is not None and "fsdp" in RULES[name]


def _reduce(names: Axes, gradient: jax.Array, *, local: tuple[str, ...]) -> jax.Array:
    """The sum over `local`; of what `fsdp` splits in the state, this device's part."""
    dim = next((dim for dim, name in enumerate(names) if _scatters(name, local)), None)
    if dim is not None:
        gradient = scatter_sum(gradient, "fsdp", dim)
        local = tuple(axis for axis in local if axis != "fsdp")
    return jax.lax.psum(gradient, local) if local else gradient


def _gather_layers(config: Config, params: Parameters) -> Parameters:
    """The layers' weights in the dtype of the matmuls, whole over `fsdp`; their gradients are scattered as they are formed. Embedding and
    unembedding are read once a microbatch anyway.
    """
    axes = parameter_axes(config.model)
    layers, others = split_layers(cast_matrices(params, axes, jnp.dtype(config.precision.compute)))
    return {**others, **_map(_gather, split_layers(axes)[0], layers)}


def _gather(names: Axes, weight: jax.Array) -> jax.Array:
    whole = tuple("embed_act" if name is not None and "fsdp" in RULES[name] else name for name in names)

    @jax.custom_vjp
    def gather(weight: jax.Array) -> jax.Array:
        return constrain(weight, *whole)

    gather.defvjp(lambda weight: (gather(weight), None), lambda _, gradient: (constrain(gradient, *names),))
    return gather(weight)


def _map(function: Callable[..., jax.Array | P], axes: Parameters, *trees: Parameters) -> Parameters:
    """`function(logical axes, leaf ...)` for every parameter."""
    return jax.tree.map(function, axes, *trees, is_leaf=lambda leaf: isinstance(leaf, tuple))
