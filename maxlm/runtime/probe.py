"""`python -m maxlm.runtime.probe` prints the devices that a run would find, and whether they train, as one JSON line.

A process of its own, because a broken driver can hang or kill it: `doctor` lives to tell.
"""

import json
import os
import stat
import threading
from typing import Any

import jax
import numpy as np

from maxlm.config import UserError
from maxlm.config.schema import Config
from maxlm.parallel import build_mesh
from maxlm.runtime.jax_setup import keep_compiled_programs, look_for_devices
from maxlm.training import fits
from maxlm.training.program import build_program

SMALL = {  # what is tried; the default precision, and every other default that a run has
    "model": {"vocab_size": 512, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 128},
    "data": {"store": "none", "seq_len": 256},
    "train": {"steps": 1, "global_batch": 2},
}


def describe_devices() -> dict[str, Any]:
    """Platform and, for each device of this process, its kind and bytes of memory (null where the backend does not say)."""
    look_for_devices()
    devices = [{"kind": device.device_kind, "memory_bytes": _memory(device)} for device in jax.local_devices()]
    platform, folder = jax.default_backend(), keep_compiled_programs()
    return {"platform": platform, "devices": devices, "compilation_cache": folder, "training": try_to_train()}


def try_to_train() -> str | None:
    """Reason that an update of a small model cannot be computed here on one device, in a line; None if it can."""
    config = Config.model_validate(SMALL)
    try:
        with fits.explain_out_of_memory("training a small model"):
            devices = jax.local_devices()[:1]
            mesh = build_mesh(config, devices)
            fits.check(config, dict(mesh.shape), devices)
            program = build_program(config, mesh)
            batch = jax.tree.map(lambda a: jax.device_put(np.ones(a.shape, a.dtype), a.sharding), program.abstract_batch)
            loss = float(program.step(program.init(), batch)[1].loss)
    except (UserError, jax.errors.JaxRuntimeError) as error:
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return None if np.isfinite(loss) else f"the loss is {loss}"


def _memory(device: jax.Device) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")


def _end_with_parent() -> None:
    """End when the pipe that `doctor` gives as stdin is closed."""
    os.read(0, 1)  # not sys.stdin, whose lock the end of the interpreter asks for
    os._exit(1)


if __name__ == "__main__":
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_end_with_parent, daemon=True).start()
    print(json.dumps(describe_devices()))
