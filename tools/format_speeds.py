"""Speed of a large matmul in each number format relative to bf16, by the cycles that XLA:TPU estimates: no hardware is needed.

    python tools/format_speeds.py [--chips v5e v6e] [--size 4096]

Prints a table for chips.COMPILED_SPEEDS. `operands` are the dtypes of the dot that the compiler kept: a format that it converts before the
dot shows bf16 there. About 3 seconds a chip and format.
"""

import argparse
from collections.abc import Iterator

from maxlm.compiler.aot import leave_chips_alone

leave_chips_alone()

import jax  # noqa: E402 - it reads the environment when it is imported
import jax.numpy as jnp  # noqa: E402

from maxlm.compiler.aot import devices  # noqa: E402
from maxlm.hardware import topologies  # noqa: E402
from maxlm.hlo import parser  # noqa: E402
from maxlm.hlo.op_flops import flops_by_operands  # noqa: E402

SMALLEST = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
FORMATS = ("bfloat16", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2", "int8", "int4")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--chips", nargs="+", choices=SMALLEST, default=list(SMALLEST))
    arguments.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    arguments.add_argument("--size", type=int, default=4096)
    given = arguments.parse_args()
    for chip in given.chips:
        base = 0
        for name in dict.fromkeys(("bfloat16", *given.formats)):
            cycles, operands = compiled(chip, name, given.size)
            base = base or cycles
            speed = f"{base / cycles:5.2f}" if cycles else "    -"
            print(f"{chip:6} {name:20} {cycles:12,} cycles {speed}  operands {' '.join(sorted(operands))}", flush=True)


def compiled(chip: str, name: str, size: int) -> tuple[int, set[str]]:
    """(cycles, operands of the dots) of one compiled matmul with inputs in the format called `name`; 0 cycles where it does not compile."""
    place = jax.sharding.SingleDeviceSharding(devices(topologies.parse(SMALLEST[chip]))[0])
    x = jax.ShapeDtypeStruct((size, size), jnp.dtype(name), sharding=place)
    wide = jnp.int32 if name.startswith("int") else jnp.float32

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot(x, w, preferred_element_type=wide).astype(jnp.bfloat16)

    try:
        module = parser.read(jax.jit(multiply).lower(x, x).compile().as_text())
    except jax.errors.JaxRuntimeError as error:
        return 0, {str(error).splitlines()[0][:60]}
    return module.cycles(module.entry), set(_operands(module))


def _operands(module: parser.Module) -> Iterator[str]:
    for run in module.executed():
        yield from flops_by_operands(module, run.op, module.computations[run.computation])


if __name__ == "__main__":
    main()
