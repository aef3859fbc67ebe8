"""A plan on a console, as a chart and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Column, Table

from maxlm.base.atomic import replacing
from maxlm.base.console import Console, print_line
from maxlm.base.errors import printable, shell_command
from maxlm.config import extensions
from maxlm.cost.compile_command import output_console
from maxlm.cost.expected import source_of
from maxlm.hardware.chips import GIB
from maxlm.hardware.vocabulary import vocabulary
from maxlm.planning import run_cost
from maxlm.planning.explore import Point, Search, not_taken, rows
from maxlm.planning.gpu_attention import kernel_runs
from maxlm.planning.layouts import why_microbatches_stay
from maxlm.planning.plan import Plan, Scale, crossing_axes, describe, machine_name
from maxlm.planning.run_cost import Wanted
from maxlm.telemetry.formatting import count, duration, percent

WIDE = 100  # columns
ALONE = "estimate"  # column of the steps that nothing corrects
MOST_PREDICTED = 2000  # predicted layouts in a chart: more make it no clearer


def show(plan: Plan, written: tuple[Path, Path] | None, wanted: Wanted, console: Console | None = None) -> None:
    """Print the frontier, the chosen layout, what its run costs, and the paths of the config and the chart that were `written`."""
    console, search, asked = console or output_console(), plan.search, plan.loaded.config
    console.print(f"{asked.run.name} on {machine_name(plan.topology)}", style="bold")
    for extension in extensions.of(asked.extensions):
        console.print(f"with {extension}")
    dropped = f"{search.cannot_fit + len(search.too_large):,} cannot fit, {len(search.too_slow):,} cannot be faster"
    dropped += f", {search.set_aside:,} are predicted to be far slower" if search.set_aside else ""
    unrolled = sum(one.layout.unroll for one in search.trials)
    compiled = f"{len(search.trials) - unrolled} compiled" + (f" and {unrolled} without a loop over layers" if unrolled else "")
    end = f"none compiled: {plan.uncompiled}" if plan.uncompiled else f"{compiled}; {search.end}"
    console.print(f"{search.counted:,} layouts: {dropped}, {end}.")
    if kept := why_microbatches_stay(asked.model, asked.train.microbatches):
        console.print(kept)
    if search.failed:
        console.print(f"The compiler failed at {len(search.failed)}, which are dropped: {next(iter(search.failed.values()))}")
    console.print()
    show_frontier(rows(plan.points), plan.scale, console, _sources(plan))
    console.print()
    picked = plan.picked
    if picked is None:
        more = vocabulary(plan.topology.chip).chips
        advice = f"No layout fits: use a smaller train.global_batch or data.seq_len, or more {more}."
        console.print(advice if search.trials or plan.uncompiled else "No layout was compiled: these are predictions.", style="bold")
        return
    _show_not_taken(search, plan.scale, console)
    step_s, size = picked.step_s, f"{picked.needed / GIB:.1f} of {search.available / GIB:.1f} GiB"
    run = f"{duration(plan.scale.seconds(step_s))} for {count(plan.scale.tokens)} tokens"
    crossing = f"; between nodes: {' and '.join(crossed)}" if (crossed := crossing_axes(plan.topology, picked.layout)) else ""
    console.print(f"{'Chosen' if picked.compiled else 'Chosen by estimate'}: {describe(picked.layout)}{crossing}", style="bold")
    console.print(f"{plan.scale.headline(step_s)}, {size} a device, {run}; {_compare_to_own(plan)}")
    for note in plan.scale.notes(step_s, source_of(plan.topology.chip, compiled=picked.compiled)):
        console.print(note)
    runs = plan.topology.is_tpu or kernel_runs(asked.model, asked.data.seq_len, asked.precision.compute, plan.topology.chip)
    if not runs:
        console.print(
            f"Attention runs as XLA's operations here, not as a kernel: each score goes to the memory of {plan.topology.chip.name}."
        )
    for format, compiled_s in plan.formats.items():
        console.print(f"The fastest layout in {format}: {duration(plan.expected_in(format, compiled_s))} expected, compiled.")
    if plan.unformatted:
        console.print(f"--any-format has found nothing, {plan.unformatted}")
    for format, predicted_s in plan.quantized.items():
        if format not in plan.formats:
            expected = duration(plan.expected_in(format, predicted_s))
            console.print(f"With precision.matmul.format={format}: {expected} expected, not compiled; --any-format finds its layout.")
    if ramp := run_cost.ramp_line(asked.train):
        console.print(ramp)
    if (cost := plan.cost(wanted)) is not None:
        for line in run_cost.sentences(cost, wanted, vocabulary(plan.topology.chip).chip):
            console.print(line)
    if written is not None:
        path, chart = written
        typed = shell_command(str(path))
        look = "" if plan.uncompiled else f"; look closer: maxlm compile {typed}"
        print_line(
            console, f"{printable(str(path))} holds it, {printable(str(chart))} shows the frontier. Use it: maxlm train {typed}" + look
        )


def _show_not_taken(search: Search, scale: Scale, console: Console) -> None:
    """Print the layouts that were predicted to be faster than the chosen one, each with the reason why it was not taken."""
    others = not_taken(search)
    if others:
        console.print("Predicted to be faster, and not taken:")
        for one, before in zip(others, [None, *others], strict=False):
            reason = "the same" if before is not None and one.reason == before.reason else one.reason
            console.print(f"  {duration(scale.expected_s(one.predicted_s))} {describe(one.layout)}: {reason}", style="dim")
    if search.looped:
        console.print(f"  without a loop over layers: not compiled: {search.looped}", style="dim")
    if others or search.looped:
        console.print()


def _sources(plan: Plan) -> str:
    """Source of the seconds of a plan, in a sentence or two."""
    seconds = "Seconds are XLA's estimates, or a model's that they correct"
    if plan.topology.is_tpu:
        return f"{seconds}; nothing was measured."
    source = plan.topology.chip.achieved.source
    shares = f"shares of peak as measured ({source})" if source else "shares of peak that others measured"
    if plan.uncompiled:
        return f"Seconds and memory are a model's estimates, from {shares}."
    return f"Seconds are a guess from the compiled program and {shares}, or a model's that it corrects."


def _compare_to_own(plan: Plan) -> str:
    expected = plan.scale.expected_s
    own = next((trial for trial in plan.search.trials if trial.layout == plan.own), None)
    if plan.own is None:
        return "the mesh of your own settings does not match"
    if plan.uncompiled:
        mine = next((point for point in plan.points if point.layout == plan.own), None)
        if mine is None:
            return "your own settings do not fit, by estimate"
        return "these are your own settings" if mine == plan.picked else f"your own settings: {duration(expected(mine.step_s))}"
    if own is None and plan.formats:
        return "your own settings were compiled in another format alone"
    if own is None or not own.verdict.fits:
        return "your own settings do not fit"
    return "these are your own settings" if own is plan.chosen else f"your own settings: {duration(expected(own.verdict.step_s))}"


def show_frontier(points: Sequence[Point], scale: Scale, console: Console, sources: str) -> None:
    """Print `points`, one a line, in their order; a narrow console gets fewer columns. `sources`: where the figures come from."""
    rates = ("tokens/s", "run") if console.width >= WIDE else ()
    alone = (ALONE,) if scale.correction.ratios else ()
    table = layout_table("step", "MFU", *alone, *rates, "HBM")
    for point in points:
        mark = ("* " if point.frontier else "  ") + ("compiled" if point.compiled else "predicted")
        step_s = scale.expected_s(point.step_s)
        figures = [duration(step_s), percent(scale.mfu(step_s)), *(duration(point.step_s) for _ in alone)]
        figures += [count(scale.tokens_per_step / step_s), duration(scale.seconds(point.step_s))] if rates else []
        if not point.fits:
            figures, mark = ["-"] * len(figures), "  too large"
        style = "" if point.compiled and point.fits else "dim"
        table.add_row(*figures, f"{point.needed / GIB:.1f} GiB", mark, describe(point.layout), style=style)
    console.print(table)
    mfu = f" MFU is a share of the {scale.peak_name} peak." if scale.peak_name != "bf16" else ""
    run = f" Steps, and all that is counted from them, are expected: {scale.correction.middle:.2f} times the {ALONE}." if alone else ""
    console.print(f"*: no other is both faster and smaller.{mfu}{run} {sources}", style="dim")


def layout_table(*figures: str) -> Table:
    """An empty table of layouts: columns of `figures` aligned to the right, a mark, and the layout."""
    columns = (Column(name, justify="right" if name else "left", no_wrap=True) for name in (*figures, ""))
    layout = Column("mesh; kept for the backward pass", overflow="fold")
    return Table(*columns, layout, box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))


def to_json(plan: Plan, written: tuple[Path, Path] | None, wanted: Wanted) -> dict[str, Any]:
    """Plain values. Seconds of a step, bytes of one device, tokens and chip-hours of all devices."""
    search, topology = plan.search, plan.topology
    points = rows(plan.points)
    by_layout = {point.layout: point for point in points if point.compiled}
    own = next((by_layout[trial.layout] for trial in search.trials if trial.layout == plan.own), None)

    def as_json(point: Point) -> dict[str, Any]:
        return point_json(point, plan.scale, point.layout.settings(plan.loaded.config))

    return {
        "run": plan.loaded.config.run.name,
        extensions.FIELD: [one.to_json() for one in extensions.of(plan.loaded.config.extensions)],
        "topology": topology.name,
        "slices": topology.slices,
        "chips": topology.chips,
        "devices": topology.devices,
        "tokens": plan.scale.tokens,
        "mfu_peak": plan.scale.peak_name,
        "correction": plan.scale.correction.to_json(),
        "assumes": list(plan.scale.assumes),
        "available_bytes": search.available,
        "layouts": {
            "counted": search.counted,
            "too_large": search.cannot_fit + len(search.too_large),
            "set_aside": search.set_aside,
            "too_slow": len(search.too_slow),
            "compiled": len(search.trials),
            "failed": len(search.failed),
        },
        "end": search.end,
        "not_taken": [
            {
                "expected_step_s": plan.scale.expected_times(one.predicted_s),
                "predicted_step_s": one.predicted_s,
                "settings": one.layout.settings(plan.loaded.config),
                "reason": one.reason,
            }
            for one in not_taken(search)
        ],
        "loop_over_layers_stays": search.looped or None,
        "uncompiled": plan.uncompiled or None,
        "unformatted": plan.unformatted or None,
        "calibration": topology.chip.achieved.source or None,
        "chosen": as_json(plan.picked) if plan.picked else None,
        "cost": run_cost.to_json(cost, wanted) if (cost := plan.cost(wanted)) else None,
        "own": as_json(own) if own is not None else None,
        "expected_in": {name: plan.expected_in(name, step_s) for name, step_s in {**plan.quantized, **plan.formats}.items()},
        "quantized": dict(plan.quantized),
        "formats": dict(plan.formats),
        "frontier": [as_json(point) for point in points],
        "config": str(written[0]) if written else None,
        "chart": str(written[1]) if written else None,
    }


def point_json(point: Point, scale: Scale, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the frontier, of a layout with `settings`; times are None where it does not fit, and `run_s` is by `expected_step_s`."""
    figures = {**scale.to_json(point.step_s), "run_s": scale.seconds(point.step_s), "chip_hours": scale.chip_hours(point.step_s)}
    if not point.fits:
        figures = dict.fromkeys(figures)
    marks = {"compiled": point.compiled, "fits": point.fits, "frontier": point.frontier}
    return {**figures, "settings": settings, "needed_bytes": point.needed, **marks}


