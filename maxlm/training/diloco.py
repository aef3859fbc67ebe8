"""Local updates with an outer optimizer (DiLoCo, Douillard 2023, arXiv 2311.08105).

Workers hold states of their own, stacked along a leading dim that `data` splits, and train on their own rows of the batch. Every `every`
updates they synchronise: the shared weights minus the mean of the workers' is the pseudo-gradient of one step of SGD with Nesterov's
momentum, and all continue from the result. Between two synchronisations only scalars travel along `data`. Weights are averaged in float32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32

from maxlm.config.schema import DilocoConfig
from maxlm.models.parameters import Parameters
from maxlm.objectives import Objective, Sums
from maxlm.parallel import mesh_axes
from maxlm.training.compression import CompressedSums
from maxlm.training.step import GradFn, TrainState, Update, keep_if
from maxlm.training.transform import Transform

AXIS = "data"
WORKERS = "workers"  # entry of `TrainState.extra`


class WorkerState(NamedTuple):
    """State of each worker, with a leading dim of workers, and the momentum of the outer optimizer."""

    states: TrainState
    momentum: Parameters


# (shared weights, weights of the workers, feedback) -> (shared weights minus the mean of the workers', feedback)
PseudoGradient = Callable[[Parameters, Parameters, Any], tuple[Parameters, Any]]


class _WorkerUpdate(Update):
    """The update of one worker, which is applied in any case: all workers are judged together."""

    def judge(self, state: TrainState, sums: Sums, norm: Array, extra: Mapping[str, Any]) -> tuple[Bool[Array, ""], dict[str, Any]]:
        """Apply every update: `LocalUpdates` judges all workers together."""
        return jnp.bool_(True), {}


class LocalUpdates(Update):
    """Updates by every worker, synchronised every `every` updates. `params` of the state are the shared weights; the state of the inner
    optimizer belongs to the workers. Transforms are of the update of all workers together: compression is of their changes.
    """

    def __init__(
        self,
        settings: DilocoConfig,
        total_steps: int,
        objective: Objective,
        optimizer: Any,
        rate: optax.Schedule,
        gradients: GradFn,
        transforms: Sequence[Transform],
    ) -> None:
        super().__init__(objective, optimizer, rate, gradients, transforms)
        self._settings, self._total_steps = settings, total_steps
        self._of_worker = _WorkerUpdate(objective, optimizer, rate, gradients)
        self._changes = next((one for one in transforms if isinstance(one, CompressedSums)), None)

    @classmethod
    def from_config(cls, diloco: DilocoConfig, total_steps: int, parts: tuple[Any, ...]) -> Self:
        """`parts`: of the plain update."""
        return cls(diloco, total_steps, *parts)

    def init(self, params: Parameters, model_state: Parameters) -> TrainState:
        """The shared weights, and a state of each worker that begins there."""
        one = self._of_worker.init(params, model_state)
        workers = WorkerState(_stack(one, self._settings.workers), jax.tree.map(jnp.zeros_like, params))
        first = super().init(params, model_state)
        return replace(first, opt_state=(), extra={**first.extra, WORKERS: workers})

    def shardings(self, mesh: Mesh) -> TrainState:
        """States of workers are split along `data`."""
        axes, whole = mesh_axes("worker", mesh) or None, super().shardings(mesh)
        states = jax.tree.map(lambda one: NamedSharding(mesh, P(axes, *one.spec)), self._of_worker.shardings(mesh))
        return replace(whole, opt_state=(), extra={**whole.extra, WORKERS: WorkerState(states, whole.params)})

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        states, sums, grad_norm = self._update_workers(state.extra[WORKERS].states, batch)
        total, done = self._total_steps, state.step - state.skipped + 1
        due = (done % min(self._settings.every, total) == 0) | (state.step + 1 == total)
        workers = state.extra[WORKERS]._replace(states=states)
        gradient_of = _mean_change if self._changes is None else partial(_compressed_mean, self._changes, done - 1)
        feedback = None if self._changes is None else state.extra[self._changes.name]
        params, model_state, workers, feedback = sync_workers(
            self._settings, state.params, state.model_state, workers, feedback, due, gradient_of
        )
        extra = state.extra if self._changes is None else {**state.extra, self._changes.name: feedback}
        good, extra = self.judge(state, sums, grad_norm, extra)
        before = state.params, state.model_state, state.extra[WORKERS]
        params, model_state, workers = keep_if(good, (params, model_state, workers), before)
        skipped = state.skipped + jnp.where(good, 0, 1)
        return TrainState(state.step + 1, skipped, params, (), model_state, {WORKERS: workers, **extra}), sums, grad_norm

    def _update_workers(self, states: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        """(each worker's state after an update of its own, figures of all rows, the mean of the norms)."""
        rows = jax.tree.map(lambda a: a.reshape(self._settings.workers, -1, *a.shape[1:]), batch)

        def each(*workers: Any) -> Any:
            """The workers that one share of the devices along `data` holds, one after another."""
            if len(jax.tree.leaves(workers)[0]) > 1:
                return jax.lax.map(lambda worker: self._of_worker(*worker), workers)
            return jax.tree.map(lambda a: a[None], self._of_worker(*jax.tree.map(lambda a: a[0], workers)))

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
