"""`python -m maxlm.runtime.probe` prints the devices that a run would find as one JSON line.

A process of its own, because a broken driver can hang or kill it: `doctor` lives to tell.
"""

import json
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


if __name__ == "__main__":
    print(json.dumps(describe_devices()))
