"""A frozen matrix with a trained update of low rank (LoRA, Hu 2021, arXiv 2106.09685): W + scale A B, which is never formed."""

import math
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from maxlm.config.sections.lora import LoraConfig, LoraMatrix
from maxlm.models.layers import LowRankSum, StateVariable

INPUTS = {"out": 2}  # dims that a matrix reads, if not one
Model = TypeVar("Model", bound=nnx.Module)


class AdaptedMatrix(nnx.Module):
    """Declaration of W, A and B, in place of a matrix. A has the inputs of W and `rank`, B has `rank` and the outputs of W; all are
    stacked alike.
    """

    def __init__(self, base: nnx.Variable, a: nnx.Param, b: nnx.Param, scale: float) -> None:
        self.base, self.a, self.b = base, a, b
        self.scale = scale  # alpha / rank

    def __getitem__(self, index: Any) -> LowRankSum:
        return LowRankSum(self.base[index], self.a[index], self.b[index], self.scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of W."""
        return tuple(self.base.shape)

    @property
    def axes(self) -> tuple[str, ...]:
        """Logical axes of W."""
        axes: tuple[str, ...] = self.base.axes
        return axes


def merged(w: Array, a: Array, b: Array, scale: float, stacked: int) -> Array:
    """W + scale A B in full float32 precision, of blocks stacked along `stacked` leading dims."""
    rank = b.shape[stacked]
    leading = w.shape[:stacked]
    product = jnp.matmul(a.reshape(*leading, -1, rank), b.reshape(*leading, rank, -1), precision=jax.lax.Precision.HIGHEST)
    return w + scale * product.reshape(w.shape)


def adapt(decoder: Model, lora: LoraConfig) -> Model:
    """`decoder` with every parameter frozen, as model state, and with the parameters of its adapters instead."""
    for _, module in list(nnx.iter_modules(decoder)):
        for attribute, variable in list(vars(module).items()):
            if isinstance(variable, nnx.Param):
                frozen = StateVariable(variable[...], axes=variable.axes, mean=variable.mean, std=variable.std)
                name = attribute.rpartition("_")[0]
                matrix = getattr(module, "adaptable", False) and name in (lora.matrices or get_args(LoraMatrix))
                setattr(module, attribute, _adapted(frozen, name, lora) if matrix else frozen)
    return decoder


def _adapted(base: StateVariable, name: str, lora: LoraConfig) -> AdaptedMatrix:
    """B begins at zero. A is normal with the deviation of the uniform draw that PEFT takes from Kaiming's, (3 inputs) ** -0.5."""
    stacked, dims = base.shape[: -len(base.axes)], base.shape[-len(base.axes) :]
    n = INPUTS.get(name, 1)

    def declare(shape: tuple[int, ...], axes: tuple[str, ...], std: float = 0.0) -> nnx.Param:
        return nnx.Param(jnp.empty((*stacked, *shape), jnp.float32), axes=axes, mean=0.0, std=std)

    a = declare((*dims[:n], lora.rank), (*base.axes[:n], "rank"), (3 * math.prod(dims[:n])) ** -0.5)
    b = declare((lora.rank, *dims[n:]), ("rank", *base.axes[n:]))
    return AdaptedMatrix(base, a, b, lora.alpha / lora.rank)
