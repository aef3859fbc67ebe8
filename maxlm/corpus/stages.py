"""The stages of a corpus as passes over its documents, each with the search over all of them that it needs first.

A pass takes the documents of a task one by one (`apply`). What it must know of the whole corpus is collected while the pass before it
writes its documents (`collect`, a file for each task), and combined by one process in between (`combine`).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from maxlm.base.atomic import write_text
from maxlm.base.errors import UserError
from maxlm.base.paths import read_file
from maxlm.config.conditions import Kind
from maxlm.corpus.decontaminate import DecontaminateSettings, Decontaminator, EvalIndex, Frequencies
from maxlm.corpus.dedup.clusters import cluster
from maxlm.corpus.dedup.lines import Unit, find_repeated, split, without, write_occurrences
from maxlm.corpus.dedup.settings import DedupSettings
from maxlm.corpus.dedup.signatures import write_signatures
from maxlm.corpus.dedup.substrings import cut, find_runs, write_windows
from maxlm.corpus.dedup.tables import Priority
from maxlm.corpus.document import Document, Removed, cut_text
from maxlm.corpus.settings import CorpusSettings
from maxlm.corpus.tasks import Task
from maxlm.documents.columns import joined, kinds_of

Stream = Iterator[Document | Removed]
PARQUET = "parquet"  # the stage that removes nothing
KINDS = "kinds.json"  # of the fields of metadata


class Resources(NamedTuple):
    """Resources of a search over the whole corpus. `work`: a folder for temporary files."""

    work: Path
    memory_mb: int
    threads: int


@dataclass(frozen=True)
class Stage:
    """A pass that needs to know of the whole corpus.

    `key`: settings that decide the result, as JSON has them. `collect`: writes what the search needs of a task's documents to a file,
    atomically, and takes all of them. `combine`: searches over these files, one for each task, and writes the result to a folder. `apply`:
    one result for each document of a task, in order, by the folder. `facts`: about the search, for the report, as JSON has them.
    """

    name: str
    key: Callable[[], Any]
    collect: Callable[[Iterable[Document], Path], None]
    combine: Callable[[Sequence[Path], Path, Sequence[Task], Resources], None]
    apply: Callable[[Iterable[Document], Path, Task], Stream]
    facts: Callable[[Path], dict[str, Any]] = lambda folder: {}


def deduplicate(settings: DedupSettings, priority: Priority) -> Stage:
    """Leave one document of each cluster of copies."""
    name = "deduplicate"

    def combine(files: Sequence[Path], folder: Path, tasks: Sequence[Task], resources: Resources) -> None:
        cluster(files, folder / "copies.parquet", settings, **resources._asdict())

    def apply(documents: Iterable[Document], folder: Path, task: Task) -> Stream:
        low, high = min(f"{path}#" for path in task.paths), max(f"{path}$" for path in task.paths)  # "$" follows the "#" of "PATH#NUMBER"
        table = pq.read_table(folder / "copies.parquet", filters=[("id", ">=", low), ("id", "<", high)], use_threads=False)
        copies = {row["id"]: row for row in table.to_pylist()}
        for document in documents:
            row = copies.get(document.id)
            if row is None:
                yield document
            else:
                detail = {"kept": row["kept"], "cluster": row["cluster"], "cluster_size": row["size"]}
                yield Removed(document.id, name, f"{row['kind']}_copy", document.text[:300], detail)

    key = settings.model_dump(mode="json", exclude={"lines", "paragraphs", "substrings"})
    return Stage(name, lambda: key, partial(write_signatures, settings=settings, priority=priority), combine, apply)


def remove_parts(
    name: str,
    unit: str,
    key: Any,
    collect: Callable[[Iterable[Document], Path], None],
    find: Callable[..., None],
    remaining: Callable[[str, Mapping[str, Any]], tuple[str, str, int]],
) -> Stage:
    """Remove parts of documents, `unit`, of which `find` writes a table for each task. `remaining`: by a text and its row of the table, the
    text that is left, the first part that goes, and the number of parts.
    """

    def combine(files: Sequence[Path], folder: Path, tasks: Sequence[Task], resources: Resources) -> None:
        find(files, [folder / f"{task.name}.parquet" for task in tasks], **resources._asdict())

    def apply(documents: Iterable[Document], folder: Path, task: Task) -> Stream:
        rows = {row["row"]: row for row in pq.read_table(folder / f"{task.name}.parquet", use_threads=False).to_pylist()}
        for number, document in enumerate(documents):
            row = rows.get(number)
            if row is None:
                yield document
                continue
            text, gone, count = remaining(document.text, row)
            if text.strip():
                yield cut_text(document, text, name, unit, gone)
            else:
                yield Removed(document.id, name, "nothing_left", document.text[:300], {unit: count})

    return Stage(name, lambda: key, collect, combine, apply)


def decontaminate(settings: DecontaminateSettings) -> Stage:
    """Remove documents that hold items of evaluation sets."""

    def combine(files: Sequence[Path], folder: Path, tasks: Sequence[Task], resources: Resources) -> None:
        index = EvalIndex.build(settings, Frequencies.merge(map(Frequencies.load, files)))
        index.save(folder / "index.npz")
        write_text(folder / "sets.json", json.dumps(index.report()))

    def facts(folder: Path) -> dict[str, Any]:
        path = folder / "sets.json"
        try:
            return {"sets": json.loads(read_file(path))}
        except ValueError:
            raise UserError(f"{path}: damaged; remove the folder {folder} and run again.") from None

    return Stage(
        "decontaminate",
        lambda: [settings.model_dump(mode="json"), Frequencies.none(settings).items_digest],
        lambda documents, path: Frequencies.learn(settings, documents).save(path),
        combine,
        lambda documents, folder, task: Decontaminator(EvalIndex.load(folder / "index.npz")).run(documents),
        facts,
    )


def find_kinds() -> Stage:
    """Find the kind of each field of metadata in the whole corpus, so that all files of Parquet have the same columns."""

    def collect(documents: Iterable[Document], path: Path) -> None:
        kinds: dict[str, Kind] = {}
        for document in documents:
            joined(kinds, kinds_of(document.metadata))
        write_text(path, json.dumps(kinds))

    def combine(files: Sequence[Path], folder: Path, tasks: Sequence[Task], resources: Resources) -> None:
        kinds: dict[str, Kind] = {}
        for file in files:
            joined(kinds, json.loads(read_file(file)).items())
        write_text(folder / KINDS, json.dumps(kinds, sort_keys=True))

    return Stage(PARQUET, lambda: None, collect, combine, lambda documents, folder, task: iter(documents))


def build_stages(settings: CorpusSettings, origins: Mapping[str, str]) -> list[Stage]:
    """Stages after the first pass, which reads and filters: copies go first, so that they do not count as repetition. `origins`: the source
    of each input file.
    """
    stages: list[Stage] = []
    copies = settings.deduplicate
    if copies is not None:
        priority = Priority(copies.prefer, origins)
        if copies.url or copies.exact or copies.minhash is not None:
            stages.append(deduplicate(copies, priority))
        units: tuple[Unit, ...] = ("paragraphs", "lines")
        for unit in units:
            if (repeated := getattr(copies, unit)) is not None:
                key = {"unit": unit, "prefer": copies.prefer, **repeated.model_dump(mode="json")}
                collect = partial(write_occurrences, settings=repeated, unit=unit, priority=priority)
                find = partial(find_repeated, settings=repeated)
                stages.append(remove_parts(f"repeated_{unit}", unit, key, collect, find, partial(_remaining, unit)))
        if (runs := copies.substrings) is not None:
            key = {"prefer": copies.prefer, **runs.model_dump(mode="json")}
            collect = partial(write_windows, settings=runs, priority=priority)
            stages.append(
                remove_parts(
                    "repeated_substrings",
                    "runs",
                    key,
                    collect,
                    partial(find_runs, settings=runs),
                    lambda text, row: (*cut(text, row["firsts"], row["ends"]), len(row["firsts"])),
                )
            )
    if settings.decontaminate is not None:
        stages.append(decontaminate(settings.decontaminate))
    return [*stages, find_kinds()] if settings.format == "parquet" else stages


def _remaining(unit: Unit, text: str, row: Mapping[str, Any]) -> tuple[str, str, int]:
    positions = row["positions"]
    return without(text, positions, unit), split(text, unit)[positions[0]], len(positions)
