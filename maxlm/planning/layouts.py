"""Every layout of one batch of one model on one machine: mesh, ZeRO stage, pipeline, microbatches, what is saved and where. No jax here."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, get_args

from maxlm.base.errors import ConfigError
from maxlm.config import axes, rules
from maxlm.config.axes import divisors
from maxlm.config.schema import Config, ModelConfig, PipelineConfig
from maxlm.config.sections.memory import RematName
from maxlm.config.sections.mesh import AXES, ContextAttention
from maxlm.cost.advice import changed
from maxlm.parallel.schedule import Schedule

ALWAYS_NAMED = ("data", "fsdp", "tensor")  # axes that a plan names whatever their size
LOSS_CHUNKS = (2, 4, 8, 16)
PIPELINE_CHUNKS = (1, 2, 4)  # parts of the depth on a stage; gpipe takes as many ticks as 1f1b with one, and no less memory
# Tensors that are saved or recomputed together: with one of them missing, the same matmul or input is recomputed all the same.
GROUPS = (("attention",), ("attention_out",), ("query", "key", "value"), ("gate",), ("up",))
OFFLOADS: tuple[tuple[str, ...], ...] = (
    (),
    ("layer_input",),
    ("layer_input", "attention_out"),
    ("layer_input", "query", "key", "value", "attention_out"),
)


@dataclass(frozen=True)
class Layout:
    """One choice. `mesh` holds every axis, outermost first; `remat` is a policy or the names saved on the device. What an axis of size 1
    leaves without effect (`zero` of fsdp, `schedule` and `chunks` of stage, `attention` of context) has its default.
    """

    mesh: tuple[tuple[str, int], ...]
    microbatches: int
    loss_chunks: int
    remat: str | tuple[str, ...] = "full"
    offload: tuple[str, ...] = ()
    across_slices: str = "data"
    zero: int = 3
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    chunks: int = 1  # of the depth on a stage
    attention: ContextAttention = "ring"
    unroll: bool = False  # layers one after another, without a loop: tried last, unless the config says so

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: a search looks layouts up thousands of times. It holds in one process, so layouts are not pickled."""
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Size of each mesh axis."""
        return dict(self.mesh)

    @property
    def shards(self) -> int:
        """Number of shards of the rows of a batch."""
        sizes = self.sizes
        return sizes["data"] * sizes["fsdp"] * sizes["expert"]

    @property
    def kept(self) -> tuple[str, ...]:
        """Names kept on the device; of the policies `dots` and `none`, what they keep of the named tensors at least."""
        if isinstance(self.remat, tuple):
            return self.remat
        return () if self.remat == "full" else ("layer_input", "query", "key", "value", "attention_out", "gate", "up")

    @property
    def pipeline(self) -> Schedule:
        """The schedule of its pipeline."""
        return Schedule(self.schedule, self.sizes["stage"], self.microbatches, self.chunks)

    def settings(self, config: Config) -> dict[str, Any]:
        """Dotted settings that change `config` to this layout, without axes that stay at 1, and without `pipeline` where it stays."""
        settings: dict[str, Any] = {
            f"mesh.{axis}": size for axis, size in self.mesh if axis in ALWAYS_NAMED or size > 1 or getattr(config.mesh, axis) != 1
        }
        own = {"mesh.context_attention": self.attention, "mesh.zero": self.zero, "memory.unroll": self.unroll}
        now = (config.mesh.context_attention, config.mesh.zero, config.memory.unroll)
        settings |= {key: value for (key, value), before in zip(own.items(), now, strict=True) if value != before}
        pipeline = {"schedule": self.schedule, "chunks": self.chunks}
        if self.sizes["stage"] == 1:
            settings |= {} if config.pipeline is None else {"pipeline": None}
        elif (config.pipeline or PipelineConfig()).model_dump() != pipeline:
            settings["pipeline"] = pipeline
        return {
            **settings,
            "mesh.across_slices": self.across_slices,
            "train.microbatches": self.microbatches,
            "train.loss_chunks": self.loss_chunks,
            "memory.remat": self.remat,
            "memory.offload": self.offload,
        }

    def apply(self, config: Config) -> Config:
        """`config` with this layout. It must come from a `LayoutSpace` of the same config."""
        result = changed(config, self.settings(config))
        assert result is not None, f"{self} breaks a rule"
        return result


class Saving(NamedTuple):
    """Chunks of the loss, and tensors saved for the backward pass on the device and on the host."""

    loss_chunks: int
    remat: str | tuple[str, ...]
    offload: tuple[str, ...]

    def layout(self, frame: Layout) -> Layout:
        """The layout of a frame that saves these."""
        return replace(frame, loss_chunks=self.loss_chunks, remat=self.remat, offload=self.offload)


@dataclass(frozen=True)
class LayoutSpace:
    """Layouts of `config` on `devices` devices that the rules allow, each once. The batch, the sequence and the model stay."""

    config: Config
    devices: int

    def __iter__(self) -> Iterator[Layout]:
        for frame in self.frames():
            for saving in self.savings(frame):
                yield saving.layout(frame)

    def own(self) -> Layout:
        """Layout of the config itself. Raises ConfigError when its mesh does not match the devices."""
        config, sizes = self.config, rules.check_full_mesh(self.config, self.devices)
        remat, pipeline = config.memory.remat, config.pipeline or PipelineConfig()
        return Layout(
            mesh=tuple(sizes.items()),
            microbatches=config.train.microbatches,
            loss_chunks=config.train.loss_chunks,
            remat=remat if isinstance(remat, str) else _ordered(remat) or "full",
            offload=_ordered(config.memory.offload),
            across_slices=config.mesh.across_slices,
            zero=config.mesh.zero if sizes["fsdp"] > 1 else 3,
            schedule=pipeline.schedule,
            chunks=pipeline.chunks,
            attention=config.mesh.context_attention if sizes["context"] > 1 else "ring",
            unroll=config.memory.unroll,
        )

    def savings(self, frame: Layout) -> tuple[Saving, ...]:
        """All that the rules allow in the layouts of a frame."""
        config = self.config
        tokens = config.data.seq_len // frame.sizes["context"]  # of a sequence, on a device
        chunks = tuple(n for n in sorted({*LOSS_CHUNKS, config.train.loss_chunks}) if tokens % n == 0)
        return _savings(chunks, config.memory.layers_on_host, config.model.gated, frame.sizes["stage"] > 1)

    def frames(self) -> Iterator[Layout]:
        """Layouts that differ in more than what they save: each mesh, with what its axes leave to choose, and the microbatches."""
        config = self.config
        for mesh in self.meshes():
            sizes = mesh.sizes
            counts = divisors(config.train.global_batch // mesh.shards)
            if config.model.balances_microbatches:
                counts = [count for count in counts if count == config.train.microbatches]
            for parts, chunks in itertools.product(counts, PIPELINE_CHUNKS if sizes["stage"] > 1 else (1,)):
                if chunks > 1 and (parts % sizes["stage"] or sizes["stage"] * chunks > periods(config.model)):
                    continue
                frame = replace(mesh, microbatches=parts, chunks=chunks)
                if self._reads_microbatches and not self.allows(frame):
                    continue
                # With several microbatches, or stages, gradients are summed once an update at stage 2 as they are at stage 1.
                stages = (3,) if config.memory.layers_on_host else (1, 2, 3) if parts == sizes["stage"] == 1 else (1, 3)
                for zero in stages if sizes["fsdp"] > 1 else (3,):
                    yield replace(frame, zero=zero)

    def meshes(self) -> Iterator[Layout]:
        """A layout of one microbatch for every mesh of all devices that the rules allow with some number of microbatches, with each axis
        across slices and each way to split attention over `context`.
        """
        config = self.config
        slices = config.mesh.slices
        searched = [axis for axis in AXES if axis != "expert" or config.model.moe is not None]
        bounds = [periods(config.model) if axis == "stage" else axes.largest(config, axis) for axis in searched]
        for counts in _products(self.devices, bounds, [axis == "stage" for axis in searched]):
            sizes = dict.fromkeys(AXES, 1) | dict(zip(searched, counts, strict=True))
            crossing: list[Any] = [config.mesh.across_slices]
            if slices > 1:
                crossing = [axis for axis in ("data", "fsdp", "stage") if sizes[axis] % slices == 0]
            for across, attention in itertools.product(crossing, get_args(ContextAttention) if sizes["context"] > 1 else ("ring",)):
                layout = Layout(tuple(sizes.items()), 1, 1, across_slices=across, attention=attention)
                numbers = divisors(config.train.global_batch // layout.shards) if self._reads_microbatches else [1]
                if any(self.allows(replace(layout, microbatches=number)) for number in numbers):
                    yield layout

    @property
    def _reads_microbatches(self) -> bool:
        """True if there are rules that the number of microbatches can break though it divides the rows of every device."""
        return self.config.train.batch_ramp is not None or self.config.train.noise_scale is not None

    def allows(self, layout: Layout) -> bool:
        """True if the config with `layout` breaks no rule on the devices."""
        candidate = changed(self.config, layout.settings(self.config))
        try:
            return candidate is not None and bool(rules.check_full_mesh(candidate, self.devices))
        except ConfigError:
            return False


def why_microbatches_stay(model: ModelConfig, microbatches: int) -> str:
    """Reason why their number is not searched; empty where it is: experts that are balanced over each make it part of the objective."""
    if not model.balances_microbatches:
        return ""
    kept = f"train.microbatches stays {microbatches}"
    return f"{kept}: model.moe.router.balance_over = batch balances the tokens of each, so another number is another loss."


def periods(model: ModelConfig) -> int:
    """Periods of the layer pattern, which stages divide: an incomplete one counts."""
    return math.ceil((model.n_layers - model.n_dense) / len(model.layer_pattern))


@lru_cache
def _savings(chunks: tuple[int, ...], layers_on_host: bool, gated: bool, staged: bool) -> tuple[Saving, ...]:
    """Savings with these chunks of the loss, the result of `savings`; the stages of a pipeline offload nothing."""
    kept = [one for one in _memory(layers_on_host, gated) if not (staged and one[1])]
    return tuple(Saving(loss_chunks, *one) for loss_chunks, one in itertools.product(chunks, kept))


@lru_cache
def _memory(layers_on_host: bool, gated: bool) -> tuple[tuple[str | tuple[str, ...], tuple[str, ...]], ...]:
    """(remat, offload) from `full` to `none`: all sets of groups to save, with each set to offload."""
    if layers_on_host:  # each is recomputed from its input
        return (("full", ()), ("full", ("layer_input",)))
    groups = [group for group in GROUPS if gated or group != ("gate",)]
    found: list[tuple[str | tuple[str, ...], tuple[str, ...]]] = [("full", ()), ("dots", ()), ("none", ())]
    for offload in OFFLOADS:
        left = [group for group in groups if not set(group) & set(offload)]
        always = () if "layer_input" in offload else ("layer_input",)
        for count in range(len(left) + 1):
            for chosen in itertools.combinations(left, count):
                names = (*always, *itertools.chain(*chosen))
                if names != ("layer_input",):  # that is `full`
                    found.append((_ordered(names) or "full", offload))
    return tuple(found)


def _ordered(names: Sequence[str]) -> tuple[str, ...]:
    """Each once, in the order in which a block makes them."""
    return tuple(name for name in get_args(RematName) if name in names)


def _products(total: int, bounds: Sequence[int], up_to: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as a product, in order, of one divisor of each bound or, where `up_to` says so, one number up to it."""
    if not bounds:
        if total == 1:
            yield ()
        return
    of_total = divisors(total)
    for first in (n for n in of_total if n <= bounds[0]) if up_to[0] else (n for n in of_total if bounds[0] % n == 0):
        for rest in _products(total // first, bounds[1:], up_to[1:]):
            yield first, *rest
