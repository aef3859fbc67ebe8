"""Runs a pipeline schedule: every stage its own layers, activations and their gradients handed round the ring of `stage`.

Only `stage` is manual here; the other axes of the mesh are split inside a stage as they are without a pipeline. What is neither first nor
last stage's work alone waits for nobody: embedding and loss run between the passes, split over `stage` like everything else.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from maxlm.parallel.schedule import Phase, Schedule

# B batch rows of a microbatch, S sequence, D model width; a leading P is over `stage`

AXIS = "stage"
Tree = Any


class Work(NamedTuple):
    """What the stages compute. Each is pure; trees of arrays are the caller's."""

    first: Callable[[Tree, Tree], Array]  # (ends, part of the batch) -> x_BSD before the first layer
    inputs: Callable[[Tree, Array], Tree]  # (part, which part of the depth) -> what layers read beside x_BSD; carries no gradient
    # (layers of a chunk, x_BSD, inputs) -> ((x_BSD, what they add to the loss), what is summed and reported, stacked as the layers are)
    layers: Callable[[Tree, Array, Tree], tuple[tuple[Array, Array], Tree]]
    last: Callable[[Tree, Tree, Array], tuple[Array, Tree]]  # (ends, part, x_BSD) -> (loss, figures of the microbatch)
    no_figures: Callable[[Tree], Tree]  # figures of no microbatch, given those of one as shapes
    add_figures: Callable[[Tree, Tree], Tree]  # figures of two parts of the batch -> of both together


class _State(NamedTuple):
    """What a tick leaves to the next."""

    y_PBSD: Array  # of each stage's forward pass, already where it goes next
    dx_PBSD: Array  # of each stage's backward pass, not yet sent: that takes place while the next forward pass computes
    stash: tuple[Array, ...]  # [P, depth, ...]: what the forward passes keep for the backward passes
    finished: Float[Array, "N B S D"]  # left the last stage
    layer_grads: Tree
    end_grads: Tree
    sums: Tree
    reports: Tree  # of the layers


def run(schedule: Schedule, work: Work, layers: Tree, ends: Tree, parts: Tree) -> tuple[tuple[Tree, Tree], tuple[Tree, Tree]]:
    """(sums over the microbatches of what `last` reports and of what layers do, float32 gradients of the loss by (layers, ends)).

    `layers`: leading dim over `stage`, in it the chunks of a stage in order. `parts`: leading dim the microbatches. `ends`: parameters of
    `first` and `last`.
    """
    runner = _Runner(schedule, work, layers, ends, parts)
    state = runner.empty()
    for phase in schedule.phases:
        ticks = jnp.arange(phase.first, phase.first + phase.ticks)
        state, _ = jax.lax.scan(partial(runner.tick, phase), state, ticks)
    return (state.sums, state.reports), (state.layer_grads, state.end_grads)


