"""Declarations of a module for cost models: its matmuls, and the sizes of the tensors that a remat policy may keep.

Each module implements `matmuls()`, in the order in which they run, and `saved_tensors()`: numbers a token by `RematName`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flax import nnx

ROUTER, JOIN = "router", "join"  # matmuls with a result that remat policies do not name: of routers, and of multi-token prediction
Split = Literal["in", "out", "rows"]


@dataclass(frozen=True)
class Matmul:
    """[rows, wide_in] x [wide_in, wide_out] of one layer, named after its result.

    `split`: what mesh axis `tensor` divides: one of the two sides or, between tensor-parallel regions, the rows.
    """

    name: str
    wide_in: int
    wide_out: int
    split: Split
    experts: int = 0  # matrices side by side, of which a row meets one; 0: one matrix for all rows
    meets: int = 1  # of them, those that a token meets
    matrix: str = ""  # the matrix as `precision.matmul.skip` calls it, where the result has another name; two may be columns of one

    def local(self, tensor: int) -> tuple[int, int]:
        """(in, out) on one device."""
        tensor_in, tensor_out = (tensor if self.split == side else 1 for side in ("in", "out"))
        return self.wide_in // tensor_in, self.wide_out // tensor_out

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of a token."""
        return self.meets * self.wide_in * self.wide_out

    def gathered(self, sizes: Mapping[str, int]) -> int:
        """Numbers of the gathered weights on one device."""
        wide_in, wide_out = self.local(sizes["tensor"])
        return wide_in * wide_out * (self.experts // sizes["expert"] if self.experts else 1)


def matmul_by(name: str, weight: nnx.Param, split: Split, dims_in: int = 1, matrix: str = "") -> Matmul:
    """The matmul by `weight`; its first `dims_in` of two or three dims are contracted; leading dims of stacked blocks are left out."""
    dims = weight.shape[-len(weight.axes) :]
    return Matmul(name, math.prod(dims[:dims_in]), math.prod(dims[dims_in:]), split, matrix=matrix)
