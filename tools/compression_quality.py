"""Compare final losses with and without compression of gradients: a small model on this machine's CPU, slices of one device each.

    python tools/compression_quality.py --steps 2000 [--seeds 1] [--slices 2] [--kinds int8 sign top_k] [--folder FOLDER]

All runs of a seed see the same batches of Python's standard library from the same first weights. Printed are the mean of the training loss
over the last tenth, of the held-out loss, and how far each is from the run without compression.
"""

import argparse
import os
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY, SEQ_LEN, BATCH, HELD_OUT = 512, 64, 16, 16
PACKAGES = ("asyncio", "email", "unittest", "importlib", "http", "logging", "json", "concurrent/futures")


def settings(kind: str, steps: int, density: float) -> dict[str, Any] | None:
    """The section that a run is given; None for the one that it is compared with."""
    fifth = {"warmup_steps": steps // 5}
    ramp = {"density": density, "ramp_steps": steps // 5}
    return {"none": None, "int8": {"kind": "int8"}, "sign": {"kind": "sign", **fifth}, "top_k": {"kind": "top_k", **fifth, **ramp}}[kind]


def losses(folder: Path, kind: str, seed: int, steps: int, slices: int, density: float) -> tuple[float, float]:
    """(mean training loss of the last tenth of a run, mean held-out loss at its end)."""
    import jax

    from maxlm.config import rules
    from maxlm.config.schema import Config
    from maxlm.data.input_pipeline import Pipeline
    from maxlm.data.prepare import prepare
    from maxlm.parallel import build_mesh
    from maxlm.training.program import build_program

    library = sysconfig.get_paths()["stdlib"]
    sources = [f"{library}/{package}/*.py" for package in PACKAGES]
    text = {"sources": sources, "eval_fraction": 0.1, "workers": 1, "tokenizer": {"vocab_size": VOCABULARY, "train_bytes": 400_000}}
    config = Config.model_validate(
        {
            "model": {"vocab_size": VOCABULARY, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 192},
            "data": {"store": str(folder / "store"), "seq_len": SEQ_LEN, "prepare": text},
            "train": {"steps": steps, "global_batch": BATCH, "loss_chunks": 1, "seed": seed},
            "optimizer": {"peak_lr": 3e-3, "warmup_steps": steps // 20},
            "mesh": {"data": slices, "fsdp": 1, "slices": slices},
            "memory": {"remat": "none"},
            "precision": {"compute": "float32"},
            "compression": settings(kind, steps, density),
        }
    )
    rules.check(config)
    if not (folder / "store").exists():
        prepare(config.data, progress=False)
    data, held_out = (
        Pipeline(config.data, global_batch=BATCH, seed=seed, vocab_size=VOCABULARY, split=split) for split in ("train", "eval")
    )
    program = build_program(config, build_mesh(config, jax.devices()[:slices]))
    state, seen = program.init(), []
    with jax.set_mesh(program.mesh):
        for step in range(steps):
            state, metrics = program.step(state, data.device_batch(step, program.batch_sharding))
            seen.append(float(metrics.loss))  # one step at a time: of many in flight XLA:CPU may run out of threads for their collectives
        batches = [held_out.device_batch(number % held_out.n_batches, program.batch_sharding) for number in range(HELD_OUT)]
        sums = [jax.device_get(program.evaluate(state.params, state.model_state, batch)) for batch in batches]
    found = sum(float(one.added["loss"]) for one in sums) / sum(float(one.denominator) for one in sums)
    return float(np.mean(seen[-steps // 10 :])), found


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--slices", type=int, default=2)
    parser.add_argument("--density", type=float, default=2**-6, help="of top_k")
    parser.add_argument("--kinds", nargs="+", default=["int8", "sign", "top_k"], choices=["int8", "sign", "top_k"])
    parser.add_argument("--folder", type=Path, help="where the token store is made, or lies already")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={arguments.slices}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        for seed in range(arguments.seeds):
            plain: tuple[float, float] | None = None
            for kind in ("none", *arguments.kinds):
                began = time.monotonic()
                found = losses(folder, kind, seed, arguments.steps, arguments.slices, arguments.density)
                plain = plain or found
                differences = ", ".join(f"{100 * (own / other - 1):+.2f}%" for own, other in zip(found, plain, strict=True))
                seconds = time.monotonic() - began
                print(f"seed {seed}  {kind:6}  train {found[0]:.4f}  held-out {found[1]:.4f}  ({differences})  {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
