"""Sums of gradients over `mesh.data` where that crosses slow links, compressed (`maxlm.parallel.reduce`), and their feedback.

Matrices are compressed: each device's own share of them, once the devices of a slice have summed it in full precision. Norms, biases and
routers are summed as ever. What is compressed, where `e` is the error that a device kept of the sums before:

int8         gradient + e
sign         momentum + e, with the device's gradient in the momentum that all share (1-bit Adam, arXiv 2102.02888, algorithm 1)
top_k        velocity + e, the momentum of the device's own gradients (Deep Gradient Compression, arXiv 1712.01887, section 3.1)
with diloco  the workers' change + e, by each of the three codecs

Section 3.2 of the last takes what was sent out of the velocity as well. Here it does not: a number that is sent every time would move by a
tenth of its gradient (1 - beta1), and the loss of a small model was worse by 2.7% (docs/lab/compression.md).

The feedback is float32 and part of the state: of every device along `data` its error, and for top_k its velocity.
"""

from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32

from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.config.schema import CompressionConfig, DilocoConfig, ModelConfig
from maxlm.config.sections.compression import TopKCompression
from maxlm.models import abstract_parameters, parameter_axes, parameter_specs
from maxlm.models.parameters import Parameters, is_matrix
from maxlm.objectives import Sums
from maxlm.parallel.reduce import Codec, Int8, Sign, TopK, reduce_compressed
from maxlm.training.step import TrainState
from maxlm.training.transform import Transform

AXIS = "data"
ERROR, VELOCITY = "error", "velocity"
FIRST_DENSITY = 1 / 4  # of a ramp; each stage has a quarter of the one before

Named = dict[str, Array]  # by the name of a parameter, as in a checkpoint
Feedback = dict[str, Named]


