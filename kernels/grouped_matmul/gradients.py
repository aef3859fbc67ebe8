"""What the grouped matmul has in common on every kind of device: both of its gradients are kernels of the same sort."""

import functools
from collections.abc import Callable

import jax

# M rows, E experts, K and N what weights map from and to

# (x [M, K], w [E, K, N], group sizes [E], kind of device, whether it is interpreted) to [M, N].
GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array, str, bool], jax.Array]


def differentiable(product: Callable[..., jax.Array], weights_gradient: Callable[..., jax.Array]) -> GroupedMatmul:
    """`maxlm.kernels.grouped_matmul` by two kernels of a device: rows times weights or their transpose, and x^T dout of every group."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
    def run(x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, device_kind: str, interpret: bool) -> jax.Array:
        return product(x_MK, w_EKN, group_sizes_E, device_kind=device_kind, interpret=interpret)

    def forward(
        x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, device_kind: str, interpret: bool
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return run(x_MK, w_EKN, group_sizes_E, device_kind, interpret), (x_MK, w_EKN, group_sizes_E)

    def backward(device_kind: str, interpret: bool, saved: tuple[jax.Array, ...], dout_MN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        x_MK, w_EKN, group_sizes_E = saved
        dx_MK = product(dout_MN, w_EKN, group_sizes_E, transposed=True, device_kind=device_kind, interpret=interpret)
        return dx_MK, weights_gradient(x_MK, dout_MN, group_sizes_E, device_kind=device_kind, interpret=interpret), None

    run.defvjp(forward, backward)
    return run
