"""The table of update rules, and learning-rate schedules, built on optax (docs/explanation/optimizers.md).

The step clips gradients, since it reports their norm.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from maxlm.config.batch_sizes import BatchSizes
from maxlm.config.schema import CompressionConfig, Config, DilocoConfig
from maxlm.config.sections.optimizer import AdafactorConfig, AdemamixConfig, MuonConfig, OptimizerConfig, SoapConfig
from maxlm.config.sections.optimizer_state import FLOAT32, OptimizerStateConfig
from maxlm.config.table import call
from maxlm.models import parameter_axes
from maxlm.models.parameters import Parameters
from maxlm.training.factored import adafactor, factored_adam, relative_scale
from maxlm.training.matrices import hidden_matrix
from maxlm.training.muon import scale_by_muon
from maxlm.training.parametrized import with_factors
from maxlm.training.schedule_free import NAME as SCHEDULE_FREE, Z, at_rate_and_averaged
from maxlm.training.small_states import FAST, FIRST, SECOND, SLOW, in_small_state
from maxlm.training.soap import scale_by_soap

LEAST_SHARE = 1e-2  # of a matrix's mean: least second moment that is kept. Rows of tokens not yet seen have none, and would be divided by 0


@dataclass(frozen=True)
class Rule:
    """An update rule of the table below.

    `direction`: from gradients to updates of about the size of 1, before decay and rate; it gets the section, the logical `axes` of the
    parameters, and the settings that its parameters name (`table.call`). `moments`: numbers that it keeps for each
    number of a hidden matrix, by the names in the state; what else it keeps is less, or `more` says what.
    `gathers`: true if it needs whole matrices, so that matrices that a mesh splits are exchanged once an update; the others are
    elementwise, or exchange sums of rows and columns.
    """

    direction: Callable[..., optax.GradientTransformation]
    moments: tuple[str, ...]
    source: str
    gathers: bool = False
    more: str = ""

    def moment_bytes(self, state: OptimizerStateConfig | None) -> int:
        """Bytes that moments take for a number of a hidden matrix, at least: scales and what is under `more` come on top."""
        settings = state or OptimizerStateConfig()
        formats: dict[str, str] = {SECOND: settings.second, Z: FLOAT32}
        return sum(FORMAT_BYTES[formats.get(moment, settings.moments)] for moment in self.moments)


FORMAT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "factored": 0}


def build_optimizer(config: Config, axes: Parameters | None = None, first_row: Any = 0) -> optax.GradientTransformation:
    """The update rule of `optimizer.name` in `RULES`, then decay, then the learning rate.

    Weight decay is decoupled, multiplied by the learning rate of the parameter (or by the schedule alone, with `independent`), and reaches
    matrices only, whatever the rule: no norm, bias or position table. `axes`: of the parameters, if it is not for all of the model's.
    `first_row`: of theirs, if they are pieces of those that are stacked.
    """
    settings, rate, axes = config.optimizer, learning_rate(config), parameter_axes(config.model) if axes is None else axes
    direction = call(RULES[settings.name].direction, config, settings, axes=axes)
    stored = in_small_state(direction, axes, first_row, settings.state, config.model, config.train.seed)
    return optax.chain(
        with_factors(stored, axes, config.model, settings),
        _decayed(settings, axes),
        at_rate_and_averaged(rate, settings.beta1) if settings.name == SCHEDULE_FREE else optax.scale_by_learning_rate(rate),
    )


def _decayed(settings: OptimizerConfig, axes: Parameters) -> optax.GradientTransformation:
    """Updates plus decay, as multiples of `peak_lr`. Adam's part of Muon may have a rate of its own, and Adafactor's is relative to the
    parameters: decay follows both, unless it is independent of rates.
    """
    matrix = _map_axes(lambda names: "embed" in names or "rank" in names, axes)
    relative = settings.adafactor or AdafactorConfig()
    if settings.name == "adafactor" and relative.relative and not settings.decays_independently:

        def shrunk(names: tuple[str, ...], decays: bool, update: Any, param: Any) -> Any:
            return update + settings.decay_per_rate * relative_scale(relative, names, param) * param if decays else update

        return optax.stateless(lambda updates, params: _map_axes(shrunk, axes, matrix, updates, params))
    if settings.name != "muon" or settings.muon is None or settings.muon.adam_lr is None:
        return optax.add_decayed_weights(settings.decay_per_rate, mask=matrix)
    ratio = settings.muon.adam_lr / settings.peak_lr
    rates = _map_axes(lambda names: ratio if hidden_matrix(names) is None else 1.0, axes)
    own = jax.tree.map(lambda rate: 1.0 if settings.decays_independently else rate, rates)
    decays = jax.tree.map(lambda decays, factor: settings.decay_per_rate * factor if decays else 0.0, matrix, own)

    def decayed(update: Any, param: Any, rate: float, decay: float) -> Any:
        update = update if rate == 1 else rate * update
        return update + decay * param if decay else update

    def step(updates: Any, params: Any) -> Any:
        return jax.tree.map(decayed, updates, params, rates, decays)

    return optax.stateless(step)


def _adam(
    settings: OptimizerConfig, axes: Parameters, compression: CompressionConfig | None, diloco: DilocoConfig | None
) -> optax.GradientTransformation:
    if settings.state is not None and settings.state.second == "factored":
        return factored_adam(settings, axes)
    if compression is not None and compression.kind != "int8" and diloco is None:
        return frozen_adam(settings, compression.warmup_steps)
    return _plain_adam(settings)


def _plain_adam(settings: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2, eps=settings.eps)


def _muon(settings: OptimizerConfig, axes: Parameters, precision_compute: str) -> optax.GradientTransformation:
    dtype = "bfloat16" if precision_compute == "bfloat16" else "float32"
    return _with_adam(settings, axes, scale_by_muon(settings.muon or MuonConfig(), dtype, axes))


def _soap(settings: OptimizerConfig, axes: Parameters) -> optax.GradientTransformation:
    return _with_adam(settings, axes, scale_by_soap(settings, settings.soap or SoapConfig(), axes))


def _with_adam(settings: OptimizerConfig, axes: Parameters, matrices: optax.GradientTransformation) -> optax.GradientTransformation:
    """`matrices` for the hidden matrices, Adam for all others: embeddings, unembedding, norms, biases, routers."""
    labels = _map_axes(lambda names: "adam" if hidden_matrix(names) is None else "matrices", axes)
    return optax.partition({"matrices": matrices, "adam": _plain_adam(settings)}, labels)


def _lion(settings: OptimizerConfig, axes: Parameters) -> optax.GradientTransformation:
    return optax.scale_by_lion(b1=settings.beta1, b2=settings.beta2)


def _adafactor(settings: OptimizerConfig, axes: Parameters) -> optax.GradientTransformation:
    return adafactor(settings.adafactor or AdafactorConfig(), axes)


def _ademamix(settings: OptimizerConfig, axes: Parameters, total_steps: int) -> optax.GradientTransformation:
    """`alpha` rises linearly, and the half-life of the slow average about linearly, over `ademamix.warmup_steps` (section 3)."""
    own = settings.ademamix or AdemamixConfig()

    def done(updates: Any) -> Array:
        return jnp.minimum((updates + 1).astype(jnp.float32) / (own.warmup_steps or total_steps), 1.0)

    return optax.contrib.scale_by_ademamix(
        b1=settings.beta1,
        b2=settings.beta2,
        b3=lambda updates: slow_decay(settings.beta1, own.beta3, done(updates)),
        alpha=lambda updates: own.alpha * done(updates),
        eps=settings.eps,
    )


def slow_decay(first: float, last: float, done: Float[Array, ""]) -> Float[Array, ""]:
    """Decay of the slow average when a share `done` of the warm-up is over (AdEMAMix, appendix A.1), from the decay of the fast one."""
    if not 0 < first < last:
        return jnp.float32(last)
    start, end = jnp.log(jnp.float32(first)), jnp.log(jnp.float32(last))
    return jnp.minimum(jnp.exp(start * end / ((1 - done) * end + done * start)), last)


def _schedule_free(settings: OptimizerConfig, axes: Parameters) -> optax.GradientTransformation:
    """Adam without a first moment: the average stands for it."""
    return optax.scale_by_rms(decay=settings.beta2, eps=settings.eps, eps_in_sqrt=False, bias_correction=True)


def frozen_adam(settings: OptimizerConfig, warmup_steps: int) -> optax.GradientTransformation:
    """`optax.scale_by_adam` for `warmup_steps` updates, with its state. Then second moments stay as they are (1-bit Adam, arXiv
    2102.02888): Adam is linear in the gradients, as feedback of compression errors needs it. Updates are momentum already, as
    `CompressedSums` gives it.
    """
    adam = optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2, eps=settings.eps)
    correction = 1 - settings.beta2**warmup_steps

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        frozen = state.count >= warmup_steps
        warm, after = adam.update(updates, state)
        least = jax.lax.cond(state.count == warmup_steps, _least, _no_least, state.nu)
        kept = jax.tree.map(jnp.maximum, state.nu, least)
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v / correction) + settings.eps), updates, kept)
        chosen = partial(jax.tree.map, partial(jnp.where, frozen))
        return chosen(scaled, warm), after._replace(mu=chosen(updates, after.mu), nu=chosen(kept, after.nu))

    return optax.GradientTransformation(adam.init, update)


def _least(moments: Any) -> Any:
    """The least second moments of each matrix: a matrix of a stacked tensor has its last two dims."""

    def of_matrices(nu: Float[Array, "..."]) -> Float[Array, "..."]:
        return LEAST_SHARE * jnp.mean(nu, axis=tuple(range(max(0, nu.ndim - 2), nu.ndim)), keepdims=True)

    return jax.tree.map(of_matrices, moments)


def _no_least(moments: Any) -> Any:
    return jax.tree.map(lambda least: jnp.zeros(least.shape, least.dtype), jax.eval_shape(_least, moments))


RULES = {
    "adamw": Rule(_adam, (FIRST, SECOND), "arXiv 1711.05101"),
    "muon": Rule(_muon, (FIRST,), "Jordan 2024; arXiv 2502.16982", gathers=True),
    "soap": Rule(_soap, (FIRST, SECOND), "arXiv 2409.11321", gathers=True, more="a covariance and a basis of each side that is rotated"),
    "lion": Rule(_lion, (FIRST,), "arXiv 2302.06675"),
    "adafactor": Rule(_adafactor, (), "arXiv 1804.04235, algorithm 4"),
    "ademamix": Rule(_ademamix, (FAST, SLOW, SECOND), "arXiv 2409.03137"),
    SCHEDULE_FREE: Rule(_schedule_free, (SECOND, Z), "arXiv 2405.15682, algorithm 1"),
}


def _map_axes(function: Callable[..., Any], axes: Parameters, *trees: Any) -> Parameters:
    """`function(logical axes, leaf ...)` for every parameter."""
    return jax.tree.map(function, axes, *trees, is_leaf=lambda leaf: isinstance(leaf, tuple))


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
    if optimizer.schedule == "cosine":
        body = optax.cosine_decay_schedule(peak, after, alpha=optimizer.end_lr_fraction)
    elif optimizer.schedule == "wsd":
        decay = total - passed(config.total_steps - config.decay_steps)
        stable = max(after - decay, 0)
        body = optax.join_schedules([optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay)], [stable])
    else:
        body = optax.constant_schedule(peak)
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
