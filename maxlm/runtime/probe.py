"""`python -m maxlm.runtime.probe` prints the devices that a run would find as one JSON line.

A process of its own, because a broken driver can hang or kill it: `doctor` lives to tell.
"""

import json
import os
import stat
import threading
from typing import Any

import jax

from maxlm.runtime.jax_setup import keep_compiled_programs, look_for_devices


def describe_devices() -> dict[str, Any]:
    """Platform and, for each device of this process, its kind and bytes of memory (null where the backend does not say)."""
    look_for_devices()
    devices = [{"kind": device.device_kind, "memory_bytes": _memory(device)} for device in jax.local_devices()]
    return {"platform": jax.default_backend(), "devices": devices, "compilation_cache": keep_compiled_programs()}


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
