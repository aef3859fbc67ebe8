"""The optimizer of a run: its update rule, decay and learning rate (docs/explanation/optimizers.md).

The step clips gradients, since it reports their norm.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from maxlm.config import choices
from maxlm.config.batch_sizes import BatchSizes
from maxlm.config.schema import Config
from maxlm.config.table import build_part
from maxlm.models import parameter_axes
from maxlm.models.parameters import Parameters
from maxlm.training.parametrized import with_factors
from maxlm.training.schedules import Span
from maxlm.training.small_states import in_small_state
from maxlm.training.update_rule import UpdateRule, checked


def build_optimizer(config: Config, axes: Parameters | None = None, first_row: Any = 0) -> optax.GradientTransformation:
    """The update rule of `optimizer.name`, then decay, then the learning rate.

    Weight decay is decoupled, multiplied by the learning rate of the parameter (or by the schedule alone, with `independent`), and reaches
    matrices only, whatever the rule: no norm, bias or position table. `axes`: of the parameters, if it is not for all of the model's.
    `first_row`: of theirs, if they are pieces of those that are stacked.
    """
    rule: UpdateRule = build_part(config, "optimizer", config.optimizer.name)
    rate, axes = learning_rate(config), parameter_axes(config.model) if axes is None else axes
    direction = rule.direction(axes)
    if choices.part("optimizer", config.optimizer.name) not in choices.own_parts():
        direction = checked(direction, config.optimizer.name)
    stored = in_small_state(direction, axes, first_row, config.optimizer.state, config.model, config.train.seed)
    return optax.chain(with_factors(stored, axes, config.model, rule), rule.decayed(axes), rule.at_rate(rate))


def learning_rate(config: Config) -> optax.Schedule:
    """Linear warm-up to `peak_lr`, then the schedule's shape down to `end_lr_fraction` of it.

    Step s (from 0) of the warm-up uses (s + 1) / warm-up of the peak, and a decay begins at the peak and would end with the step after the
    last one: no update is spent on a rate of 0.
    wsd: warm-up, stable, linear decay (MiniCPM, arXiv 2404.06395). With `train.batch_ramp` lengths are counted in tokens.
    """
    optimizer, ramped = config.optimizer, bool(config.train.batch_ramp)
    passed = _passed(config.batch_sizes, config.total_steps) if ramped else lambda step: step
    peak, end = optimizer.peak_lr, optimizer.peak_lr * optimizer.end_lr_fraction
    steps = config.warmup_steps
    total, warmup = passed(config.total_steps), passed(steps)
    after = max(total - warmup, 1)
    decay = total - passed(config.total_steps - config.decay_steps)
    body = build_part(config, "schedule", optimizer.schedule, span=Span(peak, end, after, decay))
    if ramped:
        return lambda step: jnp.where(step < steps, peak * passed(step + 1) / max(warmup, 1e-9), body(passed(step) - warmup))
    if not warmup:
        return body
    ramp = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)) if warmup > 1 else optax.constant_schedule(peak)
    return optax.join_schedules([ramp, body], [warmup])


def _passed(sizes: BatchSizes, total: int) -> Callable[[Any], Any]:
    """Step -> tokens of the updates before it, in updates of the last, largest size."""
    full, ends = sizes.stages[-1].size, [*(stage.first for stage in sizes.stages[1:]), total]

    def passed(step: Any) -> Any:
        if isinstance(step, int):
            return sizes.before(step) / full
        within = [jnp.clip(step - stage.first, 0, end - stage.first) for stage, end in zip(sizes.stages, ends, strict=True)]
        return sum(steps.astype(jnp.float32) * (stage.size / full) for steps, stage in zip(within, sizes.stages, strict=True))

    return passed
