"""Overhead of a step: the product's step and loop against the same mathematics as one bare jitted function, or in torch.

usage: python tools/bench_step.py [--rounds 5] [--steps 10] [--against bare|torch|high-precision] [CONFIG [key=value ...]]

The config is runs/quickstart by default.

- step: the bare function is written here in one piece, with plain arrays and no sharding, remat, guards or metrics beyond the loss;
  both run alternately on the same batch, and medians are compared. Target: at most 1.03.
- loop: seconds a step that the loop adds around a step that takes no time (fetch, log, observers). Target: under 1 ms.
- `--against torch`: instead of both, the same model, weights and batch under torch.compile, with SDPA and fused AdamW
  (tools/torch_llama.py); for AdamW and Llama-like models. Target: a ratio below 1, of medians, our seconds over torch's. In
  16 bits both train at a rate of 1e-6, unless it is set: at larger ones rounding takes their losses apart on a batch learned by heart.
  Options that torch's users have, too: `--torch-mode`, `--torch-attention`, `--torch-chunks`, `--torch-remat`.
- `--against high-precision`: a config with `precision.matmul` against the same without. Target of fp8 on Hopper: a ratio of at most 0.8.
Prints a table and one JSON line.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import against_torch as race
import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlm.base.errors import UserError
from maxlm.config import Config, load
from maxlm.data.batch import Batch, batch_of_windows
from maxlm.kernels.attention.rotary import rotate
from maxlm.models.mixers.attention import rope_angles
from maxlm.parallel import build_mesh
from maxlm.telemetry.console import ConsoleObserver
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.observer import Observers
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training.meter import Meter
from maxlm.training.optimizer import build_optimizer
from maxlm.training.program import Program, build_program

SLOWLY = "optimizer.peak_lr=1e-6"


def bare_loss(config: Config, p: dict[str, Any], batch: Batch) -> jax.Array:
    """The decoder of the quickstart (SwiGLU, RMSNorm, RoPE, grouped queries), written out: layers scanned, logits at once."""
    m = config.model
    norm = lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + m.norm_eps) * scale  # noqa: E731
    angles = rope_angles(m.rope, m.head_dim, batch.positions_BS)
    seen = (batch.segment_ids_BS[:, :, None] == batch.segment_ids_BS[:, None, :]) & jnp.tril(jnp.ones((config.data.seq_len,) * 2, bool))

    def layer(x: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, None]:
        a, h = w["attention"], norm(x, w["attention_norm"]["scale_D"])
        q = rotate(jnp.einsum("bsd,dhk->bshk", h, a["query_DHK"]), angles)
        k = rotate(jnp.einsum("bsd,dgk->bsgk", h, a["key_DGK"]), angles)
        v = jnp.einsum("bsd,dgk->bsgk", h, a["value_DGK"])
        q = q.reshape(*q.shape[:2], m.n_kv_heads, -1, m.head_dim)
        scores = m.head_dim**-0.5 * jnp.einsum("bsgrk,btgk->bgrst", q, k)
        mix = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
        o = jnp.einsum("bgrst,btgk->bsgrk", mix, v).reshape(*x.shape[:2], m.n_heads, m.head_dim)
        x = x + jnp.einsum("bshk,hkd->bsd", o, a["out_HKD"])
        h = norm(x, w["mlp_norm"]["scale_D"])
        return x + (jax.nn.silu(h @ w["mlp"]["gate_DF"]) * (h @ w["mlp"]["up_DF"])) @ w["mlp"]["down_FD"], None

    x, _ = jax.lax.scan(layer, p["embedding_VD"][batch.tokens_BS], p["layers"]["0"])
    logits = norm(x, p["final_norm"]["scale_D"]) @ p.get("output_VD", p["embedding_VD"]).T
    nll = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, batch.targets_BS[..., None], -1)[..., 0]
    return jnp.sum(nll * batch.weights_BS) / jnp.sum(batch.weights_BS)


def bare_step(config: Config) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """Loss, gradient, clipping by the global norm, update: one function."""
    optimizer = build_optimizer(config)

    def step(params: dict[str, Any], opt_state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: bare_loss(config, p, batch))(params)
        scale = jnp.minimum(1.0, (config.optimizer.clip_norm or jnp.inf) / optax.tree.norm(grads))
        updates, opt_state = optimizer.update(jax.tree.map(lambda g: g * scale, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def compare_steps(program: Program, batch: Batch, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds a step of (the product, the bare function), a figure a round, taken in turn. Their losses must agree."""
    state, bare = program.init(), bare_step(program.config)
    params, opt_state = jax.tree.map(jnp.copy, (state.params, state.opt_state))
    ours, theirs = [], []
    for number in range(rounds + 1):
        began = time.perf_counter()
        for _ in range(steps):
            state, metrics = program.step(state, batch)
        jax.block_until_ready(metrics)
        between = time.perf_counter()
        for _ in range(steps):
            params, opt_state, loss = bare(params, opt_state, batch)
        jax.block_until_ready(loss)
        if number == 0:  # the first round compiles; later ones learn the one batch by heart, where rounding shows
            np.testing.assert_allclose(metrics.loss, loss, rtol=2e-2, err_msg="the two do not compute the same")
        else:
            ours.append((between - began) / steps)
            theirs.append((time.perf_counter() - between) / steps)
    return ours, theirs


