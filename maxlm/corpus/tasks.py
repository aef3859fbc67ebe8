"""Tasks of a corpus: its division, and counts of the documents that pass through a task.

A corpus is divided by its input files alone, so that the number of workers changes no byte of the output. Counts are sums, so that tasks
add up, for the mark of a task and for the report.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from maxlm.corpus.document import Document, Removed, Tagged
from maxlm.documents.files import SourceFile


class Task(NamedTuple):
    """Files that one process reads, one after the other; `number` is from 0."""

    number: int
    paths: tuple[str, ...]
    size: int  # bytes

    @property
    def name(self) -> str:
        """Name of its shards: numbers of equal length, so that names sort as tasks do."""
        return f"{self.number:06}"


def divide(inputs: Iterable[SourceFile], task_bytes: int) -> list[Task]:
    """Tasks of about `task_bytes`, of whole files in the order of `inputs`; a larger file is a task by itself."""
    tasks: list[Task] = []
    paths: list[str] = []
    size = 0
    for one in inputs:
        if paths and size + one.size > task_bytes:
            tasks.append(Task(len(tasks), tuple(paths), size))
            paths, size = [], 0
        paths.append(one.path)
        size += one.size
    if paths:
        tasks.append(Task(len(tasks), tuple(paths), size))
    return tasks


def fingerprint(*parts: Any) -> str:
    """A hash of values that JSON has, such as settings, files and versions."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def largest_first(tasks: Sequence[Task]) -> list[int]:
    """Numbers of the tasks in the order in which they begin: the largest first, so that none is left alone at the end."""
    return [task.number for task in sorted(tasks, key=lambda task: (-task.size, task.number))]


UNKNOWN = "unknown"  # the language of a document without one
LONGEST = 35  # characters of a language's name that count (BCP 47)

Sizes = dict[str, list[int]]  # by name: documents and bytes of text


class Tally:
    """Counts of what came into a task and what left it.

    `came` and `left`: documents and bytes of text by source. `lengths`: documents by the number of bits of their number of characters,
    so that bin b holds lengths from 2^(b-1) to 2^b - 1. `copies`: copies removed, by the number of documents in their cluster. `cut`:
    by stage and reason, documents that stay without a part of their text, and the characters, or the personal data that were masked.
    `tagged`: by stage and reason, documents that stay with a tag. `unmet`: documents removed by `where`, by source, condition and kind.
    `origins`: the source of each input file, which need not be what a document's own metadata calls its source.
    """

    def __init__(self, origins: Mapping[str, str]) -> None:
        self._origins = origins
        self.came: Sizes = {}
        self.left: Sizes = {}
        self.languages: Sizes = {}
        self.lengths_came: Counter[str] = Counter()
        self.lengths_left: Counter[str] = Counter()
        self.removed: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.cut: Sizes = {}
        self.tagged: Counter[str] = Counter()
        self.unmet: Counter[str] = Counter()

    def come(self, document: Document) -> None:
        """Count a document before a filter may change or remove it."""
        _count(self.came, self._source(document), document)
        self.lengths_came[_length(document)] += 1

    def keep(self, document: Document) -> None:
        """Count a document that stays."""
        _count(self.left, self._source(document), document)
        _count(self.languages, str(document.metadata.get("language") or UNKNOWN)[:LONGEST], document)
        self.lengths_left[_length(document)] += 1
        for one in document.cuts:
            if isinstance(one, Tagged):
                self.tagged[f"{one.stage}/{one.reason}"] += 1
                continue
            entry = self.cut.setdefault(f"{one.stage}/{one.reason}", [0, 0])
            entry[0] += 1
            entry[1] += int(one.detail.get("characters", one.detail.get("masked", 0)))

    def remove(self, one: Removed) -> None:
        """Count a document that does not stay; a table without the column of the text counts with its rows."""
        self.removed[f"{one.stage}/{one.reason}"] += int(one.detail.get("rows", 1))
        if one.stage == "where":
            source = self._origins[one.id.rpartition("#")[0]]
            self.unmet[f"{source}: `{one.detail['condition']}`, and the field holds {one.detail['field']}"] += 1
        if "cluster_size" in one.detail:
            self.copies[str(one.detail["cluster_size"])] += 1

    def as_json(self) -> dict[str, Any]:
        """All counts, as add() takes them."""
        return {name: dict(sorted(counts.items())) for name, counts in vars(self).items() if name[0] != "_"}

    def _source(self, document: Document) -> str:
        return self._origins[document.id.rpartition("#")[0]]


def add(tallies: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of what as_json() gave for several tasks."""
    total: dict[str, Any] = Tally({}).as_json()
    for tally in tallies:
        for name, counts in total.items():
            for key, value in tally[name].items():
                counts[key] = (
                    [a + b for a, b in zip(counts.get(key, (0, 0)), value, strict=True)]
                    if isinstance(value, list)
                    else (counts.get(key, 0) + value)
                )
    return {name: dict(sorted(counts.items())) for name, counts in total.items()}


def total(sizes: Mapping[str, list[int]]) -> tuple[int, int]:
    """Documents and bytes over all names."""
    return sum(documents for documents, _ in sizes.values()), sum(size for _, size in sizes.values())


def _length(document: Document) -> str:
    return str(len(document.text).bit_length())


def _count(sizes: Sizes, name: str, document: Document) -> None:
    entry = sizes.setdefault(name, [0, 0])
    entry[0] += 1
    text = document.text
    entry[1] += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
