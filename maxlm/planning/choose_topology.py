"""Compare topologies, each by its best predicted layout; the most promising are compiled: `maxlm plan --chips-at-most`."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from maxlm.base.console import print_line
from maxlm.base.errors import ConfigError, shell_command
from maxlm.compiler.aot import available_hbm, why_not
from maxlm.config import rules
from maxlm.config.schema import ClusterConfig, Config
from maxlm.cost.compile_command import output_console, progress
from maxlm.cost.expected import source_of
from maxlm.cost.verify import Compiler, Verdict
from maxlm.hardware.topologies import Topology, near, parse
from maxlm.hardware.vocabulary import Vocabulary, vocabulary
from maxlm.planning.branching import search_all
from maxlm.planning.explore import STOPPED, Point, Search, explore, points
from maxlm.planning.layouts import Layout, Saving, why_microbatches_stay
from maxlm.planning.plan import Scale, analytic_model, best_estimate, describe, scale_of
from maxlm.planning.plan_output import ALONE, layout_table, point_json
from maxlm.planning.run_cost import RunCost, Wanted, ramp_line, run_cost, to_json
from maxlm.telemetry.formatting import count, duration, energy, mass, money, percent

WIDE = 140  # columns, from which on the table has all figures
CHECKED = 4  # topologies: the fastest and the cheapest by prediction
TRIES = 2  # layouts compiled of each, the second only when the first does not fit


@dataclass
class Machine:
    """A topology, its best layout so far, and what a run costs with it."""

    topology: Topology
    config: Config
    search: Search
    scale: Scale
    wanted: Wanted
    point: Point | None = None  # the best compiled, else the best predicted; None when nothing fits
    cost: RunCost | None = None
    refused: str = ""  # the rule that the config breaks on this chip

    def choose(self) -> None:
        """Take the best layout of the search, and its cost; both or, after Ctrl-C, neither."""
        point, cost = _best(self.search), None
        if point is not None:
            seconds, step_s = self.scale.seconds(point.step_s), self.scale.expected_s(point.step_s)
            cost = run_cost(self.topology, self.config.memory_checkpoints, seconds, step_s, self.wanted)
        self.point, self.cost = point, cost

    @property
    def wall_s(self) -> float:
        """Seconds of the whole run, infinite if nothing fits."""
        return self.cost.wall_s if self.cost else math.inf

    @property
    def dear(self) -> tuple[bool, float]:
        """Orders machines by what a run costs: those without a price come last, by their chip-hours."""
        if self.cost is None:
            return True, math.inf
        return self.cost.money is None, self.cost.chip_hours if self.cost.money is None else self.cost.money

    @property
    def breaks_a_limit(self) -> bool:
        """True if nothing fits, or the run takes more days or dollars than asked for."""
        return self.cost is None or not self.cost.within(self.wanted)


@dataclass(frozen=True)
class Comparison:
    """A run of `config` on several topologies. `arguments`: the name of the config, and the overrides."""

    config: Config
    wanted: Wanted
    arguments: tuple[str, ...]
    machines: list[Machine] = field(default_factory=list)

    @property
    def fitting(self) -> list[Machine]:
        """Machines with a layout that fits, fastest first."""
        return sorted((machine for machine in self.machines if machine.point), key=lambda machine: machine.wall_s)

    def predict(self, topology: Topology, tokens: float | None) -> None:
        """Add `topology` with its layouts predicted: without offloading, and with the user's own loss chunks, which matter little."""
        chunks = self.config.train.loss_chunks

        def offered(saving: Saving) -> bool:
            return not saving.offload and saving.loss_chunks == chunks

        config = self.config.model_copy(update={"cluster": ClusterConfig(topology=topology.name)})
        scale, available = scale_of(config, topology, tokens), available_hbm(parse(near(topology.chip, 1, most=1)[0]))
        try:
            rules.check(config, any_mesh=True)
        except ConfigError as error:
            machine = Machine(topology, config, Search(available), scale, self.wanted, refused=str(error))
        else:
            search = search_all(analytic_model(config, topology), available, offered=offered)
            machine = Machine(topology, config, search, scale, self.wanted)
        machine.choose()
        self.machines.append(machine)

    def show(self, chosen: Mapping[str, Machine | None]) -> None:
        """Print the table of machines, its notes, and the machines that were `chosen`."""
        console, machines, wanted = output_console(), self.fitting, self.wanted
        tokens = machines[0].scale.tokens if machines else 0
        console.print(f"{self.config.run.name}: {count(tokens)} tokens, {count(self.config.tokens_per_step)} a step", style="bold")
        words = vocabulary((machines or self.machines)[0].topology.chip)  # all of them are TPUs, or GPUs of one kind
        console.print(self._table(machines, words, wide=console.width >= WIDE))
        priced = any(machine.cost and machine.cost.money is not None for machine in machines)
        measure = "cheaper" if priced else f"smaller in {words.chip}-hours"
        taken = " Preemptions are not counted." if wanted.term == "spot" else ""
        notes = [f"*: no other is both faster and {measure}. ~: estimated power. Days are with failures.{taken} Nothing was measured."]
        notes += [_correction_line(machines), *_above_best(machines), _price_line(machines, wanted)] if machines else []
        notes += machines[0].scale.assumes if machines else ()
        if without := [_name(machine.topology) for machine in self.machines if machine.point is None and not machine.refused]:
            notes.append(f"Too small, or the batch does not split over them: {', '.join(without)}.")
        for reason in dict.fromkeys(machine.refused for machine in self.machines if machine.refused):
            notes.append(f"{', '.join(_name(machine.topology) for machine in self.machines if machine.refused == reason)}: {reason}")
        notes += filter(None, [why_microbatches_stay(self.config.model, self.config.train.microbatches)])
        for machine in self.machines:
            notes += [f"The compiler failed for {_name(machine.topology)}: {said}" for said in machine.search.failed.values()]
        for note in notes:
            console.print(note, style="dim")
        for line in choice_lines(chosen, wanted):
            console.print(line, style="bold")
        picked = next((machine for machine in chosen.values() if machine), machines[0] if machines and not chosen else None)
        if picked is not None:
            where = picked.topology
            many = ("--slices", str(where.slices)) if where.slices != self.config.mesh.slices else ()
            again = shell_command("maxlm", "plan", self.arguments[0], "--topology", where.name, *many, *self.arguments[1:])
            print_line(console, f"For the layout in full: {again}")

    def _table(self, machines: Sequence[Machine], words: Vocabulary, *, wide: bool) -> Table:
        starred, more = frontier(machines), ("goodput", "MFU") if wide else ()
        alone = (ALONE,) if any(machine.scale.correction.ratios for machine in machines) else ()
        table = layout_table("", words.chips, "days", f"{words.chip}-hours", "cost", "energy", "CO2e", "step", *alone, *more)
        for machine in machines:
            point, cost, topology = machine.point, machine.cost, machine.topology
            assert point is not None and cost is not None
            figures = [f"{topology.chips:,}", f"{cost.days:.3g}", count(cost.chip_hours), _or_dash(cost.money, self.wanted)]
            step_s = machine.scale.expected_s(point.step_s)
            figures += [_estimated(cost, energy, cost.kwh), _estimated(cost, mass, cost.kg_co2), duration(step_s)]
            figures += [duration(point.step_s) for _ in alone]
            figures += [percent(cost.goodput), percent(machine.scale.mfu(step_s))] if wide else []
            status = ("* " if any(machine is one for one in starred) else "  ") + ("compiled" if point.compiled else "predicted")
            layout = describe(point.layout) if wide else describe(point.layout).partition(",")[0].partition(";")[0]
            table.add_row(_name(topology), *figures, status, layout, style="" if point.compiled else "dim")
        return table

    def to_json(self, chosen: Mapping[str, Machine | None]) -> dict[str, Any]:
        """Plain values of all machines that fit, and the names of the others."""
        rows, machines = [], self.fitting
        starred = frontier(machines)
        for machine in machines:
            topology = machine.topology
            where = {"topology": topology.name, "slices": topology.slices, "chips": topology.chips}
            assert machine.point is not None and machine.cost is not None
            point = point_json(machine.point, machine.scale, machine.point.layout.settings(machine.config))
            cost = {"cost": to_json(machine.cost, self.wanted), "time_cost_frontier": any(machine is one for one in starred)}
            said = {"correction": machine.scale.correction.to_json(), "assumes": list(machine.scale.assumes)}
            rows.append({**where, "available_bytes": machine.search.available, **point, **cost, **said})
        without = [machine.topology.name for machine in self.machines if machine.point is None and not machine.refused]
        picked = {kind: machine.topology.name if machine else None for kind, machine in chosen.items()}
        refused = {machine.topology.name: machine.refused for machine in self.machines if machine.refused}
        found = {"machines": rows, "do_not_fit": without, "refused": refused}
        return {"run": self.config.run.name, "tokens_per_step": self.config.tokens_per_step, **found, **picked}


