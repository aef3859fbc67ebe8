"""Quantize results of the gated activation of a feed-forward layer, forward and backward, in one pass on TPU: hidden units and the two
gradients are never in memory in high precision.

Forward: hidden units h = act(gate) * up, with a scale for each row. Backward, from the gradient of h: h again, and the gradients of gate
and up, each column times a scale of its own: the scale of the weights by which it is multiplied next. These two share the scale of a row:
one sum adds up the products of both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Num

from maxlm.kernels.matmul.tpu import ACTIVATIONS
from maxlm.kernels.platform import GPUS, choose_on_tpu, computed_again, device, on_each_device
from maxlm.kernels.quantize import gated_tpu
from maxlm.kernels.quantize.reference import largest_magnitude, rounded, scale_of

if TYPE_CHECKING:
    from maxlm.kernels.quantize import Quantization

# B batch, S sequence, F feed-forward width, I parts of F, each with scales of its own, M rows

Rows = tuple[Num[Array, "B S F"], Float[Array, "B S I"]]  # values, and the scales of their rows


@dataclass(frozen=True)
class GatedLayout:
    """The mesh axes that split batch, sequence and feed-forward width. Empty: not split."""

    batch: tuple[str, ...] = ()
    seq: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


def gated_rows(
    gate_BSF: Float[Array, "B S F"],
    up_BSF: Float[Array, "B S F"],
    form: "Quantization",
    *,
    activation: str = "silu",
    layout: GatedLayout | None = None,
    implementation: str | None = None,
) -> Rows:
    """act(gate) * up, quantized; `activation`: "silu" or "gelu" (by tanh). The scale of a row that is not finite is NaN.

    `implementation`: "tpu", "xla", or None for what the device of the current mesh runs.
    """
    options = {"form": form, "activation": activation}
    values, scale = _on_each_device("forward", implementation, layout or GatedLayout(), options, gate_BSF, up_BSF)
    return values, scale


def gated_gradient_rows(
    dhidden_BSF: Float[Array, "B S F"],
    gate_BSF: Float[Array, "B S F"],
    up_BSF: Float[Array, "B S F"],
    of_gate_F: Float[Array, " F"],
    of_up_F: Float[Array, " F"],
    form: "Quantization",
    gradient_form: "Quantization",
    *,
    activation: str = "silu",
    layout: GatedLayout | None = None,
    implementation: str | None = None,
) -> tuple[Rows, tuple[Num[Array, "B S F"], Num[Array, "B S F"], Float[Array, "B S I"]]]:
    """(hidden units as in `gated_rows`; gradients of gate and of up times `of_gate` and `of_up`, and the scales of their rows)."""
    options = {"form": form, "gradient_form": gradient_form, "activation": activation}
    operands = dhidden_BSF, gate_BSF, up_BSF, of_gate_F, of_up_F
    results = _on_each_device("backward", implementation, layout or GatedLayout(), options, *operands)
    values, of_values, dgate, dup, scale = results
    return (values, of_values), (dgate, dup, scale)


def _on_each_device(
    part: str, implementation: str | None, layout: GatedLayout, options: dict[str, Any], *operands: Array
) -> tuple[Any, ...]:
    """Run an implementation on every device's share, sequences joined to rows."""
    platform, kind = device()

    def run(*local: Array) -> tuple[Array, ...]:
        rows = [x.reshape(-1, x.shape[-1]) if x.ndim == 3 else x[None] for x in local]
        problem = gated_tpu.why_not(rows[0], options, kind if platform == "tpu" else "")
        if choose_on_tpu("quantize gated", implementation, problem) == "tpu":
            results = getattr(gated_tpu, part)(*rows, **options, kind=kind, interpret=platform != "tpu")
        else:
            results = _DEFINITIONS[part](*rows, **options)
        return tuple(x.reshape(*local[0].shape[:2], -1) for x in results)

    whole, columns = P(layout.batch or None, layout.seq or None, layout.hidden or None), P(layout.hidden or None)
    specs = tuple(whole if x.ndim == 3 else columns for x in operands)
    split = bool(layout.batch or layout.seq or layout.hidden)
    return on_each_device(run, specs, (whole,) * {"forward": 2, "backward": 5}[part], split=split)(*operands)


def _forward(gate_MF: Array, up_MF: Array, form: "Quantization", activation: str) -> tuple[Array, Array]:
    gate_MF, up_MF = gate_MF.astype(jnp.float32), up_MF.astype(jnp.float32)
    scale_M1 = scale_of(largest_magnitude(ACTIVATIONS[activation](gate_MF) * up_MF, 1), form)
    gate_MF = computed_again(gate_MF)
    return rounded(ACTIVATIONS[activation](gate_MF) * up_MF * (1 / scale_M1), form), scale_M1[:, 0]


def _backward(
    dhidden_MF: Array,
    gate_MF: Array,
    up_MF: Array,
    of_gate_1F: Array,
    of_up_1F: Array,
    form: "Quantization",
    gradient_form: "Quantization",
    activation: str,
) -> tuple[Array, ...]:
    dhidden_MF, gate_MF, up_MF = (x.astype(jnp.float32) for x in (dhidden_MF, gate_MF, up_MF))

    def computed(gate_MF: Array) -> tuple[Array, ...]:
        hidden_MF, transposed = jax.vjp(lambda gate, up: ACTIVATIONS[activation](gate) * up, gate_MF, up_MF)
        return hidden_MF, *(x * scale for x, scale in zip(transposed(dhidden_MF), (of_gate_1F, of_up_1F), strict=True))

    hidden_MF, *gradients = computed(gate_MF)
    of_hidden_M1 = scale_of(largest_magnitude(hidden_MF, 1), form)
    scale_M1 = scale_of(jnp.maximum(*(largest_magnitude(x, 1) for x in gradients)), gradient_form)
    hidden_MF, *gradients = computed(computed_again(gate_MF))
    values_MF = rounded(hidden_MF * (1 / of_hidden_M1), form)
    results = values_MF, *(rounded(x * (1 / scale_M1), gradient_form) for x in gradients)
    if device()[0] in GPUS:  # else XLA computes them a second time where they are turned for the gradients of weights
        results = jax.lax.optimization_barrier(results)
    return results[0], of_hidden_M1[:, 0], *results[1:], scale_M1[:, 0]


_DEFINITIONS: dict[str, Callable[..., tuple[Array, ...]]] = {"forward": _forward, "backward": _backward}
