"""Statistics of a text that several rules need, each computed once."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from maxlm.corpus.filters import scan
from maxlm.corpus.filters.scan import CodePoints, Counts, Hashes, Lines

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 (used as a decorator)
    """A property computed once for each object. functools.cached_property takes a lock before Python 3.12, at 1.5 microseconds a use."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute, self.name, self.__doc__ = compute, compute.__name__, compute.__doc__

    def __get__(self, instance: Any, owner: type) -> T:
        value = instance.__dict__[self.name] = self.compute(instance)
        return value


class TextStatistics:
    """Words, lines, duplicates and n-grams of one text, computed when first asked for. W words, L lines, T tokens."""

    def __init__(self, text: str) -> None:
        self.text = text

    @lazy
    def lower_bytes(self) -> bytes:
        """UTF-8, the ASCII letters in lower case: ten times as fast as the lower-case text."""
        return self.text.encode("utf-8", "surrogatepass").lower()

    @lazy
    def codes(self) -> CodePoints:
        """Code points of the text."""
        return np.frombuffer(self.text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint32, copy=False)

    @lazy
    def _words_and_lines(self) -> tuple[Hashes, Lines, Lines, Hashes, Counts]:
        return scan.scan_text(self.codes, *scan.tables())

    @lazy
    def counts(self) -> list[int]:
        """Indexed by scan.N_WORDS and so on."""
        return self._words_and_lines[4].tolist()

    @property
    def hashes_W(self) -> Hashes:
        """Hashes of the words."""
        return self._words_and_lines[0]

    @property
    def n_words(self) -> int:
        """Number of words."""
        return self.counts[scan.N_WORDS]

    @property
    def lines(self) -> Lines:
        """One row for each line, empty ones included: scan.START (characters) and so on."""
        return self._words_and_lines[2]

    @lazy
    def flags(self) -> Lines:
        """scan.FLAGS of the lines with text."""
        lines = self.lines
        return lines[lines[:, scan.END] > 0, scan.FLAGS]

    @lazy
    def duplicates(self) -> list[int]:
        """Indexed by scan.N_LINES and so on."""
        return scan.find_duplicates(self.lines, self._words_and_lines[3]).tolist()

    @lazy
    def repetition(self) -> list[float]:
        """Indexed by the n-gram's length in words: fraction of characters (`scan.find_repetition`)."""
        return scan.find_repetition(self.hashes_W, self._words_and_lines[1], 0).tolist()

    @lazy
    def hashes_T(self) -> Hashes:
        """Tokens: runs of letters and digits, or single characters in scripts without spaces."""
        return scan.scan_tokens(self.codes, *scan.tables())

    @lazy
    def pieces(self) -> tuple[Hashes, Lines, Lines, Counts]:
        """Words and signs, with case: `scan.scan_pieces`."""
        return scan.scan_pieces(self.codes, scan.tables()[0], scan.released_signs())

    @lazy
    def hints(self) -> int:
        """scan.HINT_IPV4 and so on: what the text may contain."""
        return scan.find_hints(self.codes, scan.tables()[0])


_last = TextStatistics("")  # of the text asked for last: filters that follow each other share it


def statistics_of(text: str) -> TextStatistics:
    """Statistics of `text`; the last text's are kept."""
    global _last
    last = _last
    if last.text is not text:
        last = _last = TextStatistics(text)
    return last


def word_hashes(words: tuple[str, ...]) -> Hashes:
    """Hashes that these words have in `TextStatistics.hashes_W`, sorted."""
    return np.unique(TextStatistics(" ".join(words)).hashes_W)
