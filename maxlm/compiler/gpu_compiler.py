"""XLA's compiler for NVIDIA GPUs, without a GPU: where it is installed, and how jax finds it.

It is jax's CUDA plugin at jax's version (jax-cuda13-plugin, jax-cuda13-pjrt, without their dependencies) and nvidia-cuda-nvcc;
nvidia-cuda-nvdisasm shows kernels' code. `make gpu-compiler` installs them outside jax's path, since jax looks for a GPU wherever it finds
its plugin.
"""

import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from maxlm.config.errors import UserError
from maxlm.hardware.topologies import Topology

if TYPE_CHECKING:
    import jax

_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_APART = Path(sys.prefix) / "gpu-compiler"  # what `make gpu-compiler` makes
_PACKAGES = _APART if _APART.exists() else Path(sysconfig.get_paths()["purelib"])
_TOOLS = _PACKAGES / "nvidia" / "cu13" / "bin"  # where the package index's ptxas and nvdisasm lie

# stream_executor's GpuTargetConfigProto, as NVIDIA's H100 white paper, the H200 data sheet and XLA's own
# descriptions (xla/backends/gpu/target_config/specs) have it.
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{kind}"
"""
DESCRIBED = ("H100", "H200")


def missing() -> str:
    """An error message that names what must be installed to compile for a GPU; empty if nothing is missing."""
    if not (_PACKAGES / "jax_cuda13_plugin").exists():
        return "jax's CUDA plugin is not installed: make gpu-compiler"
    tools = [name for name in ("nvdisasm", "ptxas") if not (_TOOLS / name).exists()]
    return f"{' and '.join(tools)} of the package index are not installed: make gpu-compiler" if tools else ""


def why_not(topology: Topology) -> str:
    """Reason why nothing can be compiled for these GPUs here; empty if it can."""
    if topology.chip.name not in DESCRIBED:
        return f"only {' and '.join(f'{name.lower()}:1x8' for name in DESCRIBED)} and the like can be compiled for"
    return missing() and f"{missing()} (no GPU is needed)"


def devices(topology: Topology) -> tuple["jax.Device", ...]:
    """The GPUs of `topology`, without the hardware. Raises UserError for a chip that is not described, or without the compiler.

    Only in a process whose jax has not looked for devices yet: it then looks for plugins, once.
    """
    if reason := why_not(topology):
        raise UserError(f"{topology.name}: {reason}.")
    make_ready()
    from jax.experimental import topologies

    chip = topology.chip
    target = _HOPPER.format(bandwidth=chip.hbm_bytes_per_s, memory=chip.driver_bytes, kind=chip.device_kinds[0])
    shape = "x".join(map(str, (1, *topology.sides)))  # partitions, nodes, GPUs a node
    return tuple(topologies.get_topology_desc(platform="cuda", topology_name=chip.name, target_config=target, topology=shape).devices)


def make_ready() -> None:
    """Let jax find the plugin, and leave the machine's own GPUs alone."""
    os.environ.update(_ENVIRONMENT)
    if str(_PACKAGES) not in sys.path:
        sys.path.append(str(_PACKAGES))
        os.environ["PATH"] = f"{os.environ['PATH']}{os.pathsep}{_TOOLS}"


def show_tools() -> None:
    """Set the path of ptxas for Mosaic GPU. Call between lowering and compiling: jax 0.11 sets it itself when a kernel is lowered."""
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(_TOOLS.parent)
