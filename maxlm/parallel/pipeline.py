"""Gradients of a loss by a pipeline schedule: every stage holds its own layers and sends activations and their gradients round `stage`.

Only `stage` is a manual mesh axis here; the other axes divide the work inside a stage as they do without a pipeline. Embedding and loss are
not on the first and the last stage: they run between the passes, divided over `stage` like everything else, so no stage waits for them.
"""

import dataclasses
from collections.abc import Callable, Sequence
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


class StageFunctions(NamedTuple):
    """The functions that a pipeline computes. All are pure; the structure of their trees of arrays is the caller's."""

    embed: Callable[[Tree, Tree], Array]  # (ends, microbatch) -> x_BSD before the first layer
    inputs: Callable[[Tree, Array], Tree]  # (microbatch, part of the depth) -> inputs of the layers without gradient
    # (layers of a chunk, their constants, x_BSD, inputs) -> ((x_BSD, float32 loss of the layers), reports, stacked as the layers are)
    layers: Callable[[Tree, Tree, Array, Tree], tuple[tuple[Array, Array], Tree]]
    loss: Callable[[Tree, Tree, Array], tuple[Array, Tree]]  # (ends, microbatch, x_BSD) -> (loss, sums to report)
    empty_sums: Callable[[Tree], Tree]  # sums over no microbatch, given one microbatch's as shapes
    add_sums: Callable[[Tree, Tree], Tree]  # sums over two parts of the batch -> over both


class _State(NamedTuple):
    """Carry of the scan over ticks."""

    y_PBSD: Array  # output of each stage's forward pass, already on the stage that reads it next
    dx_PBSD: Array  # output of each stage's backward pass, not yet sent: that overlaps with the next forward pass
    stash: tuple[Array, ...]  # [P, depth, ...]: residuals of the forward passes
    finished: Float[Array, "N B S D"]  # outputs of the last stage
    layer_grads: Tree
    end_grads: Tree
    sums: Tree
    reports: Tree  # of the layers


def pipeline_gradients(
    schedule: Schedule, functions: StageFunctions, layers: Tree, constants: Tree, ends: Tree, microbatches: Tree
) -> tuple[tuple[Tree, Tree], tuple[Tree, Tree]]:
    """(sums over the microbatches of what `loss` and the layers report, float32 gradients of the loss by (layers, ends)).

    `layers`, and their `constants` without gradient: leading dim over `stage`, within a stage its chunks in order. `microbatches`: leading
    dim one entry each. `ends`: parameters of `embed` and `loss`.
    """
    pipeline = _Pipeline(schedule, functions, layers, constants, ends, microbatches)
    state = pipeline.empty()
    for phase in schedule.phases:
        ticks = jnp.arange(phase.first, phase.first + phase.ticks)
        state, _ = jax.lax.scan(partial(pipeline.tick, phase), state, ticks)
    return (state.sums, state.reports), (state.layer_grads, state.end_grads)


