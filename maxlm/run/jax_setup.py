"""Configuration of jax before it touches a device: platform, memory share and compilation cache."""

import logging
import os

import jax
from jax._src import compilation_cache, lru_cache

from maxlm.base.errors import UserError, error_kind, shorten
from maxlm.base.paths import irregular, is_remote, read_file, user_path
from maxlm.cluster.accelerators import any_device_file, find_accelerators
from maxlm.compiler import program_cache
from maxlm.hardware.chips import GPU_MEMORY_SHARE
from maxlm.hardware.xla_flags import VIRTUAL_DEVICES

_log = logging.getLogger(__name__)


def _xla_flags() -> str:
    """Options of XLA_FLAGS, or of the file that it names. Raises UserError for a file that XLA could not read, which ends the process."""
    text = os.environ.get("XLA_FLAGS", "")
    if not text or text.lstrip().startswith("-"):
        return text
    try:
        return read_file(text).decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise error_kind(error)(
            f"XLA_FLAGS = {shorten(text)}: must be options, which begin with -, or a file of them that can be read ({why}): unset it, or "
            "name a file that exists."
        ) from None


def select_platform() -> None:
    """Select the CPU where no device file exists: an installed libtpu, needed to compile, would search for seconds and print errors.

    Of a GPU jax may take the memory share that `maxlm compile` assumes, unless the environment sets another. Raises UserError if XLA_FLAGS
    names a file that cannot be read.
    """
    _xla_flags()
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # its old name: jax refuses both at once
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))
    if not any_device_file() and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def use_virtual_devices(count: int) -> None:
    """Let the CPU be `count` devices, to try meshes without an accelerator. Call it before jax finds its devices. Raises UserError where an
    accelerator is present, unless JAX_PLATFORMS=cpu leaves it alone.
    """
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        present = find_accelerators()
        if present or any_device_file():
            named = f"{present[0].kind} at {present[0].trace}" if present else "with a device file"
            raise UserError(
                f"--devices {count}: splits a CPU where there is no accelerator, and here is one ({named}): leave the option out, or set "
                "JAX_PLATFORMS=cpu."
            )
    jax.config.update("jax_platforms", "cpu")
    flags = [flag for flag in _xla_flags().split() if not flag.startswith(VIRTUAL_DEVICES)]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{VIRTUAL_DEVICES}{count}"])


class SealedCache(lru_cache.LRUCache):
    """jax's files of compiled programs, each sealed with its key: jax loads whatever a file of that name holds."""

    def get(self, key: str) -> bytes | None:
        """The program that was put under `key`. A file that holds another is removed, and the program compiled again."""
        path = self.path / f"{(name := f'maxlm-{key}')}-cache"
        if irregular(path):
            path.unlink(missing_ok=True)  # a pipe, which reading would wait for
        sealed = super().get(name)  # entries of other programs in a shared folder are left alone
        program = None if sealed is None else program_cache.unseal(key, sealed)
        if sealed is not None and program is None:
            _log.warning("compilation cache: the file of %s is damaged or another's: compiled again", key)
            path.unlink(missing_ok=True)
        return program

    def put(self, key: str, value: bytes) -> None:
        """Keep a program."""
        super().put(f"maxlm-{key}", program_cache.seal(key, value))


def enable_compilation_cache() -> str | None:
    """Cache compiled programs for restarts; return the folder, which the environment may set. An unwritable folder is no error.

    Returns None, without a cache, where no home is known and the environment sets no folder; and for several CPU devices: XLA:CPU orders
    collectives through objects shared by all devices, a loaded program has one per device, and devices may wait for each other for ever
    (seen with jax 0.10.2).
    """
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        folder = str(root / "compiled") if (root := program_cache.default_root()) is not None else None
    elif not is_remote(folder):
        folder = str(user_path(folder))
    compilation_cache.LRUCache = SealedCache  # type: ignore[misc]  # jax has no setting for it
    unordered = jax.default_backend() == "cpu" and jax.device_count() > 1
    jax.config.update("jax_compilation_cache_dir", None if unordered else folder)
    return None if unordered else folder
