"""The stages of a corpus as passes over its documents, each with the search over all of them that it needs first.

A pass takes the documents of a task one by one (`apply`). What it must know of the whole corpus is collected while the pass before it
writes its documents (`collect`, a file for each task), and combined by one process in between (`combine`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow.parquet as pq

from maxlm.config.conditions import Kind
from maxlm.config.errors import UserError
from maxlm.config.paths import read_file
from maxlm.corpus.decontaminate import DecontaminateSettings, Decontaminator, EvalIndex, Frequencies
from maxlm.corpus.dedup.clusters import cluster
from maxlm.corpus.dedup.lines import Unit, find_repeated, split, without, write_occurrences
from maxlm.corpus.dedup.settings import DedupSettings, RepeatSettings, SubstringSettings
from maxlm.corpus.dedup.signatures import write_signatures
from maxlm.corpus.dedup.substrings import cut, find_runs, write_windows
from maxlm.corpus.dedup.writing import Priority
from maxlm.corpus.document import Document, Removed, cut_text
from maxlm.corpus.settings import CorpusSettings
from maxlm.corpus.tasks import Task
from maxlm.documents.columns import joined, kinds_of
from maxlm.telemetry.atomic import write_text

Stream = Iterator[Document | Removed]
KINDS = "kinds.json"  # of the fields of metadata


class Resources(NamedTuple):
    """Resources of a search over the whole corpus. `work`: a folder for temporary files."""

    work: Path
    memory_mb: int
    threads: int


class Stage(Protocol):
    """A pass that needs to know of the whole corpus."""

    name: str

    @property
    def key(self) -> Any:
        """Settings that decide the result, as JSON has them."""
        ...

    def collect(self, documents: Iterable[Document], path: Path) -> None:
        """Write what the search needs of a task's documents to `path`, atomically. Takes all of `documents`."""
        ...

    def combine(self, files: Sequence[Path], folder: Path, tasks: Sequence[Task], resources: Resources) -> None:
        """Search over `files`, one for each task, and write the result to `folder`."""
        ...

    def apply(self, documents: Iterable[Document], folder: Path, task: Task) -> Stream:
        """One result for each document of a task, in order."""
        ...

    def facts(self, folder: Path) -> dict[str, Any]:
        """Facts about the search that the report shows, as JSON has them, by their name there."""
        return {}


class Deduplicate(Stage):
    """Leave one document of each cluster of copies."""

    name = "deduplicate"

    def __init__(self, settings: DedupSettings, priority: Priority) -> None:
        self.settings, self.priority = settings, priority

    @property
    def key(self) -> Any:
        return self.settings.model_dump(mode="json", exclude={"lines", "paragraphs", "substrings"})

    def collect(self, documents: Iterable[Document], path: Path) -> None:
        write_signatures(documents, path, self.settings, self.priority)

    def combine(self, files: Sequence[Path], folder: Path, tasks: Sequence[Task], resources: Resources) -> None:
        del tasks
        cluster(files, folder / "copies.parquet", self.settings, **resources._asdict())

    def apply(self, documents: Iterable[Document], folder: Path, task: Task) -> Stream:
        low, high = min(f"{path}#" for path in task.paths), max(f"{path}$" for path in task.paths)  # "$" follows the "#" of "PATH#NUMBER"
        table = pq.read_table(folder / "copies.parquet", filters=[("id", ">=", low), ("id", "<", high)], use_threads=False)
        copies = {row["id"]: row for row in table.to_pylist()}
        for document in documents:
            row = copies.get(document.id)
            if row is None:
                yield document
            else:
                detail = {"kept": row["kept"], "cluster": row["cluster"], "cluster_size": row["size"]}
                yield Removed(document.id, self.name, f"{row['kind']}_copy", document.text[:300], detail)


class RemoveParts(Stage):
    """Remove parts of documents, `unit`, of which a search over the corpus writes a table for each task."""

    unit: str

    def apply(self, documents: Iterable[Document], folder: Path, task: Task) -> Stream:
        rows = {row["row"]: row for row in pq.read_table(_result(folder, task), use_threads=False).to_pylist()}
        for number, document in enumerate(documents):
            row = rows.get(number)
            if row is None:
                yield document
                continue
            text, gone, count = self.without(document.text, row)
            if text.strip():
                yield cut_text(document, text, self.name, self.unit, gone)
            else:
                yield Removed(document.id, self.name, "nothing_left", document.text[:300], {self.unit: count})

    def without(self, text: str, row: Mapping[str, Any]) -> tuple[str, str, int]:
        """The text that is left by a row of the table, the first part that goes, and the number of parts."""
        raise NotImplementedError


