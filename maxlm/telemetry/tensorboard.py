"""Scalars for TensorBoard."""

import time
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from maxlm.telemetry.observer import Event, StepRecord


class TensorBoardObserver:
    """Writes every figure of a record as a scalar at its step. Figures that are None or text are left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._last_step = -1

    def on_step(self, record: StepRecord) -> None:
        if record.step <= self._last_step:
            self.close()  # the steps come again (rollback): a new file hides the old ones
        for name, value in record.to_dict().items():
            if name != "step" and value is not None:
                self._scalar(name, value, record.step)
        self._last_step = record.step

    def on_event(self, event: Event) -> None:
        loss = event.data.get("eval_loss")
        if event.kind == "eval" and loss is not None:
            self._scalar("eval_loss", loss, event.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalar(self, name: str, value: Any, step: int) -> None:
        if self._writer is None:
            # purge_step: TensorBoard forgets what an earlier, killed process wrote for this step and later ones.
            # The suffix: two writers within a second would have one name, and the second would erase the first.
            self._writer = SummaryWriter(str(self._folder), purge_step=step, filename_suffix=f".{time.time_ns()}")
        self._writer.add_scalar(name, float(value), step)
