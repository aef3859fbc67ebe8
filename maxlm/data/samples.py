"""The samples of one store: windows of a stream of text, or rows of packed conversations."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from maxlm.config.errors import UserError
from maxlm.data import marks
from maxlm.data.packing import pack
from maxlm.data.token_store import TokenStore


class Samples(Protocol):
    """Samples of T = seq_len + 1 tokens, numbered from 0 to `count`."""

    count: int

    def read(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [B, T] in the store's dtype, zero where padded, and how many of each row are real [B]. Raises as `TokenStore.read`."""

    def ranges(self, number: int) -> Sequence[tuple[int, int]]:
        """The parts [start, stop) of the store that the sample holds."""

    def inputs(self, number: int) -> int:
        """Its tokens that are inputs."""


class Windows:
    """Windows of `seq_len` inputs; a window's last target is the next one's first input."""

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        self._store, self._seq_len = store, seq_len
        self.count = -(-(store.n_tokens - 1) // seq_len)

    def read(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._store.read_windows(numbers * self._seq_len, self._seq_len + 1)

    def ranges(self, number: int) -> list[tuple[int, int]]:
        start = number * self._seq_len
        return [(start, min(start + self._seq_len + 1, self._store.n_tokens))]

    def inputs(self, number: int) -> int:
        return min(self._store.n_tokens - 1 - number * self._seq_len, self._seq_len)


class PackedRows:
    """Rows of whole documents, with marks in their ids. The packing is a function of the documents' lengths."""

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        """Raises UserError: a document is longer than a row."""
        self._store, self._width = store, seq_len + 1
        self._offsets = store.read_documents(0, store.size.documents + 1).astype(np.int64)
        lengths = np.diff(self._offsets)
        if (long := np.flatnonzero(lengths > self._width)).size:
            rule = f"{len(long):,} conversations are longer than data.seq_len = {seq_len}, the longest of {lengths.max():,} tokens"
            fix = f"raise data.seq_len to {lengths.max() - 1}, or prepare them with data.prepare.conversations.too_long=leave_out"
            raise UserError(f"{store.path}: {rule}; {fix}.")
        row_of = pack(lengths, self._width)
        self._documents = np.argsort(row_of, kind="stable")  # row after row
        self._first = np.searchsorted(row_of[self._documents], np.arange(row_of.max(initial=-1) + 2))
        self.count = len(self._first) - 1

    def documents(self, number: int) -> np.ndarray:
        """Numbers of the documents in a row, in their order."""
        return self._documents[self._first[number] : self._first[number + 1]]

    def read(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens, lengths = np.zeros((len(numbers), self._width), marks.DTYPE), np.zeros(len(numbers), np.int64)
        ranges = [self.ranges(int(number)) for number in numbers]
        parts = iter(self._store.read_marked([part for parts in ranges for part in parts]))
        for row, own in enumerate(ranges):
            found = np.concatenate([next(parts) for _ in own])
            lengths[row] = len(found)
            tokens[row, : len(found)] = found
        return tokens, lengths

    def ranges(self, number: int) -> list[tuple[int, int]]:
        return [(int(self._offsets[document]), int(self._offsets[document + 1])) for document in self.documents(number)]

    def inputs(self, number: int) -> int:
        return sum(stop - start for start, stop in self.ranges(number)) - 1
