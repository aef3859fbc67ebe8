"""Optimizers and learning-rate schedules, built on optax. The step clips gradients, since it reports their norm."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlm.config.optimizer import AdafactorConfig, MuonConfig
from maxlm.config.schema import Config
from maxlm.models import parameter_axes
from maxlm.models.parameters import Parameters, is_matrix
from maxlm.models.stack import STACKED
from maxlm.training.factored import adafactor, factored_adam
from maxlm.training.frozen_adam import frozen_adam
from maxlm.training.small_states import in_small_state


def build_optimizer(config: Config, axes: Parameters | None = None, first_row: Any = 0) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101), Muon (Jordan 2024) for the hidden matrices with Adam for the rest, or Adafactor (arXiv 1804.04235).

    Weight decay is decoupled, multiplied by the learning rate (or by the schedule alone, with `independent`), and reaches matrices only:
    no norm, bias or position table. `axes`: of the parameters, if it is not for all of the model's. `first_row`: of theirs, if they are
    pieces of those that are stacked.
    """
    axes = parameter_axes(config.model) if axes is None else axes
    direction = {"adamw": _adam, "muon": _muon, "adafactor": _adafactor}[config.optimizer.name](config, axes)
    decayed = _map_axes(lambda names: "embed" in names or "rank" in names, axes)
    return optax.chain(
        in_small_state(config, direction, axes, first_row),
        optax.add_decayed_weights(config.optimizer.decay_per_rate, mask=decayed),
        optax.scale_by_learning_rate(learning_rate(config)),
    )


def _adam(config: Config, axes: Parameters) -> optax.GradientTransformation:
    settings, compression = config.optimizer, config.compression
    if settings.state is not None and settings.state.second == "factored":
        return factored_adam(settings, axes)
    if compression is not None and compression.kind != "int8" and config.diloco is None:
        return frozen_adam(settings, compression.warmup_steps)
    return optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2, eps=settings.eps)


def _muon(config: Config, axes: Parameters) -> optax.GradientTransformation:
    """Orthogonalised momentum, scaled to the size of Adam's updates (arXiv 2502.16982, eq. 4), so both share one rate."""
    settings = config.optimizer
    direction = optax.contrib.muon(
        learning_rate=1.0,
        beta=(settings.muon or MuonConfig()).momentum,
        adam_b1=settings.beta1,
        adam_b2=settings.beta2,
        eps=settings.eps,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=_map_axes(_muon_dims, axes),
    )
    return optax.chain(direction, optax.scale(-1.0))  # optax's muon descends; the chain above does that itself


def _adafactor(config: Config, axes: Parameters) -> optax.GradientTransformation:
    return adafactor(config.optimizer.adafactor or AdafactorConfig(), axes)


def _muon_dims(names: tuple[str, ...]) -> optax.contrib.MuonDimensionNumbers | None:
    """Input and output dims of a hidden matrix; None for any other parameter."""
    if "embed" not in names or "vocab" in names or not is_matrix(names):
        return None
    embed = names.index("embed")
    others = tuple(i for i, name in enumerate(names) if i != embed and name not in ("expert", *STACKED))
    reads_embed = embed < others[0]
    return optax.contrib.MuonDimensionNumbers(*((embed,), others) if reads_embed else (others, (embed,)))


def _map_axes(function: Callable[[tuple[str, ...]], Any], axes: Parameters) -> Parameters:
    return jax.tree.map(function, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def learning_rate(config: Config) -> optax.Schedule:
    """Linear warm-up to `peak_lr`, then the schedule's shape down to `end_lr_fraction` of it at the last step.

    Step s (from 0) of the warm-up uses (s + 1) / warm-up of the peak, so no update is spent on a rate of 0.
    wsd: warm-up, stable, linear decay (MiniCPM, arXiv 2404.06395). With `train.batch_ramp` lengths are counted in tokens.
    """
    optimizer, passed = config.optimizer, _passed(config)
    peak, end = optimizer.peak_lr, optimizer.peak_lr * optimizer.end_lr_fraction
    steps = config.steps_of(optimizer.warmup_steps, optimizer.warmup_tokens, 0)
    total, warmup = passed(config.total_steps), passed(steps)
    after = max(total - warmup, 1)
    if optimizer.schedule == "cosine":
        body = optax.cosine_decay_schedule(peak, after, alpha=optimizer.end_lr_fraction)
    elif optimizer.schedule == "wsd":
        decay = total - passed(config.total_steps - config.decay_steps)
        stable = max(after - decay, 0)
        body = optax.join_schedules([optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay)], [stable])
    else:
        body = optax.constant_schedule(peak)
    if config.train.batch_ramp:
        return lambda step: jnp.where(step < steps, peak * passed(step + 1) / max(warmup, 1e-9), body(passed(step) - warmup))
    if not warmup:
        return body
    ramp = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)) if warmup > 1 else optax.constant_schedule(peak)
    return optax.join_schedules([ramp, body], [warmup])


def _passed(config: Config) -> Callable[[Any], Any]:
    """Step -> tokens of the updates before it, in updates of the last, largest size; where all batches are alike, the step itself."""
    if not config.train.batch_ramp:
        return lambda step: step
    sizes, full = config.batch_sizes, config.train.global_batch
    ends = [*(stage.first for stage in sizes.stages[1:]), config.total_steps]

    def passed(step: Any) -> Any:
        if isinstance(step, int):
            return sizes.before(step) / full
        within = [jnp.clip(step - stage.first, 0, end - stage.first) for stage, end in zip(sizes.stages, ends, strict=True)]
        return sum(steps.astype(jnp.float32) * (stage.size / full) for steps, stage in zip(within, sizes.stages, strict=True))

    return passed
