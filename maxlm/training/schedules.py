"""The shapes of the learning rate after warm-up that `maxlm/config/parts/schedules.py` lists."""

from typing import NamedTuple

import optax


class Span(NamedTuple):
    """The learning rates after warm-up: from `peak` to `end` in so many updates. `decay`: updates of a decay at the end, 0 for a schedule
    without one. With `train.batch_ramp` lengths are in updates of the largest batch, not whole numbers.
    """

    peak: float
    end: float
    updates: float
    decay: float


def cosine(own: None, span: Span, optimizer_end_lr_fraction: float) -> optax.Schedule:
    """Half a cosine."""
    return optax.cosine_decay_schedule(span.peak, span.updates, alpha=optimizer_end_lr_fraction)


def wsd(own: None, span: Span) -> optax.Schedule:
    """The peak, then a linear decay (MiniCPM, arXiv 2404.06395)."""
    stable = max(span.updates - span.decay, 0)
    return optax.join_schedules([optax.constant_schedule(span.peak), optax.linear_schedule(span.peak, span.end, span.decay)], [stable])


def constant(own: None, span: Span) -> optax.Schedule:
    """The peak."""
    return optax.constant_schedule(span.peak)
