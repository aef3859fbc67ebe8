"""Measured speeds of a CPU that no data sheet states: small matmuls, transposing copies, functions, and the first use of memory."""

import bisect
import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class MatmulSpeed(_Record):
    """Speed of matmuls with a shortest side of this length."""

    side: Annotated[int, Field(gt=0)]
    flops: Rate  # FLOP/s


Speeds = Annotated[tuple[MatmulSpeed, ...], Field(min_length=1)]


class CpuSpeeds(_Record):
    """Measured speeds that decide the time of a small model's step on a CPU, in addition to speeds of a large matmul and a large copy."""

    matmuls: Speeds  # shortest side first
    transposed_matmuls: Speeds  # the same of matmuls that read their left operand transposed
    transposed_bytes_per_s: Rate  # read and written by a copy that transposes
    fresh_bytes_per_s: Rate  # memory that the system hands out, at its first write
    function_s: Seconds  # an exponential of one number
    op_s: Seconds  # an operation on one number


def matmul_flops_per_s(speeds: Sequence[MatmulSpeed], side: int) -> float:
    """FLOP/s of a matmul with shortest side `side`: a power law between two measured ones; beyond the last as that one, below the
    first in proportion to the side.
    """
    if side >= speeds[-1].side:
        return speeds[-1].flops
    if side <= speeds[0].side:
        return speeds[0].flops * max(1, side) / speeds[0].side
    above = bisect.bisect_right([speed.side for speed in speeds], side)
    low, high = speeds[above - 1], speeds[above]
    share = math.log(side / low.side) / math.log(high.side / low.side)
    return low.flops * (high.flops / low.flops) ** share