class CompressedSums(Transform):
    """Sums over the devices along `mesh.data`, each of which gives gradients stacked along a leading dim that `data` splits."""

    name, phase = "feedback", "sum"

    @classmethod
    def from_config(
        cls,
        settings: CompressionConfig,
        device_mesh: Mesh,
        model: ModelConfig,
        optimizer_beta1: float,
        precision_compute: str,
        diloco: DilocoConfig | None,
    ) -> Self:
        """Compress gradients, or with `diloco` the changes of workers."""
        return cls(settings, device_mesh, model, optimizer_beta1, precision_compute, of_changes=diloco is not None)

    def __init__(
        self, settings: CompressionConfig, mesh: Mesh, model: ModelConfig, beta1: float, compute: str, *, of_changes: bool = False
    ) -> None:
        """`of_changes`: of the changes of weights by workers, in float32, and not of gradients in the dtype `compute`."""
        self._settings, self._mesh, self._beta1 = settings, mesh, beta1
        self._dtype = jnp.dtype("float32" if of_changes else compute)  # of sums without compression
        shapes = abstract_parameters(model)
        self._tree, names = jax.tree.structure(shapes), list(named_leaves(shapes))
        specs = jax.tree.leaves(parameter_specs(model, mesh), is_leaf=lambda leaf: isinstance(leaf, P))
        axes = jax.tree.leaves(parameter_axes(model), is_leaf=lambda leaf: isinstance(leaf, tuple))
        self._specs = dict(zip(names, specs, strict=True))
        self._matrices = [name for name, one in zip(names, axes, strict=True) if is_matrix(one)]
        self._kept = (ERROR, VELOCITY) if settings.kind == "top_k" and not of_changes else (ERROR,)

    @property
    def shares(self) -> int:
        """Devices along `data`."""
        return int(self._mesh.shape[AXIS])

    def first(self, params: Parameters) -> tuple[Parameters, Feedback]:
        """The feedback before the first sum: no error is owed."""
        leaves = named_leaves(params)
        zeros = {n: jnp.zeros((self.shares, *leaves[n].shape), jnp.float32) for n in self._matrices}
        return params, dict.fromkeys(self._kept, zeros)

    def shardings(self, params: Parameters, mesh: Mesh) -> Any:
        """Split as the parameters, and along `data`."""
        return {kind: {name: NamedSharding(mesh, P(AXIS, *self._specs[name])) for name in self._matrices} for kind in self._kept}

    def reduce(self, state: TrainState, sums: Sums, gradient: Parameters) -> tuple[Sums, Parameters, Feedback]:
        """Sum the gradients; after the warm-up of sign and top_k the result is momentum."""
        shared = {} if self._settings.kind == "int8" else named_leaves(optax.tree_utils.tree_get(state.opt_state, "mu"))
        total, feedback = self._sum(state.step - state.skipped, gradient, shared, state.extra[self.name])
        return sums, total, feedback

    def of_changes(self, updates: Int32[Array, ""], changes: Parameters, feedback: Feedback) -> tuple[Parameters, Feedback]:
        """(sum of the changes of weights, feedback). `updates`: that were made before, of which the first `warmup_steps` are exact."""
        return self._sum(updates, changes, {}, feedback)

    def _sum(self, updates: Array, addends: Parameters, shared: Named, feedback: Feedback) -> tuple[Parameters, Feedback]:
        """`shared`: the momentum of all, {} where the addends themselves are summed."""
        whole = {name: self._specs[name] for name in shared}
        own, kept = ({n: P(AXIS, *self._specs[n]) for n in names} for names in (self._specs, self._matrices))
        split = dict.fromkeys(self._kept, kept)
        run = jax.shard_map(self._on_device, in_specs=(P(), own, whole, split), out_specs=(self._specs, split), check_vma=False)
        totals, feedback = run(updates, named_leaves(addends), shared, feedback)
        return jax.tree.unflatten(self._tree, [totals[name] for name in self._specs]), feedback

    def _on_device(self, updates: Array, addends: Named, shared: Named, feedback: Feedback) -> tuple[Named, Feedback]:
        warm = updates < self._settings.warmup_steps
        exact = {name: _plain(addends[name]) for name in self._specs if name not in self._matrices}
        if shared:
            exact = {name: jnp.where(warm, one, self._with_momentum(shared[name], one)) for name, one in exact.items()}
        given = {name: addends[name] for name in self._matrices}, shared, feedback
        codecs = self._codecs()
        branches = [partial(self._compressed, codec, updates == self._settings.warmup_steps) for codec in codecs]
        if not self._settings.warmup_steps:
            totals, feedback = branches[0](*given)
        else:
            stage = jnp.where(warm, 0, 1 + self._stage(updates - self._settings.warmup_steps, len(codecs)))
            totals, feedback = lax.switch(stage, [self._uncompressed, *branches], *given)
        return {**exact, **totals}, feedback

    def _uncompressed(self, addends: Named, shared: Named, feedback: Feedback) -> tuple[Named, Feedback]:
        return {name: _plain(one.astype(self._dtype)) for name, one in addends.items()}, feedback

    def _compressed(
        self, codec: Codec, first: Bool[Array, ""], addends: Named, shared: Named, feedback: Feedback
    ) -> tuple[Named, Feedback]:
        """`first`: the sum after the warm-up, where the velocity of a device begins as its part of the momentum."""
        totals: Named = {}
        after: Feedback = {kind: {} for kind in feedback}
        for name, stacked in addends.items():
            addend = stacked[0].astype(jnp.float32)
            if VELOCITY in feedback:
                part = jnp.where(first, shared[name] / self.shares, feedback[VELOCITY][name][0])
                addend = self._with_momentum(part, addend)
            elif shared:
                addend = self._with_momentum(shared[name] / self.shares, addend)
            owed = addend + feedback[ERROR][name][0]
            totals[name], error = reduce_compressed(codec, owed, AXIS)
            after[ERROR][name] = error[None]
            if VELOCITY in feedback:
                after[VELOCITY][name] = addend[None]
        return totals, after

    def _with_momentum(self, momentum: Array, gradient: Array) -> Float[Array, "..."]:
        return self._beta1 * momentum + (1 - self._beta1) * gradient

    def _codecs(self) -> list[Codec]:
        """By which sums after the warm-up are compressed, one stage after another."""
        settings = self._settings
        if not isinstance(settings, TopKCompression):
            return [Int8() if settings.kind == "int8" else Sign()]
        densities = [settings.density]
        while settings.ramp_steps and 4 * densities[0] <= FIRST_DENSITY:
            densities.insert(0, 4 * densities[0])
        return [TopK(density) for density in densities]

    def _stage(self, updates: Array, stages: int) -> Int32[Array, ""]:
        """Number of the codec, `updates` after the warm-up."""
        if stages == 1:
            return jnp.int32(0)
        assert isinstance(self._settings, TopKCompression), "the others have one"
        each = -(-self._settings.ramp_steps // (stages - 1))
        return jnp.minimum(updates // each, stages - 1)


def _plain(stacked: Array) -> Float[Array, "..."]:
    """The sum over devices, in the dtype of the addends."""
    return lax.psum(stacked[0], AXIS).astype(jnp.float32)
