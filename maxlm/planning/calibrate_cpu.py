"""Speeds of a CPU that decide the time of a small model's step: see `CpuSpeeds`."""

import mmap
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxlm.diagnostics.comm.measure import TimedLoop, time_loop
from maxlm.hardware.cpu_speeds import CpuSpeeds, MatmulSpeed

SIDES = (16, 64, 256)  # shortest sides of matmuls; the square ones of `maxlm plan --calibrate` are above
LONG_SIDE = 1024  # the other two sides
TRANSPOSED_SIDES = (64, 256)  # gradients of weights: short sides are widths of the model
TOKENS = 2048  # they sum over them
WIDTH = 384  # of hidden states that are transposed: more than a core's own caches hold
FUNCTION_VALUES = 2**16  # few enough to stay in a cache
TINY = 8  # sides of a matmul so small that it takes the time of an empty operation
FRESH_BYTES, FRESH_RUNS = 2**26, 5

Step = Callable[[jax.Array], jax.Array]


def cpu_speeds(square: MatmulSpeed, timed: Callable[[Step, jax.Array], TimedLoop]) -> CpuSpeeds:
    """Measure all. `square`: of the fastest large matmul; `timed`: seconds of so many steps in a row."""

    def seconds(step: Step, *dims: int) -> float:
        return time_loop(timed(step, jnp.full(dims, 0.5, jnp.float32)))[0]

    narrow = [MatmulSpeed(side=side, flops=4 * LONG_SIDE**2 * side / seconds(_narrow(side, LONG_SIDE), LONG_SIDE, side)) for side in SIDES]
    gradients = [MatmulSpeed(side=side, flops=2 * TOKENS * side**2 / seconds(_gradient(side), TOKENS, side)) for side in TRANSPOSED_SIDES]
    return CpuSpeeds(
        matmuls=(*narrow, square) if square.side > SIDES[-1] else tuple(narrow),
        transposed_matmuls=tuple(gradients),
        transposed_bytes_per_s=2 * 4 * TOKENS * WIDTH / seconds(_transposed, TOKENS, WIDTH),
        fresh_bytes_per_s=FRESH_BYTES / statistics.median(_first_touch_s() for _ in range(FRESH_RUNS)),
        function_s=seconds(jnp.exp, FUNCTION_VALUES) / FUNCTION_VALUES,
        op_s=seconds(_narrow(TINY, TINY), TINY, TINY) / 2,
    )


def _narrow(side: int, long: int) -> Step:
    """Two matmuls, the first with a short sum and the second with a short result."""
    w_SL, w_LS = _weights(side, long), _weights(long, side)
    return lambda x_LS: lax.optimization_barrier(x_LS @ w_SL) @ w_LS


def _gradient(side: int) -> Step:
    """A matmul as gradients of weights are: over the tokens, the first dim of the left operand. The next one reads a row of it."""
    w_ST = _weights(side, TOKENS)

    def step(x_TS: jax.Array) -> jax.Array:
        y_SS = lax.optimization_barrier(lax.dot_general(x_TS, w_ST, (((0,), (1,)), ((), ()))))
        return lax.dynamic_update_slice(x_TS, y_SS[:1], (0, 0))

    return step


def _transposed(x_TW: jax.Array) -> jax.Array:
    """A copy that XLA cannot leave to a layout: the next one reads it by other dims."""
    return x_TW.T.reshape(x_TW.shape)


def _weights(rows: int, columns: int) -> np.ndarray:
    """Numbers that differ, or XLA would multiply by one of them; their products with numbers of one stay so."""
    return np.random.default_rng(0).uniform(0, 2 / rows, (rows, columns)).astype(np.float32)


def _first_touch_s() -> float:
    """Seconds in which the system maps and clears memory that a program writes for the first time, and takes it back."""
    began = time.perf_counter()
    with mmap.mmap(-1, FRESH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        pages = np.frombuffer(fresh, np.uint8)[:: mmap.PAGESIZE]
        pages[:] = 1
        del pages
    return time.perf_counter() - began
