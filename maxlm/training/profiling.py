"""Traces of some steps of a running job (`run.profile`). No failure here ends or changes the run: it is logged, and an event tells it."""

import json
import logging
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from maxlm.base.host import environment_of_commands, python_command
from maxlm.config.sections.profile import ProfileConfig
from maxlm.telemetry.observer import Event
from maxlm.telemetry.profile import TRACE
from maxlm.telemetry.profile.record import abandon_trace, start_trace, stop_trace
from maxlm.training.step import TrainState

_log = logging.getLogger(__name__)
LAST_WAIT_S = 60.0  # for pages, at the end of the run; none after a signal or an error
_POLL_S = 0.1


def profile_folder(profiles: Path, step: int | str) -> Path:
    """Folder of the trace of the steps from `step` on; each process has its own."""
    folder = profiles / str(step)
    return folder if jax.process_count() == 1 else folder / f"process-{jax.process_index()}"


class RunProfiler:
    """Records traces where `settings` says. Pages are made by processes of their own, while training goes on. Use it in a `with`."""

    def __init__(
        self,
        settings: ProfileConfig,
        profiles: Path,
        title: str,
        report: Callable[[Event], None],
        gives_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`gives_up`: True once a signal asks the run to end; asked often while the end of the run waits for pages."""
        self._gives_up = gives_up
        self._settings, self._profiles, self._title, self._report = settings, profiles, title, report
        self._ends = {*settings.at, *(step + settings.steps for step in settings.at)}  # of traces
        self._next: int | None = None  # the step to come, unless training goes back
        self._recording: int | None = None  # step before the first of the trace
        self._paused: dict[int, float] = {}  # seconds of training, by that step
        self._making: list[tuple[int, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> "RunProfiler":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)

    def before(self, step: int, state: TrainState, meter: Any) -> None:
        """Begin or end a trace before update `step`, if it is time. Its steps are whole: devices are idle at both ends."""
        self._collect()
        if self._next is None:
            self._report_missed(step)
        if self._recording is not None and step != self._next:
            self._fail(self._recording, f"training went back to step {step:,} before its steps were done")
        self._next = step + 1
        if step in self._ends:  # in all processes, also in one without a trace: what is read here may end training
            meter.flush()
        if self._recording is not None and step >= self._recording + self._settings.steps:
            self._guarded(self._end, self._recording, step, state, meter)
        elif step in self._settings.at and self._recording is None:
            self._guarded(self._begin, step, step, state, meter)

    def _report_missed(self, start: int) -> None:
        """Report the trace of steps within which the run begins, unless an earlier attempt has recorded it."""
        for first in self._settings.at:
            if first < start < first + self._settings.steps and not (profile_folder(self._profiles, first) / TRACE).exists():
                self._report(Event("profile", first, data={"reason": f"the run went on from step {start:,}, inside of its steps"}))

    def close(self, *, wait: bool = True) -> None:
        """Give up a trace that has not ended, and, unless something failed, wait for pages that are being made."""
        if self._recording is not None:
            self._fail(self._recording, "the run ended before its steps did")
        deadline = time.monotonic() + LAST_WAIT_S
        while self._collect() and wait and time.monotonic() < deadline and not self._gives_up():
            time.sleep(_POLL_S)
        for step, _ in self._making:
            self._report(Event("profile", step, data={"reason": "the run ended before the page was made, which may still come"}))

    def _guarded(self, action: Callable[[int, TrainState], None], first: int, step: int, state: TrainState, meter: Any) -> None:
        began, earlier = time.monotonic(), self._paused.get(first, 0.0) if step > first else 0.0
        try:
            jax.block_until_ready(state)
            meter.pause()  # writing a trace takes seconds, which are no step and no hang
            action(step, state)
        except Exception as error:
            _log.warning("profile at step %s: %s", step, error, exc_info=error)
            self._fail(first, str(error).partition("\n")[0] or type(error).__name__)
        self._paused[first] = earlier + time.monotonic() - began
        meter.pause()

    def _begin(self, step: int, state: TrainState) -> None:
        start_trace(profile_folder(self._profiles, step))
        self._recording = step

    def _end(self, step: int, state: TrainState) -> None:
        assert self._recording is not None, "a trace has begun"
        folder = profile_folder(self._profiles, self._recording)
        stop_trace(folder)
        first, self._recording = self._recording, None
        facts = {"title": f"{self._title}, step {first:,}", "steps": step - first, "step": first, "hardware": jax.devices()[0].device_kind}
        facts["prediction_note"] = "A running job makes no prediction: `maxlm profile` does."
        command = python_command("-m", "maxlm.telemetry.profile", str(folder), json.dumps(facts))
        environment = {**environment_of_commands(), "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        self._making.append((first, process))

    def _collect(self) -> bool:
        """Report pages that are done. True if more are being made."""
        for item in [item for item in self._making if item[1].poll() is not None]:
            self._making.remove(item)
            step, process = item
            try:
                answer = dict(json.loads(process.communicate()[0]))
            except (ValueError, TypeError):
                answer = {"reason": f"the page was not made: its process ended with code {process.returncode}"}
            self._report(Event("profile", step, data={**answer, "seconds": round(self._paused[step], 3)}))
        return bool(self._making)

    def _fail(self, step: int, reason: str) -> None:
        if self._recording is not None:
            self._recording = None
            abandon_trace(profile_folder(self._profiles, step))
        self._report(Event("profile", step, data={"reason": reason}))
