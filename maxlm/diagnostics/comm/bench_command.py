"""`maxlm bench-comm`: measure collectives between the devices of this process or cluster."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import jax
from jax.sharding import Mesh
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from maxlm.base.atomic import replacing
from maxlm.base.console import Console, print_line
from maxlm.base.errors import UserError, error_kind
from maxlm.base.paths import check_out
from maxlm.cluster import cluster
from maxlm.config import Config, load, rules
from maxlm.diagnostics.comm.arguments import LARGEST_ON_CPU, format_seconds, format_size, split_config, three_digits
from maxlm.diagnostics.comm.measure import OPERATIONS, Row, actual, fitting_sizes, measure
from maxlm.parallel.mesh import build_mesh, lay_mesh
from maxlm.run.jax_setup import enable_compilation_cache, select_platform

DEFAULT_CONFIG = "runs/quickstart"  # its mesh is one axis over all devices
GB = 1e9
CPU_SECONDS, CPU_STEP = 45.0, 2  # for CPU devices, where the command line states no largest size: seconds, and every so manieth size
Limit = Callable[[Mesh, str, str, float, Sequence[str]], float | None]


@dataclass(frozen=True)
class Request:
    """Request for the mesh of `config`, or for its mesh section over all devices if `whole` is False; sizes in bytes, ascending."""

    config: Config
    whole: bool
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    out: Path | None = None
    bounded: bool = False  # CPU devices get every `CPU_STEP`th size up to `LARGEST_ON_CPU`, for `CPU_SECONDS`

    @staticmethod
    def mesh_of(arguments: Sequence[str]) -> tuple[Config, bool]:
        """Return the config with the mesh, and True if the arguments name it. Raises UserError."""
        name, settings = split_config(arguments)
        if name is not None:
            return load(name, settings).config, True
        other = next((one for one in settings if not one.startswith("mesh.")), None)
        if other is not None:
            raise UserError(f"{other}: without a CONFIG only the mesh can be set, as in mesh.data=2 mesh.fsdp=4.")
        return load(DEFAULT_CONFIG, settings, any_mesh=True).config, False


def bench_comm(request: Request, named: Mapping[str, str], limit: Limit, *, as_json: bool) -> int:
    """Measure, and print a table for each axis while it is measured, or one JSON object, on process 0. Returns 0. Raises UserError before
    measuring.

    `named`: settings of the cluster on the command line; `limit`: see `maxlm.cost.mesh_links.bus_limit`.
    """
    check_out(request.out)
    log = Console(stderr=True)
    select_platform()
    with (
        cluster.stdout_to_stderr() as stdout,
        cluster.joined(named, partial(print_line, log)) as here,
    ):
        enable_compilation_cache()
        shown = _Table(sys.stderr if as_json else stdout) if jax.process_index() == 0 else None
        measured = _measure(request, here.hosts, limit, shown)
    if jax.process_index() == 0:
        _print(measured, here.hosts, request.out, as_json=as_json)
    return 0


@dataclass(frozen=True)
class _Measured:
    """Rows, and sizes in bytes without: those that do not fit, and on CPU those that were not asked for or had no time left."""

    rows: list[Row]
    too_large: list[int]
    late: list[int]


def _measure(request: Request, names: Sequence[str], limit: Limit, shown: "_Table | None") -> _Measured:
    """Measure in all processes; `names`: host of each process; `shown`: the rows as they come."""
    mesh = _mesh(request)
    bounded = request.bounded and jax.default_backend() == "cpu"
    most = max(LARGEST_ON_CPU, request.sizes[0]) if bounded else request.sizes[-1]
    asked = [size for size in request.sizes[:: CPU_STEP if bounded else 1] if size <= most]
    sizes = fitting_sizes(mesh, asked, names)
    if not sizes:
        raise UserError(f"--smallest = {format_size(asked[0])}: not even that fits the devices' memory; give a smaller one.")
    if shown is not None:
        shown.line(_where(names))
    operations = [OPERATIONS[name] for name in request.operations]
    rows: list[Row] = []
    for row in measure(mesh, operations, sizes, CPU_SECONDS if bounded else math.inf):
        limits = {one.name: limit(mesh, row.axis, one.name, one.bus_factor(row.devices), names) for one in operations}
        rows.append(replace(row, limit=limits[row.operation]))
        if shown is not None:
            shown.add(rows[-1], limits)
    if shown is not None:
        shown.line()
    done = {(row.devices, row.bytes) for row in rows}
    within = [size for size in sizes if all((n, actual(n, size)) in done for n in mesh.shape.values() if n > 1)]
    too_large = [size for size in asked if size not in sizes]
    return _Measured(rows, too_large, [size for size in request.sizes if size not in within and size not in too_large])


class _Table:
    """A table of each axis, written cell by cell: a line per size with each operation's time and bus bandwidth; heads show the limits of
    the links if known.
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self._axis, self._bytes = file, "", 0

    def line(self, text: str = "") -> None:
        """End the line that is being written, if there is one, and write `text` as another."""
        self._write(("\n" if self._bytes else "") + (f"{text}\n" if text else ""))
        self._bytes = 0

    def add(self, row: Row, limits: Mapping[str, float | None]) -> None:
        """Write a row, the next operation of its size; `limits`: of all operations over its axis, bytes/s."""
        if row.axis != self._axis:
            self.line()
            self._axis = row.axis
            self._write(f"\n{row.axis}, {row.devices} devices: time, and bus bandwidth in GB/s\n{'size':>8}")
            for name, limit in limits.items():
                self._write(f"{name:>16}{f'of {three_digits(limit / GB)}' if limit else 'GB/s':>9}")
            self._write("\n")
        if row.bytes != self._bytes:
            self.line()
            self._bytes = row.bytes
            self._write(f"{format_size(row.bytes):>8}")
        self._write(f"{format_seconds(row.seconds):>16}{three_digits(row.bus_bytes_per_s / GB):>9}")

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


