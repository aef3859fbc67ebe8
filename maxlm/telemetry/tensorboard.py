"""Scalars for TensorBoard."""

import time
from collections.abc import Mapping
from typing import Any

from tensorboardX import SummaryWriter
from tensorboardX.proto.summary_pb2 import Summary

from maxlm.telemetry.balance import peak
from maxlm.telemetry.observer import Event, StepRecord
from maxlm.telemetry.run_dir import RunDirectory


class TensorBoardObserver:
    """Writes every figure of a record as a scalar at its step, on the primary process. Figures that are None are left out."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._writer: SummaryWriter | None = None
        self._last_step = -1

    def on_step(self, record: StepRecord) -> None:
        if record.step <= self._last_step:
            self.close()  # the steps come again (rollback): a new file hides the old ones
        figures = record.to_dict()
        del figures["step"]
        if record.balance is not None:
            peaks = zip(record.balance.layers, peak(record.balance.load_LE), strict=True)
            figures |= {f"experts/layer_{layer:02}/load_max": float(value) for layer, value in peaks}
        self._write(figures, record.step)
        self._last_step = record.step

    def on_event(self, event: Event) -> None:
        if event.kind == "eval":
            self._write({"eval_loss": event.data.get("eval_loss")}, event.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, figures: Mapping[str, Any], step: int) -> None:
        if not self._run.primary:
            return
        if self._writer is None:
            # purge_step: TensorBoard forgets what an earlier, killed process wrote for this step and later ones.
            # The suffix: two writers within a second would have one name, and the second would erase the first.
            self._writer = SummaryWriter(str(self._run.tensorboard), purge_step=step, flush_secs=10, filename_suffix=f".{time.time_ns()}")
        known = ((name, float(value)) for name, value in figures.items() if value is not None)
        # All in one message: `add_scalar` for each would cost the loop half a millisecond a step.
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in known]), step)
