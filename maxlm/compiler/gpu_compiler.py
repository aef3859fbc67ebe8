"""XLA's compiler for NVIDIA GPUs, where there is none: where it lies, and what it must be told of a chip.

It is jax's CUDA plugin at jax's version (jax-cuda13-plugin, jax-cuda13-pjrt, without their dependencies) and nvidia-cuda-nvcc;
nvidia-cuda-nvdisasm shows kernels' code. `make gpu-compiler` puts them where only this finds them, since jax looks for a GPU wherever it
finds its plugin.
"""

import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from maxlm.config.errors import UserError
from maxlm.hardware.gpu_targets import DESCRIBED, target_config
from maxlm.hardware.topologies import Topology

if TYPE_CHECKING:
    import jax

_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_APART = Path(sys.prefix) / "gpu-compiler"  # what `make gpu-compiler` makes
_PACKAGES = _APART if _APART.exists() else Path(sysconfig.get_paths()["purelib"])
_TOOLS = _PACKAGES / "nvidia" / "cu13" / "bin"  # where the package index's ptxas and nvdisasm lie


def missing() -> str:
    """What must be installed to compile for a GPU that is not there; empty when all is."""
    if not (_PACKAGES / "jax_cuda13_plugin").exists():
        return "jax's CUDA plugin is not installed: make gpu-compiler"
    tools = [name for name in ("nvdisasm", "ptxas") if not (_TOOLS / name).exists()]
    return f"{' and '.join(tools)} of the package index are not installed: make gpu-compiler" if tools else ""


def devices(topology: Topology) -> tuple["jax.Device", ...]:
    """GPUs that are not there. Raises UserError for a chip that is not described here, or without the compiler.

    Only in a process whose jax has not looked for devices yet: it looks for plugins then, once.
    """
    if topology.chip.name not in DESCRIBED:
        known = " and ".join(f"{name.lower()}:1x1x8" for name in DESCRIBED)
        raise UserError(f"{topology.name}: no GPUs can be compiled for but those of {known}.")
    if topology.slices > 1:
        hosts = f"{topology.chip.name.lower()}:{topology.slices}x{'x'.join(map(str, topology.sides[1:]))}"
        raise UserError(f"mesh.slices = {topology.slices}: GPUs have hosts, which their topology counts, and no slices; write {hosts}.")
    if missing():
        raise UserError(f"{topology.name}: {missing()} (no GPU is needed).")
    make_ready()
    from jax.experimental import topologies

    chip = topology.chip
    target = target_config(chip)
    shape = "x".join(map(str, topology.sides))
    return tuple(topologies.get_topology_desc(platform="cuda", topology_name=chip.name, target_config=target, topology=shape).devices)


def make_ready() -> None:
    """Let jax find the plugin and leave the GPUs that are there alone."""
    os.environ.update(_ENVIRONMENT)
    if str(_PACKAGES) not in sys.path:
        sys.path.append(str(_PACKAGES))
        os.environ["PATH"] = f"{os.environ['PATH']}{os.pathsep}{_TOOLS}"


def show_tools() -> None:
    """Tell Mosaic GPU where ptxas lies; to be said between lowering and compiling, since jax 0.11 looks nowhere else and says it itself
    when a kernel is lowered.
    """
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(_TOOLS.parent)
