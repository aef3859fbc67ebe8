"""`maxlm plan --calibrate`: measure matmuls, memory and collectives of the devices of this machine, and write them with their peaks.

On a CPU also the speeds that decide the time of a small model's step (`CpuSpeeds`).
"""

import datetime
import functools
import importlib.metadata
import json
import mmap
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxlm.base.atomic import write_text
from maxlm.base.errors import UserError, error_kind, shell_command
from maxlm.base.paths import check_out
from maxlm.config.schema import MeshConfig
from maxlm.cost.calibration import Calibration, Factors, Measured
from maxlm.cost.compile_command import output_console, progress
from maxlm.cost.mesh_links import bus_limit
from maxlm.diagnostics.comm.measure import OPERATIONS, TimedLoop, fitting_sizes, measure, time_loop
from maxlm.hardware.chips import CpuSpeeds, MatmulSpeed, chip_of
from maxlm.parallel.mesh import lay_mesh
from maxlm.run.jax_setup import select_platform

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


MATMUL_SIZES = (1024, 2048, 4096, 8192)  # grown until a matmul takes `LONG_S`; the fastest counts
LONG_S = 0.02
COPY_BYTES = {"cpu": 2**28}  # beyond any cache
DEFAULT_COPY_BYTES = 2**30
COLLECTIVE_BYTES = {"cpu": (2**20, 2**24)}
DEFAULT_COLLECTIVE_BYTES = (2**26, 2**28)
OPERATION_NAMES = ("all-gather", "reduce-scatter")
GB = 1e9


def calibrate(out: Path | None, *, as_json: bool) -> int:
    """Measure, write the file `out` (default: calibration-CHIP.json) and print it; 0. Raises UserError."""
    check_out(out)
    select_platform()
    with progress() as show_progress:
        show_progress("measuring matmuls")
        dtype, size, flops = _matmul()
        show_progress("measuring memory")
        moved = _copy()
        cpu = cpu_speeds(MatmulSpeed(side=size, flops=flops), _timed) if jax.default_backend() == "cpu" else None
        show_progress("measuring collectives")
        gathered, scattered, link_share = _collectives()
    measured = Measured(
        matmul_dtype=dtype,
        matmul_size=size,
        matmul_flops=flops,
        hbm_bytes_per_s=moved,
        all_gather_bytes_per_s=gathered,
        reduce_scatter_bytes_per_s=scattered,
        cpu=cpu,
    )
    found = record(measured, link_share)
    path = out if out is not None else Path(f"calibration-{(found.chip or jax.default_backend()).lower()}.json")
    text = json.dumps(found.model_dump(mode="json"), indent=2) + "\n"
    try:
        write_text(path, text)
    except OSError as error:
        raise error_kind(error)(f"{path} cannot be written: {error.strerror}; give another place with --out.") from None
    if as_json:
        sys.stdout.write(text)
    else:
        _show(found, path)
    return 0


