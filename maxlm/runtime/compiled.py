"""Where compiled programs are kept, so that a restart need not compile again."""

import os
from pathlib import Path

import jax


def keep_compiled_programs() -> str:
    """Let a restart find the step compiled; the folder, which the environment may choose. An unwritable one only costs the gain."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(Path.home() / ".cache" / "maxlm" / "compiled")
    jax.config.update("jax_compilation_cache_dir", folder)
    return folder
