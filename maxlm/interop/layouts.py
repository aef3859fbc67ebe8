"""Layouts of published tensors relative to ours: reshapes, transposes and splits, each of which can be inverted."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A reversible layout: here the same numbers in the same order, and the same dims.

    `computes`: it writes other numbers, not only another order.
    """

    computes: ClassVar[bool] = False

    def shape(self, ours: Shape) -> Shape:
        """Shape of their tensor."""
        return ours

    def read(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
        """Our tensor, of the shape `ours`, from theirs."""
        return theirs.reshape(ours)

    def write(self, ours: np.ndarray) -> np.ndarray:
        """Their tensor from ours."""
        return ours.reshape(self.shape(ours.shape))


@dataclass(frozen=True)
class Flat(Layout):
    """All dims in one: biases of heads."""

    def shape(self, ours: Shape) -> Shape:
        return (math.prod(ours),)


@dataclass(frozen=True)
class Matrix(Layout):
    """Two dims, inputs first: the first `inputs` dims of ours, and the others."""

    inputs: int = 1

    def shape(self, ours: Shape) -> Shape:
        return math.prod(ours[: self.inputs]), math.prod(ours[self.inputs :])


@dataclass(frozen=True)
class Linear(Matrix):
    """As torch's Linear, outputs first."""

    def shape(self, ours: Shape) -> Shape:
        rows, columns = super().shape(ours)
        return columns, rows

    def read(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
        return theirs.T.reshape(ours)

    def write(self, ours: np.ndarray) -> np.ndarray:
        return ours.reshape(super().shape(ours.shape)).T


@dataclass(frozen=True)
class FromOne(Layout):
    """A scale stored as its difference from 1 (Gemma's norms)."""

    computes: ClassVar[bool] = True

    def read(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
        return np.float32(1) + theirs.astype(np.float32).reshape(ours)

    def write(self, ours: np.ndarray) -> np.ndarray:
        return ours - np.float32(1)


@dataclass(frozen=True)
class RotaryPairs(Linear):
    """A Linear with rotary outputs, the last `rope_dim` of each head, stored as neighbouring pairs; ours are halves (DeepSeek)."""

    rope_dim: int = 0

    def read(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
        x = super().read(theirs, ours)
        rest, rotary = x[..., : -self.rope_dim], x[..., -self.rope_dim :]
        return np.concatenate([rest, rotary[..., ::2], rotary[..., 1::2]], axis=-1)

    def write(self, ours: np.ndarray) -> np.ndarray:
        rest, rotary = ours[..., : -self.rope_dim], ours[..., -self.rope_dim :]
        pairs = np.stack(np.split(rotary, 2, axis=-1), axis=-1).reshape(rotary.shape)
        return super().write(np.concatenate([rest, pairs], axis=-1))


@dataclass(frozen=True)
class Reordered(Layout):
    """As `layout`, with the last dim of ours in another order: place i holds what `layout` has at `order[i]`."""

    layout: Layout
    order: tuple[int, ...]

    def shape(self, ours: Shape) -> Shape:
        return self.layout.shape(ours)

    def read(self, theirs: np.ndarray, ours: Shape) -> np.ndarray:
        return self.layout.read(theirs, ours)[..., np.array(self.order)]

    def write(self, ours: np.ndarray) -> np.ndarray:
        return self.layout.write(ours[..., np.argsort(self.order)])


def interleaved(head_dim: int) -> tuple[int, ...]:
    """Dims of a head with rotary pairs (2 i, 2 i + 1), in the order of our pairs (i, i + half)."""
    return (*range(0, head_dim, 2), *range(1, head_dim, 2))


def rotary_first(head_dim: int, rotary: int) -> tuple[int, ...]:
    """Return the order of a head with `rotary` first dims, paired among themselves: ours are pairs (i, i + half), the other dims last."""
    half = rotary // 2
    rest = range(rotary, head_dim)
    middle = len(rest) // 2
    return (*range(half), *rest[:middle], *range(half, rotary), *rest[middle:])


KEEP, FLAT, LINEAR, FROM_ONE = Layout(), Flat(), Linear(), FromOne()
OUTPUT = Linear(inputs=2)  # attention's output projection: heads and their dims
CONV, CONV_OUTPUT = Matrix(), Matrix(inputs=2)  # GPT-2's Conv1D is stored inputs first


@dataclass(frozen=True)
class Rule:
    """One kind of tensor of a family.

    `theirs`: its name, with `{layer}` and `{expert}` where it is one of many. `ours`: names in the parameter tree, within a layer if it is
    one of many; several lie side by side in the last dim of theirs, or if `interleaved` take turns in it. `by_expert`: their first dim
    counts experts. `exact`: float32 in every export. `rows`: (first, end, of all) of ours in the first dim of theirs, which further rules
    share with other parameters.
    """

    theirs: str
    ours: tuple[str, ...]
    layout: Layout = KEEP
    interleaved: bool = False
    by_expert: bool = False
    exact: bool = False
    rows: tuple[int, int, int] | None = None

    @property
    def per_layer(self) -> bool:
        """True if they have a tensor for each layer."""
        return "{layer}" in self.theirs

    @property
    def per_expert(self) -> bool:
        """True if ours are read expert by expert."""
        return self.by_expert or "{expert}" in self.theirs

    def shape(self, ours: Shape, experts: int) -> Shape:
        """Shape of their tensor; `ours`: of one of ours, without layers and experts."""
        *leading, last = self.layout.shape(ours)
        if self.rows is not None:
            leading[0] = self.rows[2]
        return (*((experts,) if self.by_expert else ()), *leading, last * len(self.ours))

    def part(self, theirs: np.ndarray, name: str) -> np.ndarray:
        """The rows or columns of their tensor that are `name`."""
        if self.rows is not None:
            return theirs[self.rows[0] : self.rows[1]]
        i, n = self.ours.index(name), len(self.ours)
        if self.interleaved:
            return theirs[..., i::n]
        width = theirs.shape[-1] // n
        return theirs[..., i * width : (i + 1) * width]

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        """The inverse of `part`."""
        if self.interleaved:
            return np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)
        if self.rows is not None:
            return np.concatenate(parts)
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def expert_axis(name: str) -> int:
    """The dim of experts of our parameter `name`, which ends in one letter a dim."""
    return name.rpartition("_")[2].index("E")
