"""SOAP (Vyas et al. 2024, arXiv 2409.11321, algorithm 3): Adam in the eigenbasis of Shampoo's preconditioner. For hidden matrices only."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int32

from maxlm.config.optimizer import OptimizerConfig, SoapConfig
from maxlm.models.parameters import Parameters
from maxlm.training.matrices import MatrixDims, gather, hidden_matrices, spread
from maxlm.training.small_states import path_of


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

    def update(grads: Parameters, state: Any, params: Parameters | None = None) -> tuple[Parameters, SoapState]:
        leaves: Any
        tree: Any
        leaves, tree = jax.tree_util.tree_flatten_with_path(grads)
        kept = zip(*(tree.flatten_up_to(part) for part in state[1:]), strict=True)
        with jax.default_matmul_precision("highest"):  # a TPU would round covariances to bfloat16, and small directions would be noise
            done = [
                _update(settings, own, named[path_of(path)], state.updates, grad, parts)
                for (path, grad), parts in zip(leaves, kept, strict=True)
            ]
        updates, *parts = (tree.unflatten(each) for each in zip(*done, strict=True)) if done else [grads] * 7
        return updates, SoapState(state.updates + 1, *parts)

    return optax.GradientTransformation(init, update)


def _update(
    settings: OptimizerConfig, own: SoapConfig, dims: MatrixDims, updates: Int32[Array, ""], grad: Array, parts: tuple[Any, ...]
) -> tuple[Array | None, ...]:
    """(update, mu, nu, left, left basis, right, right basis) of one parameter, of matrices spread over devices."""
    count, moments, squares = len(dims.as_matrices(grad)), parts[:2], parts[2:]
    g, mu, nu = (spread(dims.as_matrices(x)) for x in (grad, *moments))
    left, right = (_side(dims, *squares[i : i + 2]) for i in (0, 2))
    first, b1, b2 = updates == 0, settings.beta1, settings.beta2
    turned = _rotate(g, left, right)
    mu = jnp.where(first, mu, b1 * mu + (1 - b1) * g)
    nu = jnp.where(first, nu, b2 * nu + (1 - b2) * turned * turned)
    seen = jnp.maximum(updates, 1).astype(jnp.float32)
    one, two = 1 - jnp.float32(b1) ** seen, 1 - jnp.float32(b2) ** seen
    update = _rotate(mu / one, left, right) / (jnp.sqrt(nu / two) + settings.eps)
    update = jnp.where(first, 0.0, _rotate(update, left, right, back=True))
    due = updates % own.every == 0
    left, right = (_learnt(side, g if i == 0 else g.swapaxes(1, 2), b2, first, due) for i, side in enumerate((left, right)))

    def stored(x: Array | None, shape: tuple[int, ...]) -> Array | None:
        return None if x is None else dims.as_parameter(gather(x, count), shape)

    shapes = [dims.squares(grad.shape, left=is_left) for is_left in (True, False)]
    sides = [stored(x, shape) for side, shape in zip((left, right), shapes, strict=True) for x in (side or (None, None))]
    return *(stored(x, grad.shape) for x in (update, mu, nu)), *sides


def _side(dims: MatrixDims, covariance: Array | None, basis: Array | None) -> Side | None:
    if covariance is None or basis is None:
        return None
    return Side(spread(dims.as_matrices(covariance)), spread(dims.as_matrices(basis)))


def _rotate(x: Float[Array, "B E O"], left: Side | None, right: Side | None, *, back: bool = False) -> Float[Array, "B E O"]:
    """Into the bases of both sides, or `back`."""
    if left is not None:
        x = (left.basis if back else left.basis.swapaxes(1, 2)) @ x
    if right is not None:
        x = x @ (right.basis.swapaxes(1, 2) if back else right.basis)
    return x


def _learnt(side: Side | None, g: Float[Array, "B n k"], decay: float, first: Bool[Array, ""], due: Bool[Array, ""]) -> Side | None:
    """The covariance with one more gradient; and a new basis where it is `due`: eigenvectors at the first, then a step of power iteration
    and a QR decomposition (algorithm 4).
    """
    if side is None:
        return None
    covariance = decay * side.covariance + (1 - decay) * (g @ g.swapaxes(1, 2))

    def eigenvectors() -> Array:
        return jnp.linalg.eigh(covariance)[1][..., ::-1]

    def iterated() -> Array:
        return jnp.linalg.qr(covariance @ side.basis)[0]

    return Side(covariance, jax.lax.cond(due, lambda: jax.lax.cond(first, eigenvectors, iterated), lambda: side.basis))
