"""Programs of saves that are compiled ahead, while training runs: the first save would wait for them."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import NamedSharding


class AheadOfTime:
    """A jitted function of a tuple of arrays. Arrays of shapes, dtypes and shardings that were announced by `prepare` find it compiled;
    others compile it when they come.
    """

    def __init__(self, function: Callable[[tuple[Any, ...]], Any], out_sharding: NamedSharding | None) -> None:
        self._jitted = jax.jit(function, out_shardings=out_sharding)
        self._compiled: dict[Any, Future[Any]] = {}

    def prepare(self, leaves: Sequence[Any]) -> Future[Any]:
        """Compile in a thread for `leaves`, which may be abstract. For arrays on devices of one mesh."""
        kinds = _kinds(leaves)
        if kinds not in self._compiled:
            pool = ThreadPoolExecutor(1, thread_name_prefix="maxlm-compile-ahead")
            abstract = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in leaves)
            self._compiled[kinds] = pool.submit(lambda: self._jitted.lower(abstract).compile())
            pool.shutdown(wait=False)
        return self._compiled[kinds]

    def __call__(self, leaves: Sequence[jax.Array]) -> Any:
        compiled = self._compiled.get(_kinds(leaves))
        if compiled is not None and compiled.exception() is None:  # waits until it is compiled; what failed is compiled again, and raises
            return compiled.result()(tuple(leaves))
        return self._jitted(tuple(leaves))


def _kinds(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((tuple(leaf.shape), leaf.dtype, _placement(leaf.sharding)) for leaf in leaves)


@functools.cache
def _placement(sharding: Any) -> Any:
    """A sharding, the same for specs that differ in trailing dims that are not split."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = list(sharding.spec)
    while spec and spec[-1] is None:
        spec.pop()
    return sharding.mesh, tuple(spec), sharding.memory_kind
