"""Which matrices of a decoder are adapted: turns the declarations of a model into those of a frozen one with adapters."""

import math
from typing import get_args

import jax.numpy as jnp
from flax import nnx

from maxlm.config.sections.lora import LoraConfig, LoraMatrix
from maxlm.models.adapted_matrix import AdaptedMatrix
from maxlm.models.decoder import Decoder
from maxlm.models.layers import AttentionBase, Mlp, StateVariable

INPUTS = {"out": 2}  # dims that a matrix reads, if not one


def adapt(decoder: Decoder, lora: LoraConfig) -> Decoder:
    """`decoder` with every parameter frozen, as model state, and with the parameters of its adapters instead."""
    for _, module in list(nnx.iter_modules(decoder)):
        for attribute, variable in list(vars(module).items()):
            if isinstance(variable, nnx.Param):
                frozen = StateVariable(variable[...], axes=variable.axes, mean=variable.mean, std=variable.std)
                name = attribute.rpartition("_")[0]
                matrix = isinstance(module, AttentionBase | Mlp) and name in (lora.matrices or get_args(LoraMatrix))
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
