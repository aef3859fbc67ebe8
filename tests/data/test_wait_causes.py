"""Waits for a batch are told apart by what its thread was doing meanwhile."""

import contextlib
import time

from data_cases import all_of

from maxlm.data.prefetch import Batches, Span, Spans


def made(seconds):
    def make(step, spans):
        for cause, long in seconds.items():
            with spans.measure(cause):
                time.sleep(long)
        return step

    return make


def test_parts_of_a_wait_are_those_of_its_batch():
    """All together are no more than there was."""
    with contextlib.closing(Batches(made({"read": 0.05, "pack": 0.02, "transfer": 0.01}), range(3), 1)) as batches:
        began = time.monotonic()
        assert batches.get() == 0
        waited, causes = time.monotonic() - began, dict(batches.waited)
    assert set(causes) == {"read", "pack", "transfer"}
    assert 0 < sum(causes.values()) <= waited


def test_a_batch_that_is_ready_was_not_waited_for():
    """Its own work lay before the wait."""
    with contextlib.closing(Batches(made({"read": 0.03}), range(1), 1)) as batches:
        time.sleep(0.3)
        batches.get()
        assert batches.waited["read"] < 0.01
        assert all_of(batches) == []
        assert batches.waited == {}


def test_spans_are_cut_at_both_ends():
    spans = Spans()
    spans.spans = [Span("pack", 1.0, 2.0), Span("read", 2.0, 5.0), Span("pack", 5.0, 7.0), Span("transfer", 7.0, 8.0)]
    assert spans.within(0.0, 9.0) == {"pack": 3.0, "read": 3.0, "transfer": 1.0}
    assert spans.within(3.0, 5.5) == {"pack": 0.5, "read": 2.0, "transfer": 0.0}
    assert spans.within(8.0, 9.0) == {"pack": 0.0, "read": 0.0, "transfer": 0.0}
