"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon): momentum of hidden matrices, orthogonalised by Newton-Schulz iterations."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int32

from maxlm.config.sections.optimizer import MuonConfig
from maxlm.models.parameters import Parameters
from maxlm.models.parametrization import WRITERS, part_of
from maxlm.training.matrices import SCOPE, Names, devices, gather, hidden_matrices, spread
from maxlm.training.small_states import path_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the odd polynomial of degree 5, the steepest at 0 (Jordan 2024)
EPSILON = 1e-7  # added to norms (Jordan 2024)


class MuonState(NamedTuple):
    updates: Int32[Array, ""]
    mu: Parameters


def scale_by_muon(settings: MuonConfig, dtype: str, axes: Parameters) -> optax.GradientTransformation:
    """The orthogonalised momentum, as in Jordan's code and `torch.optim.Muon`. For hidden matrices only. `dtype`: of the products.

    Momentum has no correction for its start: orthogonalisation removes every scale, and correcting momentum and gradient by two different
    powers, as NAdam and `optax.contrib.muon` do, would only mix more of the gradient into the first updates.
    """
    named, beta = hidden_matrices(axes), settings.momentum

    def init(params: Parameters) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    @jax.named_scope(SCOPE)
    def update(grads: Parameters, state: Any, params: Parameters | None = None) -> tuple[Parameters, MuonState]:
        mu = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.mu, grads)
        seen = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, mu, grads) if settings.nesterov else mu
        leaves: Any
        tree: Any
        leaves, tree = jax.tree_util.tree_flatten_with_path(seen)
        dims = [named[path_of(path)] for path, _ in leaves]
        stacks = [own.as_matrices(leaf) for own, (_, leaf) in zip(dims, leaves, strict=True)]
        whole = zip(dims, leaves, orthogonalized(stacks, settings.iterations, jnp.dtype(dtype)), strict=True)
        updates = [own.as_parameter(_scale(settings, path_of(path), x) * x, leaf.shape) for own, (path, leaf), x in whole]
        return tree.unflatten(updates), MuonState(state.updates + 1, mu)

    return optax.GradientTransformation(init, update)


def _scale(settings: MuonConfig, name: Names, x: Float[Array, "B E O"]) -> float:
    embed, others = x.shape[1:]
    if settings.update_rms is not None:
        return settings.update_rms * math.sqrt(max(embed, others))
    inputs, outputs = (others, embed) if part_of(name) in WRITERS else (embed, others)
    return math.sqrt(max(1, outputs / inputs))


def orthogonalized(stacks: Sequence[Float[Array, "B E O"]], iterations: int, dtype: jnp.dtype) -> list[Float[Array, "B E O"]]:
    """Each matrix with singular values near 1, in float32. Groups of stacks are spread over all devices together."""
    found: dict[int, Array] = {}
    for group in groups([x.shape for x in stacks], devices()):
        width = max(stacks[i].shape[2] for i in group)
        # A matrix beside zeros has the same polynomial beside zeros.
        alike = [jnp.pad(_unit(stacks[i]).astype(dtype), ((0, 0), (0, 0), (0, width - stacks[i].shape[2]))) for i in group]
        done = gather(newton_schulz(spread(alike), iterations), [len(x) for x in alike])
        for i, x in zip(group, done, strict=True):
            found[i] = x[:, :, : stacks[i].shape[2]].astype(jnp.float32)
    return [found[i] for i in range(len(stacks))]


def groups(shapes: Sequence[tuple[int, ...]], count: int) -> list[list[int]]:
    """Stacks that are spread over `count` devices together: all of one width as they are in, or all, padded to the widest. The one with the
    least work for the busiest device.
    """
    if not shapes:
        return []
    widths = dict.fromkeys(shape[1:] for shape in shapes)
    alike = [[i for i, shape in enumerate(shapes) if shape[1:] == width] for width in widths]
    together = [list(range(len(shapes)))] if len({shape[1] for shape in shapes}) == 1 else alike

    def work(group: list[int]) -> int:
        rows, width = shapes[group[0]][1], max(shapes[i][2] for i in group)
        small, large = sorted((rows, width))
        return -(-sum(shapes[i][0] for i in group) // count) * small * small * (2 * large + small)

    return min(alike, together, key=lambda plan: sum(map(work, plan)))


def newton_schulz(x: Float[Array, "B m n"], iterations: int) -> Float[Array, "B m n"]:
    """`iterations` of x -> a x + (b A + c A A) x with A = x x^T, for matrices of Frobenius norm 1. In the dtype of `x`."""
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.swapaxes(1, 2) if tall else x
    with jax.default_matmul_precision("highest"):  # or a TPU would round float32 to bfloat16
        for _ in range(iterations):
            gram = x @ x.swapaxes(1, 2)
            x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.swapaxes(1, 2) if tall else x


def _unit(x: Float[Array, "B E O"]) -> Float[Array, "B E O"]:
    return x / (jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2), keepdims=True)) + EPSILON)