def draw(path: Path, title: str, points: Sequence[Point], chosen: Point, available: int, scale: Scale) -> None:
    """Write a PNG of expected step time against memory; `available`: HBM of a device, `chosen`: the chosen point. Raises OSError."""
    said = f"chosen: {duration(scale.expected_s(chosen.step_s))}"
    said += f" expected, {duration(chosen.step_s)} estimated" if scale.correction.ratios else ""
    *points, chosen = (replace(one, step_s=scale.expected_s(one.step_s)) for one in (*points, chosen))
    compiled = [point for point in points if point.compiled and point.fits]
    top = 1.1 * max(point.step_s for point in (chosen, *compiled) if point.step_s < 2 * chosen.step_s)  # slower ones are of no interest
    top = top if compiled else 1.5 * chosen.step_s
    predicted = [point for point in points if not point.compiled and point.step_s < top]
    leaner = sorted((point for point in predicted if point.frontier), key=lambda point: point.needed)
    refused = [point.needed / GIB for point in points if not point.fits]
    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="HBM that a device needs, GiB", ylabel="expected step time, s")
    axes.set_title(title, parse_math=False)  # a `$` in the name of a run is no formula
    axes.scatter(*_coordinates(predicted[:: 1 + len(predicted) // MOST_PREDICTED]), s=8, color="0.8", label="predicted")
    if leaner:
        label = "predicted, with less memory than was compiled" if compiled else "predicted: no other is faster and smaller"
        axes.plot(*_coordinates(leaner), color="0.45", linewidth=1, linestyle="--", label=label)
    if compiled:
        axes.scatter(*_coordinates(compiled), s=45, color="tab:blue", zorder=3, label="compiled")
    axes.scatter(*_coordinates([chosen]), s=190, color="tab:orange", marker="*", zorder=4, label=said)
    if refused:
        axes.scatter(refused, [chosen.step_s] * len(refused), s=45, color="tab:red", marker="x", zorder=3, label="compiled, does not fit")
    axes.axvline(available / GIB, color="tab:red", linewidth=1, label=f"HBM: {available / GIB:.1f} GiB")
    axes.set_xlim(left=0)
    axes.set_ylim(0.97 * chosen.step_s, top)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    FigureCanvasAgg(figure)
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _coordinates(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.needed / GIB for point in points], [point.step_s for point in points]
