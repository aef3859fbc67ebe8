"""XLA's compiler for NVIDIA GPUs, without a GPU: where it is installed, and how jax finds it.

It is jax's CUDA plugin at jax's version (jax-cuda13-plugin, jax-cuda13-pjrt, without their dependencies) and nvidia-cuda-nvcc;
nvidia-cuda-nvdisasm shows kernels' code. `gpu_compiler_command` installs them outside jax's path, since jax looks for a GPU wherever it
finds its plugin.
"""

import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from maxlm.base.errors import UserError
from maxlm.base.installing import GPU_COMPILER, gpu_compiler_command
from maxlm.hardware.chips import Chip, facts
from maxlm.hardware.topologies import Topology

if TYPE_CHECKING:
    import jax

_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_PACKAGES = GPU_COMPILER if GPU_COMPILER.exists() else Path(sysconfig.get_paths()["purelib"])
_TOOLS = _PACKAGES / "nvidia" / "cu13" / "bin"  # where the package index's ptxas and nvdisasm lie

# stream_executor's GpuTargetConfigProto, as NVIDIA's white papers and XLA's own descriptions have it
# (xla/backends/gpu/target_config/specs).
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{kind}"
"""


def missing() -> str:
    """An error message that names what must be installed to compile for a GPU; empty if nothing is missing."""
    if not (_PACKAGES / "jax_cuda13_plugin").exists():
        return f"jax's CUDA plugin is not installed: {gpu_compiler_command()}"
    tools = [name for name in ("nvdisasm", "ptxas") if not (_TOOLS / name).exists()]
    return f"{' and '.join(tools)} of the package index are not installed: {gpu_compiler_command()}" if tools else ""


def devices(topology: Topology) -> tuple["jax.Device", ...]:
    """The GPUs of `topology`, without the hardware. Raises UserError without the compiler.

    Only in a process where jax has not looked for devices yet: it then looks for plugins, once.
    """
    if missing():
        raise UserError(f"{topology.name}: {missing()} (no GPU is needed).")
    make_ready()
    from jax.experimental import topologies

    name, target = topology.chip.name, target_of(topology.chip)
    shape = "x".join(map(str, (1, *topology.sides)))  # partitions, nodes, GPUs a node
    return tuple(topologies.get_topology_desc(platform="cuda", topology_name=name, target_config=target, topology=shape).devices)


def target_of(chip: Chip) -> str:
    """The GPU's description, as the compiler reads it."""
    own = {"bandwidth": chip.hbm_bytes_per_s, "memory": chip.driver_bytes, "kind": chip.device_kinds[0]}
    return _TARGET.format(**own, **facts()["architectures"][chip.architecture])


def make_ready() -> None:
    """Let jax find the plugin, and leave the machine's own GPUs alone."""
    os.environ.update(_ENVIRONMENT)
    if str(_PACKAGES) not in sys.path:
        sys.path.append(str(_PACKAGES))
        os.environ["PATH"] = f"{os.environ['PATH']}{os.pathsep}{_TOOLS}"


def show_tools() -> None:
    """Set the path of ptxas for Mosaic GPU. Call between lowering and compiling: jax 0.11 sets it itself when a kernel is lowered."""
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(_TOOLS.parent)
