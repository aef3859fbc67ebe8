"""Observers of a run, as its config asks for them."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from maxlm.config import Config
from maxlm.config.console import Console
from maxlm.runtime import frozen, progress_file
from maxlm.telemetry.alerts import AlertObserver
from maxlm.telemetry.bill import Bill
from maxlm.telemetry.console import ConsoleObserver
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.observer import Event, Observer, Observers, StepRecord
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.tensorboard import TensorBoardObserver
from maxlm.telemetry.wandb_observer import WandbObserver


class _ProgressObserver:
    """Records each logged step for the supervisor, and that the run has a checkpoint; keeps nothing open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step(self, record: StepRecord) -> None:
        progress_file.record(step=record.step)

    def on_event(self, event: Event) -> None:
        if event.kind == "save" or (event.kind == "start" and event.step > 0):
            frozen.note_saved(self._folder)

    def close(self) -> None: ...


@contextlib.contextmanager
def observing(
    config: Config, directory: RunDirectory, console: Console, primary: bool, beside: Sequence[Observer] = (), bill: Bill | None = None
) -> Iterator[Observers]:
    """Observers, with those `beside`, closed however the block ends; prints the problems of those that failed. Records have the figures of
    `bill`.
    """
    active: list[Observer] = [ConsoleObserver(config.total_steps, primary=primary, console=console), *beside]
    if primary:
        active.append(FileObserver(directory))
    if progress_file.VARIABLE in os.environ:
        active.append(_ProgressObserver(directory.path))
    if config.run.tensorboard and primary:
        active.append(TensorBoardObserver(directory))
    if config.run.alerts is not None and primary:
        active.append(
            AlertObserver(
                config.run.alerts,
                directory,
                report=lambda event: observers.on_event(event),
                ended=lambda cause: progress_file.record(alerted=cause),
            )
        )
    if config.wandb is not None and primary:
        active.append(WandbObserver(config.wandb.project, directory, config.model_dump(mode="json")))
    observers = Observers(active) if bill is None else Observers(active, bill.complete)
    try:
        yield observers
    finally:
        for problem in observers.close():
            console.print(problem, markup=False, highlight=False, soft_wrap=True)
