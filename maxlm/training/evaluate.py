"""Held-out loss."""

import jax

from maxlm.data.pipeline import Pipeline
from maxlm.training.program import Program
from maxlm.training.state import TrainState


def evaluate(program: Program, state: TrainState, held_out: Pipeline) -> float:
    """Mean negative log-likelihood in nats a token over the first `train.eval_batches` held-out batches."""
    batches = min(program.config.train.eval_batches, held_out.n_batches)
    with jax.set_mesh(program.mesh):
        sums = [program.evaluate(state.params, held_out.device_batch(n, program.batch_sharding)) for n in range(batches)]
    nll, tokens = (sum(float(getattr(part, name)) for part in jax.device_get(sums)) for name in ("nll", "tokens"))
    return nll / max(tokens, 1.0)
