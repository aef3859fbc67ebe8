"""Runs of words that stand in the corpus more than once: found on disk, and removed wherever they are not the first.

A suffix array finds what two places have in common from its first to its last word (Lee et al. 2022, arXiv 2107.06499), in memory of
several times the corpus. The runs of at least `min_words` words that it finds consist of equal windows of `min_words` words, so
the hashes of all windows, sorted on disk, find them in bounded memory. The first place of a window is that in the first document in keep
order (`DedupSettings`), and there the first. Of all other places every word goes, but for those that a place shares
with the first one, which it overlaps where text repeats itself. So of each window one place stays whole at most, and every word that goes
stands at an earlier place with the same words around it.

Hashes have 64 bits: among 10 billion windows (60 GB of English), two or three differ and are taken for the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from maxlm.corpus.dedup.settings import SubstringSettings
from maxlm.corpus.dedup.signatures import ngram_hashes
from maxlm.corpus.dedup.tables import BY_LENGTH, HASHES, Database, Priority, lists, open_database, parquet, row_groups
from maxlm.corpus.dedup.words import locate_by_pieces, locate_words
from maxlm.corpus.document import Document

AT_ONCE = 1 << 20  # windows that are written and read together
ROW = 16  # windows that a row counts for besides
SHIFT = np.uint64(32)  # a place is a node, a document's number in keep order, and below it the number of a word
WORD = np.uint64((1 << 32) - 1)

WINDOWS = pa.schema(
    [
        ("row", pa.int64()),  # number of the document in its shard
        ("id", pa.string()),
        ("priority", pa.int64()),  # of the document in keep order
        ("first", pa.int64()),  # word that the first of `windows` begins with: a document of more than AT_ONCE windows has several rows
        ("windows", pa.list_(pa.uint64())),  # hashes, by the first word of each
    ]
)
REMOVED_RUNS = pa.schema([("row", pa.int64()), ("id", pa.string()), ("firsts", pa.list_(pa.int64())), ("ends", pa.list_(pa.int64()))])


def write_windows(documents: Iterable[Document], path: Path, settings: SubstringSettings, priority: Priority = BY_LENGTH) -> None:
    """Write the hashes of a shard's windows to `path`, atomically. Raises UserError."""
    with parquet(path, WINDOWS, **HASHES) as writer:
        rows: list[dict[str, Any]] = []
        size = 0
        for number, document in enumerate(documents):
            hashes = window_hashes(document.text, settings.min_words)
            for first in range(0, max(len(hashes), 1), AT_ONCE):
                some = hashes[first : first + AT_ONCE]
                rows.append({"row": number, "id": document.id, "priority": priority(document), "first": first, "windows": some})
                size += len(some) + ROW
                if size > AT_ONCE:
                    writer.write_table(_table(rows))
                    rows, size = [], 0
        if rows:
            writer.write_table(_table(rows))


def find_runs(
    files: Sequence[Path], outputs: Sequence[Path], settings: SubstringSettings, *, work: Path, memory_mb: int = 512, threads: int = 2
) -> None:
    """Write for each shard of `files` which words to remove, atomically: Parquet with REMOVED_RUNS, one row for each document that loses
    some, in the order of the shard; runs from a word to before another, ascending and apart. `work`: a folder
    for temporary files, several times as large as the files of windows. Raises UserError.
    """
    with open_database(work, memory_mb, threads) as database:
        database.run("CREATE TABLE documents (shard BIGINT, row BIGINT, id VARCHAR, priority BIGINT)")
        for shard, path in enumerate(files):
            for table in row_groups(path, ["row", "id", "priority", "first"]):
                begins = table.filter(pc.equal(table["first"], 0)).drop_columns(["first"])
                database.insert("documents", begins.add_column(0, "shard", pa.array(np.full(len(begins), shard))))
        ordered = "SELECT shard, row, id FROM documents ORDER BY priority DESC, id"  # keep order
        database.run(f"CREATE TABLE ranked AS SELECT row_number() OVER () - 1 AS node, shard, row, id FROM ({ordered})")  # noqa: S608
        database.run("CREATE TABLE windows (hash UBIGINT, place UBIGINT)")
        for hashes, places in _places(database, files):
            database.insert("windows", {"hash": hashes, "place": places})
        size = settings.min_words
        database.run(  # words of repeated windows; words that overlap the first window of the same hash stay
            f"CREATE TABLE later AS SELECT greatest(place, head + {size}) AS first, place + {size} AS last FROM windows "  # noqa: S608
            "JOIN (SELECT hash, min(place) AS head FROM windows GROUP BY hash HAVING count(*) > 1) USING (hash) WHERE place <> head"
        )
        database.run("DROP TABLE windows")
        database.run("CREATE TABLE runs (node BIGINT, first BIGINT, last BIGINT)")
        for firsts, ends in _joined(database):
            nodes = (firsts >> SHIFT).astype(np.int64)
            database.insert("runs", {"node": nodes, "first": (firsts & WORD).astype(np.int64), "last": (ends & WORD).astype(np.int64)})
        for shard, path in enumerate(outputs):
            query = (
                "SELECT row, any_value(id), list(first ORDER BY first), list(last ORDER BY first) FROM runs "  # noqa: S608
                f"JOIN ranked USING (node) WHERE shard = {shard} GROUP BY row ORDER BY row"
            )
            database.write(query, REMOVED_RUNS, path)


