"""Matrices of the layer stack with weights or gradients in host memory (`memory.offload_state`), while a program is traced.

A gradient is in the memory of what is differentiated. So where weights and gradients are in different memories, an array that is never read
stands for the weights in the tree of parameters, and the weights come by themselves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from maxlm.config.schema import Config, ModelConfig
from maxlm.memory.layer_stream import empty_on_host, scan_layers
from maxlm.memory.pieces import fold
from maxlm.memory.spaces import is_on_host
from maxlm.models.layers import Scan
from maxlm.models.parameters import Parameters, declarations
from maxlm.models.stack import LayerGroup, group_of
from maxlm.parallel import partition_spec
from maxlm.training.state_paths import Leaves, Name, flat_params, nested

STACK = "layers"  # entry of the parameters that is scanned


class HostedLayers:
    """The matrices `weights` of one update, and their gradients once those are there. See `current`."""

    def __init__(self, config: Config, weights: Leaves) -> None:
        settings = config.memory.offload_state
        assert settings is not None, "program.py chooses"
        self._config, self._names = config, list(weights)
        self.gradients: Leaves = {}
        self._apart = {name: weight for name, weight in weights.items() if is_on_host(weight) != (settings.gradients == "host")}
        self._differentiated = weights | {name: _unread(weight) for name, weight in self._apart.items()}

    def joined(self, params: Parameters) -> Parameters:
        """All parameters, from those that are not of the stack's matrices."""
        return nested(flat_params(params) | self._differentiated)

    def taken(self, grads: Parameters) -> Parameters:
        """The inverse of `joined` for gradients; the gradients of the stack's matrices are kept in `gradients`."""
        flat = flat_params(grads)
        self.gradients = {name: flat.pop(name) for name in self._names}
        return nested(flat)

    def sum_of_squares(self) -> Float[Array, ""]:
        """Sum of squares of all `gradients`, in float32, layer by layer."""

        def add(total: jax.Array, row: jax.Array, _: Any) -> jax.Array:
            return total + jnp.sum(jnp.square(row.astype(jnp.float32)))

        return sum((fold(add, jnp.float32(0), array, array.shape[0]) for array in self.gradients.values()), jnp.float32(0))

    @property
    def scan(self) -> Scan:
        """Scan over the stack, which reads the weights that are apart."""
        return layer_scan(self._config, self._apart)

    @contextmanager
    def current(self) -> Iterator["HostedLayers"]:
        """Trace the model with these layers."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)


_CURRENT: ContextVar[HostedLayers | None] = ContextVar("hosted layers", default=None)


def hosted_layers() -> HostedLayers | None:
    """Those of the update that is traced; None if there are none."""
    return _CURRENT.get()


def with_hosted_layers(loss: Callable[..., Any]) -> Callable[..., Any]:
    """`Objective.loss`, with the layers of the current update."""

    def hosted_loss(*inputs: Any, **options: Any) -> Any:
        hosted = hosted_layers()
        return loss(*inputs, scan=None if hosted is None else hosted.scan, **options)

    return hosted_loss


def layer_scan(config: Config, read: Leaves) -> Scan:
    """Scan over a stack of which one layer at a time is on the device. `read`: matrices that are read in place of parameters."""
    leaves = _of_stack(config.model)

    def scan(period: Any, x_BSD: jax.Array, layers: Any) -> tuple[jax.Array, Any]:
        mesh, shapes = jax.sharding.get_abstract_mesh(), [leaf.shape[1:] for leaf in jax.tree.leaves(layers)]
        named = zip(shapes, leaves, strict=True)
        specs = [PartitionSpec() if mesh.empty else partition_spec(axes, dims, mesh, ".".join(name)) for dims, (name, axes) in named]
        weights = [read.get(name) for name, _ in leaves]
        return scan_layers(period, x_BSD, layers, weights=weights, specs=specs, inputs_on_host="layer_input" in config.memory.offload)

    return scan


def _of_stack(model: ModelConfig) -> list[tuple[Name, tuple[str, ...]]]:
    """(name, logical axes within a period) of every leaf of the stack, in order."""

    def axes(group: LayerGroup | None, own: tuple[str, ...]) -> tuple[str, ...]:
        assert group is not None, "a leaf of a stack is one of layers"
        return group.axes[1:] + own

    return [(name, axes(group_of(model, name), variable.axes)) for name, variable in declarations(model) if name[0] == STACK]


def _unread(weight: jax.Array) -> jax.Array:
    """An array of the same shape in the other memory."""
    return jnp.zeros(weight.shape, weight.dtype) if is_on_host(weight) else empty_on_host(weight.shape, weight.dtype)
