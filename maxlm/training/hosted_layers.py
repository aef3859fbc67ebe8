"""Tracing of a layer stack with weights or gradients in host memory (`memory.offload_state`)."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from maxlm.config.schema import ModelConfig
from maxlm.memory.layer_stream import scan_layers
from maxlm.models.layers import Scan
from maxlm.models.parameters import declarations
from maxlm.models.stack import LayerGroup, group_of
from maxlm.parallel import partition_spec
from maxlm.training.state_paths import Leaves, Name

STACK = "layers"  # entry of the parameters that is scanned


def layer_scan(model: ModelConfig, read: Leaves, *, inputs_on_host: bool) -> Scan:
    """Scan over a stack of which one layer at a time is on the device. `read`: matrices that are read in place of parameters."""
    leaves = _of_stack(model)

    def scan(period: Any, x_BSD: jax.Array, layers: Any) -> tuple[jax.Array, Any]:
        mesh, shapes = jax.sharding.get_abstract_mesh(), [leaf.shape[1:] for leaf in jax.tree.leaves(layers)]
        named = zip(shapes, leaves, strict=True)
        specs = [PartitionSpec() if mesh.empty else partition_spec(axes, dims, mesh, ".".join(name)) for dims, (name, axes) in named]
        weights = [read.get(name) for name, _ in leaves]
        return scan_layers(period, x_BSD, layers, weights=weights, specs=specs, inputs_on_host=inputs_on_host)

    return scan


def _of_stack(model: ModelConfig) -> list[tuple[Name, tuple[str, ...]]]:
    """(name, logical axes within a period) of every leaf of the stack, in order."""

    def axes(group: LayerGroup | None, own: tuple[str, ...]) -> tuple[str, ...]:
        assert group is not None, "a leaf of a stack is one of layers"
        return group.axes[1:] + own

    return [(name, axes(group_of(model, name), variable.axes)) for name, variable in declarations(model) if name[0] == STACK]
