"""`python -m maxlm.planning.lab.hopper OPERATION IMPLEMENTATION SHAPE [HEADS]`: compiles for an H200 that is not there.

Prints a JSON line a kernel. Mosaic GPU turns a kernel into machine code with no GPU at hand: ptxas says what registers it takes,
nvdisasm shows the code. Needs jax's CUDA plugin at jax's version (jax-cuda13-plugin, jax-cuda13-pjrt, without their dependencies),
nvidia-cuda-nvcc and nvidia-cuda-nvdisasm: `make gpu-compiler` puts them where only this finds them, since jax looks for a GPU wherever it
finds its plugin. A process of its own, since the environment is read when libraries are loaded, and since they print from C++.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxlm.config.errors import UserError

if TYPE_CHECKING:
    import jax

# What the compiler asks of a chip, as NVIDIA's H100 white paper and the H200 data sheet have it; stream_executor's GpuTargetConfigProto.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"
"""
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_SASS": "1"}
_APART = Path(sys.prefix) / "gpu-compiler"  # what `make gpu-compiler` makes
_PACKAGES = _APART if _APART.exists() else Path(sysconfig.get_paths()["purelib"])
_TOOLS = _PACKAGES / "nvidia" / "cu13" / "bin"  # where the package index's ptxas and nvdisasm lie
_KERNEL = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_NOTE = re.compile(r"(?:warning|\(C75\d+\)).*in (?:the )?function '(\w+)'")
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One kernel's machine code: registers a thread at launch, bytes that spill, what ptxas warns of, instructions by opcode.

    Among the warnings is the one that costs most: wgmma that are serialized wait for each other's results.
    """

    name: str
    target: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    warnings: tuple[str, ...]
    opcodes: dict[str, int]


def missing() -> str:
    """What must be installed to compile for a GPU that is not there; empty when all is."""
    if not (_PACKAGES / "jax_cuda13_plugin").exists():
        return "jax's CUDA plugin is not installed: make gpu-compiler"
    tools = [name for name in ("nvdisasm", "ptxas") if not (_TOOLS / name).exists()]
    return f"{' and '.join(tools)} of the package index are not installed: make gpu-compiler" if tools else ""


def kernels_of(operation: str, implementation: str, shape: str, heads: int = 8) -> list[Kernel]:
    """Forward and backward at `shape`, attention of so many query heads. Raises UserError when they do not compile."""
    command = [sys.executable, "-m", "maxlm.planning.lab.hopper", operation, implementation, shape, str(heads)]
    paths = [str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    if done.returncode:
        raise UserError(f"{operation} {implementation} at {shape} does not compile for an H200: {done.stderr.strip()[-2000:]}")
    return [Kernel(**json.loads(line)) for line in done.stdout.splitlines()]


def compile_for_h200(function: Callable[..., Any], arguments: Sequence["jax.ShapeDtypeStruct"]) -> list[Kernel]:
    """The Mosaic GPU kernels of `jit(function)`. Only in a process whose jax was not loaded yet: see `main`."""
    os.environ.update(_ENVIRONMENT)
    os.environ["PATH"] = f"{os.environ['PATH']}:{_TOOLS}"
    import jax
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    there = topologies.get_topology_desc(platform="cuda", topology_name="h200", target_config=H200, topology="1x1x1")
    mesh = Mesh(there.devices, ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    placed = [jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=whole) for argument in arguments]
    with tempfile.TemporaryFile() as said, jax.set_mesh(mesh):
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(said.fileno(), 1)  # the compiler prints from C++
        try:
            lowered = jax.jit(function).lower(*placed)
            os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(_TOOLS.parent)  # jax 0.11 looks nowhere else, and sets it when a kernel is lowered
            lowered.compile()
        finally:
            os.dup2(stdout, 1)
        said.seek(0)
        return read(said.read().decode())


def read(text: str) -> list[Kernel]:
    """Kernels of what ptxas and nvdisasm printed."""
    starts = [found.start() for found in _KERNEL.finditer(text)]
    warnings = [(found[1], found[0]) for found in _NOTE.finditer(text)]  # said before the kernel is
    return [_kernel(text[start:end], warnings) for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def _kernel(text: str, warnings: Sequence[tuple[str, str]]) -> Kernel:
    named, spills, registers = _KERNEL.search(text), _SPILLS.search(text), _REGISTERS.search(text)
    assert named and spills and registers, "ptxas says all three of every kernel"
    stack, stores, loads = (int(number) for number in spills.groups())
    mine = tuple(warning for name, warning in warnings if name == named[1])
    return Kernel(named[1], named[2], int(registers[1]), stack, stores, loads, mine, dict(Counter(_OPCODE.findall(text))))


def main(operation: str, implementation: str, shape: str, heads: str = "8") -> None:
    """Compile the gradients of one case and print."""
    os.environ.update(_ENVIRONMENT)  # before jax is loaded
    from maxlm.planning.lab.cases import gpu_case

    for kernel in compile_for_h200(*gpu_case(operation, shape, implementation, int(heads))):
        print(json.dumps(asdict(kernel)))


if __name__ == "__main__":
    main(*sys.argv[1:])
