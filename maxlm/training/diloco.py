"""Local updates, with an outer optimizer (DiLoCo, Douillard 2023, arXiv 2311.08105).

Workers hold weights and optimizer state of their own, stacked along a leading dim that `data` splits, and train apart on their own rows
of the batch. Every `every` updates they synchronise: the mean of how far they moved from the shared weights is the gradient of one step
of SGD with Nesterov's momentum, and all go on from the result. Between two synchronisations only scalars travel along `data`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from maxlm.config.schema import DilocoConfig
from maxlm.data.batch import Batch
from maxlm.models.parameters import Parameters
from maxlm.training.loss import LossSums

AXIS = "data"
Update = Callable[[Parameters, Any, Batch], tuple[Parameters, Any, LossSums, Float[Array, ""]]]


class WorkerState(NamedTuple):
    """The optimizer state of a run with local updates. `workers_*` has a leading dim of one entry a worker."""

    workers_params: Parameters
    workers_state: Any
    momentum: Parameters


def with_workers(inner: optax.GradientTransformation, settings: DilocoConfig) -> optax.GradientTransformation:
    """`inner`, whose first state is that of every worker."""

    def init(params: Parameters) -> WorkerState:
        return WorkerState(
            _stack(params, settings.workers), _stack(inner.init(params), settings.workers), jax.tree.map(jnp.zeros_like, params)
        )

    return optax.GradientTransformation(init, inner.update)


def update_workers(update: Update, apart: WorkerState, batch: Batch) -> tuple[WorkerState, LossSums, Float[Array, ""]]:
    """(what an update of its own by each worker makes of `apart`, sums over all of them, the mean of their gradients' norms)."""
    workers = jax.tree.leaves(apart.workers_state)[0].shape[0]
    rows = jax.tree.map(lambda a: a.reshape(workers, -1, *a.shape[1:]), batch)

    def one(worker: tuple[Parameters, Any, Batch]) -> tuple[Parameters, Any, LossSums, Float[Array, ""]]:
        return update(*worker)

    def own(*held: Any) -> Any:
        """Of the workers that one share of the devices along `data` holds, one after another."""
        if len(jax.tree.leaves(held)[0]) > 1:
            return jax.lax.map(one, held)
        return jax.tree.map(lambda a: a[None], one(jax.tree.map(lambda a: a[0], held)))

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get(AXIS, 1) > 1:
        own = jax.shard_map(own, in_specs=P(AXIS), out_specs=P(AXIS), axis_names={AXIS}, check_vma=False)
    params, state, sums, norms = own(apart.workers_params, apart.workers_state, rows)
    return apart._replace(workers_params=params, workers_state=state), jax.tree.map(lambda a: jnp.sum(a, 0), sums), jnp.mean(norms)


def sync_workers(settings: DilocoConfig, shared: Parameters, apart: WorkerState, due: Bool[Array, ""]) -> tuple[Parameters, WorkerState]:
    """The shared weights and the workers: after another outer step, and at a new start, where a meeting is due, else as they are."""

    def step(shared: Parameters, apart: WorkerState) -> tuple[Parameters, WorkerState]:
        gone = jax.tree.map(lambda anchor, own: anchor - jnp.mean(own, 0), shared, apart.workers_params)
        momentum = jax.tree.map(lambda m, g: settings.momentum * m + g, apart.momentum, gone)
        shared = jax.tree.map(lambda p, m, g: p - settings.lr * (settings.momentum * m + g), shared, momentum, gone)
        return shared, apart._replace(workers_params=_stack(shared, settings.workers), momentum=momentum)

    return jax.lax.cond(due, step, lambda *same: same, shared, apart)


def _stack(tree: Any, workers: int) -> Any:
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (workers, *a.shape)), tree)
