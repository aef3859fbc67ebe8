"""The command `maxlm plan`: settings in, the fastest layout out, as a table, a picture and a config."""

import itertools
import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maxlm.config.errors import ConfigError, UserError
from maxlm.config.loader import LoadedConfig, find
from maxlm.config.schema import Config
from maxlm.cost.compile_command import meant, progress
from maxlm.hardware.topologies import Topology
from maxlm.telemetry.formatting import duration

if TYPE_CHECKING:
    from maxlm.cost.collectives import AxisLinks
    from maxlm.planning.analytic import Analytic
    from maxlm.planning.calibrate import Found
    from maxlm.planning.explore import Search
    from maxlm.planning.frontier import Point
    from maxlm.planning.layouts import Layout
    from maxlm.planning.table import Scale

GIB = 2**30


@dataclass(frozen=True)
class Request:
    """The command line: config, overrides, machine, tokens of the run to speak of, and where the plan is written."""

    name: str
    overrides: tuple[str, ...]
    topology: str | None
    slices: int | None
    tokens: float | None
    out: Path | None

    def __post_init__(self) -> None:
        if self.tokens is not None and not math.isfinite(self.tokens):
            raise UserError(f"--tokens {self.tokens} is no number of tokens: give one such as 15e12.")

    @property
    def file(self) -> Path:
        """The config to write."""
        return self.out if self.out is not None else Path(f"{find(self.name).stem}-planned.yml")


@dataclass(frozen=True)
class Plan:
    """What the search came to. `own`: the user's settings, where they are a layout of this machine."""

    request: Request
    loaded: LoadedConfig
    topology: Topology
    search: "Search"
    own: "Layout | None"
    scale: "Scale"
    points: "tuple[Point, ...]"

    @property
    def chosen(self) -> "Found | None":
        return self.search.best


def run(request: Request, *, as_json: bool) -> int:
    """Find the layout, print and write it; 0 when one fits, else 2. Raises UserError."""
    loaded, machine = meant(request.name, request.overrides, request.topology, request.slices, any_mesh=True)
    if not machine.is_tpu:
        raise UserError(f"{machine.name} is no TPU: maxlm plan knows how fast TPUs are, and no GPU; use for example --topology v5p:4x4x4.")
    if not request.file.absolute().parent.is_dir():
        raise UserError(f"--out {request.file}: there is no folder {request.file.absolute().parent}; make it first.")
    plan = _plan(request, loaded, machine)
    from maxlm.planning.render import show, to_json

    written, refused = _write(plan)
    if as_json:
        sys.stdout.write(json.dumps(to_json(plan, written)) + "\n")
    else:
        show(plan, written)
    if refused is not None:
        raise refused
    return 0 if plan.chosen else 2


def _plan(request: Request, loaded: LoadedConfig, topology: Topology) -> Plan:
    from maxlm.compiler.aot import available_hbm, leave_chips_alone

    leave_chips_alone()
    from maxlm.planning import explore
    from maxlm.planning.frontier import points
    from maxlm.planning.layouts import layouts
    from maxlm.planning.table import words
    from maxlm.planning.verify import Compiler

    config, started = loaded.config, time.monotonic()
    with progress() as tell, Compiler() as compiler:
        tell(f"enumerating layouts of {config.run.name} for {topology.name}")
        model = analytic(config, topology)
        own = _own(config, topology)
        offered = filter(model.fits_host, layouts(config, topology.devices))
        candidates = itertools.chain([own] if own is not None else [], offered)
        search = explore.begin(candidates, model, available_hbm(topology))
        if not search.open:
            raise UserError(_why_none(search, config, topology))

        def said(search: "Search", layout: "Layout") -> None:
            best = f"fastest step so far {duration(search.best.verdict.step_s)}, " if search.best else ""
            number = f"{len(search.found) + 1} of at most {explore.MOST_COMPILES}"
            spent = duration(time.monotonic() - started)
            tell(f"compiling {words(layout)} ({number}; {best}searching for {spent}; Ctrl-C keeps what was found)")

        explore.explore(search, config, own, lambda candidate: compiler(candidate, topology), said, explore.MOST_COMPILES)
        return Plan(request, loaded, topology, search, own, scale_of(config, topology, request.tokens), points(search))


