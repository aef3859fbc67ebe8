"""What jax is told before it touches a device: where compiled programs are kept, what not to look for, what it may take."""

import os
from pathlib import Path

import jax

from maxlm.hardware.chips import GPU_MEMORY_SHARE
from maxlm.runtime.accelerators import may_be_there


def look_for_devices() -> None:
    """Where no device file is, spare a libtpu that was installed for planning its search, which is loud and takes seconds.

    Of a GPU jax may take as much memory as `maxlm compile` counts on, unless the environment says otherwise.
    """
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # its old name: jax refuses to be told by both
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))
    if not may_be_there() and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def keep_compiled_programs() -> str | None:
    """Let a restart find the step compiled; the folder, which the environment may choose. An unwritable one only costs the gain.

    None where several CPU devices run the step, and nothing is kept: XLA:CPU keeps collectives in one order on every device through objects
    that they share, and a program that is loaded has one for each, so devices may wait for each other for ever (seen with jax 0.10.2).
    """
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(Path.home() / ".cache" / "maxlm" / "compiled")
    unordered = jax.default_backend() == "cpu" and jax.device_count() > 1
    jax.config.update("jax_compilation_cache_dir", None if unordered else folder)
    return None if unordered else folder