class _Runner:
    def __init__(self, schedule: Schedule, work: Work, layers: Tree, ends: Tree, parts: Tree) -> None:
        self.schedule, self.work = schedule, work
        self.layers, self.ends, self.parts = layers, ends, parts

    def empty(self) -> _State:
        """Nothing has been computed."""
        part = jax.eval_shape(lambda parts: _take(parts, 0), self.parts)
        x_BSD = jax.eval_shape(self.work.first, self.ends, part)

        def kept(layers: Tree, x_BSD: Array, part: Tree) -> tuple[list[Array], Tree]:
            inputs = self.work.inputs(part, jax.lax.axis_index(AXIS))
            _, stash, reports = _forward(self.work, self._chunk(layers, 0), x_BSD, inputs)
            return [leaf[None] for leaf in stash], jax.tree.map(lambda a: jnp.concatenate([a] * self.schedule.chunks), reports)

        stash, reports = jax.eval_shape(_on_stages(kept, (P(AXIS), P(), P()), P(AXIS)), self.layers, x_BSD, part)
        _, sums = jax.eval_shape(self.work.last, self.ends, part, x_BSD)
        between = _zeros((self.schedule.stages, *x_BSD.shape), x_BSD.dtype)
        return _State(
            y_PBSD=between,
            dx_PBSD=between,
            stash=tuple(_zeros((self.schedule.stages, self.schedule.depth, *leaf.shape[1:]), leaf.dtype) for leaf in stash),
            finished=jnp.zeros((self.schedule.finished, *x_BSD.shape), x_BSD.dtype),
            layer_grads=jax.tree.map(lambda a: _zeros(a.shape, jnp.float32), self.layers),
            end_grads=jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), self.ends),
            sums=self.work.no_figures(sums),
            reports=jax.tree.map(lambda a: _zeros(a.shape, a.dtype), reports),
        )

    def tick(self, phase: Phase, state: _State, tick: Array) -> tuple[_State, None]:
        """One tick: forward passes, the loss of the microbatch that has left the last stage, backward passes."""
        schedule = self.schedule
        if phase.forward:
            state = self._forward(state, tick)
        if phase.loss:
            microbatch, chunk = schedule.backward(tick - schedule.turn)
            loss = partial(self._loss, microbatch, state.finished[microbatch % schedule.finished])
            dloss_BSD, (end_grads, sums) = self._when(chunk == schedule.chunks - 1, loss, (state.end_grads, state.sums))
            state = state._replace(end_grads=end_grads, sums=sums)
        else:
            dloss_BSD = jnp.zeros(state.finished.shape[1:], state.finished.dtype)
        if phase.backward:
            state = self._backward(state, dloss_BSD, tick)
        return state, None

    def _when(self, due: Array, run: Callable[[Tree], tuple[Array, Tree]], totals: Tree) -> tuple[Array, Tree]:
        """`run(totals)` where it is due; otherwise zeros and `totals`. All devices agree on it, so collectives may be inside."""
        if self.schedule.chunks == 1:
            return run(totals)
        nothing_BSD = jnp.zeros_like(jax.eval_shape(run, totals)[0])
        return jax.lax.cond(due, run, lambda totals: (nothing_BSD, totals), totals)

    def _forward(self, state: _State, tick: Array) -> _State:
        schedule = self.schedule
        microbatch, chunk = schedule.forward(jnp.clip(schedule.forward_unit(0, tick), 0, schedule.units - 1))
        x_BSD, _ = self._when(chunk == 0, lambda _: (self.work.first(self.ends, self._part(microbatch)), None), None)

        def on_stage(
            tick: Array, y_PBSD: Array, x_BSD: Array, stash: tuple, reports: Tree, layers: Tree, parts: Tree
        ) -> tuple[Array, Array, tuple, Tree]:
            stage = jax.lax.axis_index(AXIS)
            unit = schedule.forward_unit(stage, tick)
            valid, unit = (unit >= 0) & (unit < schedule.units), jnp.clip(unit, 0, schedule.units - 1)
            microbatch, chunk = schedule.forward(unit)
            x_BSD = _select((stage == 0) & (chunk == 0), x_BSD, y_PBSD[0])
            inputs = self.work.inputs(_take(parts, microbatch), chunk * schedule.stages + stage)
            y_BSD, kept, found = _forward(self.work, self._chunk(layers, chunk), _select(valid, x_BSD), inputs)
            reports = self._add_chunk(reports, jax.tree.map(partial(_select, valid), found), chunk)
            stash = tuple(_put(ring, leaf, unit % schedule.depth, valid) for ring, leaf in zip(stash, kept, strict=True))
            left = (stage == schedule.stages - 1) & (chunk == schedule.chunks - 1) & valid
            return _send(y_BSD, schedule.stages, 1), jax.lax.psum(_select(left, y_BSD), AXIS), stash, reports

        given = (tick, state.y_PBSD, x_BSD, state.stash, state.reports, self.layers, self.parts)
        specs = (P(), P(AXIS), P(), P(AXIS), P(AXIS), P(AXIS), P())
        y_PBSD, left_BSD, stash, reports = _on_stages(on_stage, specs, (P(AXIS), P(), P(AXIS), P(AXIS)))(*given)
        unit = schedule.forward_unit(schedule.stages - 1, tick)
        microbatch, chunk = schedule.forward(jnp.clip(unit, 0, schedule.units - 1))
        done = (unit >= 0) & (unit < schedule.units) & (chunk == schedule.chunks - 1)
        finished = _put(state.finished[None], left_BSD, microbatch % schedule.finished, done)[0]
        return state._replace(y_PBSD=y_PBSD, stash=stash, finished=finished, reports=reports)

    def _loss(self, microbatch: Array, x_BSD: Array, totals: Tree) -> tuple[Array, Tree]:
        """Gradient of the loss with respect to what left the last stage; the gradients of `last` and its sums are added to `totals`."""
        part = self._part(microbatch)
        loss, pull, sums = jax.vjp(lambda ends, x: self.work.last(ends, part, x), self.ends, x_BSD, has_aux=True)
        end_grads, dx_BSD = pull(jnp.ones_like(loss))
        return dx_BSD, (_add(totals[0], end_grads), self.work.add_figures(totals[1], sums))

    def _backward(self, state: _State, dloss_BSD: Array, tick: Array) -> _State:
        schedule = self.schedule

        def on_stage(
            tick: Array, dx_PBSD: Array, dloss_BSD: Array, stash: tuple, grads: Tree, layers: Tree, parts: Tree
        ) -> tuple[Array, Array, Tree]:
            stage = jax.lax.axis_index(AXIS)
            unit = schedule.backward_unit(stage, tick)
            valid, unit = (unit >= 0) & (unit < schedule.units), jnp.clip(unit, 0, schedule.units - 1)
            microbatch, chunk = schedule.backward(unit)
            arriving_BSD = _send(dx_PBSD[0], schedule.stages, -1)[0]
            dy_BSD = _select((stage == schedule.stages - 1) & (chunk == schedule.chunks - 1), dloss_BSD, arriving_BSD)
            slot = schedule.forward_of(microbatch, chunk) % schedule.depth
            kept = [_select(valid, ring[0, slot]) for ring in stash]
            inputs = self.work.inputs(_take(parts, microbatch), chunk * schedule.stages + stage)
            layer_grads, dx_BSD = _pull(self.work, self._chunk(layers, chunk), kept, inputs, _select(valid, dy_BSD), valid)
            left_BSD = _select((stage == 0) & (chunk == 0) & valid, dx_BSD)
            layer_grads = jax.tree.map(partial(_select, valid), layer_grads)  # of nothing kept they need not be finite
            return dx_BSD[None], jax.lax.psum(left_BSD, AXIS), self._add_chunk(grads, layer_grads, chunk)

        given = (tick, state.dx_PBSD, dloss_BSD, state.stash, state.layer_grads, self.layers, self.parts)
        specs = (P(), P(AXIS), P(), P(AXIS), P(AXIS), P(AXIS), P())
        dx_PBSD, left_BSD, layer_grads = _on_stages(on_stage, specs, (P(AXIS), P(), P(AXIS)))(*given)
        microbatch, chunk = schedule.backward(jnp.clip(schedule.backward_unit(0, tick), 0, schedule.units - 1))
        _, end_grads = self._when(chunk == 0, partial(self._embedded, microbatch, left_BSD), state.end_grads)
        return state._replace(dx_PBSD=dx_PBSD, layer_grads=layer_grads, end_grads=end_grads)

    def _embedded(self, microbatch: Array, dx_BSD: Array, end_grads: Tree) -> tuple[Array, Tree]:
        """The gradients of `first` are added to `end_grads`."""
        part = self._part(microbatch)
        _, pull = jax.vjp(lambda ends: self.work.first(ends, part), self.ends)
        return dx_BSD, _add(end_grads, *pull(dx_BSD))

    def _part(self, microbatch: Array) -> Tree:
        return _take(self.parts, microbatch)

    def _chunk(self, layers: Tree, chunk: Array | int) -> Tree:
        """The layers of a chunk, of those of a stage."""
        if self.schedule.chunks == 1:
            return layers
        return jax.tree.map(lambda a: a.reshape(self.schedule.chunks, -1, *a.shape[1:])[chunk], layers)

    def _add_chunk(self, total: Tree, grads: Tree, chunk: Array) -> Tree:
        if self.schedule.chunks == 1:
            return _add(total, grads)

        def add(total: Array, grad: Array) -> Array:
            by_chunk = total.reshape(self.schedule.chunks, -1, *total.shape[1:])
            return by_chunk.at[chunk].add(grad.astype(total.dtype)).reshape(total.shape)

        return jax.tree.map(add, total, grads)


