"""A plan for people, and for programs."""

from pathlib import Path
from typing import Any

from maxlm.config.schema import Config
from maxlm.cost.compile_command import screen
from maxlm.planning.frontier import Point, rows
from maxlm.planning.plan import Plan, machine_name
from maxlm.planning.table import GIB, Scale, frontier, words
from maxlm.telemetry.formatting import count, duration


def show(plan: Plan, written: tuple[Path, Path] | None) -> None:
    """Print the frontier, what was chosen, and the files that were `written`: config and picture."""
    console, search = screen(), plan.search

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)

    line(f"{plan.loaded.config.run.name} on {machine_name(plan.topology)}", "bold")
    dropped = f"{len(search.too_large):,} cannot fit, {len(search.too_slow):,} cannot be faster"
    line(f"{search.counted:,} layouts: {dropped}, {len(search.found)} compiled; {search.end}.")
    console.print()
    frontier(rows(plan.points), plan.scale, console)
    console.print()
    chosen = plan.chosen
    if chosen is None:
        why = "Nothing that was compiled fits: use a smaller train.global_batch or data.seq_len, or more chips."
        line(why if search.found else "Nothing was compiled: these are predictions.", "bold")
        return
    step_s, size = chosen.verdict.step_s, f"{chosen.verdict.needed / GIB:.1f} of {search.available / GIB:.1f} GiB"
    run = f"{duration(plan.scale.seconds(step_s))} for {count(plan.scale.tokens)} tokens"
    line(f"Chosen: {words(chosen.layout)}", "bold")
    line(f"{duration(step_s)} a step, MFU {plan.scale.mfu(step_s):.1%}, {size} a device, {run}; {_own_words(plan)}")
    if written is not None:
        config, picture = written
        line(f"{config} holds it, {picture} shows the frontier. Use it: maxlm train {config}; look closer: maxlm compile {config}")


def _own_words(plan: Plan) -> str:
    own = next((one for one in plan.search.found if one.layout == plan.own), None)
    if plan.own is None:
        return "the mesh of your own settings does not match"
    if own is None or not own.verdict.fits:
        return "your own settings do not fit"
    return "these are your own settings" if own is plan.chosen else f"your own settings: {duration(own.verdict.step_s)}"


def to_json(plan: Plan, written: tuple[Path, Path] | None) -> dict[str, Any]:
    """Plain values. Seconds of a step, bytes of one device, tokens and chip-hours of all."""
    search, topology = plan.search, plan.topology
    found = rows(plan.points)
    by_layout = {point.layout: point for point in found if point.compiled}
    own = next((by_layout[one.layout] for one in search.found if one.layout == plan.own), None)

    def as_json(point: Point) -> dict[str, Any]:
        return point_json(point, plan.scale, plan.loaded.config)

    return {
        "run": plan.loaded.config.run.name,
        "topology": topology.name,
        "slices": topology.slices,
        "chips": topology.chips,
        "devices": topology.devices,
        "tokens": plan.scale.tokens,
        "available_bytes": search.available,
        "layouts": {
            "counted": search.counted,
            "too_large": len(search.too_large),
            "too_slow": len(search.too_slow),
            "compiled": len(search.found),
        },
        "end": search.end,
        "chosen": as_json(by_layout[plan.chosen.layout]) if plan.chosen else None,
        "own": as_json(own) if own is not None else None,
        "frontier": [as_json(point) for point in found],
        "config": str(written[0]) if written else None,
        "chart": str(written[1]) if written else None,
    }


def point_json(point: Point, scale: Scale, config: Config) -> dict[str, Any]:
    """A row of the frontier for `config`; None for the times of what does not fit."""
    figures: dict[str, Any] = dict.fromkeys(("step_s", "mfu", "tokens_per_s", "run_s", "chip_hours"))
    if point.fits:
        step_s = point.step_s
        rates = (step_s, scale.mfu(step_s), scale.tokens_per_step / step_s, scale.seconds(step_s), scale.chip_hours(step_s))
        figures = dict(zip(figures, rates, strict=True))
    marks = {"compiled": point.compiled, "fits": point.fits, "frontier": point.frontier}
    return {"settings": point.layout.settings(config), "needed_bytes": point.needed, **marks, **figures}