def compare(comparison: Comparison, topologies: Sequence[Topology], tokens: float | None, only: str = "", *, as_json: bool) -> int:
    """Print time and cost of a run of `tokens` on each topology; 0 if one fits, within the limits if there are any, else 2. `only`: why
    other chips are not compared, in a sentence.
    """
    machines = comparison.machines
    with progress() as show_progress:
        try:
            for topology in topologies:
                show_progress(f"predicting {comparison.config.run.name} on {topology.name}")
                comparison.predict(topology, tokens)
            _check(machines, show_progress)
        except KeyboardInterrupt:
            show_progress("stopped")
    fitting = comparison.fitting
    chosen = choose(fitting, comparison.wanted)
    missing = [_name(topology) for topology in topologies[len(machines) :]]  # after Ctrl-C
    if as_json:
        sys.stdout.write(json.dumps(comparison.to_json(chosen) | {"not_predicted": missing}) + "\n")
    else:
        comparison.show(chosen)
        for note in filter(None, (ramp_line(comparison.config.train), only)):
            output_console().print(note, style="dim")
        if missing:
            output_console().print(f"Stopped, so not predicted: {', '.join(missing)}.", style="bold")
    return 0 if fitting and None not in chosen.values() else 2


def choose(machines: Sequence[Machine], wanted: Wanted) -> dict[str, Machine | None]:
    """Machines that the limits ask for, within all of them: `cheapest` if there is one of days, `fastest` if there is one of dollars."""
    kept = [machine for machine in machines if not machine.breaks_a_limit]
    chosen: dict[str, Machine | None] = {}
    if wanted.days_at_most is not None:
        chosen["cheapest"] = min(kept, key=lambda machine: machine.dear, default=None)
    if wanted.dollars_at_most is not None:
        chosen["fastest"] = min(kept, key=lambda machine: machine.wall_s, default=None)
    return chosen


