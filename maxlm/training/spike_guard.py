"""An update that refuses spikes: where its loss or gradient norm is far above the recent ones, the state stays as it is.

Decided on the devices, from the window of recent values in the state: so without waiting for the host, alike on every device, and
the same after a restart. The rule of `telemetry.alarms.JumpAlarm`, for a single update and so with a wider limit.
"""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from maxlm.config.schema import DilocoConfig
from maxlm.config.sections.health import HealthConfig
from maxlm.models.parameters import Parameters
from maxlm.telemetry.alarms import JUMP_FEWEST, JUMP_WINDOW, LEAST_LOSS_SPREAD, LEAST_NORM_SPREAD
from maxlm.training.step import TrainState
from maxlm.training.transform import Transform

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
    """The window before the first update."""
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


class SpikeGuard(Transform):
    """Refuse updates that `settings` call spikes; not the last one with local updates, after which workers meet for the last time."""

    name, phase = "guard", "refuse"

    def __init__(self, settings: HealthConfig, last: int | None) -> None:
        """`last`: number of updates of a run that must apply its last one."""
        self._settings, self._last = settings, last

    @classmethod
    def from_config(cls, health: HealthConfig, diloco: DilocoConfig | None, total_steps: int) -> Self | None:
        return cls(health, None if diloco is None else total_steps) if health.spike == "skip" else None

    def first(self, params: Parameters) -> tuple[Parameters, Window]:
        return params, empty_window()

    def judge(self, own: Window, state: TrainState, loss: Array, norm: Array) -> tuple[Bool[Array, ""], Window]:
        refused, window = judge(own, state.step, loss, norm, self._settings)
        return refused if self._last is None else refused & (state.step + 1 < self._last), window
