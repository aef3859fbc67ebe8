"""`maxlm ladder --compare`: optimizers, each tuned with equal trials, at equal FLOPs and at equal time, over seeds."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from scipy.special import stdtrit

from maxlm.base.errors import ConfigError, UserError
from maxlm.config.fields import flatten
from maxlm.ladder.grid import Rung, make_grid, variant
from maxlm.ladder.runs import Found, find, train, write_configs
from maxlm.ladder.settings import TUNED, CompareConfig, LadderSettings
from maxlm.telemetry.formatting import count, duration
from maxlm.telemetry.report.load import load_run

SHARE = 0.9  # of the intervals
ALIKE = ("model.", "data.", "precision.", "objective.")  # settings that contestants share: losses are compared at equal FLOPs
Train = Callable[[Sequence[Rung]], list[Found]]  # all of them done, or UserError


@dataclass(frozen=True)
class Entry:
    """An optimizer at one size: its best trial, and final losses over seeds, at equal FLOPs and at the time of the quickest."""

    optimizer: str
    size: str
    parameters: int
    best: Mapping[str, Any]  # settings of the best trial
    at_edge: bool  # its learning rate is the least or the largest that was tried: try more
    losses: Sequence[float]
    losses_at_equal_time: Sequence[float]
    step_s: float


def compare(settings: LadderSettings, names: Sequence[str], folder: Path, *, training: bool, say: Callable[[str], None]) -> list[Entry]:
    """Train the missing runs of the comparison and return it, sizes from small to large.

    Raises UserError: no `compare` section, an optimizer that it does not name, or runs that failed or are missing.
    """
    config = _check(settings, names)

    def run(rungs: Sequence[Rung]) -> list[Found]:
        write_configs(folder, rungs)
        # A rate at which training is unhealthy is a result, and would be again.
        codes = train(folder, [rung for rung in rungs if not find(folder, rung).failed], say) if training else {}
        found = [find(folder, rung) for rung in rungs]
        if missing := [f"{one.rung.name} ({one.state}{f', exit code {codes[one.rung.name]}' if one.rung.name in codes else ''})"
                       for one in found if one.loss is None and not one.failed]:  # fmt: skip
            raise UserError(
                f"{len(missing)} of {len(found)} runs of the comparison have no loss: {', '.join(missing[:5])}; mend and run again."
            )
        return found

    first: dict[str, Rung] = {}
    for rung in make_grid(settings):
        first.setdefault(rung.size, rung)
    entries = [entry for rung in first.values() for entry in _at_size(rung, settings, config, names, run, folder)]
    return sorted(entries, key=lambda entry: (entry.parameters, names.index(entry.optimizer)))


def _check(settings: LadderSettings, names: Sequence[str]) -> CompareConfig:
    if settings.compare is None:
        raise UserError("--compare needs the section `compare` in the ladder file: optimizers and the learning rates to try for each.")
    if unknown := [name for name in names if name not in settings.compare.optimizers]:
        known = ", ".join(settings.compare.optimizers)
        raise UserError(f"--compare {unknown[0]}: compare.optimizers has no such optimizer; it has {known}.")
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise ConfigError("--compare", ",".join(names), "must name two optimizers or more, each once", "name others")
    for field, key in settings.given():
        if key.startswith(TUNED):
            raise ConfigError(field, key, "is set by --compare itself", "leave it out")
    for name, one in settings.compare.optimizers.items():
        if wrong := next((key for key, _ in flatten(one.settings) if f"{key}.".startswith(ALIKE)), None):
            rule = "would give this optimizer another model or other data than the others"
            raise ConfigError(f"compare.optimizers.{name}.settings", wrong, rule, "set it for all in `settings`")
    return settings.compare


def _at_size(rung: Rung, settings: LadderSettings, config: CompareConfig, names: Sequence[str], run: Train, folder: Path) -> list[Entry]:
    """Tune, then train the best of each with all seeds, then again for as long as the quickest takes."""
    best: dict[str, Mapping[str, Any]] = {}
    for name in names:
        trials = _trials(rung, settings, config, name)
        done = [(one.loss, values) for one, (_, values) in zip(run([trial for trial, _ in trials]), trials, strict=True) if one.loss]
        if not done:
            raise UserError(f"{name} failed at every trial of size {rung.size}: try smaller learning rates in compare.optimizers.{name}.")
        best[name] = min(done, key=lambda one: one[0])[1]
    finals = {name: run(_finals(rung, settings, config, name, best[name], rung.config.total_steps)) for name in names}
    step_s = {name: statistics.median(_step_s(folder, one) for one in finals[name]) for name in names}
    quickest = min(step_s.values())
    entries = []
    for name in names:
        steps = max(1, round(rung.config.total_steps * quickest / step_s[name]))
        timed = finals[name]
        if steps < rung.config.total_steps:
            timed = run(_finals(rung, settings, config, name, best[name], steps))
        rates = config.optimizers[name].peak_lr
        entries.append(
            Entry(
                name, rung.size, rung.parameters, best[name], best[name]["peak_lr"] in (min(rates), max(rates)),
                _losses(finals[name]), _losses(timed), step_s[name],
            )
        )  # fmt: skip
    return entries


def _losses(found: Sequence[Found]) -> list[float]:
    """Return losses of final runs. Raises UserError if one failed: its settings are too near to failing ones."""
    if failed := [one for one in found if one.loss is None]:
        names = ", ".join(f"{one.rung.name} ({one.state})" for one in failed)
        raise UserError(f"final runs failed though their trials did not: {names}; try smaller learning rates, or other seeds.")
    return [one.loss for one in found if one.loss is not None]


def _trials(rung: Rung, settings: LadderSettings, config: CompareConfig, name: str) -> list[tuple[Rung, Mapping[str, Any]]]:
    """Return runs with the seed 0, each with the values to try: `peak_lr`, and `warmup` and `weight_decay` if they are tuned."""
    tried: dict[str, Sequence[float]] = {"peak_lr": config.optimizers[name].peak_lr}
    warmup = config.warmup or (None if settings.warmup is None else (settings.warmup,))
    tried |= {key: values for key, values in (("warmup", warmup), ("weight_decay", config.weight_decay)) if values is not None}
    combinations = [dict(zip(tried, values, strict=True)) for values in product(*tried.values())]
    return [(_run(rung, settings, config, name, values, rung.config.total_steps, 0), values) for values in combinations]


def _finals(rung: Rung, settings: LadderSettings, config: CompareConfig, name: str, values: Mapping[str, Any], steps: int) -> list[Rung]:
    return [_run(rung, settings, config, name, values, steps, seed) for seed in config.seeds]


def _run(rung: Rung, settings: LadderSettings, config: CompareConfig, name: str, values: Mapping[str, Any], steps: int, seed: int) -> Rung:
    """One run. Its name says all that differs, so that another comparison in the same folder uses it or has its own."""
    chosen: dict[str, Any] = {f"optimizer.{key}": value for key, value in values.items() if key != "warmup"}
    if "warmup" in values:
        chosen |= {"optimizer.warmup_tokens": None, "optimizer.warmup_steps": round(values["warmup"] * steps)}
    run = "-".join([rung.size, name, *(f"{key}{value:g}" for key, value in values.items()), f"{steps}steps", f"seed{seed}"])
    own = config.optimizers[name].settings
    return variant(rung, settings, run, {**own, "optimizer.name": name, **chosen, "train.steps": steps, "train.seed": seed})


def _step_s(folder: Path, found: Found) -> float:
    """Median seconds of a step."""
    seconds_N = load_run(folder / "runs" / found.rung.name).get("step_time_s").values_N
    if not len(seconds_N):
        raise UserError(f"{found.rung.name} has no step times in its metrics: remove its folder and train it again.")
    return float(np.median(seconds_N))


def interval(losses: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of Student's interval of it."""
    mean = statistics.fmean(losses)
    return mean, float(stdtrit(len(losses) - 1, (1 + SHARE) / 2)) * statistics.stdev(losses) / len(losses) ** 0.5


