"""Agreement among the processes of a run, so that none waits for a collective that others never start.

Every process makes the same calls, in the same order; processes may have different numbers of devices.
"""

import functools
import json
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.base.errors import UnavailableError, UserError, as_user_error, shorten
from maxlm.base.transient import first_line, is_storage_error
from maxlm.cluster.environment import process_label

Value = TypeVar("Value")
_WIDTH = 1024  # bytes of which the width of a text is a multiple: each width is a program of its own


def agree(mine: Value) -> list[Value]:
    """Return the values of all processes, by number. Each must be JSON."""
    if jax.process_count() == 1:
        return [mine]
    text = json.dumps(mine).encode()
    lengths = gather(np.array([len(text)], np.int32))[:, 0]
    return [json.loads(bytes(row[:length])) for row, length in zip(gather(_padded(text, lengths.max())), lengths, strict=True)]


def from_process_0(mine: Value) -> Value:
    """Return the value of process 0, which must be JSON: listings of a network folder may differ for a while."""
    if jax.process_count() == 1:
        return mine
    text = json.dumps(mine).encode() if jax.process_index() == 0 else b""
    length = int(largest(np.array([len(text)], np.int32))[0])
    found: Value = json.loads(bytes(largest(_padded(text, length))[:length]))
    return found


def max_over_processes(code: int) -> int:
    """Return the largest `code` of all processes."""
    return code if jax.process_count() == 1 else int(gather(np.array([code], np.int32)).max())


def on_process_0(do: Callable[[], Value], what: str) -> Value:
    """Return the result, which must be JSON, of `do()` in process 0, which must not communicate. `what` it does, in words.

    If it raises, all processes do: UnavailableError if storage failed; else process 0 raises the same error.
    """
    result, problem = None, None
    if jax.process_index() == 0:
        try:
            result = do()
        except Exception as error:  # any: the other processes must learn of it
            problem = error
    if max_over_processes(int(problem is not None)):
        try:
            if isinstance(problem, UserError) or (problem is not None and not is_storage_error(problem)):
                raise problem
            reason = "see process 0" if problem is None else first_line(problem)
            raise UnavailableError(f"{what} failed: {reason}; try again when the cause is gone. Nothing was changed.") from problem
        finally:
            del problem  # as in `on_all`
    return from_process_0(result)  # type: ignore[return-value]


def on_all(
    do: Callable[[], Value],
    facts: Callable[[Value], Mapping[str, str]] = lambda result: {},
    explain: Callable[[UserError | OSError], UserError] = as_user_error,
) -> Value:
    """Return `do()`, which must not communicate, if it succeeds in all processes and has the same `facts`, name -> value, in them.

    `explain`: makes the error for all of what `do` raises. Raises UserError in all processes alike.
    """
    try:
        result = do()
    except (UserError, OSError) as error:
        problem = explain(error)
        try:
            require_equal({}, problem)
            if problem is error:
                raise
            raise problem from error
        finally:
            del problem  # with its traceback it would keep what `do` held, arrays too, until the next garbage collection
    require_equal(facts(result))
    return result


def require_equal(facts: Mapping[str, str], problem: UserError | None = None) -> None:
    """Compare `facts`, name -> value, across all processes; a name that a process does not have differs from any value.

    `problem`: why this process cannot go on, if it cannot; the others must not wait for it.

    Raises:
        UserError: in all processes alike, naming the host that cannot go on, or that differs from the others, and in what.
        UnavailableError: if the first host that cannot go on has raised one.
    """
    if jax.process_count() == 1:
        if problem is not None:
            raise problem
        return
    mine = {"host": socket.gethostname(), "unavailable": isinstance(problem, UnavailableError), "problem": str(problem or "")}
    answers: list[dict[str, Any]] = agree({**mine, "facts": dict(facts)})
    hosts = [process_label(answer["host"], number) for number, answer in enumerate(answers)]
    for host, answer in zip(hosts, answers, strict=True):
        if answer["problem"]:
            raise (UnavailableError if answer["unavailable"] else UserError)(f"{host}: {answer['problem']}")
    for name in dict.fromkeys(name for answer in answers for name in answer["facts"]):
        values = [answer["facts"].get(name) for answer in answers]
        ((usual, count), *_) = Counter(values).most_common()
        odd = [number for number, value in enumerate(values) if value != usual]
        if odd:
            raise UserError(
                f"{', '.join(hosts[number] for number in odd[:4])}{' and others' if len(odd) > 4 else ''}: {shorten(name)} is "
                f"{_said(values[odd[0]])}, and {_said(usual)} on {count} other{'s' if count > 1 else ''}, such as "
                f"{hosts[values.index(usual)]}; give all hosts the same code, libraries, environment, config and data."
            )


def _said(value: str | None) -> str:
    return "not set" if value is None else shorten(value)


def gather(values: np.ndarray) -> np.ndarray:
    """Return `values` of all processes, stacked by process number; the same shape everywhere. Floats are returned as float32."""
    if jax.process_count() == 1:  # without a program to compile
        return np.asarray(values[None], jax.dtypes.canonicalize_dtype(values.dtype))
    return fetched(_run(_copy, start_row(values)))


def largest(values: np.ndarray) -> np.ndarray:
    """Return the largest value of all processes at each place of `values` (8- or 32-bit integers, the same shape everywhere).

    With zeros in all processes but one it sends that one's values to all.
    """
    return fetched(start_largest(values))


def start_largest(values: np.ndarray) -> Any:
    """Begin to compute `largest`, and do not wait. Returns an array for `fetched`."""
    return values if jax.process_count() == 1 else _run(_largest, start_row(values))


def start_row(values: np.ndarray) -> Any:
    """Return an array with a row for each process on a device of its own, of which `values` is this one's."""
    rows = _one_device_a_process()
    assert isinstance(rows.mesh, Mesh), "of devices"
    mine = jax.device_put(values[None], rows.mesh.local_devices[0])
    return jax.make_array_from_single_device_arrays((jax.process_count(), *values.shape), rows, [mine])


def fetched(started: Any) -> np.ndarray:
    """Return the part of a result that is here. In any thread: it only waits and copies."""
    return started if isinstance(started, np.ndarray) else np.asarray(started.addressable_data(0))


def _run(compute: Callable[[Any], Any], rows: Any) -> Any:
    with jax.set_mesh(rows.sharding.mesh):  # training may have set its own
        return _program(compute, NamedSharding(rows.sharding.mesh, PartitionSpec()))(rows)


def _padded(text: bytes, length: int) -> np.ndarray:
    """Bytes with zeros up to a multiple of `_WIDTH`, `length` at least."""
    padded = np.zeros(-(-int(length) // _WIDTH) * _WIDTH, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return padded


def _copy(rows: Any) -> Any:
    return rows


def _largest(rows: Any) -> Any:
    return rows.max(0)


@functools.cache
def _one_device_a_process() -> NamedSharding:
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[number] for number in sorted(firsts)]), ("process",))
    return NamedSharding(mesh, PartitionSpec("process"))


@functools.cache
def _program(compute: Callable[[Any], Any], everywhere: NamedSharding) -> Any:
    return jax.jit(compute, out_shardings=everywhere)
