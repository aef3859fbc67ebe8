"""Samples of one source, all documents of a store or some: windows of the stream of its text, or rows of packed conversations."""

from collections.abc import Sequence

import numpy as np

from maxlm.base.errors import UserError
from maxlm.data import storage
from maxlm.data.token_store import TokenStore


class Samples:
    """Samples of T = seq_len + 1 tokens of a store, numbered from 0 to `count`. `tokens`: in all."""

    count: int
    tokens: int

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        self._store, self._seq_len = store, seq_len

    def ranges(self, number: int) -> list[tuple[int, int]]:
        """The parts [start, stop) of the store that the sample holds."""
        raise NotImplementedError

    def inputs(self, number: int) -> int:
        """Tokens of the sample that are inputs."""
        return sum(stop - start for start, stop in self.ranges(number)) - 1

    def read(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [B, T] in the store's dtype, zero where padded, and how many of each row are real [B]. Raises as `TokenStore.read`."""
        ranges = [self.ranges(int(number)) for number in numbers]
        windows, lengths = np.zeros((len(numbers), self._seq_len + 1), self._store.info.dtype), np.zeros(len(numbers), np.int64)
        stretches = iter(self._store.read_marked([(first, last) for parts in ranges for first, last, _ in _near(parts)]))
        for row, parts in enumerate(ranges):
            for first, _, inside in _near(parts):
                tokens = next(stretches)
                for start, stop in inside:
                    windows[row, lengths[row] : lengths[row] + stop - start] = tokens[start - first : stop - first]
                    lengths[row] += stop - start
        return windows, lengths


class Windows(Samples):
    """Windows of `seq_len` inputs; a window's last target is the next one's first input."""

    def __init__(self, store: TokenStore, seq_len: int, documents: np.ndarray | None = None) -> None:
        """`documents`: numbers of those to read, ascending, of which the stream then consists; None: all."""
        super().__init__(store, seq_len)
        self._starts, self._ends = np.zeros(1, np.int64), np.array([store.n_tokens])  # stretches of the store that are read
        if documents is not None and not len(documents):
            self._ends = np.zeros(1, np.int64)
        elif documents is not None:
            breaks = np.flatnonzero(np.diff(documents) != 1)
            firsts, lasts = documents[np.append(0, breaks + 1)], documents[np.append(breaks, len(documents) - 1)]
            offsets = store.read_documents(0, store.size.documents + 1).astype(np.int64)
            self._starts, self._ends = offsets[firsts], offsets[lasts + 1]
        self._first = np.concatenate([[0], np.cumsum(self._ends - self._starts)])  # token of the stream that begins each stretch
        self.tokens = int(self._first[-1])
        self.count = -(-max(self.tokens - 1, 0) // seq_len)

    def read(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `Samples.read`; windows of one stretch are read together."""
        if len(self._starts) == 1:
            return self._store.read_windows(self._starts[0] + numbers * self._seq_len, self._seq_len + 1, int(self._ends[0]))
        return super().read(numbers)

    def ranges(self, number: int) -> list[tuple[int, int]]:
        """As `Samples.ranges`."""
        start = number * self._seq_len
        stop, parts = min(start + self._seq_len + 1, self.tokens), []
        stretch = int(np.searchsorted(self._first, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self._first[stretch + 1]))
            at = int(self._starts[stretch] - self._first[stretch])
            parts.append((at + start, at + end))
            start, stretch = end, stretch + 1
        return parts


def _near(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Parts in groups that are read at once, (start, stop, parts): a gap of less than a chunk costs less than another read."""
    groups: list[tuple[int, int, list[tuple[int, int]]]] = []
    for start, stop in parts:
        if groups and start - groups[-1][1] < storage.TOKENS.chunk:
            groups[-1] = (groups[-1][0], stop, [*groups[-1][2], (start, stop)])
        else:
            groups.append((start, stop, [(start, stop)]))
    return groups


class PackedRows(Samples):
    """Rows of whole documents, with marks in their ids. The packing is a function of the documents' lengths."""

    def __init__(self, store: TokenStore, seq_len: int, documents: np.ndarray | None = None) -> None:
        """`documents`: numbers of those to pack; None: all. Raises UserError: a document is longer than a row."""
        super().__init__(store, seq_len)
        width = seq_len + 1
        offsets = store.read_documents(0, store.size.documents + 1).astype(np.int64)
        chosen = slice(None) if documents is None else documents
        self._starts, self._ends = offsets[:-1][chosen], offsets[1:][chosen]
        lengths = self._ends - self._starts
        self.tokens = int(lengths.sum())
        if (long := np.flatnonzero(lengths > width)).size:
            rule = f"{len(long):,} conversations are longer than data.seq_len = {seq_len}, the longest of {lengths.max():,} tokens"
            fix = f"raise data.seq_len to {lengths.max() - 1}, or prepare them with data.prepare.conversations.too_long=leave_out"
            raise UserError(f"{store.path}: {rule}; {fix}.")
        row_of = pack(lengths, width)
        self._documents = np.argsort(row_of, kind="stable")  # row after row
        self._first = np.searchsorted(row_of[self._documents], np.arange(row_of.max(initial=-1) + 2))
        self.count = len(self._first) - 1
        self.n_documents = len(lengths)

    def documents(self, number: int) -> np.ndarray:
        """Numbers of the documents in a row among those that are packed, in their order."""
        return self._documents[self._first[number] : self._first[number + 1]]

    def ranges(self, number: int) -> list[tuple[int, int]]:
        """As `Samples.ranges`."""
        return [(int(self._starts[document]), int(self._ends[document])) for document in self.documents(number)]


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
