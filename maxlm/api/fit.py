"""`maxlm.fit`: a whole training run, as `maxlm train` makes it."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxlm.api.configs import load_config
from maxlm.api.data import Data, batch_reader
from maxlm.api.errors import plain_errors
from maxlm.api.runs import Run
from maxlm.api.training import train
from maxlm.base.console import Console
from maxlm.base.errors import UserError
from maxlm.base.paths import PYTHON
from maxlm.config.schema import Config
from maxlm.data.given import GivenBatches, GivenHeldOut
from maxlm.data.input_pipeline import Pipeline
from maxlm.run.open_data import OpenedData
from maxlm.run.open_run import Given
from maxlm.telemetry.observer import Event, Observer, StepRecord
from maxlm.telemetry.phases import Phases

Callback = Observer | Callable[[StepRecord], Any]


@dataclass(frozen=True, repr=False)
class FitResult:
    """End of a training run."""

    run: Run  # its folder: metrics, events, checkpoints, the model
    status: str  # done, nothing_left, interrupted, preempted, unhealthy, corrupted
    step: int  # updates done
    message: str  # a sentence: why it ended
    eval_loss: float | None  # of the last step, nats a token; None without held-out data
    metrics: Mapping[str, Any]  # the last record, by name; {} if there is none
    exit_code: int  # of `maxlm train` for such an end

    @property
    def done(self) -> bool:
        """True if all steps are done."""
        return self.status in ("done", "nothing_left")

    def __repr__(self) -> str:
        loss = "" if self.eval_loss is None else f", held-out loss {self.eval_loss:.4f}"
        return f"FitResult({self.message}{loss}; {str(self.run.path)!r})"


@plain_errors
def fit(
    config: Config,
    *,
    data: Iterable[Any] | None = None,
    held_out: Iterable[Any] | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> FitResult:
    """Train `config`, or go on where its run stopped: the same run folder, checkpoints and report as of `maxlm train`.

    It works in a script and in a notebook. Ctrl-C, or the notebook's stop button, saves and returns with the status "interrupted". On a
    cluster call it in every process, before jax has looked for its devices.

    Args:
        config: from `load_config`.
        data: training batches in place of the config's token stores, from any iterable: `maxlm.pack_texts`, or items that are a
            `maxlm.Batch` or ids [train.global_batch, data.seq_len + 1], each row a document. They are resumed by state, not by number: an
            iterable with `state_dict` and `load_state_dict` goes on from its state, another is read from its beginning and passed over.
        held_out: with `data`, batches to evaluate: the first `train.eval_batches` are kept in memory.
        callbacks: `maxlm.Observer` objects, or functions of a `maxlm.StepRecord`. They run in threads of their own on the first process;
            one that fails is reported, and training goes on.
        quiet: print nothing.

    Raises UserError: the config cannot be honoured here. Nothing was written then.
    """
    if not isinstance(config, Config):
        raise UserError('fit takes a config: fit(load_config("runs/quickstart")).')
    phases = Phases(Console(quiet=quiet, force_jupyter=False, force_terminal=sys.stdout.isatty()))  # a notebook claims to be a terminal
    last = _Last()
    open_data = None
    if data is not None:
        config, open_data = _with_data(config, data, held_out)
    elif held_out is not None:
        raise UserError("held_out goes with data: without it the config's stores have held-out documents of their own.")
    observers = tuple(map(_observer, callbacks))
    ended = train(config, phases, given=Given((last, *observers), open_data))
    run = Run.open(Path(config.run.dir) / config.run.name)
    outcome = ended.outcome
    metrics = last.record.to_dict() if last.record is not None else {}
    return FitResult(run, outcome.status, outcome.step, outcome.message, outcome.eval_loss, metrics, int(ended.code))


def _with_data(config: Config, data: Iterable[Any], held_out: Iterable[Any] | None) -> tuple[Config, Callable[[Config], OpenedData] | None]:
    """(the config that says where its batches come from, the function that opens them)."""
    if isinstance(data, Data):
        raise UserError("data are the token stores of a config: leave data out, and fit reads them by number.")
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | os.PathLike | Mapping):
        raise UserError(f"data is of the kind {type(data).__name__}: give an iterable of batches, or maxlm.pack_texts(texts, ...).")
    if config.evaluation is not None:
        raise UserError("the section evaluation reads the tokenizer of a token store: remove it, or train on a store.")
    name = getattr(data, "__name__", type(data).__name__)
    settings = [f"data.store={PYTHON}{name}", "data.mixture=null", "data.prepare=null", "data.eval=null", "data.skip_bad_chunks=null"]
    settings += [] if held_out is not None else ["train.eval_batches=0", "train.eval_every=null"]
    config = load_config(config, *settings)
    tokenizer = getattr(data, "tokenizer", None)

    def open_data(config: Config) -> OpenedData:
        common = config.data, config.batch_sizes, name, batch_reader(config), tokenizer
        kept: Pipeline | None = None if held_out is None else GivenHeldOut(held_out, config.train.eval_batches, *common)
        return OpenedData(GivenBatches(data, *common), kept, {})

    return config, open_data


def _observer(callback: Callback) -> Observer:
    if isinstance(callback, Observer):
        return callback
    if not callable(callback):
        raise UserError(f"a callback is of the kind {type(callback).__name__}: give a maxlm.Observer, or a function of a StepRecord.")
    return _StepCallback(callback)


class _Last(Observer):
    """Keeps the newest record."""

    record: StepRecord | None = None

    def on_step(self, record: StepRecord) -> None:
        self.record = record

    def on_event(self, event: Event) -> None: ...

    def close(self) -> None: ...


class _StepCallback(_Last):
    """Calls a function with each record."""

    def __init__(self, function: Callable[[StepRecord], Any]) -> None:
        self._function = function

    def on_step(self, record: StepRecord) -> None:
        self._function(record)
