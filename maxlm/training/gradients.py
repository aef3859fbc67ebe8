"""Gradients of a batch in all cases but the plain one, `step.in_one_pass`. `build_gradients` chooses how they are computed (in one pass,
`accumulated`, or by a pipeline) and how they are reduced over devices: by XLA's partitioner, or once an update (`reduced_once`).

The dtype of reduction is one rule on every path: a gradient is reduced in the dtype that its weight is computed with, `precision.compute`
for matrices and float32 for norms, biases and routers. Microbatches, and all that comes after the reduction, are float32. (The kernel of
the loss forms the unembedding's gradient by itself, and sums it over the shards of its width in float32.) With `compression` matrices are
reduced so inside a slice, and what crosses slices is compressed from there (compression.py).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from maxlm.config.schema import Config, ModelConfig
from maxlm.kernels.collectives import scatter_sum
from maxlm.memory.layer_stream import empty_on_host
from maxlm.memory.pieces import add_up
from maxlm.memory.spaces import is_on_host
from maxlm.models import parameter_axes
from maxlm.models.layers import Scan
from maxlm.models.parameters import Parameters, cast_matrices
from maxlm.models.stack import split_layers
from maxlm.objectives import Objective, Sums
from maxlm.parallel import RULES, constrain, mesh_axes
from maxlm.training import pipelined
from maxlm.training.compression import AXIS
from maxlm.training.noise_scale import with_part_norms
from maxlm.training.step import GradFn, LossFn, in_one_pass, split

Axes = tuple[str | None, ...]
# (gradient of one device, mesh axes) -> their sum over the axes, in the same dtype
Addition = Callable[[jax.Array, tuple[str, ...]], jax.Array]


def build_gradients(objective: Objective, sizes: Mapping[str, int], scan: Scan | None = None) -> GradFn:
    """Build the function that computes and reduces the gradients of a batch, for a mesh of `sizes`. `scan`: over layers in host memory.

    computed   by a pipeline (`mesh.stage`); microbatch after microbatch (`train.microbatches`); in one pass
    reduced    once an update (`reduction_axes`), over `data` by a transform where it is compressed; as layers are done, with whole weights
               (ZeRO stage 2); by the partitioner
    """
    config, axes = objective.config, reduction_axes(objective.config, sizes)
    computed = config.model, config.precision.compute
    loss = partial(objective.loss, summed=axes, scan=scan)
    measured = (lambda grad_fn: grad_fn) if config.train.noise_scale is None else with_part_norms
    grad_fn: GradFn = measured(partial(in_one_pass, loss))
    if sizes.get("stage", 1) > 1:
        grad_fn = partial(pipelined.gradients, objective, axes)
    elif config.train.microbatches > 1:
        grad_fn = partial(accumulated, config.train.microbatches, grad_fn)
    elif config.mesh.zero == 2:
        grad_fn = measured(partial(in_one_pass, with_layers_gathered(*computed, loss)))
    apart = AXIS if compresses(config) else None
    return cast_frozen(*computed, reduced_once(*computed, grad_fn, axes, apart=apart) if axes else grad_fn)


# Several microbatches.


@jax.named_scope("accumulate")
def accumulated(
    microbatches: int, grad_fn: GradFn, params: Parameters, model_state: Parameters, batch: Any, denominator: Float[Array, ""]
) -> tuple[Sums, Parameters]:
    """`grad_fn` of one microbatch after another; gradients are summed in float32."""
    parts = split(batch, microbatches)

    def body(carry: tuple[Sums, Parameters], numbered: tuple[Any, Any]) -> tuple[tuple[Sums, Parameters], None]:
        part, number = numbered
        sums, grads = grad_fn(params, model_state, part, denominator)
        return (carry[0].plus(sums), add_up(carry[1], grads, number == 0)), None

    sums, _ = jax.eval_shape(grad_fn, params, model_state, jax.tree.map(lambda a: a[0], parts), denominator)
    zero = sums.empty(), jax.tree.map(lambda a: (empty_on_host if is_on_host(a) else jnp.zeros)(a.shape, jnp.float32), params)
    return jax.lax.scan(body, zero, (parts, jnp.arange(microbatches)))[0]


# Reduction once an update.


def reduction_axes(config: Config, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes over which `reduced_once` reduces: weights are whole along them (`data`; `fsdp` as well below ZeRO stage 3, Rajbhandari
    2020, arXiv 1910.02054), and there is more than one microbatch to wait for, or compression. Below ZeRO stage 2 gradients stay whole
    anyway, and so they do on the stages of a pipeline. Workers of local updates are not reduced over `data`.
    """
    if config.memory.layers_on_host:  # gradients of the layers are reduced one by one
        return ()
    waits = config.train.microbatches > 1 or config.mesh.zero == 1 or sizes.get("stage", 1) > 1 or compresses(config)
    axes = ("data",) if config.mesh.zero == 3 else ("data", "fsdp")
    return tuple(axis for axis in axes if waits and sizes.get(axis, 1) > 1 and not (axis == "data" and config.diloco))