def cut(text: str, firsts: Sequence[int], ends: Sequence[int]) -> tuple[str, str]:
    """The text without runs of its words, each with what stands between it and the next word; and the first run."""
    _, starts = locate_words(text)
    bounds = np.append(starts, len(text))
    pieces, done = [], 0
    for first, end in zip(firsts, ends, strict=True):
        pieces.append(text[done : bounds[first]])
        done = int(bounds[end])
    return "".join([*pieces, text[done:]]), text[bounds[firsts[0]] : bounds[ends[0]]]


def window_hashes(text: str, size: int) -> np.ndarray:
    """Hashes of all runs of `size` words."""
    found, words = [np.zeros(0, np.uint64)], np.zeros(0, np.uint64)
    for hashes, _ in locate_by_pieces(text):
        words = np.concatenate((words[max(0, len(words) - size + 1) :], hashes))
        found.append(ngram_hashes(words, np.array([0, len(words)]), size)[0])
    return np.concatenate(found)


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    columns = [pa.array([row[name] for row in rows], WINDOWS.field(name).type) for name in ("row", "id", "priority", "first")]
    return pa.Table.from_arrays([*columns, lists([row["windows"] for row in rows], np.uint64)], schema=WINDOWS)


def _places(database: Database, files: Sequence[Path]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Hash and place of each window."""
    nodes = (array.astype(np.uint64) for (array,) in database.arrays("SELECT node FROM ranked ORDER BY shard, row"))
    held = np.zeros(0, np.uint64)  # nodes that were read, from row `at` of the file on
    for path in files:
        at, has_rows = 0, False
        for table in row_groups(path, ["row", "first", "windows"]):
            rows, first, lists = table["row"].to_numpy(), table["first"].to_numpy(), table["windows"].combine_chunks()
            while at + len(held) <= rows[-1]:
                held = np.concatenate((held, next(nodes)))
            counts = np.diff(lists.offsets.to_numpy())
            words = np.arange(len(lists.values)) + np.repeat(first - lists.offsets.to_numpy()[:-1], counts)
            yield lists.values.to_numpy(), (np.repeat(held[rows - at], counts) << SHIFT) | words.astype(np.uint64)
            held, at, has_rows = held[rows[-1] - at :], int(rows[-1]), True
        held = held[1:] if has_rows else held


def _joined(database: Database) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The runs that `later` adds up to, apart from each other and in order."""
    begin, reach = None, np.uint64(0)
    for firsts, ends in database.arrays("SELECT first, last FROM later ORDER BY first, last"):
        reached = np.maximum.accumulate(np.maximum(ends, reach))  # one document's words lie below the next one's
        new = firsts > np.append(reach, reached[:-1])
        if begin is None:
            begin, new[0] = firsts[0], False
        starts = np.append(begin, firsts[new])
        yield starts[:-1], np.append(reach, reached[:-1])[new]
        begin, reach = starts[-1], reached[-1]
    if begin is not None:
        yield np.array([begin]), np.array([reach])
