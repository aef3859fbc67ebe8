"""Statistics of a text that several rules need, each computed once."""

from functools import cached_property

import numpy as np

from maxlm.corpus.filters import scan
from maxlm.corpus.filters.scan import CodePoints, Counts, Hashes, Lines


class TextStatistics:
    """Words, lines, duplicates and n-grams of one text, computed when first asked for. W words, L lines, T tokens."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def lower(self) -> str:
        return self.text.lower()

    @cached_property
    def codes(self) -> CodePoints:
        return np.frombuffer(self.text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint32, copy=False)

    @cached_property
    def _words_and_lines(self) -> tuple[Hashes, Lines, Lines, Hashes, Counts]:
        return scan.scan_text(self.codes, *scan.tables())

    @cached_property
    def counts(self) -> list[int]:
        """Indexed by scan.N_WORDS and so on."""
        return self._words_and_lines[4].tolist()

    @property
    def hashes_W(self) -> Hashes:
        return self._words_and_lines[0]

    @property
    def n_words(self) -> int:
        return self.counts[scan.N_WORDS]

    @property
    def lines(self) -> Lines:
        """One row for each line, empty ones included: scan.START (characters) and so on."""
        return self._words_and_lines[2]

    @cached_property
    def flags(self) -> Lines:
        """scan.FLAGS of the lines with text."""
        lines = self.lines
        return lines[lines[:, scan.END] > 0, scan.FLAGS]

    @cached_property
    def duplicates(self) -> list[int]:
        """Indexed by scan.N_LINES and so on."""
        return scan.find_duplicates(self.lines, self._words_and_lines[3]).tolist()

    @cached_property
    def repetition(self) -> list[float]:
        """Indexed by the n-gram's length in words: fraction of characters (`scan.find_repetition`)."""
        return scan.find_repetition(self.hashes_W, self._words_and_lines[1]).tolist()

    @cached_property
    def hashes_T(self) -> Hashes:
        """Tokens: runs of letters and digits, or single characters in scripts without spaces."""
        return scan.scan_tokens(self.codes, *scan.tables())

    def line_texts(self) -> list[str]:
        return self.text.split("\n")


_last = TextStatistics("")  # of the text asked for last: filters that follow each other share it


def statistics_of(text: str) -> TextStatistics:
    """Statistics of `text`; those of the last text are kept."""
    global _last
    last = _last
    if last.text is not text:
        last = _last = TextStatistics(text)
    return last


def word_hashes(words: tuple[str, ...]) -> Hashes:
    """Hashes that these words have in `TextStatistics.hashes_W`, sorted."""
    return np.unique(TextStatistics(" ".join(words)).hashes_W)
