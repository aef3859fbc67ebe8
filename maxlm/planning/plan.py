"""The search for a layout, from a config and a machine to a `Plan`. Nothing is printed but progress, and nothing is written."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from maxlm.base.errors import ConfigError, UserError
from maxlm.compiler.aot import available_hbm, devices, why_not
from maxlm.config.loader import LoadedConfig
from maxlm.config.schema import Config
from maxlm.cost.advice import changed
from maxlm.cost.compile_command import progress
from maxlm.cost.compile_report import too_small
from maxlm.cost.expected import StepScale, step_scale
from maxlm.cost.mesh_links import axis_links, node_links
from maxlm.cost.network import AxisLinks
from maxlm.cost.verify import Compiler, Verdict
from maxlm.hardware.chips import GIB, WORTH, MatmulFormat
from maxlm.hardware.topologies import Topology
from maxlm.hardware.vocabulary import vocabulary
from maxlm.models import mfu_format
from maxlm.parallel.mesh import lay_mesh
from maxlm.planning import explore
from maxlm.planning.analytic import Analytic, host_room
from maxlm.planning.branching import search_all
from maxlm.planning.explore import Point, Search, Trial, points
from maxlm.planning.layouts import Layout, LayoutSpace
from maxlm.planning.run_cost import RunCost, Wanted, run_cost
from maxlm.telemetry.formatting import duration

MEMORY_MARGIN = 0.05  # of memory, where it is only estimated: compiled programs for H200 needed up to 4% more (docs/lab/truth_gpu.md)
MATMULS: Mapping[str, MatmulFormat] = {"bf16": "bf16", "int8": "int8", "fp8": "e4m3"}  # formats of `Plan.formats`
SHORT = {"query": "q", "key": "k", "value": "v", "attention_out": "out", "layer_input": "input", "mlp_out": "mlp"}


@dataclass(frozen=True)
class Scale(StepScale):
    """Converts estimated seconds of a step into run time and chip-hours, too."""

    tokens: float  # of the whole run
    chips: int

    def seconds(self, step_s: float) -> float:
        """Duration of the whole run, if no time is lost, with steps of `expected_s`."""
        return self.tokens / self.tokens_per_step * self.expected_s(step_s)

    def chip_hours(self, step_s: float) -> float:
        """Chips times hours of the whole run."""
        return self.seconds(step_s) / 3600 * self.chips


@dataclass(frozen=True)
class Plan:
    """Result of a search. `own`: the layout of the user's settings, None where they do not match the machine."""

    loaded: LoadedConfig
    topology: Topology
    search: Search
    own: Layout | None
    scale: Scale
    points: tuple[Point, ...]
    quantized: Mapping[str, float]  # formats that are faster on this chip: predicted seconds of a step in the chosen layout
    formats: Mapping[str, float] = field(default_factory=dict)  # others that were searched: seconds of a step in their fastest layout
    unformatted: str = ""  # why nothing is known of another format that was asked for
    uncompiled: str = ""  # why nothing can be compiled for this machine here, so that all figures are the analytic model's

    @property
    def chosen(self) -> Trial | None:
        """The fastest compiled layout that fits."""
        return self.search.best

    def expected_in(self, format: str, step_s: float) -> float:
        """Expected seconds of a step that is estimated to take `step_s` with matmuls in `format`: bf16, int8 or fp8."""
        return replace(self.scale, format=MATMULS[format]).expected_s(step_s)

    def cost(self, wanted: Wanted) -> RunCost | None:
        """Cost of the run in the chosen layout."""
        if self.picked is None:
            return None
        step_s, copies = self.picked.step_s, self.loaded.config.memory_checkpoints
        return run_cost(self.topology, copies, self.scale.seconds(step_s), self.scale.expected_s(step_s), wanted)

    @property
    def picked(self) -> Point | None:
        """The chosen layout. Where nothing can be compiled: the fastest predicted to fit with `MEMORY_MARGIN` left, else the leanest
        that is predicted to fit.
        """
        if self.chosen is not None:
            return next(point for point in self.points if point.compiled and point.layout == self.chosen.layout)
        if not self.uncompiled:
            return None
        return best_estimate(self.points, self.search.available)


