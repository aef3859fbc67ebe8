"""Time that copies of the state in memory take from training, and time to restore from them and from a checkpoint.

    python tools/bench_memory_copies.py [--megabytes 100] [--step-ms 200] [--steps 30] [--folder /dev/shm]

A step multiplies matrices for about `--step-ms` and updates the state in place (float32, donated, split over all devices); as in training,
a number of the step before is read while it runs. Rounds without copies, with one every step and with one every 4 steps alternate.
`blocked`: time inside `save`; `slower`: time of a whole round against one without copies, which also holds what the copy takes from the
step while it runs. The first round compiles and is not counted.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from maxlm.checkpoint import Checkpoints
from maxlm.config.schema import CheckpointConfig
from maxlm.config.sections.memory_checkpoints import MemoryCheckpointsConfig

LEAVES, ROUNDS, EVERY = 24, 3, (0, 1, 4)
Step = Callable[[Any], tuple[Any, jax.Array]]


def make_state(megabytes: float) -> dict[str, Any]:
    """Random float32 leaves of `megabytes` (10^6 bytes) in all, split by rows over every device, and a count of steps."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = max(1, int(megabytes * 1e6 / (4 * 1024 * LEAVES)) // mesh.size) * mesh.size
    create = jax.jit(lambda key: jax.random.normal(key, (rows, 1024)), out_shardings=NamedSharding(mesh, PartitionSpec("fsdp")))
    step = jax.device_put(jnp.int32(0), NamedSharding(mesh, PartitionSpec()))
    return {"params": {f"w{number}": create(jax.random.key(number)) for number in range(LEAVES)}, "step": step}


def make_step(seconds: float, state: Any) -> Step:
    """A step of about `seconds`."""
    width = 512 if jax.default_backend() == "cpu" else 4096

    def step(state: Any, products: int) -> tuple[Any, jax.Array]:
        matrix = jnp.full((width, width), 1 / width) + state["params"]["w0"][0, 0] * 1e-9
        product = jax.lax.fori_loop(0, products, lambda _, one: one @ matrix, matrix)
        params = jax.tree.map(lambda leaf: leaf * 1.0001 + product[0, 0] * 1e-9, state["params"])
        return {"params": params, "step": state["step"] + 1}, product[0, 0]

    compiled = jax.jit(step, static_argnums=1)
    products = 8
    while True:
        jax.block_until_ready(compiled(state, products))
        began = time.perf_counter()
        jax.block_until_ready(compiled(state, products))
        took = time.perf_counter() - began
        if took > seconds / 2:
            break
        products *= 2
    products = max(1, round(products * seconds / took))
    return jax.jit(lambda state: step(state, products), donate_argnums=0)


class Round(NamedTuple):
    """Figures of a round of steps, in seconds."""

    wall: float
    blocked: float  # inside `save`
    cpu: float  # of the main thread inside `save`; CPU time does not depend on other programs of the machine
    all_cpu: float  # of all threads, steps included


def run_round(checkpoints: Checkpoints, step: Step, state: Any, number: int, steps: int, every: int) -> tuple[Any, Round]:
    """State after `steps` steps, and what they took."""
    assert checkpoints.memory is not None
    blocked, cpu, before = checkpoints.memory.blocked_s, 0.0, None
    began, used = time.perf_counter(), time.process_time()
    for done in range(number, number + steps):
        if every and done % every == 0:
            cpu -= time.thread_time()
            checkpoints.memory.save(done, state, {"next_step": done})
            cpu += time.thread_time()
        state, figure = step(state)
        if before is not None:
            float(before)
        before = figure
    jax.block_until_ready(state)
    return state, Round(time.perf_counter() - began, checkpoints.memory.blocked_s - blocked, cpu, time.process_time() - used)


def measure(checkpoints: Checkpoints, megabytes: float, step_ms: float, steps: int) -> dict[str, Any]:
    """Medians over rounds."""
    state = make_state(megabytes)
    step = make_step(step_ms / 1e3, state)
    rounds: dict[int, list[Round]] = {every: [] for every in EVERY}
    number = 0
    for counted in range(-1, ROUNDS):
        for every in EVERY:
            length = steps if counted >= 0 else 8
            state, figures = run_round(checkpoints, step, state, number, length, every)
            number += length
            if counted >= 0:
                rounds[every].append(figures)
    plain = statistics.median(one.wall for one in rounds[0])
    result: dict[str, Any] = {"megabytes": megabytes, "device": jax.devices()[0].device_kind, "step_ms": round(plain / steps * 1e3, 2)}
    result["main_thread_cpu_ms_a_copy"] = round(statistics.median(one.cpu for one in rounds[1]) / steps * 1e3, 3)
    all_cpu = [statistics.median(one.all_cpu for one in rounds[every]) / steps * 1e3 for every in (0, 1)]
    result["cpu_ms_a_step"], result["all_cpu_ms_a_copy"] = round(all_cpu[0], 3), round(all_cpu[1] - all_cpu[0], 3)
    for every in EVERY[1:]:
        result[f"blocked_every_{every}"] = round(statistics.median(one.blocked for one in rounds[every]) / plain, 5)
        slower = [with_copies.wall / without.wall - 1 for with_copies, without in zip(rounds[every], rounds[0], strict=True)]
        result[f"slower_every_{every}"] = round(statistics.median(slower), 5)
    return result | restores(checkpoints, step, state, number)


def restores(checkpoints: Checkpoints, step: Step, state: Any, number: int) -> dict[str, float]:
    """Seconds to restore a state from a checkpoint and from memory, each once it has been done before."""
    assert checkpoints.memory is not None
    checkpoints.save(number, state, {"next_step": number})
    checkpoints.wait()
    state, _ = step(state)
    checkpoints.memory.save(number + 1, state, {"next_step": number + 1})
    checkpoints.memory.close(remove=False)
    result = {}
    for name, exactly in (("checkpoint", number), ("memory", None)):
        for _ in range(2):
            fresh = Checkpoints(str(checkpoints.directory), CheckpointConfig(keep=1), {})
            if exactly is None:
                fresh.add_memory(checkpoints.memory.config)
            began = time.perf_counter()
            restored = fresh.restore(state, exactly)
            jax.block_until_ready(restored.state)
            result[f"restore_{name}_s"] = round(time.perf_counter() - began, 3)
            assert restored.source == name, restored.source
    checkpoints.close()
    return result


def main(megabytes: float = 100, step_ms: float = 200, steps: int = 30, folder: str = "/dev/shm") -> None:
    """Measure, and print a table and one line of JSON."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Checkpoints(Path(directory) / "checkpoints", CheckpointConfig(keep=1), {})
        checkpoints.add_memory(MemoryCheckpointsConfig(every_steps=1, folder=folder))
        result = measure(checkpoints, megabytes, step_ms, steps)
    table = Table("figure", "value", title=f"{megabytes:g} MB of state")
    for name, value in result.items():
        table.add_row(name, f"{value:.3%}" if "every" in name else str(value))
    Console().print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)
