"""`python -m maxlm.kernel_lab OPERATION IMPLEMENTATION SHAPE TOPOLOGY FOLDER [sweep]`: compile one shape, print a JSON line a kernel.

`sweep`: at every choice of blocks. A process of its own, since libtpu reads where to write machine code when it is loaded.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxlm.compiler.aot import devices, leave_chips_alone
from maxlm.hardware.topologies import parse
from maxlm.hlo import parser
from maxlm.kernel_lab import bundles, execute

if TYPE_CHECKING:
    from maxlm.kernel_lab.cases import Case, Kernel


def main(operation: str, implementation: str, shape: str, topology: str, folder: str, sweep: str = "") -> None:
    """Compile the kernels of one shape, and print a JSON line for each."""
    bundles.write_to(folder)
    leave_chips_alone()
    # These load jax, which reads the environment.
    from maxlm.kernel_lab.cases import CASES
    from maxlm.kernel_lab.problems import shape_of
    from maxlm.kernels.platform import CORES

    target = parse(topology)
    device, clock_hz = devices(target)[0], target.chip.clock_hz
    assert clock_hz is not None, "every TPU has a clock"
    bandwidth = target.chip.hbm_bytes_per_s_per_device / CORES.get(device.device_kind, 1)
    for case in CASES[operation](shape_of(operation, shape), implementation, device.device_kind, sweep=bool(sweep)):
        written, program = compiled(case, device, Path(folder))
        for kernel in case.kernels:
            row = {"part": kernel.part, "blocks": kernel.blocks, "flops": kernel.flops}
            if written:
                row |= {**count(kernel, written, bandwidth / clock_hz, device.device_kind), "estimated": estimated(kernel, program)}
                row["sums"] = round(kernel.summed / (target.chip.hbm_bytes_per_s_per_device / clock_hz))
            print(json.dumps(row), flush=True)


def compiled(case: "Case", device: Any, folder: Path) -> tuple[dict[str, dict[str, Path]], str]:
    """(files of each operation's machine code by `DUMPS`, the last of each; the program); empty if the chip's memory is too small."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh([device], ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    before = set(folder.iterdir())
    arguments = [jax.ShapeDtypeStruct(size, dtype, sharding=whole) for size, dtype in case.arguments]
    try:
        with jax.set_mesh(mesh):
            program = jax.jit(case.function).lower(*arguments).compile(compiler_options=dict(case.options)).as_text()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {}, ""
    assert program is not None, "XLA shows the programs that it compiles ahead of time"
    return bundles.written(set(folder.iterdir()) - before), program


def estimated(kernel: "Kernel", program: str) -> int:
    """XLA's own estimate of its cycles; 0 for a kernel of ours, since XLA does not know its code."""
    return sum(run.times * (run.op.cycles or 0) for run in parser.read(program).executed() if kernel.name in run.op.name)


def count(kernel: "Kernel", written: dict[str, dict[str, Path]], bytes_a_cycle: float, device_kind: str) -> dict[str, Any]:
    """Counts of its machine code: cycles, bytes moved, waits, memory; `slots`: used shares of the slots of its bundles."""
    total, filled, memory = Counter[str](), Counter[str](), Counter[str]()
    bound = False
    for called, scalars in {kernel.name: kernel.scalars, **kernel.others}.items():
        of_name = [paths for name, paths in written.items() if called in name]
        assert of_name, f"no machine code of {called}"
        for paths in of_name:
            code = bundles.load(paths)
            run = execute.execute(code, scalars, bytes_a_cycle, device_kind)
            total.update(cycles=run.cycles, matrix=run.matrix, moved=run.moved, waited=run.waited, spills=run.units[bundles.SPILLS])
            filled.update({name: run.units[name] / number for name, number in code.capacity.items()})
            memory |= Counter(code.memory)  # one operation at a time
            bound |= run.matrix >= run.bundles
    return {
        **total,
        "lower_bound": bound,
        "slots": {name: count / total["cycles"] for name, count in filled.items()},
        "vmem": 0,
        "smem": 0,
        **memory,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
