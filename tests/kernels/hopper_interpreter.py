"""Pallas's interpreter for GPU kernels, on a CPU: shared memory, its barriers and the copy engine as they are, races noticed."""

import contextlib
import threading

import jax
import pytest

# Public only from jax 0.11 on, and what compiles a kernel not even there.
params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
from jax._src.pallas.mosaic.interpret import thread_map  # noqa: E402
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # noqa: E402

_lock = threading.Lock()
_compiled = {}


def _run_compiled_once(jaxpr, consts, *args):
    """The interpreter compiles a kernel for every warpgroup of every thread block anew; it is the same program each time."""
    with _lock:
        if id(jaxpr) not in _compiled:
            run = jax.jit(lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args) and None)
            _compiled[id(jaxpr)] = jaxpr, run.lower(consts, *args).compile()
    _compiled[id(jaxpr)][1](consts, *args)


@contextlib.contextmanager
def interpreting(monkeypatch):
    """Kernels that are traced in this context are interpreted. Fails if two warpgroups used memory without waiting for each other.

    Under jax 0.10 an error in one warpgroup leaves the others waiting for ever: pytest then ends this process (`faulthandler_timeout`).
    """
    monkeypatch.setattr(thread_map, "_run_jaxpr", _run_compiled_once)
    with params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=True)):
        yield
    assert not gpu_callbacks.get_races().races_found