class RemoveRepeated(RemoveParts):
    """Remove lines or paragraphs that many documents share from all but one of them."""

    def __init__(self, settings: RepeatSettings, unit: Unit, priority: Priority) -> None:
        self.name, self.settings, self.parts, self.priority = f"repeated_{unit}", settings, unit, priority
        self.unit = unit

    @property
    def key(self) -> Any:
        return {"unit": self.unit, "prefer": self.priority.prefer, **self.settings.model_dump(mode="json")}

    def collect(self, documents: Iterable[Document], path: Path) -> None:
        write_occurrences(documents, path, self.settings, self.parts, self.priority)

    def combine(self, files: Sequence[Path], folder: Path, tasks: Sequence[Task], resources: Resources) -> None:
        find_repeated(files, [_result(folder, task) for task in tasks], self.settings, **resources._asdict())

    def without(self, text: str, row: Mapping[str, Any]) -> tuple[str, str, int]:
        positions = row["positions"]
        return without(text, positions, self.parts), split(text, self.parts)[positions[0]], len(positions)


class RemoveSubstrings(RemoveParts):
    """Remove runs of words that stand elsewhere in the corpus, too, from all places but the first."""

    name, unit = "repeated_substrings", "runs"

    def __init__(self, settings: SubstringSettings, priority: Priority) -> None:
        self.settings, self.priority = settings, priority

    @property
    def key(self) -> Any:
        return {"prefer": self.priority.prefer, **self.settings.model_dump(mode="json")}

    def collect(self, documents: Iterable[Document], path: Path) -> None:
        write_windows(documents, path, self.settings, self.priority)

    def combine(self, files: Sequence[Path], folder: Path, tasks: Sequence[Task], resources: Resources) -> None:
        find_runs(files, [_result(folder, task) for task in tasks], self.settings, **resources._asdict())

    def without(self, text: str, row: Mapping[str, Any]) -> tuple[str, str, int]:
        return *cut(text, row["firsts"], row["ends"]), len(row["firsts"])


class Decontaminate(Stage):
    """Remove documents that hold items of evaluation sets."""

    name = "decontaminate"

    def __init__(self, settings: DecontaminateSettings) -> None:
        self.settings = settings

    @property
    def key(self) -> Any:
        return [self.settings.model_dump(mode="json"), Frequencies.none(self.settings).items_digest]

    def collect(self, documents: Iterable[Document], path: Path) -> None:
        Frequencies.learn(self.settings, documents).save(path)

    def combine(self, files: Sequence[Path], folder: Path, tasks: Sequence[Task], resources: Resources) -> None:
        del tasks, resources
        index = EvalIndex.build(self.settings, Frequencies.merge(map(Frequencies.load, files)))
        index.save(folder / "index.npz")
        write_text(folder / "sets.json", json.dumps(index.report()))

    def apply(self, documents: Iterable[Document], folder: Path, task: Task) -> Stream:
        del task
        return Decontaminator(EvalIndex.load(folder / "index.npz")).run(documents)

    def facts(self, folder: Path) -> dict[str, Any]:
        path = folder / "sets.json"
        try:
            return {"sets": json.loads(read_file(path))}
        except ValueError:
            raise UserError(f"{path}: damaged; remove the folder {folder} and run again.") from None


class ParquetColumns(Stage):
    """Find the kind of each field of metadata in the whole corpus, so that all files of Parquet have the same columns."""

    name = "parquet"
    key = None

    def collect(self, documents: Iterable[Document], path: Path) -> None:
        kinds: dict[str, Kind] = {}
        for document in documents:
            joined(kinds, kinds_of(document.metadata))
        write_text(path, json.dumps(kinds))

    def combine(self, files: Sequence[Path], folder: Path, tasks: Sequence[Task], resources: Resources) -> None:
        del tasks, resources
        kinds: dict[str, Kind] = {}
        for file in files:
            joined(kinds, json.loads(read_file(file)).items())
        write_text(folder / KINDS, json.dumps(kinds, sort_keys=True))

    def apply(self, documents: Iterable[Document], folder: Path, task: Task) -> Stream:
        del folder, task
        return iter(documents)


def build_stages(settings: CorpusSettings, origins: Mapping[str, str]) -> list[Stage]:
    """Stages after the first pass, which reads and filters: copies go first, so that they do not count as repetition. `origins`: the source
    of each input file.
    """
    stages: list[Stage] = []
    copies = settings.deduplicate
    if copies is not None:
        priority = Priority(copies.prefer, origins)
        if copies.url or copies.exact or copies.minhash is not None:
            stages.append(Deduplicate(copies, priority))
        if copies.paragraphs is not None:
            stages.append(RemoveRepeated(copies.paragraphs, "paragraphs", priority))
        if copies.lines is not None:
            stages.append(RemoveRepeated(copies.lines, "lines", priority))
        if copies.substrings is not None:
            stages.append(RemoveSubstrings(copies.substrings, priority))
    if settings.decontaminate is not None:
        stages.append(Decontaminate(settings.decontaminate))
    if settings.format == "parquet":
        stages.append(ParquetColumns())
    return stages


def _result(folder: Path, task: Task) -> Path:
    """Findings of a search in the documents of a task."""
    return folder / f"{task.name}.parquet"
