"""Every layout of one batch of one model on one machine: mesh, microbatches, saved and offloaded tensors. No jax here."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from maxlm.config import axes, rules
from maxlm.config.errors import ConfigError
from maxlm.config.schema import AXES, Config, RematName
from maxlm.cost.advice import changed

SEARCHED = ("data", "fsdp", "tensor", "expert")  # mesh axes whose sizes are searched; others stay 1
ALWAYS_NAMED = ("data", "fsdp", "tensor")  # axes that a plan names whatever their size
LOSS_CHUNKS = (2, 4, 8, 16)
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
    """One choice. `mesh` holds every axis, outermost first; `remat` is a policy or the names saved on the device."""

    mesh: tuple[tuple[str, int], ...]
    microbatches: int
    loss_chunks: int
    remat: str | tuple[str, ...] = "full"
    offload: tuple[str, ...] = ()
    across_slices: str = "data"

    @property
    def sizes(self) -> dict[str, int]:
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

    def settings(self, config: Config) -> dict[str, Any]:
        """As dotted settings over those of `config`, without axes of size 1 that it leaves at 1."""
        settings: dict[str, Any] = {
            f"mesh.{axis}": size for axis, size in self.mesh if axis in ALWAYS_NAMED or size > 1 or getattr(config.mesh, axis) != 1
        }
        if self.sizes.get("context", 1) == 1 and config.mesh.context_attention != "ring":
            settings["mesh.context_attention"] = "ring"  # the default, since no sequence is split
        if self.sizes["fsdp"] == self.sizes.get("expert", 1) == 1 and config.mesh.zero != 3:
            settings["mesh.zero"] = 3
        return {
            **settings,
            "mesh.across_slices": self.across_slices,
            "train.microbatches": self.microbatches,
            "train.loss_chunks": self.loss_chunks,
            "memory.remat": self.remat,
            "memory.offload": self.offload,
        }

    def apply(self, config: Config) -> Config:
        """`config` with this layout. It must come from `layouts` or `layout_of` for the same config."""
        result = changed(config, self.settings(config))
        assert result is not None, f"{self} breaks a rule"
        return result


def layout_of(config: Config, devices: int) -> Layout:
    """Layout of `config` itself. Raises ConfigError when its mesh does not match `devices`."""
    sizes = rules.check_devices(config, devices)
    remat = config.memory.remat
    return Layout(
        mesh=tuple(sizes.items()),
        microbatches=config.train.microbatches,
        loss_chunks=config.train.loss_chunks,
        remat=remat if isinstance(remat, str) else _ordered(remat) or "full",
        offload=_ordered(config.memory.offload),
        across_slices=config.mesh.across_slices,
    )


def layouts(config: Config, devices: int) -> Iterator[Layout]:
    """All layouts of `config` on `devices` that the rules allow, each once. The batch, the sequence and the model stay."""
    kept = list(_memory(config))
    chunks = sorted({n for n in (*LOSS_CHUNKS, config.train.loss_chunks) if config.data.seq_len % n == 0})
    for sizes, across in meshes(config, devices):
        rows = config.train.global_batch // (sizes["data"] * sizes["fsdp"] * sizes["expert"])
        for parts, loss_chunks, (remat, offload) in itertools.product(divisors(rows), chunks, kept):
            yield Layout(tuple(sizes.items()), parts, loss_chunks, remat, offload, across)


def meshes(config: Config, devices: int) -> Iterator[tuple[dict[str, int], str]]:
    """(axis -> size, axis across slices) of every mesh of `devices` that the rules allow."""
    slices = config.mesh.slices
    searched = [axis for axis in SEARCHED if axis != "expert" or config.model.moe is not None]
    for counts in _products(devices, [axes.largest(config, axis) for axis in searched]):
        sizes = dict.fromkeys(AXES, 1) | dict(zip(searched, counts, strict=True))
        crossing = [axis for axis in ("data", "fsdp") if sizes[axis] % slices == 0] if slices > 1 else [config.mesh.across_slices]
        for across in crossing:
            settings = {f"mesh.{axis}": size for axis, size in sizes.items()} | {"train.microbatches": 1, "mesh.across_slices": across}
            if _allowed(config, settings, devices):
                yield sizes, across


def _allowed(config: Config, settings: Mapping[str, Any], devices: int) -> bool:
    candidate = changed(config, settings)
    try:
        return candidate is not None and bool(rules.check_devices(candidate, devices))
    except ConfigError:
        return False


def _memory(config: Config) -> Iterator[tuple[str | tuple[str, ...], tuple[str, ...]]]:
    """(remat, offload) from `full` to `none`: all sets of groups to save, with each set to offload."""
    groups = [group for group in GROUPS if config.model.activation != "gelu" or group != ("gate",)]
    yield from (("full", ()), ("dots", ()), ("none", ()))
    for offload in OFFLOADS:
        left = [group for group in groups if not set(group) & set(offload)]
        always = () if "layer_input" in offload else ("layer_input",)
        for count in range(len(left) + 1):
            for chosen in itertools.combinations(left, count):
                names = (*always, *itertools.chain(*chosen))
                if names == ("layer_input",):
                    continue  # that is `full`
                yield _ordered(names) or "full", offload


def _ordered(names: Sequence[str]) -> tuple[str, ...]:
    """Each once, in the order in which a block makes them."""
    return tuple(name for name in get_args(RematName) if name in names)


def divisors(number: int) -> list[int]:
    """Smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _products(total: int, bounds: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as a product of one divisor of each bound, in order."""
    if not bounds:
        if total == 1:
            yield ()
        return
    for first in divisors(math.gcd(total, bounds[0])):
        for rest in _products(total // first, bounds[1:]):
            yield first, *rest
