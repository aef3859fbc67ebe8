"""Held-out loss."""

from collections.abc import Callable
from typing import Any

import jax

from maxlm.data.input_pipeline import Pipeline
from maxlm.training.program import Program
from maxlm.training.state import TrainState

AHEAD = 2  # batches that are dispatched before the result of one is there


def evaluate(program: Program, state: TrainState, held_out: Pipeline, gives_up: Callable[[], bool] = lambda: False) -> float | None:
    """Mean negative log-likelihood in nats a token over the first `train.eval_batches` held-out batches; None once `gives_up()`."""
    batches = min(program.config.train.eval_batches, held_out.n_batches)
    sums: list[Any] = []
    with jax.set_mesh(program.mesh):
        for n in range(batches):
            if gives_up():
                return None
            if n >= AHEAD:  # else all of them would be under way when a signal comes
                jax.block_until_ready(sums[n - AHEAD])
            sums.append(program.evaluate(state.params, state.model_state, held_out.device_batch(n, program.batch_sharding)))
    nll, tokens = (sum(float(getattr(part, name)) for part in jax.device_get(sums)) for name in ("nll", "tokens"))
    return nll / max(tokens, 1.0)
