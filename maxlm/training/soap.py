"""SOAP (Vyas et al. 2024, arXiv 2409.11321, algorithm 3): Adam in the eigenbasis of Shampoo's preconditioner. For hidden matrices only."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int32

from maxlm.config.sections.optimizer import OptimizerConfig, SoapConfig
from maxlm.models.parameters import Parameters
from maxlm.training.matrices import SCOPE, MatrixDims, each_on_its_device, gather, hidden_matrices, spread
from maxlm.training.rounding import random_bits, uniform
from maxlm.training.small_states import path_of

RESOLVED = 3e-5  # of the largest eigenvalue; float32 has no direction of smaller ones
ROUNDING = (
    1e-6  # of the largest rotated gradient: smaller ones, as of weights without gradients, are rounding errors, which Adam would enlarge
)
Columns = tuple[Any, ...]  # arrays of one parameter: gradient, mu, nu, left, left basis, right, right basis; None: no basis


class SoapState(NamedTuple):
    """`mu`: mean of gradients. `nu`: of the squares of rotated ones. `left`, `right`: mean of G G^T and of G^T G for each matrix, and their
    bases; those of sides that are not rotated are absent.
    """

    updates: Int32[Array, ""]
    mu: Parameters
    nu: Parameters
    left: Parameters
    left_basis: Parameters
    right: Parameters
    right_basis: Parameters


class Side(NamedTuple):
    """Covariance of one side of matrices, and its basis: columns."""

    covariance: Float[Array, "B n n"]
    basis: Float[Array, "B n n"]


def scale_by_soap(settings: OptimizerConfig, own: SoapConfig, axes: Parameters) -> optax.GradientTransformation:
    """The first update is zero: it only finds the bases, so that no gradient is rotated by a basis that has seen it."""
    named = hidden_matrices(axes)

    def init(params: Parameters) -> SoapState:
        def square(path: Any, param: Array, *, left: bool) -> Array | None:
            shape = named[path_of(path)].squares(param.shape, left=left)
            return jnp.zeros(shape, jnp.float32) if shape[named[path_of(path)].embed] <= own.largest else None

        sides = [
            jax.tree_util.tree_map_with_path(lambda *of, left=left: square(*of, left=left), params) for left in (True, True, False, False)
        ]
        moments = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return SoapState(jnp.zeros((), jnp.int32), *moments, *sides)

    @jax.named_scope(SCOPE)
    def update(grads: Parameters, state: Any, params: Parameters | None = None) -> tuple[Parameters, SoapState]:
        leaves: Any
        tree: Any
        leaves, tree = jax.tree_util.tree_flatten_with_path(grads)
        if not leaves:
            return grads, state._replace(updates=state.updates + 1)
        dims = [named[path_of(path)] for path, _ in leaves]
        columns = zip((leaf for _, leaf in leaves), *(tree.flatten_up_to(part) for part in state[1:]), strict=True)
        found = _by_shape(partial(_update, settings, own), state.updates, dims, list(columns))
        updates, *parts = (tree.unflatten(each) for each in zip(*found, strict=True))
        return updates, SoapState(state.updates + 1, *parts)

    return optax.GradientTransformation(init, update)


def _by_shape(
    function: Callable[[Columns, Array], Columns], updates: Array, dims: Sequence[MatrixDims], leaves: Sequence[Columns]
) -> list[Columns]:
    """`function` of each parameter's columns. Matrices of one shape are spread over all devices together."""
    found: dict[int, Columns] = {}
    shapes = [own.as_matrices(leaf[0]).shape for own, leaf in zip(dims, leaves, strict=True)]
    for shape in dict.fromkeys(shape[1:] for shape in shapes):
        group = [i for i, other in enumerate(shapes) if other[1:] == shape]
        own, columns = [dims[i] for i in group], list(zip(*(leaves[i] for i in group), strict=True))
        done = each_on_its_device(function, tuple(_joined(own, column) for column in columns), updates)
        apart = zip(*(_apart(own, old, new) for old, new in zip(columns, done, strict=True)), strict=True)
        found.update(zip(group, apart, strict=True))
    return [found[i] for i in range(len(leaves))]


def _joined(dims: Sequence[MatrixDims], arrays: Columns) -> Array | None:
    """Matrices of all `arrays`, spread; None if they are absent."""
    stacks = [own.as_matrices(x) for own, x in zip(dims, arrays, strict=True) if x is not None]
    return spread(stacks) if stacks else None


def _apart(dims: Sequence[MatrixDims], old: Columns, new: Array | None) -> Columns:
    """The inverse of `_joined`: arrays of the shapes of `old`."""
    if new is None:
        return (None,) * len(dims)
    shapes = [x.shape for x in old if x is not None]
    counts = [math.prod(shape[dim] for dim in own.stacked) for own, shape in zip(dims, shapes, strict=True)]
    return tuple(own.as_parameter(x, shape) for own, x, shape in zip(dims, gather(new, counts), shapes, strict=True))


