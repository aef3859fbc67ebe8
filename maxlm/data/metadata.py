"""Metadata of the documents of a token store: source, licence, URL, date, language, scores, as far as their files state them.

STORE/metadata.json                    kinds of all fields, and digests of the files below
STORE/<split>/metadata/<number>.parquet  `id` and fields of ROWS documents, in the order of the split

A training run reads none of it unless `data.mixture` selects by it or splits by it.
"""

import hashlib
import io
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from pyarrow import parquet

from maxlm.base.errors import UserError
from maxlm.config.conditions import Kind
from maxlm.data import storage
from maxlm.data.manifest import METADATA
from maxlm.documents.columns import KINDS, Value, column, encodable, join, joined, kinds_of, scalars

Name = TypeVar("Name", bound=str)
ROWS = 2**16  # documents a file
ID, TOKENS = "id", "tokens"  # fields of every document: its name, and its length, which the store knows itself
MOST_FIELDS = 1000


class About(NamedTuple):
    """Name of a document, FILE#NUMBER unless it has an `id` of its own, and its metadata."""

    id: str
    fields: Mapping[str, Value]


def about(id: str, fields: Mapping[str, Any], content: frozenset[str]) -> About:
    """Metadata of a record. `id`: its name if it has none of its own; `content`: fields that are not metadata."""
    found = scalars(fields, content, encodable)
    own = found.pop(ID, None)
    found.pop(TOKENS, None)
    return About(id if own is None or own == "" else str(own), found)


class MetadataWriter:
    """Append the metadata of one split's documents: whole files are written at once, the rest is buffered in memory."""

    def __init__(self, store: str, split: str, resume: Mapping[str, Any] | None = None) -> None:
        """`resume`: continue from there, from `state`."""
        self._folder, state = f"{store}/{split}/metadata", resume or {}
        self.digests: list[str] = list(state.get("digests", []))  # of the files written
        self.kinds: dict[str, Kind] = dict(state.get("kinds", {}))
        self._rows = [About(*row) for row in state.get("rows", [])]
        if not resume:
            storage.delete_folder(self._folder)

    @property
    def state(self) -> dict[str, Any]:
        """JSON value from which another writer continues."""
        return {"digests": self.digests, "kinds": self.kinds, "rows": self._rows}

    def add(self, document: About) -> None:
        """Append one document. Raises UserError: there are more than MOST_FIELDS fields."""
        joined(self.kinds, kinds_of(document.fields))
        if len(self.kinds) > MOST_FIELDS:
            rule = f"has metadata of more than {MOST_FIELDS:,} names, with those before it"
            raise UserError(f"{document.id} {rule}: metadata are fields that many documents share; keep the others out of `metadata`.")
        self._rows.append(document)
        if len(self._rows) == ROWS:
            self.finish()

    def finish(self) -> None:
        """Write what is buffered."""
        if self._rows:
            columns: dict[str, pa.Array] = {ID: pa.array([row.id for row in self._rows], pa.string())}
            for name in sorted({name for row in self._rows for name in row.fields}):
                values = [row.fields.get(name) for row in self._rows]
                columns[f"f:{name}"] = column(values, join(*{KINDS[type(value)] for value in values if value is not None}))
            stream = io.BytesIO()
            parquet.write_table(pa.table(columns), stream, compression="zstd", store_schema=False, write_statistics=False)
            content = stream.getvalue()
            storage.write_bytes(self._folder, f"{len(self.digests)}.parquet", content)
            self.digests.append(hashlib.sha256(content).hexdigest())
            self._rows = []


def write_index(store: str, writers: Mapping[Name, MetadataWriter]) -> None:
    """Write metadata.json, after everything was added; nothing if there are no metadata."""
    kinds: dict[str, Kind] = {}
    for writer in writers.values():
        writer.finish()
        joined(kinds, writer.kinds.items())
    if any(writer.digests for writer in writers.values()):
        index = {"rows": ROWS, "kinds": kinds, "files": {split: writer.digests for split, writer in writers.items()}}
        storage.write_bytes(store, METADATA, json.dumps(index, indent=1, sort_keys=True).encode())
