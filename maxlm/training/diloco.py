"""Local updates with an outer optimizer (DiLoCo, Douillard 2023, arXiv 2311.08105).

Workers hold states of their own, stacked along a leading dim that `data` splits, and train on their own rows of the batch. Every `every`
updates they synchronise: the shared weights minus the mean of the workers' is the pseudo-gradient of one step of SGD with Nesterov's
momentum, and all continue from the result. Between two synchronisations only scalars travel along `data`. Weights are averaged in float32.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32

from maxlm.config.schema import DilocoConfig
from maxlm.models.parameters import Parameters
from maxlm.objectives import Sums
from maxlm.parallel import mesh_axes
from maxlm.training.compression import CompressedSums
from maxlm.training.step import TrainState, Updater

AXIS = "data"


class WorkerState(NamedTuple):
    """`TrainState.updater`: the state of each worker, with a leading dim of workers, and the momentum of the outer optimizer."""

    states: TrainState
    momentum: Parameters


# (shared weights, weights of the workers, feedback) -> (shared weights minus the mean of the workers', feedback)
PseudoGradient = Callable[[Parameters, Parameters, Any], tuple[Parameters, Any]]


class LocalUpdates(Updater):
    """Local updates by every worker, synchronised every `every` updates. `params` of the state are the shared weights; the state of the
    inner optimizer belongs to the workers.
    """

    def __init__(self, *arguments: Any) -> None:
        """As of `Updater`, but `compressed` sums the changes of the workers: their gradients are not summed."""
        super().__init__(*arguments)
        self._changes, self._compressed = self._compressed, None

    @property
    def _settings(self) -> DilocoConfig:
        assert self.config.diloco is not None, "program.py chooses"
        return self.config.diloco

    def init(self, state: TrainState) -> TrainState:
        workers = WorkerState(_stack(state, self._settings.workers), jax.tree.map(jnp.zeros_like, state.params))
        feedback = None if self._changes is None else self._changes.init(state.params)
        return replace(state, opt_state=(), updater=workers, feedback=feedback)

    def shardings(self, shardings: TrainState, mesh: Mesh) -> TrainState:
        axes = mesh_axes("worker", mesh) or None
        states = jax.tree.map(lambda one: NamedSharding(mesh, P(axes, *one.spec)), shardings)
        feedback = None if self._changes is None else self._changes.shardings()
        return replace(shardings, opt_state=(), updater=WorkerState(states, shardings.params), feedback=feedback)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        states, sums, grad_norm = self._update_workers(state.updater.states, batch)
        total, done = self.config.total_steps, state.step - state.skipped + 1
        due = (done % min(self._settings.every, total) == 0) | (state.step + 1 == total)
        workers = state.updater._replace(states=states)
        gradient_of = _mean_change if self._changes is None else partial(_compressed_mean, self._changes, done - 1)
        before = state.params, state.model_state, workers, state.feedback
        params, model_state, workers, feedback = sync_workers(self._settings, *before, due, gradient_of)
        synced = replace(state, step=state.step + 1, params=params, model_state=model_state, updater=workers, feedback=feedback)
        return synced, sums, grad_norm

    def _update_workers(self, states: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        """(each worker's state after an update of its own, figures of all rows, the mean of the norms)."""
        rows = jax.tree.map(lambda a: a.reshape(self._settings.workers, -1, *a.shape[1:]), batch)

        def one(worker: tuple[TrainState, Any]) -> tuple[TrainState, Sums, Float[Array, ""]]:
            return Updater.__call__(self, *worker)

        def each(*workers: Any) -> Any:
            """The workers that one share of the devices along `data` holds, one after another."""
            if len(jax.tree.leaves(workers)[0]) > 1:
                return jax.lax.map(one, workers)
            return jax.tree.map(lambda a: a[None], one(jax.tree.map(lambda a: a[0], workers)))

        mesh = jax.sharding.get_abstract_mesh()
        if mesh.shape.get(AXIS, 1) > 1:
            each = jax.shard_map(each, in_specs=P(AXIS), out_specs=P(AXIS), axis_names={AXIS}, check_vma=False)
        states, sums, norms = each(states, rows)
        return states, sums.over_leading_dim(), jnp.mean(norms)


def _mean_change(shared: Parameters, own: Parameters, feedback: None) -> tuple[Parameters, None]:
    return jax.tree.map(lambda anchor, each: anchor - jnp.mean(each, 0), shared, own), feedback


def _compressed_mean(compressed: CompressedSums, updates: Int32[Array, ""], shared: Parameters, own: Parameters, feedback: Any) -> Any:
    """`_mean_change`, compressed: each device along `data` gives the mean of its own workers."""
    shares = compressed.shares

    def of_share(anchor: Array, each: Array) -> Array:
        return (anchor - jnp.mean(each.reshape(shares, -1, *anchor.shape), 1)) / shares

    return compressed.of_changes(updates, jax.tree.map(of_share, shared, own), feedback)


def sync_workers(
    settings: DilocoConfig,
    shared: Parameters,
    model_state: Parameters,
    workers: WorkerState,
    feedback: Any,
    due: Bool[Array, ""],
    pseudo_gradient: PseudoGradient = _mean_change,
) -> tuple[Parameters, Parameters, WorkerState, Any]:
    """(shared weights, shared model state, workers, feedback): after one more outer step if a synchronisation is `due`, else unchanged.

    The model state is not learnt by gradient, so it is the mean over workers.
    """

    def step(shared: Parameters, model_state: Parameters, workers: WorkerState, feedback: Any) -> tuple[Any, ...]:
        gradient, feedback = pseudo_gradient(shared, workers.states.params, feedback)
        momentum = jax.tree.map(lambda m, g: settings.momentum * m + g, workers.momentum, gradient)
        shared = jax.tree.map(lambda p, m, g: p - settings.lr * (settings.momentum * m + g), shared, momentum, gradient)
        model_state = jax.tree.map(lambda own: jnp.mean(own, 0), workers.states.model_state)
        stacked = {"params": _stack(shared, settings.workers), "model_state": _stack(model_state, settings.workers)}
        return shared, model_state, WorkerState(replace(workers.states, **stacked), momentum), feedback

    return jax.lax.cond(due, step, lambda *same: same, shared, model_state, workers, feedback)


def _stack(tree: Any, workers: int) -> Any:
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (workers, *a.shape)), tree)
