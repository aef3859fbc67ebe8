"""Held-out loss."""

import collections
from collections.abc import Callable
from typing import Any

import jax

from maxlm.data.pipeline import Pipeline
from maxlm.training.program import Program
from maxlm.training.state import TrainState

AHEAD = 2  # batches in work on the device while the next one is read


def evaluate(program: Program, state: TrainState, held_out: Pipeline, gives_up: Callable[[], bool] = lambda: False) -> float | None:
    """Mean negative log-likelihood in nats a token over the first `train.eval_batches` held-out batches; None once `gives_up()`."""
    batches = min(program.config.train.eval_batches, held_out.n_batches)
    nll = tokens = 0.0
    with jax.set_mesh(program.mesh):
        parts = collections.deque[Any]()
        for n in range(batches + AHEAD):
            if gives_up():
                return None
            if n < batches:
                parts.append(program.evaluate(state.params, held_out.device_batch(n, program.batch_sharding)))
            if n >= AHEAD:
                part = jax.device_get(parts.popleft())
                nll, tokens = nll + float(part.nll), tokens + float(part.tokens)
    return nll / max(tokens, 1.0)
