"""Held-out loss."""

from collections.abc import Callable

import jax

from maxlm.data.input_pipeline import Pipeline
from maxlm.objectives import Sums
from maxlm.training.program import Program
from maxlm.training.step import TrainState

IN_FLIGHT = 2  # batches dispatched before the first of them has finished


def evaluate(program: Program, state: TrainState, held_out: Pipeline, gives_up: Callable[[], bool] = lambda: False) -> float | None:
    """Mean loss over the first `train.eval_batches` held-out batches; None once `gives_up()`."""
    batches = min(program.config.train.eval_batches, held_out.n_batches)
    sums: list[Sums] = []
    with jax.set_mesh(program.mesh):
        for n in range(batches):
            if gives_up():
                return None
            if n >= IN_FLIGHT:  # or a signal would have to wait for all of them
                jax.block_until_ready(sums[n - IN_FLIGHT])
            sums.append(program.evaluate(state.params, state.model_state, held_out.device_batch(n, program.batch_sharding)))
    whole = jax.device_get(sums)
    return sum(float(part.added["loss"]) for part in whole) / max(sum(float(part.denominator) for part in whole), 1.0)
