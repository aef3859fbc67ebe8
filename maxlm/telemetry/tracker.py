"""Shared part of observers that log figures to an experiment tracker, such as Weights & Biases or trackio."""

from abc import abstractmethod
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from maxlm.telemetry.observer import ConfiguredObserver, Event, StepRecord, evaluated
from maxlm.telemetry.run_dir import RunDirectory


class Tracker(ConfiguredObserver):
    """Log the figures of every record, and held-out losses, over `step`. A restart continues the same run of the tracker.

    The first call connects; it is repeated while the service is not reached.
    """

    def __init__(self, project: str, run: RunDirectory, config: Mapping[str, Any]) -> None:
        self.project, self.directory, self.config = project, run, config
        self._run: Any = None

    @abstractmethod
    def connect(self) -> Any:
        """Start or continue the tracker's run, an object with `finish()`. Raises OSError if the service is not reached."""

    @abstractmethod
    def log(self, run: Any, figures: Mapping[str, Any]) -> None:
        """Hand figures to the tracker's run; `step` is one of them, and no figure is None."""

    def on_step(self, record: StepRecord) -> None:
        """Log the figures of the record."""
        figures = record.to_dict()
        del figures["time"]
        self._log(figures)

    def on_event(self, event: Event) -> None:
        """Log held-out losses and results of tasks."""
        if figures := evaluated(event):
            self._log({"step": event.step, **figures})

    def close(self) -> None:
        """Finish the tracker's run."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _log(self, figures: Mapping[str, Any]) -> None:
        if self._run is None:
            self._run = self.connect()
        self.log(self._run, {name: value for name, value in figures.items() if value is not None})


def digest_of(run: RunDirectory) -> str:
    """Digest of the run's folder, by which a tracker knows the run again and tells it from others of its name."""
    return sha256(str(run.path.resolve()).encode(errors="surrogateescape")).hexdigest()[:16]
