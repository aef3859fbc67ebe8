"""The races of `bench_step.py`: maxlm's step against torch.compile's or its own without 8-bit matmuls, each turn in a process of its own.

Neither gives memory back before it ends, so each has the whole device in its turn. Programs compiled once are kept for the turns that
follow. Weights are maxlm's first ones, the batch is the same and one document a row, and losses and gradient norms must agree.
"""

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlm.base.errors import UserError
from maxlm.config import Config
from maxlm.data.batch import batch_of_windows
from maxlm.hardware.chips import chip_of
from maxlm.models import mfu_format, step_flops
from maxlm.parallel import build_mesh
from maxlm.run.jax_setup import select_platform
from maxlm.training.program import build_program
from maxlm.training.step import Metrics

TORCH_TURN = Path(__file__).with_name("torch_llama.py")
WARMUP = 5  # steps, the first of which compiles
# How far losses may be apart, relative: of the first step, and of all, where the batch is learned by heart and rounding shows.
# Gradient norms may be ten times as far apart.
TOLERANCE = {"float32": (1e-4, 1e-4), "bfloat16": (1e-3, 1e-2)}
PLAIN: dict[str, dict[str, Any]] = {  # settings that tools/torch_llama.py has
    "model": {"activation": "swiglu", "norm": "rmsnorm", "norm_position": "pre", "qk_norm": False, "bias": "none", "softcap": None}
    | {"learned_positions": None, "attention_scale": None, "scale_embeddings": False},
    "train": {"microbatches": 1, "z_loss": 0.0},
    "optimizer": {"name": "adamw"},
}


@dataclass(frozen=True)
class Torch:
    """Torch's settings. `mode`: of torch.compile, or "eager"; `attention`: "auto", "cudnn" or "flash"; `chunks` of the logits."""

    python: str
    mode: str
    attention: str
    chunks: int
    remat: bool


def check(config: Config, torch: Torch) -> None:
    """Raises UserError when torch is missing, or when tools/torch_llama.py does not compute what `config` says."""
    model = config.model
    for section, needed in PLAIN.items():
        for field, plain in needed.items():
            if (value := getattr(getattr(config, section), field)) != plain:
                name = f"{section}.{field}"
                raise UserError(f"{name} = {value}: the torch model of this benchmark has only {plain}; add {name}={plain}.")
    if set(model.layer_pattern) != {"global"}:
        raise UserError(f"model.layer_pattern = {model.layer_pattern}: the torch model of this benchmark has only global layers.")
    if model.rope.scaling is not None and model.rope.scaling.kind != "llama3":
        raise UserError(f"model.rope.scaling.kind = {model.rope.scaling.kind}: the torch model of this benchmark has only llama3.")
    try:
        found = subprocess.run([torch.python, "-c", "import torch"], capture_output=True, check=False).returncode
    except OSError:
        found = -1
    if found:
        raise UserError(f"{torch.python} has no torch: pip install torch, or name a Python that has it by --torch-python.")


def race(config: Config, torch: Torch, rounds: int, steps: int) -> dict[str, Any]:
    """Medians of `rounds` turns each, taken alternately. Raises UserError when torch fails, AssertionError when the two do not agree."""
    ours: list[dict[str, Any]] = []

    def theirs(folder: Path) -> dict[str, Any]:
        turn = _torch_turn(config, torch, folder, steps, ours[0]["rates"])
        _agree(ours[-1], turn, config.precision.compute)
        return turn

    def mine(folder: Path) -> dict[str, Any]:
        ours.append(in_process(config, folder, steps))
        return ours[-1]

    return take_turns(config, {"ours": mine, "torch": theirs}, rounds)


def race_formats(config: Config, plain: Config, rounds: int, steps: int) -> dict[str, Any]:
    """The same of `config` and `plain`, which multiplies in high precision. Losses are reported, not compared: they are to differ."""
    turns = {"quantized": partial(in_process, config, steps=steps), config.precision.compute: partial(in_process, plain, steps=steps)}
    return take_turns(config, turns, rounds)


def in_process(config: Config, folder: Path, steps: int) -> dict[str, Any]:
    """`our_turn` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(our_turn, config, folder, steps).result()


def take_turns(config: Config, turns: Mapping[str, Callable[[Path], dict[str, Any]]], rounds: int) -> dict[str, Any]:
    """Medians of `rounds` turns of two, alternately, on one batch; "ratio": of the first's seconds to the second's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = (config.train.global_batch, config.data.seq_len + 1)
        windows = np.random.default_rng(0).integers(1, config.model.vocab_size, shape, dtype=np.int32)  # none of which ends a document
        np.save(folder / "windows.npy", windows)
        taken: dict[str, list[dict[str, Any]]] = {name: [] for name in turns}
        for number in range(rounds):
            for name, turn in turns.items():
                taken[name].append(turn(folder))
            both = " and ".join(f"{name} {1e3 * done[-1]['step_s']:.1f}" for name, done in taken.items())
            print(f"round {number + 1}: {both} ms a step", file=sys.stderr)
    first, second = taken.values()
    medians = [statistics.median(turn["step_s"] for turn in done) for done in taken.values()]
    return {
        **{
            name: _summary(done, first[0] | done[0]) for name, done in taken.items()
        },  # each with the peak of its own format, torch with ours
        "ratio": medians[0] / medians[1],
        "device": first[0]["device"],
        "model_flops": first[0]["model_flops"],
        "tokens_per_step": config.tokens_per_step,
        "losses": [first[0]["losses"], second[0]["losses"]],
    }


