"""A frozen matrix with a trained update of low rank (LoRA, Hu 2021, arXiv 2106.09685): W + scale A B, which is never formed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array


class AdaptedMatrix(nnx.Module):
    """Declaration of W, A and B, in place of that of a matrix. A has the inputs of W and `rank`, B has `rank` and the outputs of W; all are
    stacked alike.
    """

    def __init__(self, base: nnx.Variable, a: nnx.Param, b: nnx.Param, scale: float) -> None:
        self.base, self.a, self.b = base, a, b
        self.scale = scale  # alpha / rank

    def __getitem__(self, index: Any) -> "LowRankSum":
        return LowRankSum(self.base[index], self.a[index], self.b[index], self.scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    @property
    def axes(self) -> tuple[str, ...]:
        axes: tuple[str, ...] = self.base.axes
        return axes


@dataclass(frozen=True)
class LowRankSum:
    """W + scale A B of one layer, as arrays."""

    w: Array
    a: Array
    b: Array
    scale: float

    def __getitem__(self, index: Any) -> "LowRankSum":
        return self

    def reshape(self, inputs: int, outputs: int) -> "LowRankSum":
        """As a matrix of two dims."""
        rank = self.a.shape[-1]
        return LowRankSum(self.w.reshape(inputs, outputs), self.a.reshape(inputs, rank), self.b.reshape(rank, outputs), self.scale)

    def times(self, spec: str, x: Array, linear: Callable[[str, Array, Array], Array]) -> Array:
        """`linear(spec, x, W + scale A B)`, a matmul, as x W + scale (x A) B (eq. 3 of the paper): no array of the size of W beside W."""
        operands, out = spec.split("->")
        read, matrix = operands.split(",")
        inputs, outputs = ("".join(dim for dim in matrix if (dim in out) == kept) for kept in (False, True))
        rows = "".join(dim for dim in read if dim not in inputs)
        low = jnp.einsum(f"{read},{inputs}r->{rows}r", x, self.a)
        return linear(spec, x, self.w) + self.scale * jnp.einsum(f"{rows}r,r{outputs}->{out}", low, self.b)


def merged(w: Array, a: Array, b: Array, scale: float, stacked: int) -> Array:
    """W + scale A B in full float32 precision, of blocks stacked along `stacked` leading dims."""
    rank = b.shape[stacked]
    leading = w.shape[:stacked]
    product = jnp.matmul(a.reshape(*leading, -1, rank), b.reshape(*leading, rank, -1), precision=jax.lax.Precision.HIGHEST)
    return w + scale * product.reshape(w.shape)
