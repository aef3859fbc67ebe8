"""Speed of a large matmul in each number format relative to bf16, on TPUs that are not there.

    python tools/lab/format_speeds.py [--chips v5e v6e] [--formats bfloat16 int8] [--size 4096]

Prints, for each chip and format: the dtypes that the compiled dot reads, the cycles that XLA estimates, those that its machine code issues,
waits for HBM included, and the speeds that follow from both. The two differ by up to a factor of two: `chips.COMPILED_SPEEDS` has the
counted ones. About a minute a line.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from maxlm.compiler.aot import devices, leave_chips_alone
from maxlm.hardware import topologies
from maxlm.hlo import parser
from maxlm.hlo.op_flops import flops_by_operands
from maxlm.kernel_lab import bundles
from maxlm.kernel_lab.counted import TOPOLOGIES
from maxlm.telemetry.formatting import count as shown

FORMATS = ("bfloat16", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2", "int8", "int4")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    arguments.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    arguments.add_argument("--size", type=int, default=4096)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundles.write_to(folder)
        leave_chips_alone()
        for chip in given.chips:
            base: tuple[float, ...] = ()
            for name in dict.fromkeys(("bfloat16", *given.formats)):
                operands, *cycles = compiled(chip, name, given.size, Path(folder))
                base = base or tuple(cycles)
                speeds = " ".join(f"{bf16 / number:.2f}" if number else "-" for bf16, number in zip(base, cycles, strict=True))
                figures = " ".join(shown(number) for number in cycles)
                sys.stdout.write(f"{chip:6} {name:20} reads {operands:12} estimated, counted: {figures} cycles, speeds {speeds}\n")
                sys.stdout.flush()


def compiled(chip: str, name: str, size: int, folder: Path) -> tuple[str, float, float]:
    """(dtypes of the dot, estimated cycles, counted cycles) of one matmul with inputs in the format called `name`."""
    import jax
    import jax.numpy as jnp

    from maxlm.kernel_lab.__main__ import compiled as machine_code, count
    from maxlm.kernel_lab.cases import LIKE_A_STEP, Case, Kernel, from_hbm
    from maxlm.kernels.platform import CORES

    topology = topologies.parse(TOPOLOGIES[chip])
    device, clock_hz = devices(topology)[0], topology.chip.clock_hz
    assert clock_hz is not None, "every TPU has a clock"
    wide = jnp.int32 if name.startswith("int") else jnp.float32

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot(x, w, preferred_element_type=wide).astype(jnp.bfloat16)

    written, text = machine_code(Case(from_hbm(multiply), [((size, size), name)] * 2, [], LIKE_A_STEP), device, folder)
    module = parser.read(text)
    dots = {operands for run in module.executed() for operands in flops_by_operands(module, run.op, module.computations[run.computation])}
    bandwidth = topology.chip.hbm_bytes_per_s_per_device / CORES.get(device.device_kind, 1)
    counted = count(Kernel("", "fusion", [], 0.0), written, bandwidth / clock_hz, device.device_kind)
    return ", ".join(sorted(dots)), float(module.cycles(module.entry)), float(counted["cycles"] + counted["waited"])


if __name__ == "__main__":
    main()
