"""Parquet files that are there whole or not at all and say what they were made with, and groups of documents to fill them with."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from maxlm.config.errors import UserError, as_user_error, shorten
from maxlm.corpus.document import Document
from maxlm.telemetry.atomic import replacing


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


@contextlib.contextmanager
def parquet(path: Path, schema: pa.Schema, **options: Any) -> Iterator[pq.ParquetWriter]:
    """A writer whose file replaces `path` when the block ends without an error. `options`: of ParquetWriter.

    Raises UserError: the file cannot be written, or a document's id is not valid Unicode.
    """
    try:
        with replacing(path) as file, pq.ParquetWriter(file, schema, **options) as writer:
            yield writer
    except UnicodeEncodeError as error:
        raise UserError(f"{shorten(str(path))}: a document's id is not valid Unicode: {ascii(error.object)[:80]}.") from None
    except OSError as error:
        raise as_user_error(error) from error


def row_groups(path: Path, name: bytes, made_with: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Tables of a file whose schema says `made_with` under `name`. Raises UserError: it says otherwise, or is damaged."""
    try:
        with pq.ParquetFile(path) as file:
            stored = (file.schema_arrow.metadata or {}).get(name, b"").decode(errors="replace")
            if stored != made_with:
                raise UserError(
                    f"{shorten(str(path))}: made with {stored or 'another program'}, and the settings are {made_with}: "
                    "use the same settings, or make the file again."
                )
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, columns=columns, use_threads=False)
    except OSError as error:
        raise as_user_error(error) from error
    except pa.ArrowException as error:
        raise UserError(f"{shorten(str(path))}: not a whole Parquet file ({error}); make it again.") from None


def groups(documents: Iterable[Document], characters: int, each: int = 0, rows: int | None = None) -> Iterator[list[Document]]:
    """Documents in lists that end where they hold more than `characters`, or `rows` documents. `each`: characters added for a document."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text) + each
        if len(group) == rows or size > characters:
            yield group
            group, size = [], 0
    if group:
        yield group
