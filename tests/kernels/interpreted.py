"""A TPU that a CPU plays: memory that was not written is NaN, reads out of bounds are refused, accesses that may collide are found."""

from collections.abc import Iterator
from contextlib import contextmanager

from jax.experimental.pallas import tpu as pltpu


@contextmanager
def interpreted_tpu(capfd, cores: int = 2) -> Iterator[None]:
    """Kernels inside run on `cores` cores, which share dimensions that are declared parallel. Fails where two accesses may collide."""
    capfd.readouterr()
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=cores)
    with pltpu.force_tpu_interpret_mode(params):
        yield
    said = capfd.readouterr().out
    assert "RACE DETECTED" not in said, said[:1000]
