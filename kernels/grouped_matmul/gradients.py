"""Custom gradient shared by the grouped matmul on every kind of device: both gradients are kernels of the same kind."""

import functools
from collections.abc import Callable
from typing import Any

import jax

# M rows, E experts, K inputs and N outputs of the weights, G = E N

# (x, w [K, G], group sizes [E], whether by the weights' transposes, kind of device, whether it is interpreted) to rows times weights.
GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array, bool, str, bool], jax.Array]


def differentiable(product: Callable[..., jax.Array], weights_gradient: Callable[..., jax.Array]) -> GroupedMatmul:
    """`maxlm.kernels.grouped_matmul` by two kernels of a device: rows times weights or their transpose, and x^T dout of every group."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
    def run(x: jax.Array, w_KG: jax.Array, group_sizes_E: jax.Array, transposed: bool, device_kind: str, interpret: bool) -> jax.Array:
        return product(x, w_KG, group_sizes_E, transposed=transposed, device_kind=device_kind, interpret=interpret)

    def forward(*operands: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return run(*operands), operands[:3]

    def backward(
        transposed: bool, device_kind: str, interpret: bool, saved: tuple[jax.Array, ...], dout: jax.Array
    ) -> tuple[jax.Array, jax.Array, None]:
        x, w_KG, group_sizes_E = saved
        dx = product(dout, w_KG, group_sizes_E, transposed=not transposed, device_kind=device_kind, interpret=interpret)
        from_K, from_N = (dout, x) if transposed else (x, dout)
        return dx, weights_gradient(from_K, from_N, group_sizes_E, device_kind=device_kind, interpret=interpret), None

    run.defvjp(forward, backward)
    return run