class _Pipeline:
    def __init__(
        self, schedule: Schedule, functions: StageFunctions, layers: Tree, constants: Tree, ends: Tree, microbatches: Tree
    ) -> None:
        self.schedule, self.functions = schedule, functions
        self.layers, self.constants, self.ends, self.microbatches = layers, constants, ends, microbatches
        microbatch = jax.eval_shape(lambda tree: _take(tree, 0), microbatches)
        self.x_BSD = jax.eval_shape(functions.embed, ends, microbatch)
        _, self.sums = jax.eval_shape(functions.loss, ends, microbatch, self.x_BSD)

        def first(layers: Tree, constants: Tree, x_BSD: Array, microbatch: Tree) -> tuple[list[Array], Tree]:
            layers, constants = self._chunk(layers, 0), self._chunk(constants, 0)
            inputs = self._inputs(microbatch, jax.lax.axis_index(AXIS))

            def opaque_residuals(operands: tuple[Tree, Tree]) -> list[Array]:
                residuals: list[Array] = self._vjp(layers, operands[0], x_BSD, operands[1])[1].opaque_residuals
                return residuals

            jaxpr = jax.make_jaxpr(opaque_residuals)((constants, inputs)).jaxpr
            self.forwarded = [variable in jaxpr.invars for variable in jaxpr.outvars]
            _, vjp, reports = self._vjp(layers, constants, x_BSD, inputs)
            return [leaf[None] for leaf in self._residuals(vjp)], jax.tree.map(lambda a: jnp.concatenate([a] * schedule.chunks), reports)

        specs = (P(AXIS), P(AXIS), P(), P())
        self.residuals, self.reports = jax.eval_shape(_on_stages(first, specs, P(AXIS)), layers, constants, self.x_BSD, microbatch)

    def empty(self) -> _State:
        """The carry before the first tick."""
        schedule, x_BSD = self.schedule, self.x_BSD
        between = _zeros((schedule.stages, *x_BSD.shape), x_BSD.dtype)
        return _State(
            y_PBSD=between,
            dx_PBSD=between,
            stash=tuple(_zeros((schedule.stages, schedule.depth, *leaf.shape[1:]), leaf.dtype) for leaf in self.residuals),
            finished=jnp.zeros((schedule.finished, *x_BSD.shape), x_BSD.dtype),
            layer_grads=jax.tree.map(lambda a: _zeros(a.shape, jnp.float32), self.layers),
            end_grads=jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), self.ends),
            sums=self.functions.empty_sums(self.sums),
            reports=jax.tree.map(lambda a: _zeros(a.shape, a.dtype), self.reports),
        )

    def _inputs(self, microbatch: Tree, part: Array) -> Tree:
        """Inputs of the layers, each array a value of its own: of one that stands in the tree twice, JAX keeps one residual."""
        return jax.tree.map(jnp.copy, self.functions.inputs(microbatch, part))

    def _vjp(self, layers: Tree, constants: Tree, x_BSD: Array, inputs: Tree) -> tuple[Array, Any, Tree]:
        """The forward pass of a chunk: (its output, its VJP, reports of its layers)."""
        (y_BSD, _), vjp, reports = jax.vjp(
            lambda layers, x: self.functions.layers(layers, constants, x, inputs), layers, x_BSD, has_aux=True
        )
        return y_BSD, vjp, reports

    def _residuals(self, vjp: Any) -> list[Array]:
        """Residuals of a chunk under the remat policy. Weights, constants and inputs are at hand in both passes and not kept."""
        computed = [leaf for leaf, forwarded in zip(vjp.opaque_residuals, self.forwarded, strict=True) if not forwarded]
        return [*jax.tree.leaves(vjp.args_res[1]), *computed]

    def _with_residuals(self, vjp: Any, residuals: Sequence[Array]) -> Any:
        """The VJP of a chunk with residuals from its forward pass."""
        kept = iter(residuals)
        x_BSD = jax.tree.map(lambda _: next(kept), vjp.args_res[1])
        opaque = [leaf if forwarded else next(kept) for leaf, forwarded in zip(vjp.opaque_residuals, self.forwarded, strict=True)]
        return dataclasses.replace(vjp, args_res=[vjp.args_res[0], x_BSD], opaque_residuals=opaque)

    def tick(self, phase: Phase, state: _State, tick: Array) -> tuple[_State, None]:
        """One tick: forward passes, the loss of the microbatch that left the last stage, backward passes."""
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

    def _when(self, due: Array, function: Callable[[Tree], tuple[Array, Tree]], totals: Tree) -> tuple[Array, Tree]:
        """`function(totals)` if due, else zeros and `totals`. `due` is equal on all devices, so collectives may be inside."""
        if self.schedule.chunks == 1:
            return function(totals)
        zeros_BSD = jnp.zeros_like(jax.eval_shape(function, totals)[0])
        return jax.lax.cond(due, function, lambda totals: (zeros_BSD, totals), totals)

    def _forward(self, state: _State, tick: Array) -> _State:
        schedule = self.schedule
        microbatch, chunk = schedule.forward(jnp.clip(schedule.forward_unit(0, tick), 0, schedule.units - 1))
        x_BSD, _ = self._when(chunk == 0, lambda _: (self.functions.embed(self.ends, _take(self.microbatches, microbatch)), None), None)

        def on_stage(
            tick: Array, y_PBSD: Array, x_BSD: Array, stash: tuple, reports: Tree, layers: Tree, constants: Tree, microbatches: Tree
        ) -> tuple[Array, Array, tuple, Tree]:
            stage = jax.lax.axis_index(AXIS)
            unit = schedule.forward_unit(stage, tick)
            valid, unit = (unit >= 0) & (unit < schedule.units), jnp.clip(unit, 0, schedule.units - 1)
            microbatch, chunk = schedule.forward(unit)
            x_BSD = _select((stage == 0) & (chunk == 0), x_BSD, y_PBSD[0])
            inputs = self._inputs(_take(microbatches, microbatch), chunk * schedule.stages + stage)
            y_BSD, vjp, new = self._vjp(self._chunk(layers, chunk), self._chunk(constants, chunk), _select(valid, x_BSD), inputs)
            reports = self._add_chunk(reports, jax.tree.map(partial(_select, valid), new), chunk)
            stash = tuple(_put(slots, leaf, unit % schedule.depth, valid) for slots, leaf in zip(stash, self._residuals(vjp), strict=True))
            left = (stage == schedule.stages - 1) & (chunk == schedule.chunks - 1) & valid
            return _send(y_BSD, schedule.stages, 1), jax.lax.psum(_select(left, y_BSD), AXIS), stash, reports

        operands = (tick, state.y_PBSD, x_BSD, state.stash, state.reports, self.layers, self.constants, self.microbatches)
        specs = (P(), P(AXIS), P(), P(AXIS), P(AXIS), P(AXIS), P(AXIS), P())
        y_PBSD, left_BSD, stash, reports = _on_stages(on_stage, specs, (P(AXIS), P(), P(AXIS), P(AXIS)))(*operands)
        unit = schedule.forward_unit(schedule.stages - 1, tick)
        microbatch, chunk = schedule.forward(jnp.clip(unit, 0, schedule.units - 1))
        done = (unit >= 0) & (unit < schedule.units) & (chunk == schedule.chunks - 1)
        finished = _put(state.finished[None], left_BSD, microbatch % schedule.finished, done)[0]
        return state._replace(y_PBSD=y_PBSD, stash=stash, finished=finished, reports=reports)

    def _loss(self, microbatch: Array, x_BSD: Array, totals: Tree) -> tuple[Array, Tree]:
        """Gradient of the loss with respect to the output of the last stage; the gradients of `ends` and the sums are added to `totals`."""
        inputs = _take(self.microbatches, microbatch)
        loss, vjp, sums = jax.vjp(lambda ends, x: self.functions.loss(ends, inputs, x), self.ends, x_BSD, has_aux=True)
        end_grads, dx_BSD = vjp(jnp.ones_like(loss))
        return dx_BSD, (_add(totals[0], end_grads), self.functions.add_sums(totals[1], sums))

    def _backward(self, state: _State, dloss_BSD: Array, tick: Array) -> _State:
        schedule = self.schedule

        def on_stage(
            tick: Array, dx_PBSD: Array, dloss_BSD: Array, stash: tuple, grads: Tree, layers: Tree, constants: Tree, microbatches: Tree
        ) -> tuple[Array, Array, Tree]:
            stage = jax.lax.axis_index(AXIS)
            unit = schedule.backward_unit(stage, tick)
            valid, unit = (unit >= 0) & (unit < schedule.units), jnp.clip(unit, 0, schedule.units - 1)
            microbatch, chunk = schedule.backward(unit)
            arriving_BSD = _send(dx_PBSD[0], schedule.stages, -1)[0]
            dy_BSD = _select((stage == schedule.stages - 1) & (chunk == schedule.chunks - 1), dloss_BSD, arriving_BSD)
            slot = schedule.forward_of(microbatch, chunk) % schedule.depth
            residuals = [_select(valid, slots[0, slot]) for slots in stash]
            inputs = self._inputs(_take(microbatches, microbatch), chunk * schedule.stages + stage)
            # A forward pass of zeros gives the VJP its form. None of its results is used, so the compiler removes it.
            _, vjp, _ = self._vjp(self._chunk(layers, chunk), self._chunk(constants, chunk), jnp.zeros_like(dy_BSD), inputs)
            vjp = self._with_residuals(vjp, residuals)
            layer_grads, dx_BSD = vjp((_select(valid, dy_BSD), valid.astype(jnp.float32)))
            left_BSD = _select((stage == 0) & (chunk == 0) & valid, dx_BSD)
            layer_grads = jax.tree.map(partial(_select, valid), layer_grads)  # from residuals of zero they need not be finite
            return dx_BSD[None], jax.lax.psum(left_BSD, AXIS), self._add_chunk(grads, layer_grads, chunk)

        operands = (tick, state.dx_PBSD, dloss_BSD, state.stash, state.layer_grads, self.layers, self.constants, self.microbatches)
        specs = (P(), P(AXIS), P(), P(AXIS), P(AXIS), P(AXIS), P(AXIS), P())
        dx_PBSD, left_BSD, layer_grads = _on_stages(on_stage, specs, (P(AXIS), P(), P(AXIS)))(*operands)
        microbatch, chunk = schedule.backward(jnp.clip(schedule.backward_unit(0, tick), 0, schedule.units - 1))
        _, end_grads = self._when(chunk == 0, partial(self._embedding_grads, microbatch, left_BSD), state.end_grads)
        return state._replace(dx_PBSD=dx_PBSD, layer_grads=layer_grads, end_grads=end_grads)

    def _embedding_grads(self, microbatch: Array, dx_BSD: Array, end_grads: Tree) -> tuple[Array, Tree]:
        """Add the gradients of `embed` to `end_grads`."""
        inputs = _take(self.microbatches, microbatch)
        _, vjp = jax.vjp(lambda ends: self.functions.embed(ends, inputs), self.ends)
        return dx_BSD, _add(end_grads, *vjp(dx_BSD))

    def _chunk(self, layers: Tree, chunk: Array | int) -> Tree:
        """The layers of one chunk of a stage."""
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


