"""The wait for data is a share of the time of its steps, never more."""

import time
from types import SimpleNamespace

import pytest

from maxlm.config.schema import Config
from maxlm.objectives import build_objective
from maxlm.telemetry.console import describe
from maxlm.telemetry.observer import Observers
from maxlm.training import meter
from maxlm.training.step import Metrics


class Records:
    def __init__(self):
        self.seen = []

    def on_step(self, record):
        self.seen.append(record)

    def on_event(self, event):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("log_every", [1, 3])
def test_the_wait_is_counted_in_the_time_in_which_it_lay(monkeypatch, log_every):
    """The batch of step n + 1 is fetched before the figures of step n are read: slow data and a fast step made it "1275.8%"."""
    monkeypatch.setattr(meter, "token_flops", lambda *_: 1.0)
    model = {"vocab_size": 64, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32}
    training = {"train": {"steps": 12, "global_batch": 8}, "run": {"name": "r", "log_every": log_every}}
    config = Config.model_validate({"model": model, "data": {"store": "s", "seq_len": 8}, "optimizer": {"peak_lr": 1e-3}, **training})
    records = Records()
    observers = Observers([records])
    measured = meter.Meter(
        SimpleNamespace(config=config, objective=build_objective(config), mesh=SimpleNamespace(size=1), metrics=()), observers, 0
    )
    for step in range(1, 13):
        began = time.monotonic()
        time.sleep(0.02 if step % 2 else 0.0)
        waited = time.monotonic() - began
        measured.stepped(
            step, Metrics({"loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64.0, "skipped": 0}), waited, {"read": waited / 2}
        )
    measured.flush()
    observers.close()
    assert records.seen[-1].step == 12
    for record in records.seen:
        assert 0 <= record.data_wait_s <= record.step_time_s
        shown = next(piece for piece in describe(record, 12, 0.0) if piece.startswith("data wait"))
        assert float(shown.removeprefix("data wait ").partition("%")[0].lstrip("<")) <= 100
        assert record.extra["data_read_s"] == pytest.approx(record.data_wait_s / 2)
        assert record.extra["memory_peak_bytes"] is None, "a CPU does not count"
    assert sum(record.data_wait_s for record in records.seen) > 0
