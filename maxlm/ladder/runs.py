"""Runs of a ladder: trained on this machine, one after another, and found in its folder, trained here or elsewhere."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxlm.base.atomic import write_text
from maxlm.base.errors import ExitCode, UserError, error_kind, show
from maxlm.base.host import python_command
from maxlm.base.paths import read_file
from maxlm.config import extensions
from maxlm.config.fields import flatten
from maxlm.config.loader import dump, load
from maxlm.ladder.forms import Runs
from maxlm.ladder.grid import Rung
from maxlm.supervision.launch import Supervisor
from maxlm.telemetry.ledger import OVER
from maxlm.telemetry.report.load import load_run

RESTARTS = 10
# Settings that change losses, but for those that say where and how fast a run is trained, which whoever trains it may choose
LOSSES = ("model.", "data.", "train.", "optimizer.", "precision.", "objective.", "diloco.", "compression.", "health.")
SPEED = ("data.read_threads", "data.prefetch", "data.prepare.workers", "train.microbatches", "train.loss_chunks")
PLACES = (".store", ".path")  # ends of settings that say where files are


@dataclass(frozen=True)
class Found:
    """State of a run. `loss`: held-out, nats a token, of a run that is done; else `state` says why there is none."""

    rung: Rung
    loss: float | None
    state: str  # done, not begun, not finished, or how it failed
    failed: bool = False
    seconds: float | None = None  # of training, with starts and saves, without the time between attempts


def config_file(folder: Path, rung: Rung) -> Path:
    """Return the file with the config of a run."""
    return folder / "configs" / f"{rung.name}.yml"


def write_configs(folder: Path, rungs: Sequence[Rung]) -> None:
    """Write the config of each run. Raises UserError if a run has begun with another config, or a file cannot be written."""
    for rung in rungs:
        begun = folder / "runs" / rung.name / "config.yml"
        file, text = config_file(folder, rung), dump(rung.config)
        if begun.exists() and (changed := _difference(begun, text, rung)):
            raise UserError(
                f"{rung.name} was begun with {changed}: undo the change, remove its folder {begun.parent}, or take another `folder`."
            )
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, text)
        except OSError as error:
            raise error_kind(error)(f"{file} cannot be written ({error.strerror or error}): choose another `folder`.") from error


def _difference(file: Path, text: str, rung: Rung) -> str:
    """The first setting that changes losses and differs: its value in the file, and now; "" if none does, as where `text`, the config as it
    is written now, has settings that the version of maxlm before did not have.
    """
    if read_file(file) == text.encode():
        return ""
    before, now = (dict(flatten(config.model_dump(mode="json"))) for config in (load(str(file), any_mesh=True).config, rung.config))
    changed = (key for key in sorted({*before, *now}) if before.get(key) != now.get(key))
    key = next((key for key in changed if f"{key}.".startswith(LOSSES) and key not in SPEED and not key.endswith(PLACES)), None)
    return "" if key is None else f"{key} = {show(before.get(key))}, and the ladder says {show(now.get(key))} now"


def find(folder: Path, rung: Rung) -> Found:
    """Read the folder of a run."""
    path, total = folder / "runs" / rung.name, rung.config.total_steps
    if not (path / "events.jsonl").exists():
        return Found(rung, None, "not begun")
    run = load_run(path)
    starts = [number for number, event in enumerate(run.events) if event.kind == "start"]
    stop = next((event for event in run.events[starts[-1] if starts else 0 :] if event.kind == "stop"), None)
    if stop is None:
        return Found(rung, None, "not finished")
    reason = str(stop.data.get("reason"))
    if reason not in OVER:
        # Training that was unhealthy would be again; a hang or corrupted memory is the machine's fault.
        return Found(rung, None, "not finished" if reason in ("preempted", "interrupted") else reason, failed=reason == "unhealthy")
    if stop.step != total:
        return Found(rung, None, f"done at step {stop.step:,} of {total:,}", failed=True)
    trained = max((number for number in starts if run.events[number].step < total), default=0)  # later starts had no step left
    losses = [event.data.get("eval_loss") for event in run.events[trained:] if event.step == total and event.kind in ("eval", "stop")]
    loss = next((loss for loss in reversed(losses) if loss is not None), None)
    if loss is None:
        return Found(rung, None, "done, but not evaluated")  # the next start does that
    if not isinstance(loss, float) or not math.isfinite(loss) or loss <= 0:
        return Found(rung, None, f"done with a held-out loss of {show(loss)}", failed=True)
    return Found(rung, loss, "done", seconds=run.ledger.held_s)


def train(folder: Path, rungs: Sequence[Rung], say: Callable[[str], None]) -> dict[str, int]:
    """Train those that are not done, smallest first; a failed one does not stop the others, unless its input was wrong, as theirs would be.

    Returns name -> exit code of those that failed.

    Raises SystemExit(ExitCode.STOPPED) after a signal, when the run is saved or done.
    """
    failed: dict[str, int] = {}
    speed: float | None = None  # FLOP/s of the last run, starting up included
    for number, rung in enumerate(rungs, start=1):
        if find(folder, rung).loss is not None:
            continue
        left = sum(one.flops for one in rungs[number - 1 :] if find(folder, one).loss is None)
        time_left = "" if speed is None else f"; about {max(left / speed / 60, 1):.0f} min for all that are left"
        say(f"[{number} of {len(rungs)}] {rung.name}: {rung.parameters:,} parameters, {rung.tokens:,} tokens{time_left}")
        command = python_command("-m", "maxlm", *extensions.arguments(), "train", str(config_file(folder, rung)))
        supervisor = Supervisor(command, restarts=RESTARTS, backoff=1.0, say=say)
        code = supervisor.run()
        if code == ExitCode.STOPPED or supervisor.signalled:  # also one that came when all was done
            ended = "was saved" if code == ExitCode.STOPPED else "is done" if code == ExitCode.DONE else f"failed with exit code {code}"
            say(f"{rung.name} {ended}; stopped by a signal, and the same command goes on.")
            raise SystemExit(ExitCode.STOPPED)
        found = find(folder, rung)
        if found.loss is None:
            failed[rung.name] = code
            say(f"{rung.name} failed with exit code {code} ({found.state})")
            if code == ExitCode.WRONG_INPUT:
                break
        elif found.seconds:
            speed = rung.flops / found.seconds
    return failed


def measured(found: Sequence[Found]) -> tuple[Runs, list[Found]]:
    """Sizes, lengths and losses of the runs that are done, and these."""
    done = [one for one in found if one.loss is not None]
    columns = (
        [one.rung.parameters for one in done],
        [one.rung.tokens for one in done],
        [one.rung.flops for one in done],
        [one.loss for one in done],
        [one.rung.seed for one in done],
    )
    return Runs(*(np.array(column, np.float64) for column in columns)), done
