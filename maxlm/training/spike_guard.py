"""An update that refuses spikes: where its loss or gradient norm is far above the recent ones, the state stays as it is.

Decided on the devices, from the window of recent values in `TrainState.guard`: so without waiting for the host, alike on every device, and
the same after a restart. The rule is that of `telemetry.alarms.JumpAlarm`, for a single update and so with a wider limit.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from maxlm.config.sections.health import HealthConfig
from maxlm.objectives import Sums
from maxlm.telemetry.alarms import JUMP_FEWEST, JUMP_WINDOW, LEAST_LOSS_SPREAD, LEAST_NORM_SPREAD
from maxlm.training.layer_figures import RATIO, layer_metrics, ratios
from maxlm.training.step import TrainState, Updater

ALONE = 2  # times `spreads`: of a single update, which has no other to confirm it. Measured on batches of 32 tokens: up to 13.5 deviations

# W window


class Window(NamedTuple):
    """Losses and logarithms of gradient norms of the `applied` updates, the newest at (applied - 1) % W. `last`: the step after the newest.
    All zeros is an empty one.
    """

    losses_W: Float[Array, " W"]
    norms_W: Float[Array, " W"]
    applied: Int32[Array, ""]
    last: Int32[Array, ""]


def empty_window() -> Window:
    zeros, zero = jnp.zeros(JUMP_WINDOW, jnp.float32), jnp.zeros((), jnp.int32)
    return Window(zeros, zeros, zero, zero)


def limit(values_W: Float[Array, " W"], count: Int32[Array, ""], spreads: float, least: float) -> Float[Array, ""]:
    """Median of the first `count` values + `spreads` * the larger of 1.4826 * their median absolute deviation and `least`."""
    known_W = jnp.arange(JUMP_WINDOW) < count
    median = _median(values_W, known_W, count)
    spread = 1.4826 * _median(jnp.abs(values_W - median), known_W, count)
    return median + spreads * jnp.maximum(spread, least)


def _median(values_W: Float[Array, " W"], known_W: Bool[Array, " W"], count: Int32[Array, ""]) -> Float[Array, ""]:
    sorted_W = jnp.sort(jnp.where(known_W, values_W, jnp.inf))
    count = jnp.clip(count, 1, JUMP_WINDOW)
    return (sorted_W[(count - 1) // 2] + sorted_W[count // 2]) / 2


def judge(
    window: Window, step: Int32[Array, ""], loss: Float[Array, ""], grad_norm: Float[Array, ""], settings: HealthConfig
) -> tuple[Bool[Array, ""], Window]:
    """(True if the update of the batch of `step` is refused, the window if it is not).

    After `spike_steps` in a row without an update the next is let through, and the window begins anew: so many different batches are not
    all bad, and a lasting change is for the alarms.
    """
    norm = jnp.log(jnp.maximum(grad_norm, 1e-30))
    high = loss > limit(window.losses_W, window.applied, ALONE * settings.spreads, LEAST_LOSS_SPREAD)
    high |= norm > limit(window.norms_W, window.applied, ALONE * settings.spreads, LEAST_NORM_SPREAD)
    high &= window.applied >= JUMP_FEWEST
    count = jnp.where(high, 0, window.applied)
    at = count % JUMP_WINDOW
    after = Window(window.losses_W.at[at].set(loss), window.norms_W.at[at].set(norm), count + 1, step + 1)
    return high & (step - window.last < settings.spike_steps), after


class WatchedUpdates(Updater):
    """The update of `inner` as `settings` watch it: spikes are refused, and figures of layers reported."""

    def __init__(self, inner: Updater, settings: HealthConfig) -> None:
        self.config, self._inner, self._settings = inner.config, inner, settings
        self.metrics = inner.metrics + (layer_metrics(inner.config.model) if settings.layers is not None else ())

    @property
    def _refuses(self) -> bool:
        return self._settings.spike == "skip"

    def init(self, state: TrainState) -> TrainState:
        state = self._inner.init(state)
        return replace(state, guard=empty_window()) if self._refuses else state

    def shardings(self, shardings: TrainState, mesh: Mesh) -> TrainState:
        whole = NamedSharding(mesh, PartitionSpec())
        shardings = self._inner.shardings(shardings, mesh)
        return replace(shardings, guard=jax.tree.map(lambda _: whole, empty_window())) if self._refuses else shardings

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        proposed, sums, grad_norm = self._inner(state, batch)
        if self._settings.layers is not None:
            sums = sums._replace(added={**sums.added, RATIO: ratios(self.config.model, state.params, proposed.params)})
        if self._refuses:
            refused, window = judge(state.guard, state.step, sums.values(self.metrics)["loss"], grad_norm, self._settings)
            if self.config.diloco is not None:
                refused &= (
                    state.step + 1 < self.config.total_steps
                )  # the last update is where workers meet, and no later one makes up for it
            proposed = replace(proposed, guard=window, skipped=state.skipped + refused)
        return proposed, sums, grad_norm