def _on_stages(function: Callable, in_specs: Tree, out_specs: Tree) -> Callable:
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names={AXIS}, check_vma=False)


def _send(x_BSD: Array, stages: int, by: int) -> Array:
    """Send to the stage `by` further round the ring. The result has its leading dim over `stage`."""
    return jax.lax.ppermute(x_BSD, AXIS, [(stage, (stage + by) % stages) for stage in range(stages)])[None]


def _select(condition: Array, x: Array, other: Array | None = None) -> Array:
    """`x` where the condition holds, else `other` or zeros: the output of an idle stage is dropped."""
    return jax.lax.select(jnp.broadcast_to(condition, x.shape), x, jnp.zeros_like(x) if other is None else other)


def _put(slots: Array, leaf: Array, slot: Array, valid: Array) -> Array:
    """Write `leaf` to slots[0, slot] if it is valid."""
    return slots.at[0, slot].set(_select(valid, leaf, slots[0, slot]))


def _take(tree: Tree, microbatch: Array | int) -> Tree:
    return jax.tree.map(lambda a: a[microbatch], tree)


def _add(total: Tree, grads: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, grads)


def _zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros with the leading dim over `stage`; the partitioner decides how the other dims are split."""
    spec = P(AXIS, *[P.UNCONSTRAINED] * (len(shape) - 1))
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), spec)