def _update(settings: OptimizerConfig, own: SoapConfig, columns: Columns, updates: Int32[Array, ""]) -> Columns:
    """(update, mu, nu, left, left basis, right, right basis) of matrices on one device, from these with the gradient for the update."""
    g, mu, nu, *squares = columns
    left, right = (None if squares[i] is None else Side(*squares[i : i + 2]) for i in (0, 2))
    first, b1, b2 = updates == 0, settings.beta1, settings.beta2
    with jax.default_matmul_precision("highest"):  # a TPU would round covariances to bfloat16, and small directions would be noise
        turned = _rotate(g, left, right)
        mu = jnp.where(first, mu, b1 * mu + (1 - b1) * g)
        nu = jnp.where(first, nu, b2 * nu + (1 - b2) * turned * turned)
        seen = jnp.maximum(updates, 1).astype(jnp.float32)
        one, two = 1 - jnp.float32(b1) ** seen, 1 - jnp.float32(b2) ** seen
        root = jnp.sqrt(nu / two)
        update = _rotate(mu / one, left, right) / (root + settings.eps)
        update = jnp.where(root > ROUNDING * jnp.max(root, axis=(1, 2), keepdims=True), update, 0.0)
        update = jnp.where(first, 0.0, _rotate(update, left, right, back=True))
        due = updates % own.every == 0
        left, nu = _learnt(left, g, nu, b2, first, due)
        right, turned = _learnt(right, g.swapaxes(1, 2), nu.swapaxes(1, 2), b2, first, due)
        nu = turned.swapaxes(1, 2)
        return update, mu, nu, *(x for side in (left, right) for x in (side or (None, None)))


def _rotate(x: Float[Array, "B E O"], left: Side | None, right: Side | None, *, back: bool = False) -> Float[Array, "B E O"]:
    """Into the bases of both sides, or `back`."""
    if left is not None:
        x = (left.basis if back else left.basis.swapaxes(1, 2)) @ x
    if right is not None:
        x = x @ (right.basis.swapaxes(1, 2) if back else right.basis)
    return x


def _learnt(
    side: Side | None, g: Float[Array, "B n k"], nu: Float[Array, "B n k"], decay: float, first: Bool[Array, ""], due: Bool[Array, ""]
) -> tuple[Side | None, Float[Array, "B n k"]]:
    """The covariance with one more gradient, a new basis where it is `due`, and `nu` (rows: directions of the basis) in the basis's order.

    A step of power iteration and a QR decomposition (algorithm 4), at the first update from eigenvectors. Directions are sorted before it
    by their estimated eigenvalues, the largest first, as in the authors' code: QR keeps the first and turns the last.
    """
    if side is None:
        return None, nu
    covariance = decay * side.covariance + (1 - decay) * (g @ g.swapaxes(1, 2))

    def renewed() -> tuple[Array, Array]:
        old = jax.lax.cond(first, lambda: _each(lambda x: jnp.linalg.eigh(x)[1][..., ::-1], covariance), lambda: side.basis)
        power = covariance @ old
        eigenvalues = jnp.sum(old * power, axis=1)
        least = RESOLVED * jnp.max(eigenvalues, axis=1, keepdims=True)
        order = jnp.argsort(jnp.maximum(eigenvalues, least), axis=1, descending=True)  # stable: unresolved directions keep their order
        power, old = (jnp.take_along_axis(x, order[:, None, :], axis=2) for x in (power, old))
        size = old.shape[1]
        fixed = uniform(random_bits(0, "SOAP's unresolved directions", jnp.int32(0), (size, size))) - 0.5
        basis = _each(_orthonormal, (power, jnp.where(first, fixed, old)))
        return basis, jnp.take_along_axis(nu, order[:, :, None], axis=1)

    basis, nu = jax.lax.cond(due, renewed, lambda: (side.basis, nu))
    return Side(covariance, basis), nu


def _orthonormal(columns: tuple[Float[Array, "*B n n"], Float[Array, "*B n n"]]) -> Float[Array, "*B n n"]:
    """Orthonormal basis (QR) of the first matrix's columns; columns of the second replace columns that depend on earlier columns.

    A covariance of deficient rank (a matrix that is not square, few tokens, zeros in gradients) has no eigenvectors in its null space: what
    rounding makes of them would differ on every mesh, and with them whole updates.
    """
    power, instead = columns

    def decomposed(_: int, x: Array) -> Array:
        basis, r = jnp.linalg.qr(x)
        rest = jnp.abs(jnp.diagonal(r, axis1=-2, axis2=-1))
        return jnp.where((rest <= RESOLVED * jnp.max(rest, axis=-1, keepdims=True))[..., None, :], instead, basis)

    return jax.lax.fori_loop(0, 2, decomposed, power)  # a loop, since XLA takes minutes to compile one decomposition


def _each(decompose: Callable[[Any], Array], x: Any) -> Float[Array, "B n n"]:
    """`decompose` of each matrix, on a CPU one by one: jax's calls of LAPACK share a batch among the threads that run the program, and wait
    for each other for ever where as many batches as threads are decomposed at once.
    """
    return jax.lax.platform_dependent(x, cpu=lambda x: jax.lax.map(decompose, x), default=decompose)