def _forward(work: Work, layers: Tree, x_BSD: Array, inputs: Tree) -> tuple[Array, list[Array], Tree]:
    """The forward pass of a chunk, what its backward pass needs beside layers and inputs, as the remat policy says, and its report."""
    (y_BSD, _), pull, report = jax.vjp(lambda layers, x: work.layers(layers, x, inputs), layers, x_BSD, has_aux=True)
    return y_BSD, [leaf for leaf, own in zip(jax.tree.leaves(pull), _is_own(pull, layers, inputs), strict=True) if own], report


def _pull(work: Work, layers: Tree, kept: list[Array], inputs: Tree, dy_BSD: Array, valid: Array) -> tuple[Tree, Array]:
    """The backward pass of a chunk. What was not kept comes from a forward pass of nothing, of which the compiler leaves nothing else."""
    (_, added), pull, _ = jax.vjp(lambda layers, x: work.layers(layers, x, inputs), layers, jnp.zeros_like(dy_BSD), has_aux=True)
    leaves, treedef = jax.tree.flatten(pull)
    own = iter(kept)
    leaves = [next(own) if is_own else leaf for leaf, is_own in zip(leaves, _is_own(pull, layers, inputs), strict=True)]
    return jax.tree.unflatten(treedef, leaves)((dy_BSD, valid.astype(added.dtype)))


