"""`python -m maxlm.planning.lab OPERATION IMPLEMENTATION SHAPE TOPOLOGY FOLDER`: compiles one case, prints a JSON line a kernel.

A process of its own, since libtpu reads where to write machine code when it is loaded.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path


def main(operation: str, implementation: str, shape: str, topology: str, folder: str) -> None:
    """Compile and run one case."""
    dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dump}"
    from maxlm.planning.aot import devices, leave_chips_alone

    leave_chips_alone()
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from maxlm.hardware.topologies import parse
    from maxlm.kernels.platform import CORES
    from maxlm.planning.cost import CLOCK_HZ
    from maxlm.planning.lab import bundles, execute
    from maxlm.planning.lab.cases import build

    found = parse(topology)
    device = devices(found)[0]
    bandwidth = found.chip.hbm_bytes_per_s / found.chip.devices_per_chip / CORES.get(device.device_kind, 1)
    mesh = Mesh([device], ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    for case in build(operation, shape, implementation, device.device_kind):
        before = set(Path(folder).iterdir())
        arguments = [jax.ShapeDtypeStruct(size, dtype, sharding=whole) for size, dtype in case.arguments]
        with jax.set_mesh(mesh):
            jax.jit(case.function).lower(*arguments).compile(compiler_options=dict(case.options))
        written = {
            path.name.split("-", 1)[1]: path for path in sorted(set(Path(folder).glob("*final_bundles.txt")) - before)
        }  # the last of each
        for kernel in case.kernels:
            total: Counter[str] = Counter()
            for path in (path for name, path in written.items() if kernel.name in name and "schedule" not in name):
                code = bundles.read(path.read_text(encoding="utf-8"))
                run = execute.execute(code, kernel.scalars, bandwidth / CLOCK_HZ[found.chip.name])
                total.update(cycles=run.cycles, matrix=run.matrix, moved=run.moved, waited=run.waited, spills=run.units["spill store"])
            assert total["cycles"], f"no machine code of {kernel.name}"
            print(json.dumps({"part": kernel.part, "flops": kernel.flops, **total}))


if __name__ == "__main__":
    main(*sys.argv[1:])
