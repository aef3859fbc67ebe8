"""`python -m maxlm.planning.lab OPERATION IMPLEMENTATION SHAPE TOPOLOGY FOLDER`: compiles one case, prints a JSON line a kernel.

A process of its own, since libtpu reads where to write machine code when it is loaded.
"""

import json
import os
import sys
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
    case = build(operation, shape, implementation, device.device_kind)
    bandwidth = found.chip.hbm_bytes_per_s / found.chip.devices_per_chip / CORES.get(device.device_kind, 1)
    mesh = Mesh([device], ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(size, dtype, sharding=whole) for size, dtype in case.arguments]
    with jax.set_mesh(mesh):
        jax.jit(case.function).lower(*arguments).compile(compiler_options=dict(case.options))
    for kernel in case.kernels:
        (code,) = (path for path in Path(folder).glob("*final_bundles.txt") if kernel.name in path.name and "schedule" not in path.name)
        run = execute.execute(bundles.read(code.read_text(encoding="utf-8")), kernel.scalars, bandwidth / CLOCK_HZ[found.chip.name])
        counted = {"cycles": run.cycles, "matrix": run.matrix, "units": run.units, "moved": run.moved, "waited": run.waited}
        print(json.dumps({"part": kernel.part, "flops": kernel.flops, **counted}))


if __name__ == "__main__":
    main(*sys.argv[1:])