def _is_own(pull: Tree, layers: Tree, inputs: Tree) -> list[bool]:
    """Of each array that a backward pass holds, whether the forward pass made it, rather than was given it."""
    given = {id(leaf) for leaf in jax.tree.leaves((layers, inputs))}
    return [id(leaf) not in given for leaf in jax.tree.leaves(pull)]


def _on_stages(run: Callable, in_specs: Tree, out_specs: Tree) -> Callable:
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, axis_names={AXIS}, check_vma=False)


def _send(x_BSD: Array, stages: int, by: int) -> Array:
    """To the stage `by` further round the ring; with its leading dim over `stage`."""
    return jax.lax.ppermute(x_BSD, AXIS, [(stage, (stage + by) % stages) for stage in range(stages)])[None]


def _select(condition: Array, x: Array, other: Array | None = None) -> Array:
    """`x` where the condition holds, else `other` or zeros: what a stage with nothing to do has computed reaches nobody."""
    return jax.lax.select(jnp.broadcast_to(condition, x.shape), x, jnp.zeros_like(x) if other is None else other)


def _put(ring: Array, leaf: Array, slot: Array, valid: Array) -> Array:
    """`leaf` in `slot` of ring[0], if it is valid."""
    return ring.at[0, slot].set(_select(valid, leaf, ring[0, slot]))


def _take(parts: Tree, microbatch: Array | int) -> Tree:
    return jax.tree.map(lambda a: a[microbatch], parts)


def _add(total: Tree, grads: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, grads)


def _zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros whose leading dim is over `stage`; how the others are split follows from what is written there."""
    spec = P(AXIS, *[P.UNCONSTRAINED] * (len(shape) - 1))
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), spec)
