"""The process that calls the API: its platform, its compilation cache, and what libraries would print."""

import contextlib
import logging
from collections.abc import Iterator

from maxlm.compiler.hidden_stderr import hidden_stderr
from maxlm.run.jax_setup import enable_compilation_cache, select_platform

_NOISY = ("absl", "jax", "orbax", "tensorstore")
_started = False


def start_process() -> None:
    """Choose the platform and find the devices, once, with what XLA and libtpu print at their start hidden. Later calls do nothing."""
    global _started
    if _started:
        return
    _started = True
    import jax

    select_platform()
    with hidden_stderr():
        jax.devices()
    enable_compilation_cache()


@contextlib.contextmanager
def quiet_process() -> Iterator[None]:
    """`start_process`, and no lines below WARNING from the libraries in the block."""
    start_process()
    levels = {name: logging.getLogger(name).level for name in _NOISY}
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