def best_estimate(points: Sequence[Point], available: int) -> Point | None:
    """The fastest of `points` that leaves `MEMORY_MARGIN` of the memory free, else the leanest."""
    safe = [point for point in points if point.needed <= (1 - MEMORY_MARGIN) * available]
    fastest = min(safe, key=lambda point: (point.step_s, point.needed), default=None)
    return fastest or min(points, key=lambda point: point.needed, default=None)


def make_plan(
    loaded: LoadedConfig, topology: Topology, tokens: float | None, start: Layout | None = None, *, quick: bool = False, quiet: bool = False
) -> Plan:
    """Search the layouts of a config on `topology`; `tokens`: of the run, default the config's; `start`: compiled first, default the
    config's own; `quick`: compile a few only; `quiet`: show no progress. Raises UserError if none can fit.
    """
    config, started = loaded.config, time.monotonic()
    with progress(quiet=quiet) as show_progress, Compiler(machine_code=False) as compiler:
        show_progress(f"enumerating layouts of {config.run.name} for {topology.name}")
        model, space = analytic_model(config, topology), LayoutSpace(config, topology.devices)
        try:
            own: Layout | None = space.own()
        except ConfigError:
            own = None
        first = start or own
        search = search_all(model, available_hbm(topology), first)
        if not search.open:
            raise UserError(_why_none(search, model))

        scale = scale_of(config, topology, tokens)
        search.updates, search.hosts = scale.seconds(1.0), max(1.0, topology.chips / explore.HOST_CHIPS)
        most, unrolled = explore.MOST_COMPILES, explore.MOST_UNROLLED
        if quick:
            most, unrolled = explore.QUICK_COMPILES, explore.QUICK_UNROLLED
            search.patience_s, search.least = explore.QUICK_PATIENCE_S, 1
        began = time.monotonic()

        def compiling(search: Search, layout: Layout) -> None:
            now, tried = time.monotonic(), search.tried
            number = f"{tried + 1} of at most {most}"
            if search.trial_s:
                number = f"layers without a loop: {tried + 1 - search.began} of at most {unrolled}"
            best = f"fastest step so far {duration(scale.expected_s(search.best.verdict.step_s))}; " if search.best else ""
            left_s = explore.most_left_s(search, unrolled if search.trial_s else most, (now - began) / max(1, tried))
            left = f", at most about {duration(left_s)} more" if left_s else ""
            show_progress(
                f"compiling {describe(layout)} ({number}; {best}{duration(now - started)} so far{left}; Ctrl-C keeps the best so far)"
            )

        uncompiled = why_not(topology)
        if not uncompiled:

            def verify(layout: Layout) -> Verdict:
                return compiler(layout.apply(config), topology)

            explore.explore(search, [first] if first else [], verify, compiling, most)
            explore.explore_unrolled(search, space, model, verify, compiling, unrolled)
        quantized = _quantized(model, search.best)
        return Plan(loaded, topology, search, own, scale, points(search), quantized, uncompiled=uncompiled)


def _quantized(model: Analytic, best: Trial | None) -> dict[str, float]:
    """Predicted seconds of the best layout in each format that the chip is faster with, where the config has bf16 matmuls."""
    config, topology, predicted = model.config, model.topology, dict[str, float]()
    if best is None or config.precision.matmul is not None or config.precision.compute != "bfloat16":
        return {}
    for format in ("int8", "fp8"):
        other = changed(config, {"precision.matmul": {"format": format}})
        if other is not None and topology.chip.matmul_speed(mfu_format(other.precision.matmul)) >= WORTH:
            ratio = sum(analytic_model(other, topology).estimate(best.layout).parts) / sum(best.estimate.parts)
            predicted[format] = ratio * best.verdict.step_s
    return predicted