def difference(losses: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """Mean difference over seeds to the baseline's, which saw the same batches, and half the width of its interval."""
    return interval([one - other for one, other in zip(losses, baseline, strict=True)])


def table(entries: Sequence[Entry], baseline: str) -> Table:
    """Return one row for each optimizer and size; differences are to `baseline` at the same size."""
    found = Table(title=f"Held-out loss over {len(entries[0].losses)} seeds, with {SHARE:.0%} intervals; differences to {baseline}")
    for head in ("size", "optimizer", "best settings", "equal FLOPs", "difference", "equal time", "difference", "a step"):
        found.add_column(head, no_wrap=head in ("size", "optimizer"))
    for one in entries:
        other = next(entry for entry in entries if entry.size == one.size and entry.optimizer == baseline)
        settings = ", ".join(f"{key} {value:g}" for key, value in one.best.items())
        cells = [f"{one.size} ({count(one.parameters)})", one.optimizer, settings + (" (at the edge)" if one.at_edge else "")]
        for losses, reference in ((one.losses, other.losses), (one.losses_at_equal_time, other.losses_at_equal_time)):
            mean, half = interval(losses)
            change, doubt = difference(losses, reference)
            cells += [f"{mean:.4f} ± {half:.4f}", "" if one is other else f"{change:+.4f} ± {doubt:.4f}"]
        found.add_row(*cells, duration(one.step_s))
    return found


def to_json(entries: Sequence[Entry], baseline: str) -> dict[str, Any]:
    """Return the comparison for `comparison.json`."""
    return {"baseline": baseline, "share": SHARE, "entries": [asdict(one) for one in entries]}
