"""Which named tensor of a forward pass is the first that is not finite: the pass is traced, and run again with a check of every tensor that
has a name for the remat policy (`checkpoint_name`), in every iteration of every scan.

The traced program is interpreted equation by equation (as in "Writing custom Jaxpr interpreters in JAX", docs.jax.dev). Scans, remat and
jit are entered where they hold a named tensor; all else, kernels and `shard_map` too, runs as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

ENTERED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
}
SCAN, NAME = "scan", "name"


class Mark(NamedTuple):
    """A named tensor, or a scan of `length` iterations over such; `tensors` are in the order in which they are computed."""

    name: str
    length: int = 0
    tensors: tuple["Mark", ...] = ()


def with_checks(function: Callable[..., Any], *arguments: Any) -> tuple[Callable[..., Any], list[Mark]]:
    """(a function that returns the outputs of `function` in a flat list, and for each named tensor if it is finite; the tensors, which are
    known once that was traced). `arguments`: abstract ones. With scans around a tensor, its check has a leading dim for each.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    marks: list[Mark] = []

    def checked(*arguments: Any) -> tuple[list[Any], list[jax.Array]]:
        outputs, found, finite = _run(closed, jax.tree.leaves(arguments))
        marks[:] = found
        return outputs, finite

    return checked, marks


def in_order(marks: Sequence[Mark], finite: Sequence[Any]) -> Iterator[tuple[str, bool]]:
    """(name, finite or not) of every tensor on the host, in the order in which the pass computes them."""
    rest = iter(finite)
    yield from _in_order([(mark, _take(mark, rest)) for mark in marks], ())


def _take(mark: Mark, rest: Iterator[Any]) -> Any:
    return [(inner, _take(inner, rest)) for inner in mark.tensors] if mark.name == SCAN else next(rest)


def _in_order(pairs: Sequence[tuple[Mark, Any]], at: tuple[int, ...]) -> Iterator[tuple[str, bool]]:
    for mark, value in pairs:
        if mark.name == SCAN:
            for i in range(mark.length):
                yield from _in_order(value, (*at, i))
        else:
            yield mark.name, bool(value[at])


def _run(closed: ClosedJaxpr, arguments: Sequence[Any]) -> tuple[list[Any], list[Mark], list[jax.Array]]:
    """(outputs, named tensors, whether each is finite)."""
    jaxpr, marks, finite = closed.jaxpr, [], []
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        inputs, inner = [read(variable) for variable in equation.invars], _inner(equation)
        if inner is None:
            with equation.ctx.manager:
                outputs = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
            outputs = outputs if equation.primitive.multiple_results else [outputs]
            if equation.primitive.name == NAME:
                marks.append(Mark(equation.params["name"]))
                finite.append(jnp.all(jnp.isfinite(inputs[0])))
        else:
            run = _scan if equation.primitive.name == SCAN else lambda _, inner, inputs: _run(inner, inputs)
            outputs, found, checks = run(equation, inner, inputs)
            marks += found
            finite += checks
        values |= zip(equation.outvars, outputs, strict=True)
    return [read(variable) for variable in jaxpr.outvars], marks, finite


def _scan(equation: JaxprEqn, inner: ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[Any], list[Mark], list[jax.Array]]:
    consts, carried = equation.params["num_consts"], equation.params["num_carry"]
    found: list[Mark] = []

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        outputs, found[:], finite = _run(inner, [*inputs[:consts], *carry, *xs])
        return outputs[:carried], (outputs[carried:], finite)

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    carry, (ys, finite) = jax.lax.scan(body, list(inputs[consts : consts + carried]), list(inputs[consts + carried :]), **options)
    return [*carry, *ys], [Mark(SCAN, equation.params["length"], tuple(found))], finite


def _inner(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The program of an equation that holds named tensors; None if it is run as it is."""
    key = "jaxpr" if equation.primitive.name == SCAN else ENTERED.get(equation.primitive.name)
    inner = None if key is None else equation.params[key]
    if isinstance(inner, Jaxpr):
        inner = ClosedJaxpr(inner, ())
    return inner if inner is not None and _has_names(inner.jaxpr) else None


def _has_names(jaxpr: Jaxpr) -> bool:
    return any(equation.primitive.name == NAME or _inner(equation) is not None for equation in jaxpr.eqns)