def _mesh(request: Request) -> Mesh:
    devices = jax.devices()
    if len(devices) == 1:
        raise UserError(
            "there is one device, and nothing to measure: start one process a host, with coordinator=, process_count= and process_id= "
            "where no launcher says them; for several devices of a CPU add --devices 8."
        )
    if request.whole:
        return build_mesh(request.config)
    return lay_mesh(request.config.mesh, rules.resolve_mesh(request.config.mesh, len(devices)), devices)


def _where(hosts: Sequence[str]) -> str:
    processes = f"{len(hosts)} process{'es' if len(hosts) > 1 else ''}"
    return f"{jax.device_count()} x {jax.devices()[0].device_kind} in {processes}, jax {jax.__version__}"


def _print(measured: _Measured, hosts: Sequence[str], out: Path | None, *, as_json: bool) -> None:
    """Write the JSON object or the notes below the tables, and the plot."""
    kind, rows = jax.devices()[0].device_kind, measured.rows
    if as_json:
        facts: dict[str, Any] = {"device_kind": kind, "devices": jax.device_count(), "hosts": list(hosts), "jax": jax.__version__}
        left_out = [*measured.too_large, *measured.late]
        sys.stdout.write(json.dumps({**facts, "rows": [row.to_json() for row in rows], "left_out_bytes": left_out}) + "\n")
    else:
        if measured.too_large:
            print(f"Left out, since they may not fit the devices' memory: {', '.join(map(format_size, measured.too_large))}.")
        if measured.late:
            last = format_size(measured.late[-1]).replace(" ", "")
            few = f"a few sizes up to {format_size(LARGEST_ON_CPU)}, for {CPU_SECONDS:.0f} s"
            print(f"Devices of a CPU are measured with {few}; --largest {last} measures all sizes.")
        if not any(row.limit for row in rows):
            print(f"The speed of the links between {kind} devices is not known, so no limit is shown.")
    if out is not None:
        try:
            plot(rows, _where(hosts), out)
        except OSError as error:
            raise error_kind(error)(f"--out {out} cannot be written: {error.strerror}; choose another path.") from None
        if not as_json:
            print(f"plot: {out}")


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG to `path`: bus bandwidth against size, a panel per axis, a line per operation, dashed limits. Raises OSError."""
    axes_names = list(dict.fromkeys(row.axis for row in rows))
    figure = Figure(figsize=(1.5 + 7 * len(axes_names), 5.5), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize="medium", parse_math=False)
    panels = figure.subplots(1, len(axes_names), sharey=True, squeeze=False)[0]
    for panel, axis in zip(panels, axes_names, strict=True):
        _panel(panel, [row for row in rows if row.axis == axis])
    panels[0].set_ylabel("bus bandwidth of a device, GB/s")
    FigureCanvasAgg(figure)
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _panel(panel: Axes, rows: Sequence[Row]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    sizes = sorted({row.bytes for row in rows})
    names = list(dict.fromkeys(row.operation for row in rows))
    for name in names:
        line = [row for row in rows if row.operation == name]
        panel.plot([row.bytes for row in line], [row.bus_bytes_per_s / GB for row in line], label=name, marker="o", markersize=4)
    panel.legend(fontsize=9)
    for limit in sorted({row.limit for row in rows if row.limit}):
        limited = dict.fromkeys(row.operation for row in rows if row.limit == limit)
        which = "" if len(limited) == len(names) else f" of {', '.join(limited)}"
        panel.axhline(limit / GB, color="0.3", linestyle="--", linewidth=1)
        panel.annotate(
            f"limit{which}: {three_digits(limit / GB)} GB/s", (sizes[0], limit / GB), xytext=(0, 4), textcoords="offset points", fontsize=8
        )
    panel.set_title(f"{rows[0].axis}, {rows[0].devices} devices", fontsize="medium")
    panel.set_xlabel("bytes of a device's full buffer")
    panel.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45, ha="right")
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.grid(alpha=0.3)
    panel.margins(x=0.02)
