"""Records to observe."""

import pytest

from maxlm.telemetry.observer import StepRecord


@pytest.fixture
def record():
    """Makes the record of a step; keywords change figures."""

    def make(step=1, **changes):
        values = {
            "loss": 3.0,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "tokens": 512 * step,
            "tokens_per_s": 5e3,
            "step_time_s": 0.1,
            "tflops_per_device": 0.01,
            "mfu": None,
            "data_wait_s": 0.001,
            "time": 1000.0 + 0.1 * step,
        }
        return StepRecord(step=step, **{**values, **changes})

    return make
