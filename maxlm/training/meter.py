"""Turns the metrics of the device into records, one step late, so that reading them never makes the device wait."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from maxlm.base.metric import records
from maxlm.config.table import build
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.order import batch_number, sequences_before
from maxlm.data.prefetch import Cause
from maxlm.hardware.chips import chip_of
from maxlm.models import mfu_format, token_flops
from maxlm.telemetry.compilations import Compilations
from maxlm.telemetry.device_memory import PROCESS, ProcessMemory, memory_use
from maxlm.telemetry.observer import Event, Observers, StepRecord
from maxlm.training.health import ODD_BATCH, Health
from maxlm.training.layer_figures import figures_of, layer_names
from maxlm.training.program import Program
from maxlm.training.progress import LoopProgress
from maxlm.training.reader import Reader
from maxlm.training.step import Metrics

DETAILED_RECORDS = 1000  # records of a run, about, that hold `Reader.details`


class _Pending(NamedTuple):
    step: int
    metrics: Metrics


class Meter:
    """Reads the metrics of every update. Call `stepped` after each dispatch; `health` judges every update that was read."""

    def __init__(
        self,
        program: Program,
        observers: Observers,
        start: int,
        levels: Mapping[str, Any] | None = None,
        progress: LoopProgress | None = None,
        *,
        skipped: int = 0,
        left_out: Sequence[int] = (),
        compilations: Compilations | None = None,
        data: Pipeline | None = None,
    ) -> None:
        """`levels`: as in `Health`; `skipped`: updates that the state of `start` has skipped; `left_out`: as in `Pipeline`; `data`: what
        is trained on, for alarms on batches.
        """
        self._progress = LoopProgress() if progress is None else progress
        config = program.config
        chip = None if config.precision.compute == "float32" else chip_of(jax.devices()[0].device_kind)
        self._observers, self._compilations, self._data = observers, compilations, data
        self._log_every = config.run.log_every
        self._total = config.total_steps
        self._sizes, self._left_out, self._seq_len = config.batch_sizes, tuple(left_out), config.data.seq_len
        self._flops_per_token = token_flops(config.model, config.data.seq_len) / program.mesh.size  # of one device
        self._peak = None if chip is None else chip.peak_flops_per_device(mfu_format(config.precision.matmul))
        self._pending: _Pending | None = None
        self._since = time.monotonic()
        self._steps, self._tokens, self._seconds, self._waited = 0, 0, 0.0, 0.0  # since the last record
        self._process_memory = ProcessMemory(jax.local_device_count()) if jax.default_backend() == "cpu" else None
        self._causes: Counter[Cause] = Counter()  # of the wait for batches, in seconds since the last record
        self._detail_every = self._log_every * -(-self._total // (DETAILED_RECORDS * self._log_every))
        self._start = start
        self._declared = program.metrics
        self._skipped = skipped
        self._layers = layer_names(config.model)
        trained = any(one.first_state() is not None for one in build(config, "opening"))
        self._readers: list[Reader] = build(config, "readers", levels=levels or {})
        self.health = Health(program.objective.untrained_loss, levels, trained=trained, settings=config.health)

    @property
    def levels(self) -> dict[str, Any]:
        """State that a checkpoint keeps, so that the next update is judged and measured as it would be without a restart."""
        return {**self.health.levels, **{one.level: one.levels for one in self._readers if one.level}}

    def stepped(self, step: int, metrics: Metrics, data_wait_s: float, causes: Mapping[Cause, float] | None = None) -> None:
        """Update number `step` was dispatched; the one before is read now, while it runs. `causes`: parts of `data_wait_s` by cause.

        The wait for the batch of `step` lay between the reads of the two updates before, so it is a share of that time.
        """
        self._progress.dispatch(step)
        self._waited += data_wait_s
        self._causes.update(causes or {})
        self.flush()
        self._pending = _Pending(step, metrics)

    def pause(self) -> None:
        """Leave the time until now out of the time of steps."""
        self._since = time.monotonic()
        self._progress.pause()

    def flush(self) -> None:
        """Read the step that is still pending; waits for it to finish."""
        if self._pending is None:
            return
        step, device_metrics = self._pending
        self._pending = None
        with self._progress.waiting(step):
            metrics: Metrics = jax.device_get(device_metrics)
        now = time.monotonic()
        self._steps, self._seconds = self._steps + 1, self._seconds + now - self._since
        self._tokens += self.sequences(step) * self._seq_len
        self._since = now
        self._watch(step, metrics)
        if self._due(step, self._log_every) or any(one.must_record(metrics) for one in self._readers):
            self._observers.on_step(self._record(step, metrics))
            self._steps, self._tokens, self._seconds, self._waited = 0, 0, 0.0, 0.0
            self._causes = Counter(dict.fromkeys(self._causes, 0.0))
            for event in self._compilations.take(step) if self._compilations is not None else ():
                self._observers.on_event(event)

    def sequences(self, step: int) -> int:
        """Sequences of the batch of update `step`."""
        return self._sizes.of(batch_number(step - 1, self._left_out))

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self._total or step == self._start + 1

    def _record(self, step: int, metrics: Metrics) -> StepRecord:
        step_time_s = self._seconds / self._steps
        tokens_per_s = self._tokens / self._seconds
        flops_per_s = self._flops_per_token * tokens_per_s
        figures: Mapping[str, Any] = metrics.values
        for one in self._readers:
            figures = one.record(figures)
        values = records(figures)
        del values["tokens"]  # the record counts those consumed
        details = dict[str, Any]()
        for one in self._readers if self._due(step, self._detail_every) else ():
            details |= one.details()
        return StepRecord(
            step=step,
            loss=values.pop("loss"),
            grad_norm=values.pop("grad_norm"),
            lr=values.pop("lr"),
            tokens=sequences_before(step, self._sizes, self._left_out) * self._seq_len,
            tokens_per_s=tokens_per_s,
            step_time_s=step_time_s,
            tflops_per_device=flops_per_s / 1e12,
            mfu=flops_per_s / self._peak if self._peak else None,
            data_wait_s=self._waited / self._steps,
            extra={
                **values,
                **({"global_batch": self.sequences(step)} if self._sizes.vary else {}),
                **{f"data_{cause}_s": seconds / self._steps for cause, seconds in self._causes.items()},
                **memory_use(jax.local_devices()),
                **({} if self._process_memory is None else {PROCESS: self._process_memory.peak()}),
            },
            declared=self._declared,
            **details,
        )

    def _watch(self, step: int, metrics: Metrics) -> None:
        """Report alarms of the readers, a skipped update, and a loss or gradient norm that stands out."""
        for one in self._readers:
            for alarm in one.update(step, metrics):
                self._observers.on_event(alarm)
        loss, grad_norm = float(metrics.loss), float(metrics.grad_norm)
        fault = "; ".join(filter(None, (one.fault(metrics) for one in self._readers)))
        refused, self._skipped = int(metrics.skipped) > self._skipped, int(metrics.skipped)
        overflowed = "; ".join(filter(None, (one.overflow(metrics) for one in self._readers)))
        if overflowed:
            reason = f"{overflowed}; {int(metrics.skipped)} skipped so far"
            self._observers.on_event(Event("skip", step, data={"reason": reason, "cause": "loss_scale"}))
        elif not (math.isfinite(loss) and math.isfinite(grad_norm)):
            reason = f"loss {loss:g}, gradient norm {grad_norm:g}; {int(metrics.skipped)} skipped so far"
            reason += f"; {fault}" if fault else ""
            self._observers.on_event(Event("skip", step, data={"reason": reason}))
        elif refused:
            reason = f"a spike: loss {loss:.4g}, gradient norm {grad_norm:.4g}; {int(metrics.skipped)} skipped so far"
            self._observers.on_event(Event("skip", step, data={"reason": reason, "cause": "spike"}))
        layers = figures_of(metrics.values, self._layers)
        skips = {"refused": refused, "overflowed": bool(overflowed)}
        other_data = self._data is not None and self._data.stage_begins(step - 1)
        for alarm in self.health.update(step, loss, grad_norm, fault, **skips, layers=layers, other_data=other_data):
            if alarm.data["cause"] == ODD_BATCH and self._data is not None:
                where = f"`maxlm data inspect` with the run's folder and --step {step} shows its documents"
                alarm = replace(alarm, data={**alarm.data, "reason": f"{alarm.data['reason']}: {self._data.described(step - 1)}; {where}"})
            self._observers.on_event(alarm)
