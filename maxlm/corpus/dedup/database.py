"""DuckDB as a sorter and joiner in bounded memory: tables on disk, results as NumPy arrays."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from maxlm.base.errors import UnavailableError, UserError, system_errors
from maxlm.corpus.dedup.writing import parquet

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
