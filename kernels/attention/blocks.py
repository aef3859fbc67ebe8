"""Block sizes of the TPU's attention kernels: the best by counted cycles, by chip, in blocks.json.

`maxlm kernels sweep --operation attention --write` writes the table. Results do not depend on it: any block gives the same attention.
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
        """The largest blocks up to these that are multiples of `LANES` and divide the sequence, itself a multiple of `LANES`."""
        return Blocks(*(max(b for b in range(LANES, min(seq_len, most) + 1, LANES) if seq_len % b == 0) for most in self))


DEFAULT = Blocks(1024, 512)  # for a chip that the table lacks: the best on v6e


def blocks_of(seq_len: int, head_dim: int, window: int | None, device_kind: str) -> Blocks:
    """Block sizes by the table's row for the chip, with or without a window, and the nearest head dim (the lower of two as near);
    `DEFAULT` where the chip has no row. A window makes large blocks dearer: much of those at its ends is masked.
    """
    at = (device_kind, window is not None)
    rows = {dim: blocks for (*where, dim), blocks in table().items() if tuple(where) == at}
    width = padded(head_dim)
    most = rows[min(rows, key=lambda dim: (abs(dim - width), dim))] if rows else DEFAULT
    return most.within(seq_len)


def padded(head_dim: int) -> int:
    """The head dim rounded up to a multiple of `LANES`, as the kernels take it."""
    return -(-head_dim // LANES) * LANES


@functools.cache
def table() -> dict[tuple[str, bool, int], Blocks]:
    """Blocks by device kind, whether there is a window, and padded head dim."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["blocks"]
    return {(row["device_kind"], row["windowed"], row["head_dim"]): Blocks(row["forward"], row["backward"]) for row in rows}
