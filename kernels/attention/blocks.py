"""Tokens of a block of the TPU's attention kernels: the best of those counted, by chip, as blocks.json has them.

`maxlm kernels sweep --operation attention --write` makes the table. Nothing needs it to be right: any block gives the same attention.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

from maxlm.kernels.platform import LANES

TABLE = Path(__file__).with_name("blocks.json")


class Blocks(NamedTuple):
    """Tokens of a block of queries, and of keys."""

    forward: int
    backward: int

    def within(self, seq_len: int) -> "Blocks":
        """The largest that are no larger, are whole lanes and divide the sequence, which must be a multiple of lanes itself."""
        return Blocks(*(max(b for b in range(LANES, min(seq_len, most) + 1, LANES) if seq_len % b == 0) for most in self))


OTHERWISE = Blocks(1024, 512)  # of a chip that the table lacks: on v6e they were counted best


def blocks_of(seq_len: int, head_dim: int, window: int | None, device_kind: str) -> Blocks:
    """Of the chip's rows with a window, or without one, that of the nearest head dim, a lower one where two are as near; `OTHERWISE` where
    the chip has none. A window makes large blocks dearer: of those at its ends much is computed for nothing.
    """
    at = (device_kind, window is not None)
    rows = {dim: blocks for (*where, dim), blocks in table().items() if tuple(where) == at}
    width = padded(head_dim)
    most = rows[min(rows, key=lambda dim: (abs(dim - width), dim))] if rows else OTHERWISE
    return most.within(seq_len)


def padded(head_dim: int) -> int:
    """The head dim as the kernels have it: whole lanes."""
    return -(-head_dim // LANES) * LANES


@functools.cache
def table() -> dict[tuple[str, bool, int], Blocks]:
    """Blocks by device kind, whether there is a window, and padded head dim."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["blocks"]
    return {(row["device_kind"], row["windowed"], row["head_dim"]): Blocks(row["forward"], row["backward"]) for row in rows}