def loop_overhead(program: Program, batch: Batch, steps: int = 300) -> float:
    """Seconds a step of everything around the step: observers to files and screen, the meter, the read of the metrics."""
    _, metrics = program.step(program.init(), batch)
    jax.block_until_ready(metrics)
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory.create(folder, "bench")
        observers = Observers([FileObserver(directory), ConsoleObserver(steps)])
        meter = Meter(program, observers, 0)
        began = time.perf_counter()
        for step in range(steps):
            meter.stepped(step + 1, metrics, 0.0)
        meter.flush()
        took = time.perf_counter() - began
        observers.close()
    return took / steps


def against_bare(config: Config, rounds: int, steps: int) -> dict[str, Any]:
    """The step and the loop of `config` beside the bare function; prints a line on stderr."""
    program = build_program(config, build_mesh(config, jax.devices()[:1]))
    ids = np.random.default_rng(0).integers(1, config.model.vocab_size, (config.train.global_batch, config.data.seq_len + 1))
    host = batch_of_windows(ids, np.full(len(ids), ids.shape[1]), 0, mask_documents=True)
    with jax.set_mesh(program.mesh):
        batch = jax.device_put(host, program.batch_sharding)
        ours, theirs = (statistics.median(times) for times in compare_steps(program, batch, rounds, steps))
        overhead = loop_overhead(program, batch)
    print(
        f"step {1e3 * ours:.1f} ms, bare {1e3 * theirs:.1f} ms, ratio {ours / theirs:.3f}; loop overhead {1e3 * overhead:.3f} ms a step",
        file=sys.stderr,
    )
    return {"step_s": ours, "bare_step_s": theirs, "ratio": ours / theirs, "loop_overhead_s": overhead}


def against_torch(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """The step of `config` beside torch's; prints a line on stderr. Raises UserError without torch, or for a model that it lacks."""
    torch = race.Torch(args.torch_python, args.torch_mode, args.torch_attention, args.torch_chunks, args.torch_remat)
    race.check(config, torch)
    found = race.race(config, torch, args.rounds, args.steps)
    print(race.show(found), file=sys.stderr)
    return {**found, "torch_settings": asdict(torch)}


def against_high_precision(args: argparse.Namespace) -> dict[str, Any]:
    """The step of the config beside the same without `precision.matmul`; prints a table on stderr. Raises UserError without it."""
    config = load(args.config, args.overrides).config
    if config.precision.matmul is None:
        raise UserError("precision.matmul is not set: --against high-precision compares a config with it; add precision.matmul.format=fp8.")
    found = race.race_formats(config, load(args.config, [*args.overrides, "precision.matmul=null"]).config, args.rounds, args.steps)
    print(race.show(found), file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="runs/quickstart")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--against", choices=("bare", "torch", "high-precision"), default="bare")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--torch-python", default=sys.executable, help="the Python that has torch; default: this one")
    parser.add_argument("--torch-mode", choices=("default", "max-autotune", "eager"), default="default", help="of torch.compile")
    parser.add_argument("--torch-attention", choices=("auto", "cudnn", "flash"), default="auto", help="the kernel behind SDPA")
    parser.add_argument("--torch-chunks", type=int, default=1, help="parts in which Inductor computes the logits; default: all at once")
    parser.add_argument("--torch-remat", action="store_true", help="compute layers again in the backward pass")
    args = parser.parse_intermixed_args()
    try:
        if args.against == "high-precision":
            found = against_high_precision(args)
        else:
            config = load(args.config, args.overrides).config
            if args.against == "torch" and config.precision.compute != "float32":  # first, so that the user's own counts
                args.overrides = [SLOWLY, *args.overrides]
                config = load(args.config, args.overrides).config
            found = against_torch(config, args) if args.against == "torch" else against_bare(config, args.rounds, args.steps)
    except UserError as error:
        print(f"bench_step: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps({**found, "jax": jax.__version__, "config": Path(args.config).stem, "overrides": args.overrides}))


if __name__ == "__main__":
    main()