def analytic(config: Config, topology: Topology) -> "Analytic":
    """The fast model of `config` on `topology`; the links of each mesh are read off its devices."""
    from maxlm.compiler.aot import devices
    from maxlm.cost.mesh_links import axis_links
    from maxlm.parallel import build_mesh
    from maxlm.planning.analytic import Analytic

    def links(layout: "Layout") -> Mapping[str, "AxisLinks"]:
        return axis_links(build_mesh(layout.apply(config), devices(topology)), topology)

    return Analytic(config, topology, links)


def scale_of(config: Config, topology: Topology, tokens: float | None) -> "Scale":
    """What turns seconds a step into MFU and days; `tokens` of the whole run, by default those of the config."""
    from maxlm.models import step_flops
    from maxlm.planning.table import Scale

    return Scale(
        tokens_per_step=config.tokens_per_step,
        model_flops=step_flops(config),
        peak_flops=topology.devices * topology.chip.peak_bf16_flops_per_device,
        tokens=tokens if tokens is not None else config.total_steps * config.tokens_per_step,
        chips=topology.chips,
    )


def _own(config: Config, topology: Topology) -> "Layout | None":
    """The user's layout; None where it does not match the machine, which is then not asked of it."""
    from maxlm.planning.layouts import layout_of

    try:
        return layout_of(config, topology.devices)
    except ConfigError:
        return None


def _why_none(search: "Search", config: Config, topology: Topology) -> str:
    from maxlm.cost.model_shapes import held
    from maxlm.cost.report import too_small

    if not search.counted:
        batch = f"train.global_batch = {config.train.global_batch:,}"
        return f"No mesh of {topology.devices:,} devices splits {batch} and the model evenly: change the batch, or the topology."
    state = 4 * sum((1 + leaf.moments) * leaf.numbers for leaf in held(config))
    short = (search.leanest - search.available) / GIB
    return too_small(topology, state, search.available) or (
        f"No layout fits: the leanest needs at least {search.leanest / GIB:.1f} GiB a device, {short:.1f} GiB more than there is; "
        "use a smaller train.global_batch or data.seq_len, or more chips."
    )


def _write(plan: Plan) -> tuple[tuple[Path, Path] | None, UserError | None]:
    """Write config and picture of the chosen layout: (their paths, None), or (None, why not)."""
    from maxlm.planning.chart import draw
    from maxlm.planning.plan_yaml import as_yaml, write

    chosen, request = plan.chosen, plan.request
    if chosen is None:
        return None, None
    config, picture = request.file, request.file.with_suffix(".png")
    size = f"{chosen.verdict.needed / GIB:.1f} of {plan.search.available / GIB:.1f} GiB"
    remark = (
        f"Chosen by `maxlm plan` for {machine_name(plan.topology)}: {duration(chosen.verdict.step_s)} a step, {size} a device, as compiled."
    )
    try:
        write(config, as_yaml(request.name, plan.loaded, chosen.layout, config, remark), may_replace=request.out is not None)
        star = next(point for point in plan.points if point.compiled and point.layout == chosen.layout)
        draw(picture, f"{plan.loaded.config.run.name} on {machine_name(plan.topology)}", plan.points, star, plan.search.available)
    except UserError as error:
        return None, error
    except OSError as error:
        return None, UserError(f"{picture} cannot be written: {error.strerror}; give another place with --out.")
    return (config, picture), None


def machine_name(topology: Topology) -> str:
    """As in `2 slices of v5p:4x4x4 (128 chips)`."""
    slices = f"{topology.slices} slices of " if topology.slices > 1 else ""
    return f"{slices}{topology.name} ({topology.chips:,} chip{'s' if topology.chips > 1 else ''})"
