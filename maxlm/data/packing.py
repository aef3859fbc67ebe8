"""Whole documents packed into rows: no document is cut, and few places of a row stay empty."""

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Row of every document, int64 [N], so that the documents of no row are longer than `capacity` together.

    Best fit, longest documents first: a function of the lengths alone. Rows are numbered by their first document, so that rows follow each
    other about as documents do. About 1 s for a million documents. Requires 0 < lengths <= capacity.
    """
    assert not len(lengths) or (lengths.min() > 0 and lengths.max() <= capacity), "no row holds such a document"
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    row_of = np.empty(len(lengths), np.int64)
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the places that are left
    spaces = 0  # bit n: there are rows with n places left
    count = 0
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = spaces >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = rows_with[left].pop()
            if not rows_with[left]:
                spaces ^= 1 << left
        else:
            left, row, count = capacity, count, count + 1
        row_of[document] = row
        left -= length
        if left:
            rows_with[left].append(row)
            spaces |= 1 << left
    first = np.full(count, len(lengths), np.int64)
    np.minimum.at(first, row_of, np.arange(len(lengths)))
    number = np.empty(count, np.int64)
    number[np.argsort(first)] = np.arange(count)
    return number[row_of]
