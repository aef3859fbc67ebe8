"""Memory spaces of arrays: HBM, and the host memory that a device reads and writes by itself."""

from typing import Any

import jax
from jax.sharding import NamedSharding

HOST = "pinned_host"


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same split, in host memory."""
    return sharding.with_memory_kind(HOST)


def on_device(sharding: NamedSharding) -> NamedSharding:
    """The same split, in the memory of the device."""
    return NamedSharding(sharding.mesh, sharding.spec)


def is_on_host(leaf: Any) -> bool:
    """True for an array, an abstract one or a sharding in host memory; a traced array knows its space by its type."""
    if isinstance(leaf, jax.core.Tracer):
        return bool(jax.typeof(leaf).memory_space == jax.memory.Space.Host)
    return getattr(leaf, "sharding", leaf).memory_kind == HOST


def to_device(array: jax.Array) -> jax.Array:
    """The array in device memory, split as it is. While a program is traced."""
    return jax.device_put(array, jax.memory.Space.Device)


def to_host(array: jax.Array) -> jax.Array:
    """The array in host memory, split as it is. While a program is traced."""
    return jax.device_put(array, jax.memory.Space.Host)


def peak_on_device(stats: Any) -> int:
    """Bytes of arguments, results and temporaries at the fullest moment of a program, by its `memory_analysis()`, which counts those
    arguments and results that are in host memory; 0 if it has none. Where there are some its `temp_size_in_bytes` is up to 1.7 times what
    is allocated (libtpu 0.0.42). An upper bound where temporaries are in host memory: how many of them it counts is not stated.
    """
    on_hosts = stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
    return max(int(stats.peak_memory_in_bytes - on_hosts), 0)


def needed_on_device(held: int, peak: int, code: int) -> int:
    """Bytes that a program needs on a device, its code included. `held`: arguments, results that overwrite no argument, temporaries and
    what fragmentation wastes; `peak`: as `peak_on_device`, with what lies in VMEM. Compilers refuse a program by neither alone, and each
    bounds what is needed.
    """
    return (min(held, peak) if peak else held) + code


def needed_by(step: Any, platform: str) -> int | None:
    """`needed_on_device` of a program compiled for devices of that platform; None where the compiler does not state it."""
    stats = step.memory_analysis()
    if stats is None:
        return None
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    peak = 0 if platform == "cpu" else peak_on_device(stats)  # XLA:CPU leaves temporaries out of it
    return needed_on_device(int(held), peak, int(stats.generated_code_size_in_bytes))
