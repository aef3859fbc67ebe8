"""A matrix of the model as its matmul reads it: quantized, with the matrix that it stands for."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jaxtyping import Array, Float

from maxlm.config.sections.matmul import QuantizedConfig
from maxlm.precision.dot import Parts, quantized_dot
from maxlm.precision.emulated import emulated_dot, rotated, rounded_weights
from maxlm.precision.formats import Quantized, quantize

_STATIC: dict[str, Any] = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """`values` times `scale` stand for w, which is not read: its gradient is the weights' gradient. Without both: w is rounded where it is
    multiplied. May be stacked along leading dims, as a `jax.lax.scan` cuts them off.
    """

    w: Array
    form: Quantized | None
    config: QuantizedConfig = field(metadata=_STATIC)

    def __getitem__(self, index: Any) -> "QuantizedWeight":
        return self

    def reshape(self, inputs: int, outputs: int) -> "QuantizedWeight":
        """As a matrix of two dims."""
        form = self.form
        if form is not None:
            form = Quantized(form.values.reshape(inputs, outputs), form.scale.reshape(1, -1))
        return replace(self, w=self.w.reshape(inputs, outputs), form=form)

    def times(self, x_BSC: Float[Array, "B S C"], parts: Parts) -> Array:
        """x w, in the dtype of x."""
        config = self.config
        if config.hadamard is not None:
            x_BSC = rotated(x_BSC, 2, config.hadamard)
        if self.form is None:
            return emulated_dot(config, x_BSC, self.w)
        if config.weights_only:
            w = rounded_weights(self.form.values, self.form.scale, self.w)
            return jax.lax.dot_general(x_BSC, w.astype(x_BSC.dtype), (((2,), (0,)), ((), ())))
        return quantized_dot(config, parts, x_BSC, self.form.values, self.form.scale, self.w)


def quantized_weight(config: QuantizedConfig, w: Array, stacked: int, inputs: int) -> QuantizedWeight:
    """w quantized, of which `stacked` leading dims count matrices, and the next `inputs` dims are summed in its matmul."""
    dims = tuple(range(stacked, stacked + inputs))
    if config.hadamard is not None:
        merged = w.reshape(*w.shape[:stacked], -1, *w.shape[stacked + inputs :])
        w = rotated(merged, stacked, config.hadamard).reshape(w.shape)
    if config.tile_size is not None:
        return QuantizedWeight(w, None, config)
    shared = tuple(range(stacked, w.ndim)) if config.scaling == "tensor" else dims
    return QuantizedWeight(w, quantize(jax.lax.stop_gradient(w), config.element, shared), config)
