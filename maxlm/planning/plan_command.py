"""The command `maxlm plan`: settings in, the fastest layout out, as a table, a chart and a config. Imports jax only for valid settings."""

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

from maxlm.base.atomic import write_text
from maxlm.base.errors import UserError, error_kind
from maxlm.base.paths import check_out, read_file
from maxlm.config.capability import Capability
from maxlm.config.fields import flatten
from maxlm.config.loader import COMMAND_LINE, SHIPPED, ConfigSource, LoadedConfig, find, load
from maxlm.config.schema import ClusterConfig, Config
from maxlm.config.sections.cluster import topology_of
from maxlm.config.table import present
from maxlm.cost.calibration import FIELD, calibrated, of_config
from maxlm.cost.compile_command import NoClusterError, load_for_machine
from maxlm.hardware.chips import CHIPS, GIB, Chip
from maxlm.hardware.topologies import Topology, is_tpu, near, parse
from maxlm.planning.run_cost import Wanted

if TYPE_CHECKING:
    from maxlm.planning.layouts import Layout
    from maxlm.planning.plan import Plan

CHOSEN = "Chosen by `maxlm plan`"  # the first words of the configs that it writes


@dataclass(frozen=True)
class Request:
    """The command line: config, overrides, machine, tokens of the whole run, the file to write the plan to, what is asked about costs, and
    whether it may have 8-bit matmuls that the config has not.
    """

    name: str
    overrides: tuple[str, ...]
    topology: str | None
    slices: int | None
    tokens: float | None
    out: Path | None
    wanted: Wanted
    any_format: bool = False
    calibration: Path | None = None  # a file of `maxlm plan --calibrate`
    prices: str | None = None  # the file of `wanted.prices`
    quick: bool = False  # compile a few layouts only
    source: ConfigSource | None = None  # the settings themselves, of a program; `name` is then only for messages
    quiet: bool = False  # show no progress

    def __post_init__(self) -> None:
        if self.tokens is not None and not math.isfinite(self.tokens):
            raise UserError(f"--tokens {self.tokens} is not a number of tokens: give one such as 15e12.")

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `maxlm plan` for the same questions about one topology, without it."""
        region, tokens = self.wanted.region, None if self.tokens is None else f"{self.tokens:.0f}"
        buy = None if self.wanted.term == "on-demand" else self.wanted.term
        given = {"--tokens": tokens, "--buy": buy, "--region": region, "--prices": self.prices}
        return (self.name, *self.overrides, *(part for option, value in given.items() if value is not None for part in (option, value)))

    def load(self, *more: str) -> tuple[LoadedConfig, Topology]:
        """(config with `more` overrides, machine)."""
        source = self.name if self.source is None else self.source
        return load_for_machine(source, (*self.overrides, *more), self.topology, self.slices, any_mesh=True)

    @property
    def file(self) -> Path:
        """The config to write."""
        return self.out if self.out is not None else Path(f"{find(self.name).stem}-planned.yml")


def run(request: Request, *, as_json: bool) -> int:
    """Find the layout, print and write it; 0 if one fits, else 2. Raises UserError."""
    for option, limit in (("--days-at-most", request.wanted.days_at_most), ("--dollars-at-most", request.wanted.dollars_at_most)):
        if limit is not None:
            raise UserError(f"{option} chooses between topologies: give --chips-at-most N with it.")
    loaded, topology = opened(request)
    _check_file(request, loaded)
    from maxlm.compiler.aot import leave_chips_alone

    leave_chips_alone()
    from maxlm.planning.plan_output import show, to_json

    plan = find_plan(request, loaded, topology)
    written, error = _write(request, plan)
    if as_json:
        sys.stdout.write(json.dumps(to_json(plan, written, request.wanted)) + "\n")
    else:
        show(plan, written, request.wanted)
    if error is not None:
        raise error
    return 0 if plan.picked else 2


def opened(request: Request) -> tuple[LoadedConfig, Topology]:
    """(config, machine with its calibration) of a request. Raises UserError, also for what the cost model lacks."""
    loaded, topology = request.load()
    topology = of_config(loaded.config.cost, topology) if request.calibration is None else calibrated(topology, request.calibration)
    _check_planned(present(loaded.config))
    return loaded, topology


def find_plan(request: Request, loaded: LoadedConfig, topology: Topology) -> "Plan":
    """Search the layouts of an opened request. Raises UserError."""
    from maxlm.planning.plan import make_plan

    plan = make_plan(loaded, topology, request.tokens, quick=request.quick, quiet=request.quiet)
    return _in_fastest_format(request, plan) if request.any_format else plan


def _check_file(request: Request, loaded: LoadedConfig) -> None:
    """Raise UserError if the plan cannot be written to its file, or would replace what it extends."""
    file = request.file
    if file.is_dir():
        raise UserError(f"--out {file} is a folder; give the name of a file in it, such as {file / 'plan.yml'}.")
    check_out(file)
    if file.resolve() in {find(request.name).resolve(), *(Path(source).resolve() for source in loaded.sources.values())}:
        raise UserError(f"--out {file}: the plan extends this file, and would replace it; give another name.")
    if file.suffix == ".png":
        raise UserError(f"--out {file} is the file of the chart, which is written next to the config; give a name that ends in .yml.")
    chart = file.with_suffix(".png")
    if chart.exists() and not _is_plan(file):
        raise UserError(f"{chart} exists and is not of a plan in {file}: the chart would replace it; give another name with --out.")


def _is_plan(file: Path) -> bool:
    """True for a config that `maxlm plan` has written."""
    try:
        return read_file(file).startswith(f"# {CHOSEN}".encode())
    except OSError:
        return False


def _in_fastest_format(request: Request, plan: "Plan") -> "Plan":
    """The plan of the format that is expected to be the fastest, if its fastest layout is faster than the layout of `plan`; else `plan`,
    also after an error or Ctrl-C, with the reason.

    Each format's seconds are corrected by published runs in it.
    """
    from maxlm.planning import explore
    from maxlm.planning.plan import make_plan

    if plan.uncompiled:
        raise UserError(f"--any-format compiles layouts of each format, and {plan.topology.name}: {plan.uncompiled}.")
    if plan.chosen is None or not plan.quantized or plan.search.end == explore.STOPPED:
        return plan
    format = min(plan.quantized, key=lambda name: plan.expected_in(name, plan.quantized[name]))
    loaded, _ = request.load(f"precision.matmul={{format: {format}}}")
    try:
        other = make_plan(
            loaded, plan.topology, request.tokens, replace(plan.chosen.layout, unroll=False), quick=request.quick, quiet=request.quiet
        )
    except (UserError, KeyboardInterrupt) as error:
        return replace(plan, unformatted=f"{format}: {error}" if isinstance(error, UserError) else f"{format}: stopped")
    if other.chosen is None:
        return replace(plan, unformatted=f"{format}: no layout that was compiled fits ({other.search.end}).")
    if other.scale.expected_s(other.chosen.verdict.step_s) < plan.scale.expected_s(plan.chosen.verdict.step_s):
        return replace(other, formats={"bf16": plan.chosen.verdict.step_s})
    return replace(plan, formats={format: other.chosen.verdict.step_s})


def compare(request: Request, chips_at_most: int, *, as_json: bool) -> int:
    """Print time and cost of a run on each topology of at most so many chips in all slices; 0 if one fits. Raises UserError."""
    given = {"--any-format": request.any_format, "--calibration": request.calibration, "--out": request.out, "--quick": request.quick}
    if wrong := next((option for option, value in given.items() if value), None):
        raise UserError(f"{wrong} goes with one topology, not with --chips-at-most: plan the topology that is chosen with it.")
    config, families = _config_and_chips(request)
    said_by = "--topology" if request.topology is not None else "the config's cluster"
    only = f"Compared is {families[0].name} alone, the chip of {said_by}." if len(families) == 1 else ""
    _check_planned(present(config))
    names = [name for chip in families for name in near(chip, 1, most=100)]
    slices, network = config.mesh.slices, None if config.cluster is None else config.cluster.network_gbit_per_s
    clusters = (ClusterConfig(topology=name, network_gbit_per_s=network) for name in names)
    possible = (of_config(config.cost, topology_of(cluster, slices)) for cluster in clusters)
    asked = [topology for topology in possible if topology.chips <= chips_at_most]
    if not asked:
        least = min(parse(name, slices).chips for name in names)
        raise UserError(
            f"--chips-at-most {chips_at_most}: no topology of {', '.join(c.name for c in families)} has so few; at least {least}."
        )
    from maxlm.compiler.aot import leave_chips_alone

    leave_chips_alone()
    from maxlm.planning import choose_topology

    comparison = choose_topology.Comparison(config, request.wanted, request.arguments)
    return choose_topology.compare(comparison, asked, request.tokens, only, as_json=as_json)


def _check_planned(capabilities: Iterable[tuple[Capability, Any]]) -> None:
    """Raise UserError if the cost model lacks a capability of a config."""
    for capability, _ in capabilities:
        if capability.unplanned:
            raise UserError(f"maxlm plan has no cost model of {capability.unplanned}: plan without it, then `maxlm compile` with it.")


def _config_and_chips(request: Request) -> tuple[Config, tuple[Chip, ...]]:
    """(config, chips to compare): the chip of its cluster or of --topology if given, else every TPU."""
    try:
        loaded, topology = request.load()
    except NoClusterError:
        settings = [*request.overrides, *([f"mesh.slices={request.slices}"] if request.slices else [])]
        return load(request.name, settings).config, tuple(filter(is_tpu, CHIPS))
    return loaded.config, (topology.chip,)


def _write(request: Request, plan: "Plan") -> tuple[tuple[Path, Path] | None, UserError | None]:
    """Write config and chart of the chosen layout: (their paths, None), or (None, the error)."""
    from maxlm.cost.expected import source_of
    from maxlm.planning.plan import machine_name
    from maxlm.planning.plan_output import draw

    picked, config = plan.picked, request.file
    if picked is None:
        return None, None
    chart, machine = config.with_suffix(".png"), machine_name(plan.topology)
    size = f"{picked.needed / GIB:.1f} of {plan.search.available / GIB:.1f} GiB"
    how = "as compiled" if picked.compiled else "estimated, not compiled"
    source = source_of(plan.topology.chip, compiled=picked.compiled)
    train, tiers = plan.loaded.config.train, plan.loaded.config.memory.offload_state
    refused = train.batch_ramp or (tiers is not None and tiers.on_nvme)  # by training; else `maxlm compile` says what the plan says
    calibration = {FIELD: str(request.calibration.absolute())} if request.calibration is not None and not refused else {}
    remark = f"{CHOSEN} for {machine}: {plan.scale.both(picked.step_s, source)}, {size} a device, {how}."
    try:
        _write_config(
            config,
            as_yaml(request.name, plan.loaded, picked.layout, config, remark, calibration),
            may_replace=request.out is not None,
        )
        draw(chart, f"{plan.loaded.config.run.name} on {machine}", plan.points, picked, plan.search.available, plan.scale)
    except UserError as error:
        return None, error
    except OSError as error:
        return None, error_kind(error)(f"{chart} cannot be written: {error.strerror}; give another place with --out.")
    return (config, chart), None


def as_yaml(
    name: str, loaded: LoadedConfig, layout: "Layout", out: Path, remark: str, more: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The text of a config at `out`: the config called `name`, overrides that `loaded` remembers, `layout` and `more` settings; headed by
    `remark`.
    """
    values = dict(flatten(loaded.config.model_dump(mode="json")))
    overrides = {key: value for key, value in values.items() if loaded.source(key) == COMMAND_LINE}
    sections: dict[str, Any] = {"extends": [_parent(name, out)]}
    for key, value in {**overrides, **layout.settings(loaded.config), **more}.items():
        if key == "mesh.across_slices" and loaded.config.mesh.slices == 1 and key not in overrides:
            continue
        *path, last = key.split(".")
        section = sections
        for part in path:
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
        section[last] = list(value) if isinstance(value, tuple) else value
    text = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 120
    yaml.dump(sections, text)
    return "".join(f"# {line}\n" for line in remark.splitlines()) + text.getvalue()


def _write_config(path: Path, text: str, *, may_replace: bool) -> str:
    """Write `text`; returns what was done. An existing file that differs is replaced only if `may_replace`, else UserError."""
    try:
        before = read_file(path) if path.exists() else None
        if before == text.encode():
            return f"{path} is up to date"
        if before is not None and not may_replace:
            raise UserError(f"{path} exists and differs: give --out {path} to replace it, or another name.")
        write_text(path, text)
    except OSError as error:
        raise error_kind(error)(f"{path} cannot be written: {error.strerror}; give another place with --out.") from None
    return f"{path} {'replaced' if before is not None else 'written'}"


def _parent(name: str, out: Path) -> str:
    """Name of the config `name` in a file at `out`: shipped ones as the user gave it, others as a relative path."""
    path = find(name).resolve()
    for root in (Path("configs").resolve(), SHIPPED):
        if path.is_relative_to(root):
            return path.relative_to(root).with_suffix("").as_posix()
    if path.suffix != ".yml":
        return str(path)
    return Path(os.path.relpath(path, out.absolute().parent)).with_suffix("").as_posix()
