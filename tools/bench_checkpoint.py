"""Time that an asynchronous save blocks the training loop, against the time of the write.

    python tools/bench_checkpoint.py [--megabytes 500] [--saves 5] [--directory DIR]

The state (float32, sharded over all devices) is updated in place by a donating step before and after every save, as in
training. `blocked` is the time inside `save`; `next step` is the step right after it, which shares memory and cores with
the write; `written` is the time until the checkpoint is committed. The first save also compiles the digest and is shown but
not counted. Exit code 1 if all saves together were blocked for 5% of their write time or more. On a CPU the next step is slow because the
state it may not overwrite yet is host memory: it needs as much again, fresh from the kernel.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from maxlm.checkpoint import Checkpoints
from maxlm.config.schema import CheckpointConfig

LEAVES = 24
LIMIT = 0.05


def make_state(megabytes: int) -> dict[str, Any]:
    """Random float32 leaves of `megabytes` (10^6 bytes) in all, split by rows over every device."""
    devices = np.array(jax.devices())
    sharding = NamedSharding(Mesh(devices, ("fsdp",), axis_types=(AxisType.Auto,)), PartitionSpec("fsdp"))
    rows = max(1, megabytes * 1_000_000 // (4 * 1024 * LEAVES * devices.size)) * devices.size
    create = jax.jit(lambda key: jax.random.normal(key, (rows, 1024)), out_shardings=sharding)
    return {"params": {f"w{number}": create(jax.random.key(number)) for number in range(LEAVES)}}


def timed(step: Callable[[Any], Any], state: Any) -> tuple[float, Any]:
    """Seconds until the step's result is on the devices, and the result."""
    begin = time.perf_counter()
    result = jax.block_until_ready(step(state))
    return time.perf_counter() - begin, result


def measure(megabytes: int, saves: int, directory: str) -> list[dict[str, float]]:
    """One row of seconds a save."""
    state = make_state(megabytes)
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * jnp.float32(1.0001), tree), donate_argnums=0)
    checkpoints = Checkpoints(directory, CheckpointConfig(keep=1), {})
    rows = []
    for number in range(saves + 1):
        _, state = timed(step, state)
        plain_s, state = timed(step, state)
        begin = time.perf_counter()
        checkpoints.save(number, state, {"step": number})
        blocked_s = time.perf_counter() - begin
        next_s, state = timed(step, state)
        checkpoints.wait()
        written_s = time.perf_counter() - begin
        rows.append({"blocked_s": blocked_s, "written_s": written_s, "step_s": plain_s, "next_step_s": next_s})
    checkpoints.close()
    return rows


def main(megabytes: int = 500, saves: int = 5, directory: str | None = None) -> None:
    """Save a state several times, in a folder made in `directory` and deleted; exit with 1 if training was blocked for too long."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        rows = measure(megabytes, saves, folder)
    table = Table("save", "blocked ms", "written ms", "blocked / written", "step ms", "next step ms", title=f"{megabytes} MB of state")
    for number, row in enumerate(rows):
        table.add_row(
            str(number) if number else "0 (compiles)",
            f"{1e3 * row['blocked_s']:.1f}",
            f"{1e3 * row['written_s']:.0f}",
            f"{row['blocked_s'] / row['written_s']:.1%}",
            f"{1e3 * row['step_s']:.0f}",
            f"{1e3 * row['next_step_s']:.0f}",
        )
    Console().print(table)
    ratio = sum(row["blocked_s"] for row in rows[1:]) / sum(row["written_s"] for row in rows[1:])
    medians = {name: round(statistics.median(row[name] for row in rows[1:]), 4) for name in rows[0]}
    result = {"megabytes": megabytes, "device": jax.devices()[0].device_kind, **medians, "blocked_ratio": round(ratio, 4)}
    print(json.dumps(result))
    raise typer.Exit(0 if ratio < LIMIT else 1)


if __name__ == "__main__":
    typer.run(main)
