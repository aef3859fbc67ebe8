"""Measure what copies in memory cost a process that also sends its part to a peer and keeps the peer's.

    python tools/bench_peer_copies.py [--megabytes 100] [--copies 12] [--folder /dev/shm]

Starts two processes of one device each, which hold half of a state (10^6 bytes a megabyte) each, and copy it again and again. Prints
medians for one copy: CPU time of the main thread and of all threads of process 0, which does not depend on other programs, and the time
until the copy is written.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import typer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxlm.checkpoint import Checkpoints
from maxlm.config.reliability import MemoryCheckpointsConfig
from maxlm.config.schema import CheckpointConfig

LEAVES, COLUMNS = 24, 1024
UNCOUNTED = 3  # copies, of which the first ones compile


def measure(folder: Path, megabytes: float, copies: int) -> dict[str, float]:
    """Medians of `copies` copies, in milliseconds, in one of two processes."""
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = max(1, int(megabytes * 1e6 / (4 * COLUMNS * LEAVES)) // 2) * 2
    create = jax.jit(lambda key: jax.random.normal(key, (rows, COLUMNS)), out_shardings=NamedSharding(mesh, PartitionSpec("fsdp")))
    state = {f"w{number}": jax.block_until_ready(create(jax.random.key(number))) for number in range(LEAVES)}
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(), {})
    config = MemoryCheckpointsConfig(every_steps=1, folder=str(folder / f"host{jax.process_index()}"))
    checkpoints.add_memory(config, ("host0", "host1"))
    assert checkpoints.memory is not None
    rounds = []
    for step in range(1, UNCOUNTED + copies + 1):
        began, in_all, in_main = time.perf_counter(), time.process_time(), time.thread_time()
        checkpoints.memory.save(step, state, {"next_step": step})
        in_main = time.thread_time() - in_main
        while not list(folder.glob(f"host{jax.process_index()}/*/*/{step}-*")):
            time.sleep(0.001)
        rounds.append((in_main, time.process_time() - in_all, time.perf_counter() - began))
    checkpoints.close(remove_copies=True)
    medians = [round(1e3 * statistics.median(column), 2) for column in zip(*rounds[UNCOUNTED:], strict=True)]
    return dict(zip(("main_thread_cpu_ms", "all_threads_cpu_ms", "written_ms"), medians, strict=True))


def main(megabytes: float = 100, copies: int = 12, folder: str = "/dev/shm", process: int = 0, address: str = "") -> None:
    """Measure, and print a line of JSON. `process` and `address` are for the two processes that this starts."""
    if address:
        jax.distributed.initialize(address, num_processes=2, process_id=process)
        result = measure(Path(folder), megabytes, copies)
        if process == 0:
            print(json.dumps({"megabytes": megabytes, **result}))
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory(dir=folder) as work:
        given = [f"--megabytes={megabytes}", f"--copies={copies}", f"--folder={work}", f"--address={address}"]
        processes = [
            subprocess.Popen([sys.executable, __file__, *given, f"--process={number}"], env={**os.environ, **flags}) for number in (0, 1)
        ]
        raise typer.Exit(max(one.wait() for one in processes))


if __name__ == "__main__":
    typer.run(main)