def show(found: dict[str, Any]) -> str:
    names = [name for name, row in found.items() if isinstance(row, dict) and "step_s" in row]
    lines = [f"{'':10}{'ms a step':>12}{'tokens/s':>12}{'TFLOP/s':>10}{'MFU':>8}{'GiB':>8}{'warm-up s':>11}"]
    for name in names:
        row = found[name]
        mfu = f"{row['mfu']:.1%}" if row["mfu"] is not None else "-"
        peak = f"{row['peak_bytes'] / 2**30:.1f}" if row["peak_bytes"] is not None else "-"
        lines.append(
            f"{name:10}{1e3 * row['step_s']:12.1f}{row['tokens_per_s']:12,.0f}{row['tflops']:10.1f}{mfu:>8}{peak:>8}{row['warmup_s']:11.1f}"
        )
    return "\n".join([*lines, f"{' / '.join(names)} {found['ratio']:.3f} (below 1, {names[0]} is faster), {found['device']}"])


def our_turn(config: Config, folder: Path, steps: int) -> dict[str, Any]:
    """One turn of the product's step; leaves its first weights in `folder`. For a process whose jax has no device yet."""
    select_platform()
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(folder / "compiled"))
    device = jax.devices()[0]
    program = build_program(config, build_mesh(config, [device]))
    windows = np.load(folder / "windows.npy")
    with jax.set_mesh(program.mesh):
        state = program.init()
        _write_weights(state.params, folder / "weights")
        host = batch_of_windows(windows, np.full(len(windows), windows.shape[1]), 0, mask_documents=True)
        batch = jax.device_put(host, program.batch_sharding)
        found: list[Metrics] = []
        began = time.perf_counter()
        for number in range(WARMUP + steps):
            if number == WARMUP:
                jax.block_until_ready(found[-1])
                warm = time.perf_counter()
            state, metrics = program.step(state, batch)
            found.append(metrics)
        jax.block_until_ready((state, found[-1]))
        took = time.perf_counter() - warm
    chip, memory, matmul = chip_of(device.device_kind), device.memory_stats() or {}, config.precision.matmul
    return {
        "step_s": took / steps,
        "warmup_s": warm - began,
        "losses": [float(metrics.loss) for metrics in found],
        "grad_norms": [float(metrics.grad_norm) for metrics in found],
        "rates": [float(metrics.lr) for metrics in found],
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "device": device.device_kind,
        "peak_flops": chip.peak_flops_per_device(mfu_format(matmul)) if chip and config.precision.compute == "bfloat16" else None,
        "model_flops": step_flops(config.model, config.data.seq_len, config.tokens_per_step),
        "tokens": config.tokens_per_step,
        "version": jax.__version__,
    }


def _torch_turn(config: Config, torch: Torch, folder: Path, steps: int, rates: list[float]) -> dict[str, Any]:
    settings = {
        "model": config.model.model_dump(),
        "optimizer": config.optimizer.model_dump(),
        "compute": config.precision.compute,
        "rates": rates,
        "warmup": WARMUP,
        "steps": steps,
        **asdict(torch),
    }
    (folder / "torch.json").write_text(json.dumps(settings), encoding="utf-8")
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    command = [torch.python, str(TORCH_TURN), str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env={**os.environ, **kept})
    if done.returncode:
        raise UserError(f"torch's turn ended with code {done.returncode}; what it said is above.")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _write_weights(params: Any, folder: Path) -> None:
    if folder.exists():
        return
    folder.mkdir()
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        np.save(folder / f"{'.'.join(entry.key for entry in path)}.npy", np.asarray(leaf))


def _agree(ours: dict[str, Any], theirs: dict[str, Any], compute: str) -> None:
    for what, factor in (("losses", 1), ("grad_norms", 10)):
        first, all_ = (factor * tolerance for tolerance in TOLERANCE[compute])
        np.testing.assert_allclose(theirs[what][0], ours[what][0], rtol=first, err_msg=f"{what} of the first step: not the same model")
        np.testing.assert_allclose(theirs[what], ours[what], rtol=all_, err_msg=f"{what}: not the same training")


def _summary(turns: list[dict[str, Any]], counts: dict[str, Any]) -> dict[str, Any]:
    seconds = statistics.median(turn["step_s"] for turn in turns)
    return {
        "step_s": seconds,
        "step_s_of_turns": [turn["step_s"] for turn in turns],
        "tokens_per_s": counts["tokens"] / seconds,
        "tflops": counts["model_flops"] / seconds / 1e12,
        "mfu": counts["model_flops"] / seconds / counts["peak_flops"] if counts["peak_flops"] else None,
        "peak_bytes": turns[0]["peak_bytes"],
        "warmup_s": turns[0]["warmup_s"],
        "version": turns[0]["version"],
    }
