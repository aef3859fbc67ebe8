"""Prefetched batches that tell what training waited for: reading the store, packing rows, or the transfer to devices."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from maxlm.data.prefetch import Prefetcher

Cause = Literal["read", "pack", "transfer"]


class Span(NamedTuple):
    """Seconds of `time.monotonic`."""

    cause: Cause
    began: float
    ended: float


class Spans:
    """Times spent on making one batch, by cause."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def measure(self, cause: Cause) -> Iterator[None]:
        """The block is work of that kind."""
        began = time.monotonic()
        yield  # no `finally`: after an error there is no batch
        self.spans.append(Span(cause, began, time.monotonic()))

    def within(self, began: float, ended: float) -> dict[Cause, float]:
        """Seconds by cause between two times."""
        seconds: dict[Cause, float] = {}
        for span in self.spans:
            seconds[span.cause] = seconds.get(span.cause, 0.0) + max(0.0, min(span.ended, ended) - max(span.began, began))
        return seconds


class Batches(Prefetcher[Any]):
    """Prefetched batches. `waited`: seconds of the last `get` by cause.

    While training waits for a batch the thread makes this one and no other, so each moment of the wait lies in one of its spans; what is
    left of a wait is time in which the thread did not run. No process waits for another here: each reads the rows of its own devices.
    """

    def __init__(self, make: Callable[[int, Spans], Any], steps: Iterable[int], depth: int) -> None:
        def timed(step: int) -> tuple[Any, Spans]:
            spans = Spans()
            return make(step, spans), spans

        super().__init__(timed, steps, depth)
        self.waited: dict[Cause, float] = {}

    def get(self, gives_up: Callable[[], bool] = lambda: False) -> Any:
        """The next batch, as `Prefetcher.get`."""
        began, self.waited = time.monotonic(), {}
        result = super().get(gives_up)
        if result is None:
            return None
        batch, spans = result
        self.waited = spans.within(began, time.monotonic())
        return batch
