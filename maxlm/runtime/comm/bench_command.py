"""`maxlm bench-comm`: measure collectives between the devices of this process or cluster."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from maxlm.config import Config, load, rules
from maxlm.config.errors import UserError
from maxlm.parallel.mesh import build_mesh, lay_mesh
from maxlm.runtime import cluster
from maxlm.runtime.comm import render
from maxlm.runtime.comm.measure import Row, fitting_sizes, measure
from maxlm.runtime.comm.operations import OPERATIONS
from maxlm.runtime.comm.sizes import format_size
from maxlm.runtime.jax_setup import enable_compilation_cache, select_platform

DEFAULT_CONFIG = "runs/quickstart"  # its mesh is one axis over all devices
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
        names = [one for one in arguments if "=" not in one]
        settings = [one for one in arguments if "=" in one]
        if len(names) > 1:
            raise UserError(f"{' and '.join(names)}: give one CONFIG, and settings as key=value.")
        if names:
            return load(names[0], settings).config, True
        other = next((one for one in settings if not one.startswith("mesh.")), None)
        if other is not None:
            raise UserError(f"{other}: without a CONFIG only the mesh can be set, as in mesh.data=2 mesh.fsdp=4.")
        return load(DEFAULT_CONFIG, settings, any_mesh=True).config, False


def bench_comm(request: Request, named: Mapping[str, str], limit: Limit, *, as_json: bool) -> int:
    """Measure, and print a table for each axis, or one JSON object, on process 0. Returns 0. Raises UserError before measuring.

    `named`: settings of the cluster on the command line; `limit`: see `maxlm.cost.mesh_links.bus_limit`.
    """
    if request.out is not None and not request.out.absolute().parent.is_dir():
        raise UserError(f"--out {request.out}: there is no folder {request.out.absolute().parent}; make it first.")
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
    limit_of = lambda axis, name: limit(mesh, axis, name, OPERATIONS[name].bus_factor(mesh.shape[axis]), names)  # noqa: E731
    rows = []
    with log.status("") as status:
        for row in measure(mesh, [OPERATIONS[name] for name in request.operations], sizes, limit_of):
            status.update(f"{row.axis}: {row.operation} of {format_size(row.bytes)} done")
            rows.append(row)
    return rows, [size for size in request.sizes if size not in sizes]


def _mesh(request: Request) -> Mesh:
    devices = jax.devices()
    if len(devices) == 1:
        raise UserError(
            "there is one device, and nothing to measure: start one process a host, with coordinator=, process_count= and process_id= "
            "where no launcher says them; for several devices of a CPU set XLA_FLAGS=--xla_force_host_platform_device_count=8."
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
        console = Console()
        console = Console(width=max(WIDTH, console.width))  # a narrow terminal wraps lines; rich would cut words
        say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
        say(where)
        render.print_tables(rows, console)
        if left_out:
            say(f"Left out, since they may not fit the devices' memory: {', '.join(map(format_size, left_out))}.")
        if not any(row.limit for row in rows):
            say(f"The speed of the links between {kind} devices is not known, so no limit is shown.")
    if out is not None:
        try:
            render.plot(rows, where, out)
        except OSError as error:
            raise UserError(f"--out {out} cannot be written: {error.strerror}; choose another path.") from None
        if not as_json:
            say(f"plot: {out}")
