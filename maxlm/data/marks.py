"""Marks of tokens in stores of conversations: two high bits of the stored id, so that they share its checksums, windows and reads."""

from typing import Literal

import numpy as np

Content = Literal["text", "conversations", "preferences"]  # of a store, and of what an objective reads

COUNTS = 1 << 30  # the token belongs to a response: its prediction counts in the loss
STARTS = 1 << 29  # first token of a segment: attention does not cross it, positions restart. A preference pair is two segments
IDS = STARTS - 1  # the bits of the id itself; int32 holds all of them
DTYPE = np.dtype(np.uint32)


def segment(ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Ids [N] of one segment with their marks, uint32. `counts`: bool [N]."""
    marked = ids.astype(DTYPE) | np.where(counts, DTYPE.type(COUNTS), DTYPE.type(0))
    marked[0] |= DTYPE.type(STARTS)
    return marked
