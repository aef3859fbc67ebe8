"""Commands that install an extra of maxlm or XLA's compiler for GPUs, right for a clone and for an installed package.

An installed package has neither the repository's Makefile nor a folder for `pip install -e`.
"""

import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the clone, or site-packages
GPU_COMPILER = Path(sys.prefix) / "gpu-compiler"  # outside jax's path, since jax looks for a GPU wherever it finds its plugin


def install_command(extra: str | None = None, *, root: Path = ROOT) -> str:
    """Return the pip command that installs maxlm with an extra: from a clone at `root`, else from the package index."""
    suffix = f"[{extra}]" if extra else ""
    return f"pip install -e '.{suffix}' in the clone" if _is_clone(root) else f"pip install {shlex.quote(f'maxlm{suffix}')}"


def gpu_compiler_command(*, root: Path = ROOT, prefix: Path = Path(sys.prefix)) -> str:
    """Return the command that installs XLA's compiler for NVIDIA GPUs where `maxlm` looks for it.

    The Makefile of a clone installs into the clone's `.venv`; with any other environment it is a pip command.
    """
    if _is_clone(root) and prefix.resolve() == (root / ".venv").resolve():
        return "make gpu-compiler in the clone"
    from importlib.metadata import version

    plugins = (f"jax-cuda13-{part}=={version('jaxlib')}" for part in ("plugin", "pjrt"))
    target = str(prefix / GPU_COMPILER.name)
    return shlex.join(("pip", "install", "--no-deps", "--target", target, *plugins, "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm"))


def _is_clone(root: Path) -> bool:
    return (root / "pyproject.toml").is_file()
