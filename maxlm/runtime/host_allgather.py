"""All-gather of host values over processes with any number of devices. Every process must make the same calls, in the same order."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_WIDTH = 1024  # bytes of which the width of a text is a multiple: each width is a program of its own


def allgather(values: np.ndarray) -> np.ndarray:
    """Return `values` of all processes, stacked by process number; the same shape everywhere. Floats are returned as float32."""
    if jax.process_count() == 1:  # without a program to compile
        return np.asarray(values[None], jax.dtypes.canonicalize_dtype(values.dtype))
    firsts = {device.process_index: device for device in reversed(jax.devices())}  # jax's own needs the same number of devices in each
    mesh = Mesh(np.array([firsts[number] for number in sorted(firsts)]), ("process",))
    mine = jax.device_put(values[None], firsts[jax.process_index()])
    parts = NamedSharding(mesh, PartitionSpec("process"))
    whole = jax.make_array_from_single_device_arrays((len(firsts), *values.shape), parts, [mine])
    return jax.device_get(jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(whole).addressable_data(0))


def allgather_text(text: str) -> list[str]:
    """Return the `text` of each process, of any length."""
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = allgather(np.array([len(data)], np.int32))[:, 0]
    padded = np.zeros(max(-(-int(lengths.max()) // _WIDTH), 1) * _WIDTH, np.uint8)
    padded[: len(data)] = data
    return [bytes(row[:length]).decode() for row, length in zip(allgather(padded), lengths, strict=True)]
