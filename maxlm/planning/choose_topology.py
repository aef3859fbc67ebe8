"""Compare topologies, each by its best predicted layout; the most promising are compiled: `maxlm plan --chips-at-most`."""

import functools
import json
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from maxlm.compiler.aot import available_hbm
from maxlm.config.schema import ClusterConfig, Config
from maxlm.cost.compile_command import output_console, progress
from maxlm.cost.verify import Compiler
from maxlm.hardware.topologies import Topology, near, parse
from maxlm.planning.branching import search_all
from maxlm.planning.explore import Point, Search, explore, points
from maxlm.planning.layouts import Layout
from maxlm.planning.plan import Scale, analytic_model, describe, scale_of
from maxlm.planning.plan_output import layout_table, point_json
from maxlm.telemetry.formatting import count, duration, percent

CHECKED = 4  # topologies: the fastest and the cheapest by prediction
TRIES = 2  # layouts compiled of each, the second only when the first does not fit


@dataclass
class Machine:
    """A topology and its best layout so far."""

    topology: Topology
    config: Config
    search: Search
    scale: Scale
    point: Point | None = None  # the best compiled, else the best predicted; None when nothing fits

    @property
    def run_s(self) -> float:
        """Seconds of the whole run, infinite if nothing fits."""
        return self.scale.seconds(self.point.step_s) if self.point else math.inf

    @property
    def chip_hours(self) -> float:
        """Chips times hours of the whole run, infinite if nothing fits."""
        return self.scale.chip_hours(self.point.step_s) if self.point else math.inf


def compare(config: Config, topologies: Sequence[Topology], tokens: float | None, arguments: tuple[str, ...], *, as_json: bool) -> int:
    """Print time and cost of a run of `tokens` on each topology; 0 if one fits. `arguments`: the name of the config, and the overrides."""
    machines: list[Machine] = []
    with progress() as show_progress:
        try:
            for topology in topologies:
                show_progress(f"predicting {config.run.name} on {topology.name}")
                smallest = parse(near(topology.chip, 1, most=1)[0])
                machines.append(_machine(config, topology, tokens, available_hbm(smallest)))
                machines[-1].point = _best(machines[-1].search)
            _check(machines, show_progress)
        except KeyboardInterrupt:
            show_progress("stopped")
    fitting = sorted((machine for machine in machines if machine.point), key=lambda machine: machine.run_s)
    if as_json:
        sys.stdout.write(json.dumps(_to_json(config, fitting, machines)) + "\n")
    else:
        _show(arguments, config, fitting, machines)
    return 0 if fitting else 2


def _machine(config: Config, topology: Topology, tokens: float | None, available: int) -> Machine:
    """`config` on `topology`, its layouts predicted: without offloading, and with the user's own loss chunks, which matter little."""
    chunks = config.train.loss_chunks

    def offered(layout: Layout) -> bool:
        return not layout.offload and layout.loss_chunks == chunks

    on_topology = config.model_copy(update={"cluster": ClusterConfig(topology=topology.name)})
    return Machine(
        topology,
        on_topology,
        search_all(on_topology, analytic_model(on_topology, topology), available, offered=offered),
        scale_of(on_topology, topology, tokens),
    )


def _check(machines: Sequence[Machine], show_progress: Callable[[str], None]) -> None:
    """Compile the best layout of the most promising machines; a trial corrects the predictions of all machines of the same chip."""
    with Compiler() as compiler:
        for number in range(CHECKED):
            rank = operator.attrgetter("chip_hours" if number % 2 else "run_s")
            machine = min((one for one in machines if one.point and not one.search.trials), key=rank, default=None)
            if machine is None:
                return
            here = machine.topology

            def compiling(search: Search, layout: Layout, name: str = here.name) -> None:
                show_progress(f"compiling {describe(layout)} for {name} (Ctrl-C keeps the best so far)")

            for tries in range(1, TRIES + 1):
                explore(machine.search, machine.config, None, functools.partial(compiler, topology=here), compiling, most=tries)
                if machine.search.end == "stopped":
                    raise KeyboardInterrupt
                if machine.search.best:
                    break
                machine.search.end = ""
            for other in machines:
                if other.topology.chip == here.chip and other is not machine:
                    other.search.other_trials += machine.search.trials
                other.point = _best(other.search)


def _best(search: Search) -> Point | None:
    fitting = [point for point in points(search) if point.fits]
    return min(fitting, key=lambda point: (not point.compiled, point.step_s), default=None)


def _show(arguments: tuple[str, ...], config: Config, machines: Sequence[Machine], others: Sequence[Machine]) -> None:
    console = output_console()
    tokens = machines[0].scale.tokens if machines else 0
    console.print(f"{config.run.name}: {count(tokens)} tokens, {count(config.tokens_per_step)} a step", style="bold")
    table = layout_table("", "chips", "run", "chip-hours", "step", "MFU")
    cheapest = math.inf
    for machine in machines:
        point, topology = machine.point, machine.topology
        assert point is not None
        mark = "* " if machine.chip_hours < cheapest else "  "
        cheapest = min(cheapest, machine.chip_hours)
        figures = duration(machine.run_s), count(machine.chip_hours), duration(point.step_s), percent(machine.scale.mfu(point.step_s))
        status = mark + ("compiled" if point.compiled else "predicted")
        table.add_row(
            _name(topology), f"{topology.chips:,}", *figures, status, describe(point.layout), style="" if point.compiled else "dim"
        )
    console.print(table)
    console.print("*: no other is both faster and cheaper. Nothing was measured.", style="dim")
    without = [_name(machine.topology) for machine in others if machine.point is None]
    if without:
        console.print(f"Too small, or the batch does not split over them: {', '.join(without)}.", style="dim")
    if machines:
        fastest = machines[0].topology
        many = f" --slices {fastest.slices}" if fastest.slices > 1 else ""
        name, *overrides = arguments
        again = " ".join([f"maxlm plan {name} --topology {fastest.name}{many}", *overrides])
        console.print(f"For the layout in full: {again}")


def _name(topology: Topology) -> str:
    return f"{topology.slices} x {topology.name}" if topology.slices > 1 else topology.name


def _to_json(config: Config, machines: Sequence[Machine], others: Sequence[Machine]) -> dict[str, Any]:
    rows = []
    for machine in machines:
        topology = machine.topology
        where = {"topology": topology.name, "slices": topology.slices, "chips": topology.chips}
        assert machine.point is not None
        rows.append({**where, "available_bytes": machine.search.available, **point_json(machine.point, machine.scale, machine.config)})
    without = [machine.topology.name for machine in others if machine.point is None]
    return {"run": config.run.name, "tokens_per_step": config.tokens_per_step, "machines": rows, "do_not_fit": without}
