"""Batches: windows of tokens with targets, weights, segments and positions.

B batch, S sequence (inputs of a window), T = S + 1 (inputs and the last target).
"""

from typing import Any, NamedTuple

import numpy as np

from maxlm.data import marks


class Batch(NamedTuple):
    """A pytree of [B, S] arrays, numpy or jax."""

    tokens_BS: Any  # int32; 0 where padded
    targets_BS: Any  # int32; the token that follows
    weights_BS: Any  # float32; 1, or 0 where the target is padding or opens another document
    segment_ids_BS: Any  # int32; 1, 2, ... for each document of the window; 0 where padded
    positions_BS: Any  # int32; from 0 at the window's start and at each document's start
    random_BS: Any = None  # uint32; the seed of what is drawn for each token, where a training step draws anything


def batch_of_windows(window_BT: np.ndarray, length_B: np.ndarray, end_of_document: int, *, mask_documents: bool) -> Batch:
    """Derive targets, weights, segments and positions of windows from the end-of-document tokens in them.

    Args:
        window_BT: tokens, integers; tokens beyond a row's length are ignored.
        length_B: tokens in each row, from 0 (all padding) to T; the last of them is only a target.
        end_of_document: the id that ends every document, and that no document contains.
        mask_documents: when false the window is one segment with positions 0..S-1; weights stay 0 where a target opens
            another document, since nothing before it says what it could be.
    """
    rows, width = window_BT.shape
    S = width - 1
    column_S = np.arange(S, dtype=np.int32)
    tokens_BS = window_BT[:, :-1].astype(np.int32)
    targets_BS = window_BT[:, 1:].astype(np.int32)
    ends_BS = tokens_BS == end_of_document

    if mask_documents:
        starts_BS = np.zeros((rows, S), np.bool_)
        starts_BS[:, 0] = True
        starts_BS[:, 1:] = ends_BS[:, :-1]
        segments_BS = np.cumsum(starts_BS, axis=1, dtype=np.int32)
        positions_BS = column_S - np.maximum.accumulate(np.where(starts_BS, column_S, 0), axis=1)
    else:
        segments_BS = np.ones((rows, S), np.int32)
        positions_BS = np.tile(column_S, (rows, 1))

    weights_BS = (~ends_BS).astype(np.float32)
    return _without_padding(Batch(tokens_BS, targets_BS, weights_BS, segments_BS, positions_BS), length_B)


def batch_of_segments(window_BT: np.ndarray, length_B: np.ndarray) -> Batch:
    """The same from the marks of packed conversations: a target has weight 1 if it counts and lies in the segment of its token.

    Args:
        window_BT: ids with marks, integers (see `marks`); every row begins with a segment.
        length_B: as in `batch_of_windows`.
    """
    ids_BT, starts_BT = (window_BT & marks.IDS).astype(np.int32), (window_BT & marks.STARTS) != 0
    counts_BS = ((window_BT[:, 1:] & marks.COUNTS) != 0) & ~starts_BT[:, 1:]
    column_S = np.arange(ids_BT.shape[1] - 1, dtype=np.int32)
    starts_BS = starts_BT[:, :-1]
    positions_BS = column_S - np.maximum.accumulate(np.where(starts_BS, column_S, 0), axis=1)
    segments_BS = np.cumsum(starts_BS, axis=1, dtype=np.int32)
    batch = Batch(ids_BT[:, :-1].copy(), ids_BT[:, 1:].copy(), counts_BS.astype(np.float32), segments_BS, positions_BS)
    return _without_padding(batch, length_B)


def _without_padding(batch: Batch, length_B: np.ndarray) -> Batch:
    """`batch` with zeros where a row has neither a token nor a target."""
    S = batch.tokens_BS.shape[1]
    if (length_B <= S).any():
        padded_BS = np.arange(S) >= np.maximum(length_B[:, None] - 1, 0)
        for array_BS in batch[:5]:
            array_BS[padded_BS] = 0
    return batch
