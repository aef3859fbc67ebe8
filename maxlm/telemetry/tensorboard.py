"""Scalars for TensorBoard."""

import struct
import time
from collections.abc import Mapping
from typing import Any

from tensorboardX.proto.event_pb2 import Event as TfEvent, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from maxlm.base.atomic import AppendFile
from maxlm.telemetry.balance import peak
from maxlm.telemetry.observer import Event, StepRecord, evaluated
from maxlm.telemetry.run_dir import RunDirectory


class TensorBoardObserver:
    """Write every figure of a record that is not None as a scalar at its step. Only the primary process has one."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._file: AppendFile | None = None
        self._last_step = -1

    def on_step(self, record: StepRecord) -> None:
        """Write the figures of the record."""
        if record.step <= self._last_step:
            self.close()  # rollback: a new file replaces the later steps
        figures = record.to_dict()
        del figures["step"], figures["time"]
        if record.balance is not None:
            peaks = zip(record.balance.layers, peak(record.balance.load_LE), strict=True)
            figures |= {f"experts/layer_{layer:02}/load_max": float(value) for layer, value in peaks}
        self._write(figures, record.step, record.time)
        self._last_step = record.step

    def on_event(self, event: Event) -> None:
        """Write held-out losses and results of tasks."""
        if figures := evaluated(event):
            self._write(figures, event.step, event.time)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, figures: Mapping[str, Any], step: int, when: float) -> None:
        known = ((name, float(value)) for name, value in figures.items() if value is not None)
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in known])
        record = _framed(TfEvent(wall_time=when, step=step, summary=summary))
        if self._file is None:
            # SessionLog.START: TensorBoard discards what an earlier, killed process wrote for this step and later ones.
            started = TfEvent(wall_time=when, step=step, session_log=SessionLog(status=SessionLog.START))
            head = _framed(TfEvent(wall_time=when, file_version="brain.Event:2")) + _framed(started)
            file = AppendFile(self._run.tensorboard / f"events.out.tfevents.{time.time():.0f}.{time.time_ns()}")
            file.append(head + record)
            self._file = file
        else:
            self._file.append(record)


def _framed(event: TfEvent) -> bytes:
    """A TFRecord: length (8 bytes), its checksum, the message, its checksum."""
    message = event.SerializeToString()
    length = struct.pack("<Q", len(message))
    return length + struct.pack("<I", masked_crc32c(length)) + message + struct.pack("<I", masked_crc32c(message))
