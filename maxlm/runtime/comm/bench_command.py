"""`maxlm bench-comm`: measure collectives between the devices of this process or cluster."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from maxlm.config import Config, load, rules
from maxlm.config.errors import UserError
from maxlm.parallel.mesh import build_mesh, lay_mesh
from maxlm.runtime import cluster
from maxlm.runtime.comm.arguments import split_config
from maxlm.runtime.comm.measure import OPERATIONS, Row, fitting_sizes, measure
from maxlm.runtime.comm.sizes import format_seconds, format_size, three_digits
from maxlm.runtime.jax_setup import enable_compilation_cache, select_platform
from maxlm.telemetry.atomic import replacing
from maxlm.telemetry.link_use import check_out

DEFAULT_CONFIG = "runs/quickstart"  # its mesh is one axis over all devices
GB = 1e9
WIDTH = 128  # columns of a table with all operations
Limit = Callable[[Mesh, str, str, float, Sequence[str]], float | None]


@dataclass(frozen=True)
class Request:
    """Request for the mesh of `config`, or for its mesh section over all devices if `whole` is False; sizes in bytes, ascending."""

    config: Config
    whole: bool
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    out: Path | None = None

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
    """Measure, and print a table for each axis, or one JSON object, on process 0. Returns 0. Raises UserError before measuring.

    `named`: settings of the cluster on the command line; `limit`: see `maxlm.cost.mesh_links.bus_limit`.
    """
    check_out(request.out)
    log = Console(stderr=True)
    select_platform()
    with (
        cluster.stdout_to_stderr(),
        cluster.joined(named, lambda text: log.print(text, markup=False, highlight=False, soft_wrap=True)) as here,
    ):
        enable_compilation_cache()
        rows, left_out = _measure(request, here.hosts, limit, log)
    if jax.process_index() == 0:
        _print(rows, left_out, here.hosts, request.out, as_json=as_json)
    return 0


def _measure(request: Request, names: Sequence[str], limit: Limit, log: Console) -> tuple[list[Row], list[int]]:
    """Return rows, and the sizes that do not fit; `names`: host of each process; `log`: shows progress."""
    mesh = _mesh(request)
    sizes = fitting_sizes(mesh, request.sizes, names)
    if not sizes:
        raise UserError(f"--smallest = {format_size(request.sizes[0])}: not even that fits the devices' memory; give a smaller one.")
    rows = []
    with log.status("") as status:
        for row in measure(mesh, [OPERATIONS[name] for name in request.operations], sizes):
            status.update(f"{row.axis}: {row.operation} of {format_size(row.bytes)} done")
            rows.append(replace(row, limit=limit(mesh, row.axis, row.operation, row.bus_factor, names)))
    return rows, [size for size in request.sizes if size not in sizes]


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


def _print(rows: Sequence[Row], left_out: Sequence[int], hosts: Sequence[str], out: Path | None, *, as_json: bool) -> None:
    kind = jax.devices()[0].device_kind
    where = f"{jax.device_count()} x {kind} in {len(hosts)} process{'es' if len(hosts) > 1 else ''}, jax {jax.__version__}"
    if as_json:
        facts: dict[str, Any] = {"device_kind": kind, "devices": jax.device_count(), "hosts": list(hosts), "jax": jax.__version__}
        sys.stdout.write(json.dumps({**facts, "rows": [row.to_json() for row in rows], "left_out_bytes": list(left_out)}) + "\n")
    else:
        console = Console(width=max(WIDTH, Console().width))  # a narrow terminal wraps lines; rich would cut words
        say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
        say(where)
        for axis in dict.fromkeys(row.axis for row in rows):
            console.print(table(rows, axis))
        if left_out:
            say(f"Left out, since they may not fit the devices' memory: {', '.join(map(format_size, left_out))}.")
        if not any(row.limit for row in rows):
            say(f"The speed of the links between {kind} devices is not known, so no limit is shown.")
    if out is not None:
        try:
            plot(rows, where, out)
        except OSError as error:
            raise UserError(f"--out {out} cannot be written: {error.strerror}; choose another path.") from None
        if not as_json:
            say(f"plot: {out}")


def table(rows: Sequence[Row], axis: str) -> Table:
    """Table of one axis: a row per size with each operation's time and bus bandwidth; column heads show the links' limits if known."""
    names = list(dict.fromkeys(row.operation for row in rows))
    by_cell = {(row.operation, row.bytes): row for row in rows if row.axis == axis}
    devices = next(row.devices for row in rows if row.axis == axis)
    heading = f"{axis}, {devices} devices: time, and bus bandwidth in GB/s"
    result = Table(title=heading, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1))
    result.add_column("size", justify="right", no_wrap=True)
    for name in names:
        limit = next(row.limit for row in by_cell.values() if row.operation == name)
        result.add_column(name, justify="right", no_wrap=True)
        result.add_column(f"of {three_digits(limit / GB)}" if limit else "GB/s", justify="right", no_wrap=True)
    for size in sorted({row.bytes for row in by_cell.values()}):
        cells = []
        for row in (by_cell.get((name, size)) for name in names):
            cells += [format_seconds(row.seconds), three_digits(row.bus_bytes_per_s / GB)] if row else ["", ""]
        result.add_row(format_size(size), *cells)
    return result


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
