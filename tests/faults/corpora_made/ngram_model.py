"""An n-gram model of words with interpolated Kneser-Ney smoothing, in the ARPA format that KenLM reads: what `lmplz` makes, which the
package kenlm does not have (Chen and Goodman 1999, doi 10.1006/csla.1999.0128, equation 26; one discount for each order).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from maxlm.corpus.filters.perplexity import kenlm_units

Gram = tuple[str, ...]
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
NEVER = -99.0  # log10 of the probability of what is only ever given


def write_model(texts: Iterable[str], path: Path, order: int = 3) -> None:
    """Train on lines of `texts` and write `path`. Words that occur once count as unknown ones."""
    lines = [kenlm_units(line, characters=False).split() for text in texts for line in text.split("\n") if line.strip()]
    common = {word for word, count in Counter(word for line in lines for word in line).items() if count > 1}
    counts = _counts(([word if word in common else UNKNOWN for word in line] for line in lines), order)
    probabilities, backoffs = _smoothed(counts, order)
    with path.open("w", encoding="utf-8") as file:
        file.write("\\data\\\n" + "".join(f"ngram {size}={len(probabilities[size])}\n" for size in range(1, order + 1)))
        for size in range(1, order + 1):
            file.write(f"\n\\{size}-grams:\n")
            for gram, value in sorted(probabilities[size].items()):
                log = NEVER if gram == (BEGIN,) else math.log10(value)
                backoff = backoffs.get(gram)
                file.write(f"{log:.5f}\t{' '.join(gram)}" + (f"\t{math.log10(backoff):.5f}\n" if backoff else "\n"))
        file.write("\n\\end\\\n")


def _counts(lines: Iterable[list[str]], order: int) -> list[Counter[Gram]]:
    """Counts of n-grams of each size: occurrences for the largest and for those that begin a line, else how many words come before."""
    full: Counter[Gram] = Counter()
    begins: list[Counter[Gram]] = [Counter() for _ in range(order + 1)]
    for line in lines:
        words = (BEGIN, *line, END)
        full.update(zip(*(words[place:] for place in range(order)), strict=False))
        for size in range(1, order):
            begins[size][words[:size]] += 1
    counts = [Counter[Gram]() for _ in range(order + 1)]
    counts[order] = full
    for size in range(order - 1, 0, -1):
        counts[size] = Counter(gram[1:] for gram in counts[size + 1])
        counts[size].update(begins[size])
    return counts


def _smoothed(counts: list[Counter[Gram]], order: int) -> tuple[list[dict[Gram, float]], dict[Gram, float]]:
    """Probabilities by size, and the weight of the shorter n-gram for each context."""
    counts[1].pop((BEGIN,), None)
    counts[1][(UNKNOWN,)] += 1
    total, size = sum(counts[1].values()), len(counts[1])
    floor = 0.1 / size  # a tenth of the probability is spread evenly
    probabilities: list[dict[Gram, float]] = [{} for _ in range(order + 1)]
    probabilities[1] = {gram: 0.9 * count / total + floor for gram, count in counts[1].items()}
    probabilities[1][(BEGIN,)] = 1.0
    backoffs: dict[Gram, float] = {}
    for length in range(2, order + 1):
        ones, twos = (sum(count == times for count in counts[length].values()) for times in (1, 2))
        discount = ones / max(1, ones + 2 * twos)
        sums: dict[Gram, int] = defaultdict(int)
        different: Counter[Gram] = Counter()
        for gram, count in counts[length].items():
            sums[gram[:-1]] += count
            different[gram[:-1]] += 1
        for context, kinds in different.items():
            backoffs[context] = max(1e-7, discount * kinds / sums[context])
        for gram, count in counts[length].items():
            lower = probabilities[length - 1].get(gram[1:], floor)
            context = gram[:-1]
            probabilities[length][gram] = max(0.0, count - discount) / sums[context] + backoffs[context] * lower
    return probabilities, backoffs
