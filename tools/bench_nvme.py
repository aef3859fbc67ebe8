"""Time of an update whose optimizer state and masters are in a file on a local disk, beside the same update with a disk that moves nothing,
and the disk alone.

    python tools/bench_nvme.py FOLDER [--layers 8] [--width 1024] [--sequences 2] [--steps 3]

FOLDER needs 12 bytes a parameter while it runs, memory about 10. Prints one JSON object: bytes, seconds of each (the median of `--steps`,
after one more), and the ratio of the update to the slower of the two.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from unittest import mock

import jax
import numpy as np

from maxlm.config.schema import Config
from maxlm.memory.scratch import ScratchFile
from maxlm.models import count_parameters
from maxlm.parallel import build_mesh
from maxlm.training.program import Program, build_program

SEQ_LEN, VOCAB = 256, 8192


def program_of(arguments: argparse.Namespace) -> Program:
    heads = arguments.width // 64
    model = {"vocab_size": VOCAB, "d_model": arguments.width, "n_layers": arguments.layers, "n_heads": heads, "d_ff": 4 * arguments.width}
    config = Config.model_validate(
        {
            "model": model,
            "data": {"store": "unused", "seq_len": SEQ_LEN},
            "train": {"steps": 100, "global_batch": arguments.sequences},
            "memory": {
                "remat": "full",
                "offload_state": {"optimizer": "nvme", "master": "nvme", "nvme": {"dir": arguments.folder}},
            },
        }
    )
    return build_program(config, build_mesh(config, jax.devices()[:1]))


def seconds_of_updates(program: Program, steps: int) -> tuple[float, float]:
    """Median seconds of an update, and of one whose reads and writes move nothing."""
    assert program.nvme is not None
    disk = program.nvme.disk
    batch = jax.tree.map(lambda leaf: jax.device_put(np.ones(leaf.shape, leaf.dtype), leaf.sharding), program.abstract_batch)
    state = program.init()
    with jax.set_mesh(program.mesh):

        def step() -> None:
            nonlocal state
            state, metrics = program.step(state, batch)
            jax.block_until_ready((metrics, [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]))
            disk.flush()

        moved = _median(step, steps)
        with mock.patch.object(ScratchFile, "read", return_value=[]), mock.patch.object(ScratchFile, "write", return_value=[]):
            return moved, _median(step, steps)


def _median(run: Callable[[], None], times: int) -> float:
    run()
    seconds = []
    for _ in range(times):
        began = time.monotonic()
        run()
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    for name, default in (("layers", 8), ("width", 1024), ("sequences", 2), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    program = program_of(arguments)
    update, compute = seconds_of_updates(program, arguments.steps)
    assert program.nvme is not None
    disk = program.nvme.disk

    def whole_file() -> None:
        for number in range(min(2, len(disk.units))):
            disk.start_read(number)
        for number in range(len(disk.units)):
            pieces = disk.take(number)
            disk.start_read(number + 2)
            disk.give(number, pieces)
        disk.flush()

    alone = _median(whole_file, arguments.steps)
    moved = disk.bytes
    disk.close()
    found = {"parameters": count_parameters(program.config.model), "file_bytes": moved, "update_s": update, "disk_alone_s": alone}
    found |= {"disk_bytes_per_s": 2 * moved / alone, "without_disk_s": compute, "ratio": update / max(alone, compute)}
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
