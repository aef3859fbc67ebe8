"""Documents of a token store by their metadata: those that meet conditions, and groups of one value each."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from maxlm.base.errors import ConfigError, UserError, show
from maxlm.config import conditions
from maxlm.config.conditions import Condition, Kind
from maxlm.data import manifest, storage
from maxlm.data.metadata import ID, TOKENS
from maxlm.data.storage import DamagedStoreError
from maxlm.data.token_store import TokenStore
from maxlm.documents.columns import TYPES

THREADS = 4  # that read files
MOST_GROUPS = 1000
SHOWN = 8  # values of a field
COMPARE = {"==": pc.equal, "!=": pc.not_equal, ">=": pc.greater_equal, "<=": pc.less_equal, ">": pc.greater, "<": pc.less}


def has_metadata(store: TokenStore) -> bool:
    """False for a store that was prepared before maxlm kept metadata."""
    return manifest.METADATA in store.info.files


class Metadata:
    """Metadata of one split. Every file is compared with its checksum when it is read."""

    def __init__(self, store: TokenStore) -> None:
        """Raises UserError: the store has none, or they are damaged."""
        self._store = store
        if not has_metadata(store):
            rule = "has no metadata: it was prepared before maxlm kept them"
            raise UserError(f"{store.path} {rule}; prepare it again, in another folder.")
        manifest.check_files(store.path, store.info, [manifest.METADATA])
        index = json.loads(storage.read_bytes(store.path, manifest.METADATA) or b"{}")
        self._rows, self._digests = int(index["rows"]), list(index["files"][store.split])
        self.kinds: dict[str, Kind] = {ID: "text", TOKENS: "int", **index["kinds"]}

    def check_field(self, field: str, setting: str, value: Any) -> Kind:
        """Kind of a field that `setting`, of this value, names. Raises ConfigError if there is no such field."""
        if field not in self.kinds:
            near = get_close_matches(field, self.kinds, n=1)
            fix = f"the nearest is {near[0]}" if near else f"they have {', '.join(sorted(self.kinds)[:20])}"
            raise ConfigError(setting, value, f"documents of {self._store.path} have no field {show(field)}", fix)
        return self.kinds[field]

    def chosen(self, where: Sequence[str], setting: str) -> np.ndarray:
        """True for documents that meet all conditions, [N] bool. Raises ConfigError for an unknown field or a value of another kind."""
        parsed = [conditions.parse(text) for text in where]
        for text, condition in zip(where, parsed, strict=True):
            kind = self.check_field(condition.field, setting, list(where))
            try:
                condition.typed(kind)
            except ValueError as error:
                raise ConfigError(setting, list(where), f"{error} in {self._store.path}, and `{text}` is not so", "change it") from None
        parts = [
            reduce(np.logical_and, (self._meets(columns, one) for one in parsed)) for columns in self.columns({c.field for c in parsed})
        ]
        return np.concatenate([np.zeros(0, np.bool_), *parts])

    def unmet(self, where: Sequence[str]) -> str:
        """The first of `where` that no document meets, and the values that they have instead; or that no document meets all of them."""
        store, documents = self._store.path, self._store.size.documents
        for text in where:
            if not self.chosen([text], "where").any():
                field = conditions.parse(text).field
                fields = self.summary(documents)
                return f"no document of {store} meets `{text}`" + (f"; {field} is {values_line(fields[field])}" if field in fields else "")
        return f"no document of {store} meets all of these"

    def groups(self, field: str, setting: str) -> tuple[np.ndarray, list[str]]:
        """Group of every document by its value of `field`, [N] int32, and the value of each group in order; "" for those without one.

        Raises ConfigError: there is no such field, or it has more than MOST_GROUPS values.
        """
        self.check_field(field, setting, field)
        parts, names = [np.zeros(0, np.int32)], dict[str, int]()
        for columns in self.columns({field}):
            encoded = columns[field].cast(pa.string()).fill_null("").dictionary_encode()
            own = [names.setdefault(value, len(names)) for value in encoded.dictionary.to_pylist()]
            if len(names) > MOST_GROUPS:
                rule = f"has more than {MOST_GROUPS:,} values in {self._store.path}, and each would be a source"
                raise ConfigError(setting, field, rule, "name a field of fewer values")
            parts.append(np.array(own, np.int32)[encoded.indices.to_numpy()])
        order = sorted(names)
        place = np.zeros(len(names), np.int32)
        place[[names[name] for name in order]] = np.arange(len(names))
        return place[np.concatenate(parts)], order

    def summary(self, documents: int) -> dict[str, Any]:
        """Summary of each field in about the first `documents`: its kind, how many have it, and its values: the smallest, the median and
        the largest of numbers; the most frequent of others, unless nearly each document has its own.
        """
        fields = sorted(set(self.kinds) - {ID, TOKENS})
        columns: dict[str, list[pa.Array]] = {name: [] for name in fields}
        for one in self.columns(set(fields), -(-documents // self._rows)):
            for name in fields:
                columns[name].append(one[name])
        return {name: _summary(pa.chunked_array(parts, TYPES[self.kinds[name]]), self.kinds[name]) for name, parts in columns.items()}

    def row(self, document: int) -> dict[str, Any]:
        """All that is known of one document; its number of tokens last."""
        table = self._whole_table(document // self._rows)
        (values,) = table.slice(document % self._rows, 1).to_pylist()
        start, stop = (int(offset) for offset in self._store.read_documents(document, document + 2))
        known = {name.removeprefix("f:"): value for name, value in values.items() if value is not None}
        return {**known, TOKENS: stop - start}

    def columns(self, fields: set[str], most: int | None = None) -> Iterator[dict[str, pa.Array]]:
        """The fields of all documents, a file at a time, in order: name -> array of the field's kind, null where a document lacks it.
        `most`: files at most.
        """
        files, names = range(len(self._digests))[:most], sorted(fields)
        with ThreadPoolExecutor(THREADS) as pool:
            for first in range(0, len(files), THREADS):
                yield from pool.map(lambda number: self._columns(number, names), files[first : first + THREADS])

    def _columns(self, number: int, fields: list[str]) -> dict[str, pa.Array]:
        stored = [name for name in fields if name != TOKENS]
        table = self._table(number, [ID, *(f"f:{name}" for name in stored if name != ID)])
        found: dict[str, pa.Array] = {}
        for name in stored:
            column, kind = name if name == ID else f"f:{name}", TYPES[self.kinds[name]]
            has = column in table.column_names
            found[name] = table[column].combine_chunks().cast(kind, safe=False) if has else pa.nulls(table.num_rows, kind)
        if TOKENS in fields:
            start = number * self._rows
            offsets = self._store.read_documents(start, start + table.num_rows + 1)
            found[TOKENS] = pa.array(np.diff(offsets.astype(np.int64)))
        return found

    @lru_cache(maxsize=2)  # noqa: B019  # lives as long as the command that shows documents
    def _whole_table(self, number: int) -> pa.Table:
        return self._table(number, None)

    def _table(self, number: int, columns: list[str] | None) -> pa.Table:
        name = f"{self._store.split}/metadata/{number}.parquet"
        content = storage.read_bytes(self._store.path, name)
        if content is None or hashlib.sha256(content).hexdigest() != self._digests[number]:
            problem = "is missing" if content is None else "does not match its checksum: it is damaged or was edited"
            raise DamagedStoreError(f"{self._store.path}/{name} {problem}; {manifest.REMAKE}.")
        file = parquet.ParquetFile(pa.BufferReader(content))
        return file.read(columns if columns is None else [name for name in columns if name in file.schema_arrow.names])

    def _meets(self, columns: dict[str, pa.Array], condition: Condition) -> np.ndarray:
        values = condition.typed(self.kinds[condition.field])
        column = columns[condition.field]
        if any(isinstance(value, float) for value in values):  # whole numbers are compared with others as those
            column = column.cast(pa.float64(), safe=False)
        if condition.operator == "in":
            found = pc.and_(pc.is_in(column, pa.array(values, column.type)), column.is_valid())
        else:
            found = COMPARE[condition.operator](column, pa.scalar(values[0], column.type))
        return np.asarray(found.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


def values_line(field: dict[str, Any]) -> str:
    """The values of one field of `Metadata.summary` in a line: the range of numbers; the most frequent of others, with their counts."""
    if "median" in field:
        return f"{field['min']:g} to {field['max']:g}, median {field['median']:g}"
    values = ", ".join(f"{json.dumps(value, ensure_ascii=False)} {count:,}" for value, count in field.get("values", {}).items())
    more = field.get("distinct", 0) - len(field.get("values", {}))
    return values + (f"{', and ' if values else ''}{more:,} {'others' if values else 'different ones'}" if more else "")


def _summary(values: pa.ChunkedArray, kind: Kind) -> dict[str, Any]:
    known = values.drop_null()
    found: dict[str, Any] = {"kind": kind, "documents": len(known)}
    if kind in ("int", "float") and len(known):
        low, middle, high = pc.quantile(known, [0.0, 0.5, 1.0], interpolation="nearest").to_pylist()
        return {**found, "min": low, "median": middle, "max": high}
    counts = sorted(known.value_counts().to_pylist(), key=lambda one: (-one["counts"], one["values"]))
    frequent = {str(one["values"]).lower() if kind == "bool" else str(one["values"]): one["counts"] for one in counts[:SHOWN]}
    return {**found, "distinct": len(counts), "values": frequent if len(counts) <= max(len(known) // 2, SHOWN) else {}}
