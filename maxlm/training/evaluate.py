"""Held-out loss."""

from collections.abc import Callable

import jax

from maxlm.data.pipeline import Pipeline
from maxlm.training.program import Program
from maxlm.training.state import TrainState


def evaluate(program: Program, state: TrainState, held_out: Pipeline, gives_up: Callable[[], bool] = lambda: False) -> float | None:
    """Mean negative log-likelihood in nats a token over the first `train.eval_batches` held-out batches; None once `gives_up()`."""
    sums = []
    with jax.set_mesh(program.mesh):
        for n in range(min(program.config.train.eval_batches, held_out.n_batches)):
            if gives_up():
                return None
            sums.append(program.evaluate(state.params, held_out.device_batch(n, program.batch_sharding)))
    nll, tokens = (sum(float(getattr(part, name)) for part in jax.device_get(sums)) for name in ("nll", "tokens"))
    return nll / max(tokens, 1.0)
