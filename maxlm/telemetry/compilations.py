"""Compilations of this process: their seconds, hits of the persistent cache, and recompilations of the training step, as events.

Counted by jax.monitoring, which tells every listener of each program that is traced, lowered and compiled, or loaded from the cache.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from maxlm.telemetry.formatting import duration
from maxlm.telemetry.observer import Event

STEP = "train_step"  # name of the training step among programs
WORTH_S = 0.5  # least seconds of compilation since the last event for a new event
NAMED = 5  # programs that an event names: those that took longest

_TRACE, _LOWER = "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILE = "/jax/core/compile/backend_compile_duration"  # sent for a program from the cache, too
_HIT, _MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"

_reason = threading.local()


@contextlib.contextmanager
def because(reason: str) -> Iterator[None]:
    """Programs that this thread compiles in the block are compiled for `reason`: an alarm says it."""
    before, _reason.text = getattr(_reason, "text", ""), reason
    try:
        yield
    finally:
        _reason.text = before


class Compiled(NamedTuple):
    """A program, and the seconds that its compilation took, or its loading from the cache. `cached`: None where no cache was asked."""

    name: str
    seconds: float
    cached: bool | None
    reason: str


class Compilations:
    """Counts while the context is open. Threads may compile at the same time."""

    def __init__(self) -> None:
        self._lock, self._thread = threading.Lock(), threading.local()
        self._programs: list[Compiled] = []  # since the last event
        self._trace_s = self._lower_s = 0.0
        self._running = False  # the first update is done: what is compiled from now on makes training wait

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._on_event)
        jax.monitoring.unregister_event_duration_listener(self._on_duration)

    def _on_event(self, event: str, **_: Any) -> None:
        if event in (_HIT, _MISS):  # the duration of the same program follows in the same thread
            self._thread.cached = event == _HIT

    def _on_duration(self, event: str, duration_secs: float, **data: Any) -> None:
        if event not in (_TRACE, _LOWER, _COMPILE):
            return
        with self._lock:
            if event == _TRACE:
                self._trace_s += duration_secs
            elif event == _LOWER:
                self._lower_s += duration_secs
            else:
                program = str(data.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
                cached, self._thread.cached = getattr(self._thread, "cached", None), None
                self._programs.append(Compiled(program, duration_secs, cached, getattr(_reason, "text", "")))

    def take(self, step: int) -> list[Event]:
        """Events since the last call: the sum of what was compiled, if it took long or is the first, and an alarm for each recompilation of
        the training step. Call it after updates.
        """
        with self._lock:
            programs, trace_s, lower_s = self._programs, self._trace_s, self._lower_s
            compile_s = sum(program.seconds for program in programs)
            again = [program for program in programs if program.name == STEP] if self._running else []
            if (programs and not self._running) or again or trace_s + lower_s + compile_s >= WORTH_S:
                self._programs, self._trace_s, self._lower_s = [], 0.0, 0.0
            else:
                programs = []
            self._running = True
        if not programs:
            return []
        longest = sorted(programs, key=lambda program: -program.seconds)[:NAMED]
        data = {
            "programs": len(programs),
            "trace_s": round(trace_s, 3),
            "lower_s": round(lower_s, 3),
            "compile_s": round(compile_s, 3),
            "cache_hits": sum(program.cached is True for program in programs),
            "cache_misses": sum(program.cached is False for program in programs),
            "longest": [{"name": program.name, "seconds": round(program.seconds, 3), "cached": program.cached} for program in longest],
        }
        return [Event("compile", step, data=data), *(_alarm(step, program) for program in again)]


def _alarm(step: int, program: Compiled) -> Event:
    why = program.reason or "the reason is not known; shapes, dtypes or shardings of the state or the batch have changed"
    reason = f"the training step was compiled again, in {duration(program.seconds)}: {why}"
    return Event("alarm", step, data={"cause": "recompilation", "reason": reason, "seconds": round(program.seconds, 3)})
