"""Lines or paragraphs that many documents share: counted on disk, and removed from all documents but one.

A line ends at a line feed; a paragraph ends at one or more blank lines. Two are the same if their normalised texts are (module `words`).
One that occurs in more than `max_documents` documents stays in the first of them in keep order (`DedupSettings`),
where it first occurs.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from maxlm.corpus.dedup.settings import RepeatSettings
from maxlm.corpus.dedup.tables import BY_LENGTH, Priority, lists, open_database, parquet, row_groups
from maxlm.corpus.dedup.words import hash_words
from maxlm.corpus.document import Document, groups

Unit = Literal["lines", "paragraphs"]

GROUP_CHARS = 1 << 22
_BREAK = re.compile(r"(\n(?:[^\S\n]*\n)+)")

OCCURRENCES = pa.schema(
    [
        ("row", pa.int64()),  # number of the document in its shard
        ("id", pa.string()),
        ("priority", pa.int64()),  # of the document in keep order
        ("positions", pa.list_(pa.int32())),  # numbers of its lines that are long enough
        ("lo", pa.list_(pa.uint64())),
        ("hi", pa.list_(pa.uint64())),
    ]
)
REMOVED_LINES = pa.schema([("row", pa.int64()), ("id", pa.string()), ("positions", pa.list_(pa.int32()))])


def split(text: str, unit: Unit) -> list[str]:
    """Lines or paragraphs, each with the line feeds (and blank lines) that end it: joined they are the text."""
    if unit == "lines":
        return [line + "\n" for line in text.split("\n")[:-1]] + text.split("\n")[-1:]
    parts = [*_BREAK.split(text), ""]
    return [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]


def without(text: str, positions: Collection[int], unit: Unit) -> str:
    """The text without the lines or paragraphs at `positions`."""
    gone = set(positions)
    return "".join(part for position, part in enumerate(split(text, unit)) if position not in gone)


def write_occurrences(
    documents: Iterable[Document], path: Path, settings: RepeatSettings, unit: Unit, priority: Priority = BY_LENGTH
) -> None:
    """Write the hashes of a shard's lines to `path`, atomically. Raises UserError."""
    count = 0
    with parquet(path, OCCURRENCES, compression={"id": "zstd"}, use_dictionary=False) as writer:
        for group in groups(documents, GROUP_CHARS, each=64):
            texts: list[str] = []
            positions: list[list[int]] = []
            for document in group:
                parts = [part.strip() for part in split(document.text, unit)]
                positions.append([number for number, part in enumerate(parts) if len(part) >= settings.min_length])
                texts += [parts[number] for number in positions[-1]]
            hashes = np.zeros((len(texts), 2), np.uint64)
            for places, words in hash_words(texts):
                hashes[places] = words.exact
            found = lists([np.array(numbers, np.int32) for numbers in positions], np.int32)
            columns = {
                "row": np.arange(count, count + len(group)),
                "id": pa.array([document.id for document in group], pa.string()),
                "priority": np.array([priority(document) for document in group], np.int64),
                "positions": found,
                "lo": pa.ListArray.from_arrays(found.offsets, pa.array(hashes[:, 0])),
                "hi": pa.ListArray.from_arrays(found.offsets, pa.array(hashes[:, 1])),
            }
            writer.write_table(pa.table(columns).cast(OCCURRENCES))
            count += len(group)


def find_repeated(
    files: Sequence[Path], outputs: Sequence[Path], settings: RepeatSettings, *, work: Path, memory_mb: int = 512, threads: int = 2
) -> None:
    """Write for each shard of `files` which lines to remove, atomically: Parquet with REMOVED_LINES, one row for each document that loses
    some, in the order of the shard. `work`: a folder for temporary files. Raises UserError.
    """
    with open_database(work, memory_mb, threads) as database:
        database.run("CREATE TABLE documents (shard INTEGER, row BIGINT, id VARCHAR, priority BIGINT)")
        database.run("CREATE TABLE lines (shard INTEGER, row BIGINT, position INTEGER, lo UBIGINT, hi UBIGINT)")
        for shard, path in enumerate(files):
            for table in row_groups(path):
                rows = table["row"].to_numpy()
                shards = np.full(len(rows), shard, np.int32)
                database.insert("documents", table.select(["row", "id", "priority"]).add_column(0, "shard", pa.array(shards)))
                columns = {name: table[name].combine_chunks() for name in ("positions", "lo", "hi")}
                counts = np.diff(columns["lo"].offsets.to_numpy())
                flat = {name: column.flatten().to_numpy() for name, column in columns.items()}
                database.insert("lines", {"shard": np.repeat(shards, counts), "row": np.repeat(rows, counts), **flat})
        database.run(
            "CREATE TABLE repeated AS SELECT lo, hi FROM (SELECT DISTINCT lo, hi, shard, row FROM lines) GROUP BY lo, hi "  # noqa: S608
            f"HAVING count(*) > {settings.max_documents}"
        )
        database.run(
            "CREATE TABLE occurrences AS SELECT lo, hi, shard, row, position, ROW(-priority, id, shard, row, position) AS place FROM lines "
            "JOIN repeated USING (lo, hi) JOIN documents USING (shard, row)"
        )
        database.run(
            "CREATE TABLE removed AS SELECT shard, row, position FROM occurrences "
            "JOIN (SELECT lo, hi, min(place) AS first FROM occurrences GROUP BY lo, hi) USING (lo, hi) WHERE place <> first"
        )
        for shard, path in enumerate(outputs):
            query = (
                f"SELECT removed.row, any_value(id), list(position ORDER BY position) FROM removed "  # noqa: S608
                f"JOIN documents USING (shard, row) WHERE shard = {shard} GROUP BY removed.row ORDER BY removed.row"
            )
            database.write(query, REMOVED_LINES, path)