def frontier(machines: Sequence[Machine]) -> list[Machine]:
    """Machines, fastest first, that no other beats in both time and cost; if any has a price, those without are none of them."""
    least = (all(machine.dear[0] for machine in machines), math.inf)
    found = []
    for machine in machines:
        if machine.dear < least:
            found.append(machine)
            least = machine.dear
    return found


def _check(machines: Sequence[Machine], show_progress: Callable[[str], None]) -> None:
    """Compile the best layout of the most promising machines; a trial corrects the predictions of all machines of the same chip.

    Raises UserError if the first compile of all fails.
    """
    with Compiler(machine_code=False) as compiler:
        for number in range(CHECKED):
            rank = (lambda one: (one.breaks_a_limit, one.dear)) if number % 2 else (lambda one: (one.breaks_a_limit, (False, one.wall_s)))
            some = (one for one in machines if one.point and not one.search.tried and not why_not(one.topology))
            machine = min(some, key=rank, default=None)
            if machine is None:
                return
            here = machine.topology

            def compiling(search: Search, layout: Layout, name: str = here.name) -> None:
                show_progress(f"compiling {describe(layout)} for {name} (Ctrl-C keeps the best so far)")

            first = not any(one.search.tried for one in machines)
            _try(machine, compiler, compiling, first=first)
            for other in machines if machine.search.trials else (machine,):
                if other.topology.chip == here.chip and other is not machine:
                    other.search.other_trials += machine.search.trials
                other.choose()
            if machine.search.end == STOPPED:
                raise KeyboardInterrupt  # after what was compiled has counted


