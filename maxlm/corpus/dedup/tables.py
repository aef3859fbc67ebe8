"""Tables on disk: Parquet files that are there whole or not at all, the keep order of documents, and DuckDB as a sorter and joiner.

DuckDB works in bounded memory; its results are NumPy arrays.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from maxlm.base.atomic import replacing
from maxlm.base.errors import UnavailableError, UserError, as_user_error, shorten, system_errors
from maxlm.corpus.document import Document


@dataclass(frozen=True)
class Priority:
    """Place of documents in keep order: larger first, then the smaller id. `origins`: the source of each input file."""

    prefer: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, document: Document) -> int:
        """Number of characters, plus a multiple of 2^40 for each place in `prefer`."""
        name = self.origins.get(document.id.rpartition("#")[0]) if self.prefer else None
        rank = len(self.prefer) - self.prefer.index(name) if name in self.prefer else 0
        return len(document.text) + (rank << 40)


BY_LENGTH = Priority()
HASHES: dict[str, Any] = {"compression": {"id": "zstd"}, "use_dictionary": False, "write_statistics": False}  # hashes do not compress


def lists(rows: Sequence[np.ndarray], dtype: type) -> pa.ListArray:
    """Arrays as a column of lists."""
    offsets = np.append(0, np.cumsum([len(row) for row in rows])).astype(np.int32)
    values = np.concatenate(rows) if rows else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(dtype, copy=False)))


@contextlib.contextmanager
def parquet(path: Path, schema: pa.Schema, **options: Any) -> Iterator[pq.ParquetWriter]:
    """Write a Parquet file that replaces `path` when the block ends without an error. `options`: of ParquetWriter.

    Raises UserError: the file cannot be written, or a document's id is not valid Unicode.
    """
    try:
        with replacing(path) as file, pq.ParquetWriter(file, schema, **options) as writer:
            yield writer
    except UnicodeEncodeError as error:
        raise UserError(f"{shorten(str(path))}: a document's id is not valid Unicode: {ascii(error.object)[:80]}.") from None
    except OSError as error:
        raise as_user_error(error) from error


def row_groups(path: Path, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Row groups of a file that `parquet` wrote. Raises UserError: it is missing or damaged."""
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, columns=columns, use_threads=False)
    except OSError as error:
        raise as_user_error(error) from error
    except pa.ArrowException as error:
        raise UserError(f"{shorten(str(path))}: not a whole Parquet file ({error}); make it again.") from None


BATCH_ROWS = 1 << 17


@contextlib.contextmanager
def open_database(folder: Path, memory_mb: int, threads: int) -> Iterator["Database"]:
    """A temporary DuckDB database in a folder of its own under `folder`, removed at the end. Raises UserError.

    `memory_mb`: megabytes that DuckDB may hold before it goes to disk. Text compares by bytes.
    """
    with contextlib.ExitStack() as stack:
        with system_errors():
            folder.mkdir(parents=True, exist_ok=True)
            own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dedup-", dir=folder)))
        config: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": f"{memory_mb}MB",
            "threads": threads,
            "temp_directory": str(own / "spill"),
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        with _one_line():
            connection = duckdb.connect(str(own / "tables.duckdb"), config=config)
        stack.callback(connection.close)
        yield Database(connection, own)


class Database:
    """Tables of an open database, and statements on them. `folder`: for other temporary files."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, folder: Path) -> None:
        self._connection, self.folder = connection, folder

    def run(self, sql: str) -> None:
        """Execute a statement."""
        with _one_line():
            self._connection.execute(sql)

    def number(self, sql: str) -> int:
        """Return the one number that a query gives."""
        with _one_line():
            row = self._connection.execute(sql).fetchone()
        assert row is not None
        return int(row[0])

    def insert(self, table: str, rows: pa.Table | dict[str, np.ndarray]) -> None:
        """Append rows, by the order of their columns."""
        batch = rows if isinstance(rows, pa.Table) else pa.table(rows)
        with _one_line():
            self._connection.register("incoming", batch)
            self._connection.execute(f"INSERT INTO {table} SELECT * FROM incoming")  # noqa: S608
            self._connection.unregister("incoming")

    def tables(self, sql: str) -> Iterator[pa.Table]:
        """Rows of a query, BATCH_ROWS at most at a time, while other statements run."""
        cursor = self._connection.cursor()
        try:
            with _one_line():
                reader: pa.RecordBatchReader = cursor.sql(sql).to_arrow_reader(BATCH_ROWS)
            while True:
                with _one_line():
                    batch: pa.RecordBatch | None = next(iter(reader), None)
                if batch is None:
                    return
                yield pa.Table.from_batches([batch])
        finally:
            cursor.close()

    def write(self, sql: str, schema: pa.Schema, path: Path) -> None:
        """Write the rows of a query to a Parquet file with `schema`, atomically."""
        with parquet(path, schema) as writer:
            for table in self.tables(sql):
                writer.write_table(table.rename_columns(schema.names).cast(schema))

    def arrays(self, sql: str) -> Iterator[list[np.ndarray]]:
        """Rows of a query of numbers: one array for each column."""
        for table in self.tables(sql):
            yield [column.to_numpy() for column in table.columns]


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except (duckdb.IOException, duckdb.OutOfMemoryException, OSError) as error:
        raise UnavailableError(f"deduplication: {error}; give it more memory, or a work folder with more space.") from error
    except duckdb.ConversionException as error:
        raise UserError(f"deduplication: {error}") from error
