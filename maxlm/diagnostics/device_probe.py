"""`python -m maxlm.diagnostics.device_probe`: print the devices that a run would find, and a test of training on them, as one JSON line.

`doctor` runs it as a separate process, because a broken driver can hang or kill it.
"""

import json
import os
import stat
import threading
from typing import Any

import jax
import numpy as np

from maxlm.base.transient import message_line
from maxlm.config import UserError
from maxlm.config.schema import Config
from maxlm.parallel import build_mesh
from maxlm.run.jax_setup import enable_compilation_cache, select_platform
from maxlm.training import fits
from maxlm.training.program import build_program

SMALL = {  # the test: default precision, and every other default of a run
    "model": {"vocab_size": 512, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 128},
    "data": {"store": "none", "seq_len": 256},
    "train": {"steps": 1, "global_batch": 2},
}


def describe_devices() -> dict[str, Any]:
    """Return the platform and, for each device of this process, its kind and bytes of memory (null if unknown)."""
    select_platform()
    devices = [
        {"kind": device.device_kind, "memory_bytes": (device.memory_stats() or {}).get("bytes_limit")} for device in jax.local_devices()
    ]
    platform, folder = jax.default_backend(), enable_compilation_cache()
    return {"platform": platform, "devices": devices, "compilation_cache": folder, "training": try_to_train()}


def try_to_train() -> str | None:
    """Train a small model for one update on one device; return the reason in a line if that fails, else None."""
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
        return message_line(error)
    return None if np.isfinite(loss) else f"the loss is {loss}"


def _end_with_parent() -> None:
    """Exit when the pipe that `doctor` passes as stdin is closed."""
    os.read(0, 1)  # not sys.stdin: interpreter shutdown needs its lock
    os._exit(1)


if __name__ == "__main__":
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_end_with_parent, daemon=True).start()
    print(json.dumps(describe_devices()))
