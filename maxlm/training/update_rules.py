"""The update rules that `maxlm/config/parts/optimizers.py` lists, built on optax (docs/explanation/optimizers.md)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from maxlm.config.schema import CompressionConfig, DilocoConfig
from maxlm.config.sections.optimizer import AdafactorConfig, AdemamixConfig, MuonConfig, OptimizerConfig, SoapConfig
from maxlm.models.parameters import Parameters
from maxlm.training.factored import adafactor, factored_adam, relative_scale
from maxlm.training.matrices import hidden_matrix
from maxlm.training.muon import scale_by_muon
from maxlm.training.schedule_free import at_rate_and_averaged
from maxlm.training.soap import scale_by_soap
from maxlm.training.update_rule import Names, UpdateRule, map_axes

LEAST_SHARE = 1e-2  # of a matrix's mean: least second moment that is kept. Rows of tokens not yet seen have none, and would be divided by 0


class AdamW(UpdateRule):
    """Adam (arXiv 1711.05101), with factored second moments, or second moments that stay after a warm-up, where settings ask."""

    def __init__(self, own: None, optimizer: OptimizerConfig, compression: CompressionConfig | None, diloco: DilocoConfig | None) -> None:
        super().__init__(own, optimizer)
        frozen = compression is not None and compression.kind != "int8" and diloco is None
        self._warmup = compression.warmup_steps if compression is not None and frozen else None

    def direction(self, axes: Parameters) -> optax.GradientTransformation:
        settings = self.settings
        if settings.state is not None and settings.state.second == "factored":
            return factored_adam(settings, axes)
        return _plain_adam(settings) if self._warmup is None else frozen_adam(settings, self._warmup)


def _plain_adam(settings: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2, eps=settings.eps)


class WithAdam(UpdateRule):
    """A rule for the hidden matrices, and Adam for all others: embeddings, unembedding, norms, biases, routers."""

    def matrices(self, axes: Parameters) -> optax.GradientTransformation:
        """Return the rule of the hidden matrices."""
        raise NotImplementedError

    def direction(self, axes: Parameters) -> optax.GradientTransformation:
        labels = map_axes(lambda names: "adam" if hidden_matrix(names) is None else "matrices", axes)
        return optax.partition({"matrices": self.matrices(axes), "adam": _plain_adam(self.settings)}, labels)


class Muon(WithAdam):
    """Orthogonalised momentum (Jordan 2024; arXiv 2502.16982). Adam's part may have a rate of its own."""

    # Muon's matrices are orthogonal times the root of their longer side (arXiv 2502.16982): of the spectral norm, which should stay (arXiv
    # 2310.17813), one root. With `update_rms: null` they are times a ratio of their sides, which stays.
    BY_ROOT, BY_RATIO = -0.5, 0.0

    own: MuonConfig

    def __init__(self, muon: MuonConfig, optimizer: OptimizerConfig, precision_compute: str) -> None:
        super().__init__(muon, optimizer)
        self._dtype = "bfloat16" if precision_compute == "bfloat16" else "float32"

    def matrices(self, axes: Parameters) -> optax.GradientTransformation:
        return scale_by_muon(self.own, self._dtype, axes)

    def width_power(self, axes: Names) -> float:
        if hidden_matrix(axes) is None:
            return super().width_power(axes)
        return self.BY_RATIO if self.own.update_rms is None else self.BY_ROOT

    def decayed(self, axes: Parameters) -> optax.GradientTransformation:
        """Decay follows the rate of Adam's part, unless it is independent of rates."""
        settings = self.settings
        if self.own.adam_lr is None:
            return super().decayed(axes)
        ratio = self.own.adam_lr / settings.peak_lr
        rates = map_axes(lambda names: ratio if hidden_matrix(names) is None else 1.0, axes)
        own = jax.tree.map(lambda rate: 1.0 if settings.decays_independently else rate, rates)
        decays = jax.tree.map(lambda decays, factor: settings.decay_per_rate * factor if decays else 0.0, self.decaying(axes), own)

        def decayed(update: Any, param: Any, rate: float, decay: float) -> Any:
            update = update if rate == 1 else rate * update
            return update + decay * param if decay else update

        def step(updates: Any, params: Any) -> Any:
            return jax.tree.map(decayed, updates, params, rates, decays)

        return optax.stateless(step)


class Soap(WithAdam):
    """Adam in the eigenbasis of Shampoo's covariances (arXiv 2409.11321)."""

    own: SoapConfig

    def matrices(self, axes: Parameters) -> optax.GradientTransformation:
        return scale_by_soap(self.settings, self.own, axes)


class Lion(UpdateRule):
    """The sign of an interpolated momentum (arXiv 2302.06675)."""

    def direction(self, axes: Parameters) -> optax.GradientTransformation:
        return optax.scale_by_lion(b1=self.settings.beta1, b2=self.settings.beta2)


class Adafactor(UpdateRule):
    """Factored second moments without a first moment (arXiv 1804.04235, algorithm 4). Updates may be relative to the parameters."""

    own: AdafactorConfig

    def direction(self, axes: Parameters) -> optax.GradientTransformation:
        return adafactor(self.own, axes)

    def decayed(self, axes: Parameters) -> optax.GradientTransformation:
        """Decay is relative to the parameters as the updates are, unless it is independent of rates."""
        settings, own = self.settings, self.own
        if not own.relative or settings.decays_independently:
            return super().decayed(axes)
        matrix = self.decaying(axes)

        def shrunk(names: Names, decays: bool, update: Any, param: Any) -> Any:
            return update + settings.decay_per_rate * relative_scale(own, names, param) * param if decays else update

        return optax.stateless(lambda updates, params: map_axes(shrunk, axes, matrix, updates, params))


class AdEMAMix(UpdateRule):
    """Adam with a second, slow average of gradients (arXiv 2409.03137). `alpha` rises linearly, and the half-life of the slow average about
    linearly, over `ademamix.warmup_steps` (section 3).
    """

    own: AdemamixConfig

    def __init__(self, ademamix: AdemamixConfig, optimizer: OptimizerConfig, total_steps: int) -> None:
        super().__init__(ademamix, optimizer)
        self._steps = ademamix.warmup_steps or total_steps

    def direction(self, axes: Parameters) -> optax.GradientTransformation:
        settings, own = self.settings, self.own

        def done(updates: Any) -> Array:
            return jnp.minimum((updates + 1).astype(jnp.float32) / self._steps, 1.0)

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


class ScheduleFree(UpdateRule):
    """Adam without a first moment: an average of the iterates stands for it, and for a decaying rate (arXiv 2405.15682, algorithm 1)."""

    def direction(self, axes: Parameters) -> optax.GradientTransformation:
        return optax.scale_by_rms(decay=self.settings.beta2, eps=self.settings.eps, eps_in_sqrt=False, bias_correction=True)

    def at_rate(self, rate: Callable[[Any], Any]) -> optax.GradientTransformation:
        return at_rate_and_averaged(rate, self.settings.beta1)


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
