"""The command `maxlm ladder`: train missing runs, fit, write the page."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from maxlm.base.atomic import write_text
from maxlm.base.console import Console, print_line
from maxlm.base.directory_lock import locked
from maxlm.base.errors import UserError, some
from maxlm.base.strict_json import dumps
from maxlm.config.loader import load_as
from maxlm.ladder import compare
from maxlm.ladder.analysis import Analysis, Optimum, analyse, best_for, doubts_of
from maxlm.ladder.forms import Floats
from maxlm.ladder.grid import Rung, assumed, base_of, epochs, make_grid, token_costs
from maxlm.ladder.page import page
from maxlm.ladder.runs import Found, find, train, write_configs
from maxlm.ladder.settings import LadderSettings
from maxlm.telemetry.formatting import count, duration

PAGE, RESULT, COMPARISON = "ladder.html", "ladder.json", "comparison.json"
BEYOND = (1, 10, 100, 1000)  # times the FLOPs of the largest run, for which the page says the best size
_LOCK_SECONDS = 2.0


@dataclass(frozen=True)
class Options:
    """The command line. `dry_run`: show the grid and write nothing; `train`: false writes the configs and fits finished runs;
    `without_failed`: fit although runs are missing.
    """

    dry_run: bool = False
    train: bool = True
    without_failed: bool = False


def run(file: str, overrides: Sequence[str], options: Options, say: Callable[[str], None]) -> None:
    """Carry out the ladder of a file. Raises UserError on bad input and for runs that are missing, SystemExit(3) after a signal."""
    settings = load_as(LadderSettings, file, overrides)
    rungs, folder, console = make_grid(settings), Path(settings.folder), _console()
    console.print(grid_table(settings, folder, rungs))
    if options.dry_run:
        return
    with locked(folder, "folder", _LOCK_SECONDS, say, "wait for the other ladder, or give this one another folder"):
        write_configs(folder, rungs)
        codes = train(folder, rungs, say) if options.train else {}
        found = [find(folder, rung) for rung in rungs]
        _check_complete(found, codes, options)
        if not options.train and not any(one.loss is not None for one in found):
            say(f"no run is done yet: give each of {folder}/configs/*.yml to `maxlm train`, or on Slurm to `sbatch slurm/train.sbatch`.")
            return
        analysis = analyse(found, settings.fit)
        optima = _optima(settings, analysis)
        write_text(folder / PAGE, page(Path(file).stem, found, analysis, optima))
        write_text(folder / RESULT, dumps(_result(settings, analysis, optima), indent=1) + "\n")
    show(console, analysis, optima, folder)


def run_comparison(file: str, overrides: Sequence[str], optimizers: str, options: Options, say: Callable[[str], None]) -> None:
    """Compare optimizers of the file's `compare` section; the first is the baseline. Raises as `run`."""
    settings, names = load_as(LadderSettings, file, overrides), [name.strip() for name in optimizers.split(",")]
    folder, console = Path(settings.folder), _console()
    with locked(folder, "folder", _LOCK_SECONDS, say, "wait for the other ladder, or give this one another folder"):
        entries = compare.compare(settings, names, folder, training=options.train, say=say)
        write_text(folder / COMPARISON, dumps(compare.to_json(entries, names[0]), indent=1) + "\n")
    console.print(compare.table(entries, names[0]))
    print_line(console, f"{folder / COMPARISON} holds the figures.")


def grid_table(settings: LadderSettings, folder: Path, rungs: Sequence[Rung]) -> Table:
    """Return the runs, with their sizes, lengths, state and time."""
    total = sum(rung.flops for rung in rungs)
    table = Table(title=f"{len(rungs)} runs of {settings.base}, {total:.3g} FLOPs in all")
    for head in ("run", "parameters", "tokens", "ratio", "FLOPs", "state", "time"):
        table.add_column(head, justify="left" if head in ("run", "state") else "right", no_wrap=head == "run")
    for rung in rungs:
        one = find(folder, rung)
        table.add_row(
            rung.name, count(rung.parameters), count(rung.tokens), f"{rung.tokens / rung.parameters:.3g}", f"{rung.flops:.3g}",
            one.state if one.loss is None else f"loss {one.loss:.4f}", "" if one.seconds is None else duration(one.seconds),
        )  # fmt: skip
    return table


