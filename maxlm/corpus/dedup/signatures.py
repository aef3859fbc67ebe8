"""Files of signatures: one Parquet file for each shard of the input, a row a document."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from maxlm.config.errors import UserError, as_user_error, error_kind, shorten
from maxlm.corpus.dedup.minhash import band_hashes, ngram_hashes, samples
from maxlm.corpus.dedup.settings import FORMAT, DedupSettings, signature_key
from maxlm.corpus.dedup.words import hash_words
from maxlm.corpus.dedup.writing import BY_LENGTH, Priority, groups, parquet
from maxlm.corpus.document import Document
from maxlm.corpus.urls import is_url, url_key

METADATA = b"maxlm.dedup"
GROUP_ROWS = 4096  # documents of a row group, or fewer where they hold more than GROUP_CHARS
GROUP_CHARS = 1 << 23

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("priority", pa.int64()),  # place in keep order: characters of the text as it came, and above them the rank of its source
        ("url_lo", pa.uint64()),  # hash of its URL, 0 where there is none or URLs are not compared
        ("url_hi", pa.uint64()),
        ("exact_lo", pa.uint64()),
        ("exact_hi", pa.uint64()),
        ("bands", pa.list_(pa.uint64())),  # none for a document of fewer words than an n-gram
        ("sample", pa.list_(pa.uint32())),  # smallest hashes of its n-grams, ascending; none without verification
    ]
)

_ENCODING: dict[str, Any] = {"compression": {"id": "zstd"}, "use_dictionary": False, "write_statistics": False}  # hashes do not compress


def signatures(documents: Sequence[Document], settings: DedupSettings, priority: Priority = BY_LENGTH) -> pa.Table:
    """Signatures of some documents, in their order: a table with SCHEMA."""
    texts = [document.text for document in documents]
    urls = np.array([_url_hash(document) if settings.url else (0, 0) for document in documents], np.uint64).reshape(-1, 2)
    exact = np.zeros((len(texts), 2), np.uint64)
    bands: list[Any] = [_NO_BANDS] * len(texts)
    sample: list[Any] = [_NO_SAMPLE] * len(texts)
    for positions, words in hash_words(texts):
        exact[positions] = words.exact
        if settings.minhash is None:
            continue
        ngrams, offsets = ngram_hashes(words.hashes, words.offsets, settings.minhash.ngram, settings.minhash.seed)
        hashes = band_hashes(ngrams, offsets, settings.minhash)
        for row in np.flatnonzero(np.diff(offsets)).tolist():
            bands[positions[row]] = hashes[row]
        if settings.minhash.verify:
            values, bounds = samples(ngrams, offsets, settings.minhash.verify.sample)
            for row, position in enumerate(positions):
                sample[position] = values[bounds[row] : bounds[row + 1]]
    columns: list[Any] = [
        pa.array([document.id for document in documents], pa.string()),
        pa.array([priority(document) for document in documents], pa.int64()),
        pa.array(urls[:, 0]),
        pa.array(urls[:, 1]),
        pa.array(exact[:, 0]),
        pa.array(exact[:, 1]),
        _lists(bands, np.uint64),
        _lists(sample, np.uint32),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def write_signatures(documents: Iterable[Document], path: Path, settings: DedupSettings, priority: Priority = BY_LENGTH) -> int:
    """Write the signatures of a shard to `path`, atomically, and return the number of documents.

    The bytes depend on the documents, their order and the settings alone. Raises UserError.
    """
    stored = json.dumps({"format": FORMAT, "settings": signature_key(settings)}).encode()
    count = 0
    with parquet(path, SCHEMA.with_metadata({METADATA: stored}), **_ENCODING) as writer:
        for group in groups(documents, GROUP_CHARS, rows=GROUP_ROWS):
            writer.write_table(signatures(group, settings, priority).replace_schema_metadata(None))
            count += len(group)
    return count


def open_signatures(path: Path, settings: DedupSettings) -> pq.ParquetFile:
    """Open a file of signatures. Raises UserError if it is damaged, or was made by other settings or another format."""
    try:
        file = pq.ParquetFile(path)
    except OSError as error:
        raise as_user_error(error) from error
    except pa.ArrowException as error:
        raise UserError(f"{shorten(str(path))}: not a whole Parquet file ({error}); make the signatures again.") from None
    metadata = file.schema_arrow.metadata or {}
    if METADATA not in metadata:
        raise UserError(f"{shorten(str(path))}: not a file of signatures.")
    try:
        stored = dict(json.loads(metadata[METADATA]))
    except (ValueError, TypeError, RecursionError):
        stored = {}
    if (number := stored.get("format")) != FORMAT:
        raise UserError(f"{shorten(str(path))}: signatures of format {number}, and this version reads {FORMAT}: make them again.")
    if stored.get("settings") != signature_key(settings):
        raise UserError(
            f"{shorten(str(path))}: signatures made with {stored.get('settings')}, and the settings are {signature_key(settings)}: "
            "use the same settings, or make the signatures again."
        )
    return file


def read_columns(path: Path, settings: DedupSettings, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Columns of a file of signatures, one row group at a time. Raises UserError."""
    with open_signatures(path, settings) as file:
        for group in range(file.num_row_groups):
            try:
                yield file.read_row_group(group, columns=list(columns), use_threads=False)
            except (pa.ArrowException, OSError) as error:
                raise error_kind(error)(f"{shorten(str(path))}: damaged signatures ({error}); make them again.") from None


def _url_hash(document: Document) -> tuple[int, int]:
    """Low and high half of BLAKE2b-128 of its URL as it is compared; zeros for a document without one, or with a placeholder."""
    url = document.metadata.get("url")
    key = url_key(url) if isinstance(url, str) and is_url(url) else ""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest() if key else bytes(16)
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _lists(rows: list[Any], dtype: type) -> pa.ListArray:
    offsets = np.append(0, np.cumsum([len(row) for row in rows])).astype(np.int32)
    values = np.concatenate(rows) if rows else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(dtype, copy=False)))


_NO_BANDS = np.zeros(0, np.uint64)
_NO_SAMPLE = np.zeros(0, np.uint32)
