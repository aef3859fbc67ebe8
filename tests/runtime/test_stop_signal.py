"""A signal to one process of a cluster ends in all of them what they do together."""

import contextlib

import numpy as np
import pytest

from maxlm.runtime import signals
from maxlm.runtime.signals import StopSignal


@pytest.mark.parametrize("other", [False, True])
def test_a_signal_that_another_process_received_is_known_here(monkeypatch, other):
    monkeypatch.setattr(signals.jax, "process_count", lambda: 2)
    monkeypatch.setattr(signals, "allgather", lambda mine: np.stack([mine, np.array([other], np.int32)]))
    with contextlib.closing(StopSignal()) as stop:
        assert stop.received_anywhere() is other
        assert not stop.abandon_batch()
        stop.received = "SIGTERM"
        assert stop.received_anywhere()
