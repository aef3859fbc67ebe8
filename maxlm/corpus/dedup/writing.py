"""Parquet files that are there whole or not at all, and the keep order of documents."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from maxlm.base.atomic import replacing
from maxlm.base.errors import UserError, as_user_error, shorten
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
