"""Advice on a step: settings that make it fit, each checked by the compiler, and remarks on one that fits."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxlm.base.errors import ConfigError, UserError, show
from maxlm.compiler.aot import CompiledStep
from maxlm.config import rules
from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.memory import MemoryConfig
from maxlm.cost.network import AxisLinks
from maxlm.cost.step_cost import StepCost, Traffic, unknown_loops_line
from maxlm.cost.verify import Compiler
from maxlm.hardware.topologies import Topology
from maxlm.hardware.vocabulary import vocabulary
from maxlm.training.matrices import SCOPE as MATRICES

WANTED, MOST_COMPILES, PATIENCE_S = 3, 12, 600
LARGE = 1 << 20  # bytes: smaller collectives are counters, norms and biases
EXPOSED, SPARE = 0.02, 0.4  # shares of the step and of HBM worth a remark
SURPRISING = 0.005  # least share of the step for which an unexpected collective is reported

Settings = Mapping[str, Any]  # dotted key -> value


@dataclass(frozen=True)
class Suggestion:
    """Settings with which the step fits, checked by the compiler."""

    settings: Settings
    used: int
    available: int

    def __str__(self) -> str:
        return as_arguments(self.settings)


def as_arguments(settings: Settings) -> str:
    """Settings as typed on the command line."""
    return " ".join(f"{key}={show(value).replace(' ', '')}" for key, value in settings.items())


def changed(config: Config, settings: Settings) -> Config | None:
    """`config` with `settings`, keys of sections or whole ones, over it; None where they break a rule."""
    values = config.model_dump()
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if name:
            values[section][name] = value
        else:
            values[section] = value
    try:
        result = type(config).model_validate(values)
        rules.check(result)
    except (ConfigError, ValueError):
        return None
    return result


def ways_to_fit(config: Config, topology: Topology, sizes: Mapping[str, int], show_progress: Callable[[str], None]) -> list[Suggestion]:
    """Up to three settings that make the step fit, the least costly first. `show_progress` shows progress.

    A program that only just fits may take the compiler minutes, in another process: Ctrl-C, or the time limit, keeps those found so far.
    """
    suggestions: list[Suggestion] = []
    tried, started = 0, time.monotonic()
    with contextlib.suppress(KeyboardInterrupt), Compiler(machine_code=False) as compiler:
        for settings in _candidates(config.model_dump(), sizes):
            if len(suggestions) == WANTED or tried == MOST_COMPILES or time.monotonic() - started > PATIENCE_S:
                break
            candidate = changed(config, settings)
            if candidate is None or any(_is_more(settings, other.settings) for other in suggestions):
                continue
            if topology.chip.host_bytes_per_s is None and (settings.get("memory.offload") or "memory.offload_state" in settings):
                continue  # its time would not be known
            show_progress(f"trying {as_arguments(settings)} ({len(suggestions)} found so far; Ctrl-C keeps them)")
            tried += 1
            try:
                verdict = compiler(candidate, topology)
            except UserError:  # it is a suggestion less: the step that was asked for is shown all the same
                continue
            if verdict.fits:
                suggestions.append(Suggestion(settings, verdict.needed, verdict.available))
    return suggestions


def _is_more(settings: Settings, enough: Settings) -> bool:
    """True if `settings` contain all of `enough`, which fits, or stronger forms of it."""

    def as_strong(key: str) -> bool:
        if key not in settings:
            return False
        if key == "train.global_batch":
            return bool(settings[key] <= enough[key])
        return bool(settings[key] >= enough[key]) if isinstance(enough[key], int) else bool(settings[key] == enough[key])

    return all(map(as_strong, enough))


def _candidates(now: Mapping[str, Any], sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield combinations of settings to try, each once; settings that the config `now` has already are left out."""
    seen: list[dict[str, Any]] = []
    for settings in _changes(now["train"], now["memory"]["remat"], sizes):
        new = {key: value for key, value in settings.items() if now[key.partition(".")[0]][key.partition(".")[2]] != value}
        if new and new not in seen:
            seen.append(new)
            yield new