def compresses(config: Config) -> bool:
    """True if gradients are compressed where they are summed over `data`; of local updates, weights are."""
    return config.compression is not None and config.diloco is None


def reduced_once(
    model: ModelConfig, compute: str, grad_fn: GradFn, local: tuple[str, ...], add: Addition = jax.lax.psum, apart: str | None = None
) -> GradFn:
    """The gradient of the loss over the denominator: each device along the mesh axes `local` computes the gradient of its own rows, and
    gradients are reduced once, at the end. `add`: sums a gradient over axes along which it is whole. `apart`: one of the axes, along
    which gradients are not summed but stacked, in the dtype in which they would be: `compression.CompressedSums` sums them.
    """
    axes = parameter_axes(model)

    def on_device(params: Parameters, model_state: Parameters, batch: Any, denominator: jax.Array) -> tuple[Sums, Parameters]:
        sums, grads = grad_fn(params, model_state, batch, denominator)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        grads = _map(partial(_reduce, local=tuple(axis for axis in local if axis != apart), add=add), axes, grads)
        return sums.over_devices(local), grads if apart is None else jax.tree.map(lambda g: g[None], grads)

    def gradients(params: Parameters, model_state: Parameters, batch: Any, denominator: jax.Array) -> tuple[Sums, Parameters]:
        cast = cast_matrices(model, compute, params)
        stacked = () if apart is None else (apart,)
        specs = _map(lambda names: P(*stacked, *("fsdp" if _scatters(name, local) else None for name in names)), axes)
        rows = P(tuple(axis for axis in mesh_axes("batch", jax.sharding.get_abstract_mesh()) if axis in local))
        run = jax.shard_map(on_device, in_specs=(P(), P(), rows, P()), out_specs=(P(), specs), axis_names=set(local), check_vma=False)
        sums, grads = run(cast, model_state, batch, denominator)
        return sums, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params) if apart is None else grads

    return gradients


def _scatters(name: str | None, local: tuple[str, ...]) -> bool:
    """True if a reduction over `local` leaves each device its part of the dim of that logical axis."""
    return "fsdp" in local and name is not None and "fsdp" in RULES[name]


def _reduce(names: Axes, gradient: jax.Array, *, local: tuple[str, ...], add: Addition) -> jax.Array:
    """The sum over `local`; of what `fsdp` splits in the state, this device's part."""
    dim = next((dim for dim, name in enumerate(names) if _scatters(name, local)), None)
    if dim is not None:
        gradient = scatter_sum(gradient, "fsdp", dim)
        local = tuple(axis for axis in local if axis != "fsdp")
    return add(gradient, local) if local else gradient


# ZeRO stage 2.


def gather_layers(model: ModelConfig, compute: str, params: Parameters, *, state: bool = False) -> Parameters:
    """ZeRO stage 2: the layers' weights (or frozen ones, with `state`) in the dtype of the matmuls, whole over `fsdp`; their gradients are
    scattered as they are formed. Embedding and unembedding are read once a microbatch anyway.
    """
    axes = parameter_axes(model, state=state)
    layers, others = split_layers(cast_matrices(model, compute, params, state=state))
    return {**others, **_map(_gather, split_layers(axes)[0], layers)}


def _gather(names: Axes, weight: jax.Array) -> jax.Array:
    whole = tuple("embed_act" if name is not None and "fsdp" in RULES[name] else name for name in names)

    @jax.custom_vjp
    def gather(weight: jax.Array) -> jax.Array:
        # Without the inner one XLA:GPU gathers what the weight was cast from, in float32
        return constrain(constrain(weight, *names), *whole)

    gather.defvjp(lambda weight: (gather(weight), None), lambda _, gradient: (constrain(gradient, *names),))
    return gather(weight)


# Frozen weights (`model.lora`).


def cast_frozen(model: ModelConfig, compute: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of parameters, model state and more, with frozen matrices in the dtype of the matmuls: cast before they are gathered."""
    if model.lora is None:
        return function
    return lambda params, state, *rest, **options: function(params, cast_matrices(model, compute, state, state=True), *rest, **options)


def with_layers_gathered(model: ModelConfig, compute: str, loss: LossFn) -> LossFn:
    """`loss` with the layers' weights gathered before the first of them is read (ZeRO stage 2)."""

    def gathered(params: Parameters, state: Parameters, batch: Any) -> tuple[Float[Array, ""], Sums]:
        frozen = state if model.lora is None else gather_layers(model, compute, state, state=True)
        return loss(gather_layers(model, compute, params), frozen, batch)

    return gathered


def _map(function: Callable[..., jax.Array | P], axes: Parameters, *trees: Parameters) -> Parameters:
    """`function(logical axes, leaf ...)` for every parameter."""
    return jax.tree.map(function, axes, *trees, is_leaf=lambda leaf: isinstance(leaf, tuple))
