"""The plain matmuls of a training step in the kernel lab: what XLA makes of them.

There is no kernel of ours to compare: one written in Pallas was no faster (docs/benchmarks.md has the figures).
"""

from collections.abc import Callable, Sequence

import jax

from maxlm.hardware.xla_flags import VMEM
from maxlm.kernel_lab.cases import Case, Kernel, from_hbm
from maxlm.kernels.matmul.shapes import MatmulShape

_FORMS = {"": ((1,), (0,)), "right": ((1,), (1,)), "left": ((0,), (0,))}  # the transposed operand: contracted dims


def matmul_cases(shape: MatmulShape, implementation: str, device_kind: str, *, sweep: bool = False) -> Sequence[Case]:
    """x W, the same with a residual and with a bias added, dy W^T, and x^T dy. There are no blocks to sweep."""
    rows, deep, wide = (shape.rows, shape.d_in, shape.d_out)
    entering, weights, leaving = (rows, deep), (deep, wide), (rows, wide)
    parts: dict[str, tuple[str, list[tuple[int, int]]]] = {
        "forward": ("", [entering, weights]),
        "residual": ("", [entering, weights, leaving]),
        "bias": ("", [entering, weights, (1, wide)]),
        "dx": ("right", [leaving, weights]),
        "dw": ("left", [entering, leaving]),
    }
    options = {VMEM[0].name: str(VMEM[0].value)}  # as in the training step of chips that have as much
    flops = 2.0 * rows * deep * wide
    return [
        Case(from_hbm(_matmul(transposed)), [(size, "bfloat16") for size in sizes], [Kernel(part, "fusion", [], flops)], options)
        for part, (transposed, sizes) in parts.items()
    ]


def _matmul(transposed: str) -> Callable[..., jax.Array]:
    def run(left: jax.Array, right: jax.Array, *added: jax.Array) -> jax.Array:
        return sum(added, jax.lax.dot_general(left, right, (_FORMS[transposed], ((), ()))))

    return run