def show(console: Console, analysis: Analysis, optima: Sequence[Optimum], folder: Path) -> None:
    """Print the fit, its predictions and the best sizes."""
    ranges = analysis.fit.ranges()
    console.print(f"L = {analysis.fit.form.formula}", highlight=False)
    for name, value in analysis.fit.values().items():
        console.print(f"  {name} = {value:.4g} ({ranges[name][0]:.4g} to {ranges[name][1]:.4g})", highlight=False)
    if analysis.exponents:
        console.print("  by parabolas: best size ∝ C^{a:.3f}, best length ∝ C^{b:.3f}".format(**analysis.exponents), highlight=False)
    for one in analysis.predictions:
        limits = f"{one.low:.4f} to {one.high:.4f}"
        console.print(
            f"{one.name}: predicted from the smaller sizes {one.predicted:.4f} ({limits}), measured {one.measured:.4f}: {one.error:+.2%}",
            highlight=False,
        )
    if analysis.not_predicted:
        console.print(f"The largest size is not predicted: {analysis.not_predicted}", highlight=False)
    for best in optima:
        sizes = " to ".join(map(count, best.parameters_range))
        console.print(
            f"{best.flops:.3g} FLOPs: {count(best.parameters)} parameters ({sizes}), {count(best.tokens)} tokens, loss {best.loss:.4f}",
            highlight=False,
        )
    for line in doubts_of(analysis):
        print_line(console, f"Note: {line}")
    print_line(console, f"{folder / PAGE} shows it.")


def _console() -> Console:
    """A console as wide as the terminal; in a file or a pipe wide enough for the tables. A `[` in a name is no markup."""
    return Console(markup=False, width=None if Console().is_terminal else 160)


def _check_complete(found: Sequence[Found], codes: dict[str, int], options: Options) -> None:
    """Raise UserError that names runs without a loss, unless the rest is to be fitted."""
    failed = [f"{one.rung.name} ({one.state}{f', exit code {codes[one.rung.name]}' if one.rung.name in codes else ''})"
              for one in found if one.failed or one.rung.name in codes]  # fmt: skip
    waiting = [one.rung.name for one in found if one.loss is None and not one.failed and one.rung.name not in codes]
    if options.without_failed or (not options.train and len(waiting) == len(found)):
        return
    if failed:
        raise UserError(
            f"{len(failed)} of {len(found)} runs failed: {some(failed, 5)}; mend and run again, or fit the others with --without-failed."
        )
    if waiting:
        raise UserError(
            f"{len(waiting)} of {len(found)} runs are not done: {some(waiting, 5)}; train them, or fit the others with --without-failed."
        )


def _optima(settings: LadderSettings, analysis: Analysis) -> list[Optimum]:
    """Best sizes for budgets from the largest run's on; none for a form that says nothing of them."""
    if analysis.fit.form.name == "compute":
        return []
    runs = analysis.fit.runs
    sizes_S, costs_S = token_costs([one.rung for one in analysis.done], settings.fit.parameters)

    def cost(sizes_G: Floats) -> Floats:
        return np.interp(np.log(sizes_G), np.log(sizes_S), costs_S)

    return [best_for(analysis.fit, times * float(runs.flops_R.max()), cost) for times in BEYOND]


def _result(settings: LadderSettings, analysis: Analysis, optima: Sequence[Optimum]) -> dict[str, Any]:
    """Return all figures, for programs."""
    fit = analysis.fit
    return {
        "base": settings.base,
        "assumed": assumed(base_of(settings).model_dump(mode="json", exclude_none=True)),
        "form": fit.form.name,
        "parameters": settings.fit.parameters,
        "theta": fit.theta_P.tolist(),
        "thetas": fit.thetas_KP.tolist(),
        "centre": list(fit.centre),
        "values": fit.values(),
        "ranges": fit.ranges(),
        "noise": fit.noise,
        "exponents": analysis.exponents,
        "predictions": [{**asdict(one), "error": one.error} for one in analysis.predictions],
        "optima": [asdict(one) for one in optima],
        "runs": [
            {"name": one.rung.name, "parameters": one.rung.parameters, "tokens": one.rung.tokens, "flops": one.rung.flops,
             "loss": one.loss, "seconds": one.seconds, "epochs": epochs(one.rung.config.data.stores, one.rung.tokens)}
            for one in analysis.done
        ],
        "huber": settings.fit.huber,
        "samples": settings.fit.samples,
    }  # fmt: skip