def _changes(train: Mapping[str, Any], remat: str | tuple[str, ...], sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """One change at a time, the mildest first; then two; then three."""
    batch, microbatches = train["global_batch"], train["microbatches"]
    full: dict[str, Any] = {"memory.remat": "full", "memory.offload": ()}
    offload = {"memory.remat": "full", "memory.offload": ("layer_input",)}
    state = {"memory.offload_state": {"optimizer": "host", "master": "host"}}
    dots = [{"memory.remat": "dots", "memory.offload": ()}] if remat == "none" else []
    parts = [{"train.microbatches": microbatches * factor} for factor in (2, 4, 8, 16)]
    fewer = [{"train.global_batch": batch // factor} for factor in (2, 4, 8) if batch % factor == 0]
    shard = _more_sharding(sizes)
    yield from (*dots, full, *parts[:2], {"train.loss_chunks": train["loss_chunks"] * 4}, offload, state, *shard[:1], *fewer[:1])
    for first, second in (([full], parts), ([offload], [state]), ([offload], parts), (shard, [full]), ([full], fewer), (shard, parts)):
        yield from ({**one, **other} for one in first for other in second)
    yield from ({**one, **other, **offload} for one in shard for other in parts)


def _more_sharding(sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Meshes that split parameters over more devices: copies given up first, then whole matrices."""
    meshes = []
    if sizes["data"] > 1:
        meshes.append({"mesh.data": 1, "mesh.fsdp": sizes["data"] * sizes["fsdp"]})
    whole = sizes["data"] * sizes["fsdp"]
    for factor in (2, 4, 8):
        if whole % factor == 0:
            meshes.append({"mesh.data": 1, "mesh.fsdp": whole // factor, "mesh.tensor": sizes["tensor"] * factor})
    return meshes


def remarks(
    config: Config, topology: Topology, sizes: Mapping[str, int], links: Mapping[str, AxisLinks], step: CompiledStep, cost: StepCost
) -> list[str]:
    """Remarks on a step that fits, one sentence each."""
    return [
        *filter(None, [unknown_loops_line(cost.unknown_loops)]),
        *_not_calibrated(topology),
        *_off_tile(config.model, topology, sizes),
        *_small_batch(config.tokens_per_step, config.train.microbatches, topology, sizes, links),
        *_exposed(cost),
        *_surprises(cost),
        *_spare(config.memory, config.train.microbatches, (step.available - step.needed) / step.available),
        *_uncharged(cost),
    ]


def _not_calibrated(topology: Topology) -> Iterator[str]:
    if not topology.is_tpu:
        source = topology.chip.achieved.source
        unmeasured = "which were not measured on your machine (maxlm plan --calibrate)"
        corrected = f"corrected by what was measured ({source})" if source else unmeasured
        yield (
            f"The time is a guess from the peak and the bandwidth of {topology.chip.name}, {corrected}. "
            "On the GPU XLA also tries kernels for each matmul, which it cannot here: memory may differ a little."
        )


def _off_tile(model: ModelConfig, topology: Topology, sizes: Mapping[str, int]) -> Iterator[str]:
    if not topology.is_tpu:  # tensor cores take any width that is not tiny
        return
    tensor, tile = sizes["tensor"], topology.chip.matrix_unit
    dims = {
        "model.d_model": (model.d_model, 1),
        "model.d_ff": (model.d_ff, tensor),
        "model.n_heads x head_dim": (model.n_heads * model.head_dim, tensor),
        "model.n_kv_heads x head_dim": (model.n_kv_heads * model.head_dim, tensor),
        "model.vocab_size": (model.vocab_size, tensor),
        "model.head_dim": (model.head_dim, 1),
    }
    for name, (size, split) in dims.items():
        part = size // split
        share = part / (math.ceil(part / tile) * tile)
        if share < 0.995:
            over = f" / mesh.tensor {split}" if split > 1 else ""
            whom = "attention's matmuls" if name.endswith(".head_dim") else "its matmuls"
            unit = f"the {tile} wide matrix unit of {topology.chip.name}"
            yield f"{name} = {size}{over} is no multiple of {unit}: {whom} fill {share:.0%} of it."


def _small_batch(
    step_tokens: int, microbatches: int, topology: Topology, sizes: Mapping[str, int], links: Mapping[str, AxisLinks]
) -> Iterator[str]:
    """FSDP hides its gathers when a chip computes on enough tokens (scaling-book, part 5): FLOP/s over the bytes/s of the links."""
    if sizes["fsdp"] == 1:
        return
    chip, link = topology.chip, links["fsdp"]
    ways = 2 if link.wrapped else 1
    speed = chip.ici_bytes_per_s_per_link * (link.dims * ways if topology.is_tpu else chip.ici_links)
    if link.slices > 1:  # what crosses is shared among the chips of a slice
        speed = min(speed, chip.dcn_bytes_per_s_per_device * sizes["fsdp"] / link.slices)
    needed = chip.peak_bf16_flops_per_device / speed
    shards = sizes["data"] * sizes["fsdp"] * sizes["expert"] * sizes["context"] * sizes["tensor"]
    tokens = step_tokens / microbatches / shards
    if tokens < needed:
        parts, fewer = (" of a microbatch", "microbatches or ") if microbatches > 1 else ("", "")
        yield (
            f"{tokens:,.0f} tokens{parts} a {vocabulary(chip).chip} are too few to hide gathers over mesh.fsdp = {sizes['fsdp']}: about "
            f"{math.ceil(needed / 100) * 100:,} would; raise train.global_batch, or use fewer {fewer}fsdp shards."
        )


def _exposed(cost: StepCost) -> Iterator[str]:
    """A remark for each kind of collective over an axis that the step waits for, with its worst place."""
    kinds: dict[tuple[tuple[str, ...], str], list[Traffic]] = {}
    for traffic in cost.traffic:
        kinds.setdefault((traffic.axes, traffic.opcode), []).append(traffic)
    for (axes, opcode), rows in kinds.items():
        share = sum(row.exposed_s for row in rows) / (cost.total_s or 1.0)
        if share > EXPOSED:
            worst = max(rows, key=lambda row: row.exposed_s)
            most = f", most of all in {place(worst.where)}" if worst.where else ""
            yield f"{share:.0%} of the step waits for {opcode} over {' and '.join(axes)}{most}."


def describe(traffic: Traffic) -> str:
    """`all-gather over fsdp (67 a step, 1,024 MB, while/body/...)`."""
    where = f", {place(traffic.where)}" if traffic.where else ""
    return f"{traffic.opcode} over {' and '.join(traffic.axes)} ({traffic.count} a step, {traffic.bytes / 1e6:,.0f} MB{where})"


def place(where: str) -> str:
    """A place in the model, without the parts of its name that only the tracer uses."""
    tracer = ("jit(train_step)", "body", "closed_call", "eval_jaxpr", "checkpoint", "", "while")
    parts = [part for part in where.split("/") if part not in tracer]
    named = ["backward" if part.startswith("transpose(") else "forward" if part.startswith("jvp(") else part for part in parts]
    return " ".join("recomputed" if part == "rematted_computation" else part for part in named)


def _surprises(cost: StepCost) -> Iterator[str]:
    """A line for each collective that no setting asks for and that takes a share of the step worth a remark, with what to do about it."""
    for traffic in cost.traffic:
        if surprises(traffic, cost.total_s):
            yield (
                f"{surprise(traffic)}: {describe(traffic)}, {traffic.seconds / cost.total_s:.1%} of the step. The compiler chose it, no "
                "setting asks for it: compare another mesh, as maxlm plan does; if it stays, report this line with the config."
            )


def surprises(traffic: Traffic, step_s: float) -> bool:
    """True for an unexpected collective that takes more than `SURPRISING` of a step of `step_s`."""
    return bool(surprise(traffic)) and traffic.seconds > SURPRISING * step_s > 0


def surprise(traffic: Traffic) -> str:
    """The problem with a collective that this layout should not need; empty for an expected one."""
    if traffic.bytes < LARGE * max(traffic.count, 1):
        return ""
    if "unknown" in traffic.axes:
        return "unexpected: a collective over devices that are no mesh axis"
    parts = traffic.where.split("/")
    asked_for = parts[-1] in ("ppermute", "all_to_all") or MATRICES in parts  # in the source, as by attention over `context`
    if traffic.opcode in ("all-to-all", "collective-permute", "ragged-all-to-all") and not asked_for:
        return "unexpected: the partitioner moves data between layouts"
    if (
        traffic.opcode == "all-reduce" and "fsdp" in traffic.axes and not traffic.where.endswith(("reduce_max", "reduce_and"))
    ):  # scales of quantized weights
        if "jvp" in traffic.where and "transpose(" not in traffic.where:
            return "unexpected: activations are summed over fsdp in the forward pass, where gathered weights were to be used"
        return "unexpected: an all-reduce over fsdp moves twice what a reduce-scatter would"
    return ""


def _spare(memory: MemoryConfig, microbatches: int, free: float) -> Iterator[str]:
    if free < SPARE:
        return
    if microbatches > 1:
        yield f"{free:.0%} of HBM is free: train.microbatches = {microbatches} may be too many."
    elif memory.remat == "full":
        yield f"{free:.0%} of HBM is free: memory.remat = full recomputes what could be kept; try memory.remat=[attention] or more names."
    elif memory.offload:
        yield f"{free:.0%} of HBM is free: memory.offload = {show(list(memory.offload))} may not be needed."


def _uncharged(cost: StepCost) -> Iterator[str]:
    if cost.uncharged:
        names: Sequence[str] = sorted(set(cost.uncharged))
        yield f"The time of {', '.join(names[:3])}{' and others' if len(names) > 3 else ''} is not counted: the kernel states no cost."
