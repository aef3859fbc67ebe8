"""Matmuls fused with the elementwise operations on their results: the gated feed-forward layer."""

import functools
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from maxlm.kernels.matmul import tpu
from maxlm.kernels.platform import GPUS, device, on_each_device, precision_problem

FASTER = ("TPU v6 lite",)  # TPUs on which the kernels take less time than XLA, by their machine code

# B batch, S sequence, D model width, F feed-forward width


@dataclass(frozen=True)
class MlpLayout:
    """The mesh axes that split batch rows, and the feed-forward width. Empty: not split."""

    batch: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class _MatmulSpec:
    activation: str
    layout: MlpLayout


def gated_mlp_problem(shape: tuple[int, ...], d_ff: int, dtype: jnp.dtype, layout: MlpLayout | None = None) -> str:
    """Reason not to use `gated_mlp` for x of this shape [B, S, D]: it cannot run on the current mesh, or is no faster; else empty."""
    platform, kind = device()
    if platform != "tpu" and platform not in GPUS:
        return "the device is no TPU and no GPU"
    if platform == "tpu" and kind not in FASTER:
        return f"XLA's own matmuls leave nothing to gain on {kind}"
    found = layout or MlpLayout()
    return _problem(shape, d_ff, dtype, found, kind) or _kernels().why_slow(*_local(shape, d_ff, found), dtype, kind)


def gated_mlp(
    x_BSD: Float[Array, "B S D"],
    gate_DF: Float[Array, "D F"],
    up_DF: Float[Array, "D F"],
    down_FD: Float[Array, "F D"],
    *,
    activation: str = "silu",
    layout: MlpLayout | None = None,
) -> Float[Array, "B S D"]:
    """(act(x gate) * (x up)) down (Shazeer 2020, arXiv 2002.05202); `activation`: "silu" or "gelu" (by tanh).

    The matmuls that end in something elementwise, one forward and one backward, are kernels, interpreted on a CPU. Sums are float32, what
    is kept is rounded to x's dtype. `layout` says how the current mesh splits the operands. Remat policies save by the names "gate"
    and "up". Raises ValueError for shapes and dtypes that do not fit, and for what the kernels cannot run.
    """
    if activation not in tpu.ACTIVATIONS:
        raise ValueError(f"gated_mlp: no activation {activation!r}: there are {', '.join(tpu.ACTIVATIONS)}")
    weights = {"gate": gate_DF, "up": up_DF, "down": down_FD}
    if x_BSD.ndim != 3 or gate_DF.shape != up_DF.shape or gate_DF.shape != down_FD.shape[::-1] or gate_DF.shape[:1] != x_BSD.shape[2:]:
        shapes = ", ".join(f"{name} {w.shape}" for name, w in weights.items())
        raise ValueError(f"gated_mlp: shapes do not fit: x {x_BSD.shape}, {shapes}")
    if any(w.dtype != x_BSD.dtype for w in weights.values()):
        raise ValueError(f"gated_mlp: x {x_BSD.dtype} and weights {', '.join(str(w.dtype) for w in weights.values())} must be of one dtype")
    spec = _MatmulSpec(activation, layout or MlpLayout())
    if problem := _problem(x_BSD.shape, gate_DF.shape[1], x_BSD.dtype, spec.layout, device()[1]):
        raise ValueError(f"gated_mlp: cannot run this: {problem}")
    return _gated_mlp(spec, x_BSD, gate_DF, up_DF, down_FD)


def _problem(shape: tuple[int, ...], d_ff: int, dtype: jnp.dtype, layout: MlpLayout, kind: str) -> str:
    batch, hidden = (math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes) for axes in (layout.batch, layout.hidden))
    if shape[0] % batch or d_ff % hidden:
        return f"{shape[0]} sequences over {batch} devices, or a width of {d_ff} over {hidden}, cannot be split evenly"
    return precision_problem() or _kernels().why_not(*_local(shape, d_ff, layout), dtype, kind)


def _local(shape: tuple[int, ...], d_ff: int, layout: MlpLayout) -> tuple[int, int, int]:
    """Rows, d_model and d_ff of a device."""
    batch, hidden = (math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes) for axes in (layout.batch, layout.hidden))
    return shape[0] // batch * shape[1], shape[2], d_ff // hidden


def _kernels() -> ModuleType:
    """For the device of the current mesh: gated_forward, gated_backward, why_not and why_slow."""
    if device()[0] not in GPUS:
        return tpu
    from maxlm.kernels.matmul import gpu  # what compiles for GPUs is loaded where there is one

    return gpu


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_mlp(spec: _MatmulSpec, x_BSD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array, down_FD: jax.Array) -> jax.Array:
    return _forward(spec, x_BSD, gate_DF, up_DF, down_FD)[0]


def _forward(
    spec: _MatmulSpec, x_BSD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array, down_FD: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    whole, columns = _specs(spec.layout)
    hidden_BSF, gate_BSF, up_BSF = _on_each_device(
        spec, _kernels().gated_forward, (whole, P(None, *columns[2:]), P(None, *columns[2:])), x_BSD, gate_DF, up_DF
    )
    saved = (x_BSD, checkpoint_name(gate_BSF, "gate"), checkpoint_name(up_BSF, "up"), gate_DF, up_DF, down_FD)
    return jnp.einsum("BSF,FD->BSD", hidden_BSF, down_FD), saved


def _backward(spec: _MatmulSpec, saved: tuple[jax.Array, ...], dy_BSD: jax.Array) -> tuple[jax.Array, ...]:
    x_BSD, gate_BSF, up_BSF, gate_DF, up_DF, down_FD = saved
    whole, columns = _specs(spec.layout)
    hidden_BSF, dgate_BSF, dup_BSF = _on_each_device(
        spec, _kernels().gated_backward, (whole, P(*columns[2:]), columns, columns), dy_BSD, down_FD, gate_BSF, up_BSF
    )
    dx_BSD = jnp.einsum("BSF,DF->BSD", dgate_BSF, gate_DF) + jnp.einsum("BSF,DF->BSD", dup_BSF, up_DF)
    dgate_DF, dup_DF = (jnp.einsum("BSD,BSF->DF", x_BSD, gradient_BSF) for gradient_BSF in (dgate_BSF, dup_BSF))
    return dx_BSD, dgate_DF, dup_DF, jnp.einsum("BSF,BSD->FD", hidden_BSF, dy_BSD)


_gated_mlp.defvjp(_forward, _backward)


def _specs(layout: MlpLayout) -> tuple[P, P]:
    """Specs of arrays of the model's width, and of arrays of the feed-forward width."""
    return P(layout.batch or None, None, None), P(layout.batch or None, None, layout.hidden or None)


def _on_each_device(spec: _MatmulSpec, kernel: Any, specs: tuple[P, ...], *operands: jax.Array) -> tuple[jax.Array, ...]:
    """`kernel` on every device's share, sequences joined to rows."""
    platform, kind = device()

    def run(*local: jax.Array) -> tuple[jax.Array, ...]:
        rows = [x.reshape(-1, x.shape[-1]) for x in local]
        results = kernel(*rows, activation=spec.activation, device_kind=kind, interpret=platform == "cpu")
        return tuple(x.reshape(*local[0].shape[:2], -1) for x in results)

    split = bool(spec.layout.batch or spec.layout.hidden)
    return on_each_device(run, specs, (_specs(spec.layout)[1],) * 3, split=split)(*operands)