def _try(machine: Machine, compiler: Compiler, show_progress: Callable[[Search, Layout], None], *, first: bool) -> None:
    """Compile the best layout of a machine, and up to `TRIES` in all until one fits. `first`: nothing was compiled before."""
    search = machine.search

    def verify(layout: Layout) -> Verdict:
        return compiler(layout.apply(machine.config), machine.topology)

    for tries in range(1, TRIES + 1):
        explore(search, [], verify, show_progress, most=tries, may_fail=not first)
        if search.best or search.end == STOPPED:
            break
        search.end = ""


def _best(search: Search) -> Point | None:
    """The fastest compiled layout that fits; without one, the best by estimate."""
    fitting = [point for point in points(search) if point.fits]
    compiled = [point for point in fitting if point.compiled]
    return min(compiled, key=lambda point: point.step_s) if compiled else best_estimate(fitting, search.available)


def _correction_line(machines: Sequence[Machine]) -> str:
    """Factor between the estimated and the expected step of each chip, its range, and the published runs that it is from."""
    corrections = {machine.topology.chip.name: machine.scale.correction for machine in machines}
    if not any(corrected.ratios for corrected in corrections.values()):
        return f"Steps are estimates, and not corrected: {next(iter(corrections.values())).sentence}."
    each = (
        f"{chip} {corrected.middle:.2f}, {corrected.range[0]:.2f} to {corrected.range[1]:.2f} ({corrected.sentence})"
        for chip, corrected in corrections.items()
    )
    return f"Steps, days and costs are expected: the estimate times the factor of published runs, within its range. {'; '.join(each)}."


def _above_best(machines: Sequence[Machine]) -> list[str]:
    """A sentence for each chip on which a row has an MFU above the best published, by its highest."""
    found = {}
    for machine in sorted(machines, key=lambda one: one.scale.mfu(one.point.step_s) if one.point else 0.0):
        assert machine.point is not None
        source = source_of(machine.topology.chip, compiled=machine.point.compiled)
        if said := machine.scale.above_best(machine.point.step_s, source):
            found[machine.topology.chip.name] = f"{_name(machine.topology)}: {said[0].lower()}{said[1:]}"
    return list(found.values())


def _price_line(machines: Sequence[Machine], wanted: Wanted) -> str:
    """Prices of a chip-hour of all chips, and where they are those."""
    prices = {}
    for machine in machines:
        offer = wanted.offer(machine.topology.chip)
        price = offer.price(wanted.term) if offer else None
        text = f"{money(price, wanted.prices.currency)} ({offer.provider} {offer.region})" if offer and price is not None else "unknown"
        prices[machine.topology.chip.name] = text
    hour = f"A {vocabulary(machines[0].topology.chip).chip}-hour, {wanted.term}"
    return f"{hour}: {', '.join(f'{chip} {price}' for chip, price in prices.items())}; {wanted.prices.source}."


def choice_lines(chosen: Mapping[str, Machine | None], wanted: Wanted) -> list[str]:
    """The choices, a line each, or a line that there is none."""
    limits = [f"{wanted.days_at_most:g} days"] if wanted.days_at_most is not None else []
    limits += [money(wanted.dollars_at_most, "USD")] if wanted.dollars_at_most is not None else []
    within = " and ".join(limits)
    if chosen and not any(chosen.values()):
        return [f"None is within {within}."]
    lines = []
    for kind, machine in chosen.items():
        assert machine is not None and machine.cost is not None
        price = _or_dash(machine.cost.money, wanted)
        lines.append(f"{kind.capitalize()} within {within}: {_name(machine.topology)}, {duration(machine.wall_s)}, {price}")
    return lines


def _or_dash(amount: float | None, wanted: Wanted) -> str:
    return "–" if amount is None else money(amount, wanted.prices.currency)


def _estimated(cost: RunCost, text: Callable[[float], str], value: float | None) -> str:
    return "–" if value is None else ("~" if cost.power_estimated else "") + text(value)


def _name(topology: Topology) -> str:
    return f"{topology.slices} x {topology.name}" if topology.slices > 1 else topology.name