def analytic_model(config: Config, topology: Topology, flash: bool | None = None) -> Analytic:
    """The analytic model of `config` on `topology`; the links of each mesh are read off its devices, and of GPUs off its sizes. `flash`: as
    in `Analytic`.
    """
    if not topology.is_tpu:
        return Analytic(config, topology, lambda layout: node_links(layout.sizes, topology), flash)

    def links(layout: Layout) -> Mapping[str, AxisLinks]:
        mesh = config.mesh.model_copy(update={"across_slices": layout.across_slices})  # alone: other settings may ask more
        return axis_links(lay_mesh(mesh, layout.sizes, devices(topology)), topology)

    return Analytic(config, topology, links, flash)


def scale_of(config: Config, topology: Topology, tokens: float | None) -> Scale:
    """The scale of a run of `tokens` tokens, by default as many as in the config."""
    step = step_scale(config.model, config.precision.matmul, config.data.seq_len, config.tokens_per_step, topology)
    return Scale(**vars(step), tokens=tokens if tokens is not None else config.total_tokens, chips=topology.chips)


def _why_none(search: Search, model: Analytic) -> str:
    config, topology = model.config, model.topology
    if not search.counted:
        batch = f"train.global_batch = {config.train.global_batch:,}"
        batch += f" in {config.train.microbatches} microbatches" if config.model.balances_microbatches else ""
        return f"No mesh of {topology.devices:,} devices splits {batch} and the model evenly: change the batch, or the topology."
    if search.host_full and search.leanest <= search.available:
        room, what = host_room(topology.chip) / GIB, "memory.offload and memory.offload_state"
        full = f"No layout fits: {what} keep more than the {room:.1f} GiB of host memory a device"
        return f"{full}; keep less there, or use more {vocabulary(topology.chip).chips}."
    short = (search.leanest - search.available) / GIB
    return too_small(model.leaves, topology, search.available) or (
        f"No layout fits: the leanest needs at least {search.leanest / GIB:.1f} GiB a device, {short:.1f} GiB more than it has; "
        f"use a smaller train.global_batch or data.seq_len, or more {vocabulary(topology.chip).chips}."
    )


def describe(layout: Layout) -> str:
    """`fsdp 32 x tensor 2, 2 microbatches, loss in 4; attention out q k v, on the host: input`."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in layout.mesh if size > 1) or "one device"
    ways = f" ({layout.attention})" if layout.sizes["context"] > 1 and layout.attention != "ring" else ""
    ways += f", ZeRO {layout.zero}" if layout.zero < 3 else ""
    parts = f" in {layout.chunks} chunks" if layout.chunks > 1 else ""
    ways += f", {layout.schedule}{parts}" if layout.sizes["stage"] > 1 else ""
    microbatches = f", {layout.microbatches} microbatches" if layout.microbatches > 1 else ""
    saved = layout.remat if isinstance(layout.remat, str) else " ".join(SHORT.get(name, name) for name in layout.remat)
    host = f", on the host: {' '.join(SHORT.get(name, name) for name in layout.offload)}" if layout.offload else ""
    unrolled = ", layers unrolled" if layout.unroll else ""
    return f"{mesh}{ways}{microbatches}, loss in {layout.loss_chunks}{unrolled}; {saved}{host}"


def crossing_axes(topology: Topology, layout: Layout) -> list[str]:
    """Mesh axes of `layout` with collectives between nodes of GPUs, outermost first; empty for TPUs."""
    links = {} if topology.is_tpu else node_links(layout.sizes, topology)
    return [axis for axis in layout.sizes if axis in links and links[axis].slices > 1]


def machine_name(topology: Topology) -> str:
    """`2 slices of v5p:4x4x4 (128 chips)`, `h100:16x8 (128 GPUs; 400 Gbit/s a GPU between nodes)`."""
    slices = f"{topology.slices} slices of " if topology.slices > 1 else ""
    network = f"; {8 * topology.chip.dcn_bytes_per_s / 1e9:g} Gbit/s a GPU between nodes" if topology.hosts > 1 else ""
    return f"{slices}{topology.name} ({vocabulary(topology.chip).counted(topology.chips)}{network if not topology.is_tpu else ''})"
