"""The figures of a compiled step, as a table for a console and as JSON: the report of `maxlm compile`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from maxlm.base.console import Console
from maxlm.compiler.aot import CompiledStep, build
from maxlm.config import extensions
from maxlm.config.schema import Config
from maxlm.cost import advice, quantized_matmuls
from maxlm.cost.advice import Suggestion, place, surprises
from maxlm.cost.expected import StepScale, source_of, step_scale
from maxlm.cost.memory import MemoryPart, divide_memory
from maxlm.cost.mesh_links import axis_links
from maxlm.cost.model_shapes import ParameterLeaf, parameter_leaves
from maxlm.cost.step_cost import SecondOpinion, StepCost, program_cost
from maxlm.cost.verify import step_of
from maxlm.hardware.chips import GIB, Chip
from maxlm.hardware.topologies import Topology
from maxlm.hardware.vocabulary import vocabulary
from maxlm.hlo.parser import read
from maxlm.models import count_parameters
from maxlm.telemetry.formatting import count, duration, percent

MOST_ROWS = 12  # of a table; --json has them all
LEAST_SHARE = 0.005  # of the time of matmuls, for operands to be shown


@dataclass(frozen=True)
class Report:
    """Figures of a compiled step. `cost` is None if it does not fit, and `suggestions` are settings that would; bytes are of one device."""

    config: Config
    topology: Topology
    mesh: dict[str, int]
    parameters: int
    scale: StepScale
    step: CompiledStep
    parts: tuple[MemoryPart, ...]  # of HBM; sums to step.needed
    cost: StepCost | None
    remarks: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]

    @property
    def calibrated(self) -> bool:
        """True if speeds were counted for TPUs or measured on this machine; False for a GPU without `maxlm plan --calibrate`."""
        return self.topology.is_tpu or bool(self.topology.chip.achieved.source)

    def to_json(self) -> dict[str, Any]:
        """Plain values. Seconds, bytes and FLOPs; bytes and times of one device, tokens and model FLOPs of all."""
        topology, step = self.topology, self.step
        memory = {
            "available_bytes": step.available,
            "needed_bytes": step.needed,
            "missing_bytes": step.missing,
            "host_bytes": step.memory.host if step.memory else None,
            "parts": [asdict(part) for part in self.parts],
        }
        return {
            "run": self.config.run.name,
            extensions.FIELD: [one.to_json() for one in extensions.of(self.config.extensions)],
            "topology": topology.name,
            "slices": topology.slices,
            "chips": topology.chips,
            "devices": topology.devices,
            "hosts": topology.hosts,
            "mesh": self.mesh,
            "parameters": self.parameters,
            "tokens_per_step": self.config.tokens_per_step,
            "model_flops": self.scale.model_flops,
            "fits": step.fits,
            "hbm": memory,
            "time": self._time_json(),
            "assumes": list(self.scale.assumes),
            "communication": [asdict(traffic) | {"remark": advice.surprise(traffic)} for traffic in self.cost.traffic] if self.cost else [],
            "warnings": list(self.remarks),
            "would_fit": [
                {"settings": dict(way.settings), "needed_bytes": way.used, "available_bytes": way.available} for way in self.suggestions
            ],
            "compile": {"seconds": step.seconds, "cached": step.cached, "machine_code": step.machine_code},
        }

    def _time_json(self) -> dict[str, Any] | None:
        if self.cost is None:
            return None
        cost = {key: value for key, value in asdict(self.cost).items() if key != "traffic"}
        by = {"mfu_peak": self.scale.peak_name, "correction": self.scale.correction.to_json()}
        return {**self.scale.to_json(self.cost.total_s), **by, "calibrated": self.calibrated, **cost}


def examine(config: Config, topology: Topology, show_progress: Callable[[str], None], *, machine_code: bool = True) -> Report:
    """Compile the step of `config` for `topology` and gather its figures; `show_progress` shows progress. Without `machine_code` a step for
    TPUs is only scheduled. Raises UserError.
    """
    show_progress(f"compiling the training step of {config.run.name} for {topology.name}")
    program = build(config, topology)
    step = step_of(program, topology, machine_code=machine_code)
    sizes = dict(program.mesh.shape)
    module = read(step.text) if step.fits else None
    cost, remarks, suggestions = None, [], []
    parts = divide_memory(program, step, module)
    if module is not None:
        cost = program_cost(program, module, topology)
        remarks = advice.remarks(config, topology, sizes, axis_links(program.mesh, topology), step, cost)
        remarks += [row.problem for row in quantized_matmuls.check(config, module, sizes) if row.problem]
    else:
        hopeless = too_small(parameter_leaves(config), topology, step.available)
        remarks = [hopeless] if hopeless else []
        suggestions = [] if hopeless else advice.ways_to_fit(config, topology, sizes, show_progress)
    return Report(
        config=config,
        topology=topology,
        mesh=sizes,
        parameters=count_parameters(config.model),
        scale=step_scale(config.model, config.precision.matmul, config.data.seq_len, config.tokens_per_step, topology),
        step=step,
        parts=parts,
        cost=cost,
        remarks=tuple(remarks),
        suggestions=tuple(suggestions),
    )


def too_small(leaves: Iterable[ParameterLeaf], topology: Topology, available: int) -> str:
    """An error message if no mesh of this machine can hold the parameters and the optimizer, with `available` bytes of HBM on each device,
    else empty.
    """
    state = sum(leaf.held_bytes((None,), leaf.numbers) for leaf in leaves)
    least, room = state / topology.chips, available * topology.chip.devices_per_chip
    words = vocabulary(topology.chip)
    if least <= room:
        return ""
    return (
        f"No mesh fits: parameters and optimizer take {least / GIB:.1f} GiB a {words.chip} when split over all "
        f"{words.counted(topology.chips)}, {(least - room) / GIB:.1f} GiB more than they have; at least "
        f"{-(-state // room):,} {words.chips} are needed."
    )


def show(report: Report, console: Console) -> None:
    """Print the report: memory, time and communication of a step that fits, else why not and which settings would."""
    _header(report, console)
    _memory(report, console)
    if report.cost is not None:
        _time(report, console)
        _communication(report, console)
    if report.remarks:
        _title(console, "Warnings" if report.step.fits else "Why, and what to do")
        for remark in report.remarks:
            console.print(f"- {remark}")
    elif not report.step.fits:
        _ways(report, console)


def _header(report: Report, console: Console) -> None:
    config, topology = report.config, report.topology
    mesh = " x ".join(f"{axis} {size}" for axis, size in report.mesh.items() if size > 1) or "one device"
    slices = f"{topology.slices} slices of " if topology.slices > 1 else ""
    parts = f" in {config.train.microbatches} microbatches" if config.train.microbatches > 1 else ""
    batch = f"{config.train.global_batch:,} x {config.data.seq_len:,}{parts}"
    console.print(f"{config.run.name}: {count(report.parameters)} parameters, {count(config.tokens_per_step)} tokens a step ({batch})")
    words = vocabulary(topology.chip)
    where = f"{words.counted(topology.chips)} on {words.hosts(topology.hosts)}"
    console.print(f"{slices}{topology.name}: {where}; mesh {mesh}")
    for extension in extensions.of(config.extensions):
        console.print(f"with {extension}")
    done = "compiled" if report.step.machine_code else "scheduled"
    verb = done if report.step.fits else "refused by the compiler"
    rest = "" if report.step.machine_code or not report.step.fits else "; machine code is not made (--machine-code)"
    console.print(f"{verb}{' before,' if report.step.cached else ''} in {duration(report.step.seconds)}{rest}")


def _memory(report: Report, console: Console) -> None:
    step = report.step
    holder = vocabulary(report.topology.chip).chip if report.topology.chip.devices_per_chip == 1 else "device (half a chip)"
    if step.fits:
        summary = f"{size(step.needed)} of {size(step.available)} a {holder}, {percent(1 - step.needed / step.available)} free"
    else:
        summary = f"does not fit: at least {size(step.needed)} of {size(step.available)} a {holder}, {size(step.missing)} too much"
    _title(console, f"HBM: {summary}")
    rows = []
    previous = ""
    for part in report.parts:
        group = part.group if part.group != previous else ""
        previous = part.group
        rows.append((group, part.name if part.name != part.group else "", size(part.bytes), percent(part.bytes / step.available)))
    if step.fits:
        rows.append(("free", "", size(step.available - step.needed), percent(1 - step.needed / step.available)))
    _table(console, ("", "", ">", ">"), rows)
    if step.memory is not None and step.memory.host:
        chip = report.topology.chip
        stated = f", of {size(round(chip.host_bytes / chip.devices_per_chip))} that there is" if chip.host_bytes is not None else ""
        console.print(f"  and {size(step.memory.host)} of host memory{stated}")


def _time(report: Report, console: Console) -> None:
    cost = report.cost
    assert cost is not None
    total, chip = cost.total_s, report.topology.chip
    _title(console, f"Time: {report.scale.headline(total)} ({'expected' if report.calibrated else 'a guess'})")
    for note in report.scale.notes(total, source_of(chip, compiled=True)):
        console.print(f"  {note}")
    if cost.extra_round_s:
        more = duration(report.scale.expected_s(cost.extra_round_s))
        console.print(f"  One further round in every layer of experts is expected to take {more} a step.")
    console.print("  Parts of the estimate:")
    kinds = {
        "matmul": ("#", cost.matmul_s),
        "attention": ("@", cost.attention_s),
        "other": ("+", cost.kernel_s),
        "memory-bound": (".", cost.memory_s),
        "exposed communication": ("!", cost.exposed_s),
    }
    width = max(10, min(console.width - 6, 72))
    console.print(f"  [{_bar([(mark, seconds / total) for mark, seconds in kinds.values()], width)}]")
    parts = [f"{mark} {name} {duration(seconds)} ({percent(seconds / total)})" for name, (mark, seconds) in kinds.items()]
    console.print("  " + "   ".join(parts))
    console.print(f"  matmuls: {formats_line(cost, chip)}")
    if cost.second_opinion is not None:
        console.print(f"  {second_opinion_line(cost.second_opinion)}")
    longest = [
        (op.kind, f"{op.times:,}", duration(op.seconds), percent(op.share_of_peak) if op.share_of_peak else "", place(op.where) or op.name)
        for op in cost.top[:8]
    ]
    _table(console, ("longest", ">times", ">time", ">of peak", "where"), longest)


def second_opinion_line(second: SecondOpinion) -> str:
    """Sentence that compares our price of XLA's operations with XLA's own cycles for these operations."""
    off = f"{percent(abs(second.ours_s / second.xla_s - 1))} {'more' if second.ours_s >= second.xla_s else 'less'}"
    return f"all but kernels and communication: {duration(second.ours_s)}; by XLA's own cycles {duration(second.xla_s)} (ours is {off})"


def formats_line(cost: StepCost, chip: Chip) -> str:
    """Share of the time of matmuls, by input format: `bf16 38% (at 88% of the bf16 peak), f8e4m3fn 62% (at 91% of the fp8 peak)`."""
    total = sum(row.seconds for row in cost.formats)
    rows = [row for row in cost.formats if row.seconds > LEAST_SHARE * total]
    peaks = (f"at {row.share_of_peak:.0%} of the {chip.peak_name(row.format)} peak" for row in rows)
    shares = (f"{row.operands} {row.seconds / total:.0%} ({peak})" for row, peak in zip(rows, peaks, strict=True))
    return ", ".join(shares) or "none"


def _communication(report: Report, console: Console) -> None:
    cost = report.cost
    assert cost is not None
    if not cost.traffic:
        _title(console, "Communication: none")
        return
    _title(console, f"Communication: {duration(cost.exposed_s)} exposed, {duration(cost.hidden_s)} hidden behind compute")
    table = []
    axes, links = list(report.mesh), vocabulary(report.topology.chip).links
    rows = sorted(cost.traffic, key=lambda t: axes.index(t.axes[0]) if t.axes and t.axes[0] in axes else len(axes))
    longest = sorted(rows, key=lambda t: -t.seconds)[:MOST_ROWS]
    for traffic in (row for row in rows if row in longest):
        mark = "! " if surprises(traffic, cost.total_s) else ""
        opcode = traffic.opcode if traffic.how == "sync" else f"{traffic.opcode} ({traffic.how})"
        size = f"{traffic.bytes / 1e6:,.1f}" if traffic.bytes < 1e7 else f"{traffic.bytes / 1e6:,.0f}"
        exposed = duration(traffic.exposed_s) if traffic.exposed_s else "hidden"
        row = (" ".join(traffic.axes), mark + opcode, f"{traffic.count:,}", size, links[traffic.link], duration(traffic.seconds), exposed)
        table.append((*row, place(traffic.where)))
    _table(console, ("axis", "collective", ">count", ">MB a step", "link", ">time", ">exposed", "where"), table)
    if len(rows) > len(longest):
        console.print(f"  and {len(rows) - len(longest)} smaller ones (--json lists them)")


def _ways(report: Report, console: Console) -> None:
    if not report.suggestions:
        more = f"take more {vocabulary(report.topology.chip).chips}, or a smaller model"
        _title(console, f"No smaller setting that was tried fits: {more}")
        return
    _title(console, "It would fit with, each checked by compiling:")
    for way in report.suggestions:
        console.print(f"  {way}   ({size(way.used)} of {size(way.available)})")


def _bar(shares: list[tuple[str, float]], width: int) -> str:
    """A bar of `width` characters; ends are rounded, so that the lengths add up."""
    drawn, reached = "", 0.0
    for mark, share in shares:
        reached += share
        drawn += mark * (round(reached * width) - len(drawn))
    return drawn


def _table(console: Console, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print an indented table; `>` before a name aligns its column to the right, the last of the others is cut where the console ends."""
    cut = max(number for number, name in enumerate(header) if not name.startswith(">"))
    columns = (
        Column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", no_wrap=number != cut)
        for number, name in enumerate(header)
    )
    shown = any(name.lstrip(">") for name in header)
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="", show_header=shown)
    for row in rows:
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in row))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _title(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold")


def size(number: int) -> str:
    """Format bytes as GiB, or as MiB if small."""
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:.1f} MiB"