def record(measured: Measured, link_share: float | None) -> Calibration:
    """Relate the measurement to the peaks of the chip. Raises UserError for a share that no machine reaches."""
    kind = jax.local_devices()[0].device_kind
    chip, factors = chip_of(kind), None
    if chip is not None:
        flops, hbm = chip.peak_bf16_flops_per_device, chip.hbm_bytes_per_s_per_device
        shares = {"matmul": measured.matmul_flops / flops, "hbm": measured.hbm_bytes_per_s / hbm, "links": link_share}
        try:
            factors = Factors.model_validate(shares)
        except ValueError:
            said = ", ".join(f"{name} {share:.2f}" for name, share in shares.items() if share is not None)
            raise UserError(
                f"{kind} reached shares of its peaks that are impossible ({said}): nothing is written; measure again."
            ) from None
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "maxlm")}
    return Calibration(
        chip=None if chip is None else chip.name,
        device_kind=kind,
        devices=jax.local_device_count(),
        machine=platform.node(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions={**versions, "platform": jax.local_devices()[0].client.platform_version.splitlines()[0]},
        measured=measured,
        factors=factors,
    )


def _matmul() -> tuple[str, int, float]:
    """(dtype, size, FLOP/s) of the fastest square matmul on one device: bf16, as models multiply; on a CPU, which emulates it, float32."""
    dtype, best = "float32" if jax.default_backend() == "cpu" else "bfloat16", (0, 0.0)
    for size in MATMUL_SIZES:
        w_NN = jnp.full((size, size), 1 / size, dtype)  # keeps products of ones at one
        seconds, _ = time_loop(_timed(functools.partial(_multiply, w_NN), jnp.ones((size, size), dtype)))
        best = max(best, (size, 2 * size**3 / seconds), key=lambda one: one[1])
        if seconds > LONG_S:
            break
    return dtype, *best


def _multiply(w_NN: jax.Array, x_NN: jax.Array) -> jax.Array:
    return x_NN @ w_NN


def _copy() -> float:
    """Bytes/s that one device reads and writes, counted together, in a loop that adds to a long array."""
    count = COPY_BYTES.get(jax.default_backend(), DEFAULT_COPY_BYTES) // 4
    seconds, _ = time_loop(_timed(lambda x_N: x_N + 1, jnp.ones(count, jnp.float32)))
    return 2 * 4 * count / seconds


def _timed(step: Callable[[jax.Array], jax.Array], x: jax.Array) -> TimedLoop:
    """Seconds of so many steps in a row, each of which reads what the one before wrote."""
    program = jax.jit(lambda x, count: lax.fori_loop(0, count, lambda _, y: lax.optimization_barrier(step(y)), x), donate_argnums=0)
    x = jax.block_until_ready(program(x, 1))

    def run(count: int) -> float:
        nonlocal x
        began = time.perf_counter()
        x = jax.block_until_ready(program(x, count))
        return time.perf_counter() - began

    return run


def _collectives() -> tuple[float | None, float | None, float | None]:
    """(bus bytes/s of an all-gather, of a reduce-scatter, the slower as a share of the links' bandwidth) over all local devices."""
    devices = jax.local_devices()
    if len(devices) == 1:
        return None, None, None
    sizes = COLLECTIVE_BYTES.get(jax.default_backend(), DEFAULT_COLLECTIVE_BYTES)
    mesh = lay_mesh(MeshConfig(), {**dict.fromkeys(MeshConfig().sizes(), 1), "data": len(devices)}, devices)
    names = [platform.node()]
    rows = list(measure(mesh, [OPERATIONS[name] for name in OPERATION_NAMES], fitting_sizes(mesh, sizes, names)))
    best = {name: max((row for row in rows if row.operation == name), key=lambda row: row.bus_bytes_per_s) for name in OPERATION_NAMES}
    shares = []
    for name, row in best.items():
        limit = bus_limit(mesh, row.axis, name, row.bus_factor, names)
        shares += [row.bus_bytes_per_s / limit] if limit else []
    return best["all-gather"].bus_bytes_per_s, best["reduce-scatter"].bus_bytes_per_s, min(shares, default=None)


def _show(found: Calibration, path: Path) -> None:
    console, measured, factors = output_console(), found.measured, found.factors
    console.print(f"{found.devices} x {found.device_kind} in {found.machine}", style="bold")
    of = (lambda share: "" if share is None else f", {share:.1%} of what is stated") if factors else lambda share: ""
    size = f"{measured.matmul_dtype}, {measured.matmul_size} x {measured.matmul_size}"
    console.print(f"matmul ({size}): {measured.matmul_flops / 1e12:.3g} TFLOP/s{of(factors and factors.matmul)}")
    console.print(f"memory: {measured.hbm_bytes_per_s / GB:.4g} GB/s{of(factors and factors.hbm)}")
    if measured.all_gather_bytes_per_s is None or measured.reduce_scatter_bytes_per_s is None:
        console.print("collectives: not measured on one device; the assumed share of its links stays")
    else:
        rates = f"{measured.all_gather_bytes_per_s / GB:.4g} and {measured.reduce_scatter_bytes_per_s / GB:.4g} GB/s"
        console.print(f"all-gather and reduce-scatter (bus bandwidth): {rates}{of(factors and factors.links)}")
    if factors is None:
        console.print(
            f"No peak of {found.device_kind} is known, so these are no factors. A run predicts its step by them: "
            f"maxlm train CONFIG {shell_command(f'cost.calibration={path}')}"
        )
    elif "TPU" in found.device_kind:
        console.print(f"{path} holds what was measured. Times on TPUs are priced by counted shares, which no factor of a file changes.")
    elif found.chip is not None:
        typed = shell_command("--topology", f"{found.chip.lower()}:1x{found.devices}", "--calibration", str(path))
        console.print(f"{path} holds the factors. Use them: maxlm plan CONFIG {typed}")
