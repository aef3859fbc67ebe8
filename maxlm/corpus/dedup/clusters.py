"""Clusters of copies from files of signatures, in bounded memory.

Documents are numbered in keep order: by source as `prefer` names them, longest text first, then smallest id by its bytes. The document that
stays is the first of its cluster in this order, so nothing depends on the order of files, of rows or of threads. A cluster is a connected
component of a graph of exact copies (equal hashes) and near copies (candidates of at least one band that pass verification,
if it is on). In a band's group of equal hashes, with verification, each document is compared with the `window` ones before and after it in
keep order; without it, all are joined. Of documents with one URL, all but the first go before that: no text is compared with theirs.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from maxlm.base.errors import UserError, shorten, system_errors
from maxlm.corpus.dedup.settings import DedupSettings, MinHashSettings, VerifySettings
from maxlm.corpus.dedup.signatures import jaccard
from maxlm.corpus.dedup.tables import BATCH_ROWS, Database, open_database, parquet, row_groups

VERIFY_VALUES = 1 << 21  # sample values compared at once

REMOVED = pa.schema([("id", pa.string()), ("cluster", pa.string()), ("kept", pa.string()), ("kind", pa.string()), ("size", pa.int64())])
# Each node hands its larger neighbours to the smallest node among itself and all its neighbours. `parent` < `child` in every link, so
# the larger neighbours of a node are its children.
_LARGE_STAR = """
CREATE TABLE next AS
SELECT DISTINCT links.child, least(links.parent, up.root) AS parent FROM links
LEFT JOIN (SELECT child, min(parent) AS root FROM links GROUP BY child) up ON up.child = links.parent
"""
# Each node hands its smaller neighbours and itself to the smallest of them.
_SMALL_STAR = """
CREATE TABLE next AS
SELECT child, parent FROM (
  SELECT links.parent AS child, root AS parent FROM links JOIN (SELECT child, min(parent) AS root FROM links GROUP BY child) USING (child)
  WHERE links.parent <> root
  UNION
  SELECT child, min(parent) FROM links GROUP BY child)
"""


def cluster(files: Sequence[Path], output: Path, settings: DedupSettings, *, work: Path, memory_mb: int = 512, threads: int = 2) -> None:
    """Find the copies among the documents of `files` and write those to remove to `output`, atomically: Parquet with REMOVED, sorted by id.

    `cluster` is the smallest id of the cluster and `kept` the id of the document that stays; `kind` is "url" if an earlier document in keep
    order has its URL, else "exact" if one has the same normalised text, else "near"; `size`: documents of the cluster, the one that stays
    among them. `work`: a folder for temporary files, several times as large as the signatures. Raises UserError.
    """
    with open_database(work, memory_mb, threads) as database:
        _number(database, files)
        _copies(database, settings)
        database.run("CREATE TABLE edges (low BIGINT, high BIGINT)")  # pairs of near copies
        if settings.minhash is not None:
            _near(database, files, settings.minhash)
        _connect(database)
        database.run(  # the node that stays is `root`
            "CREATE TABLE removed AS SELECT * FROM (SELECT ranked.node, id, coalesce(labels.root, copies.first, ranked.node) AS root, "
            "coalesce(copies.kind, 'near') AS kind FROM ranked LEFT JOIN copies USING (node) "
            "LEFT JOIN labels ON labels.node = coalesce(copies.first, ranked.node)) WHERE node <> root"
        )
        _write(database, output)


def _number(database: Database, files: Sequence[Path]) -> None:
    """Table `ranked`: node (0, 1, ... in keep order), place (in order of arrival), id, exact hash, hash of the URL."""
    columns = "place BIGINT, id VARCHAR, priority BIGINT, lo UBIGINT, hi UBIGINT, url_lo UBIGINT, url_hi UBIGINT"
    database.run(f"CREATE TABLE documents ({columns})")
    place = 0
    for path in files:
        for table in row_groups(path, ["id", "priority", "exact_lo", "exact_hi", "url_lo", "url_hi"]):
            places = pa.array(np.arange(place, place + len(table)))
            database.insert("documents", table.add_column(0, "place", places))
            place += len(table)
    for table in database.tables("SELECT id FROM documents GROUP BY id HAVING count(*) > 1 ORDER BY id LIMIT 1"):
        for name in table.column(0).to_pylist():
            raise UserError(f"{shorten(name)}: two documents have this id; each document needs its own.")
    database.run(
        "CREATE TABLE ranked AS SELECT row_number() OVER () - 1 AS node, place, id, lo, hi, url_lo, url_hi FROM "
        "(SELECT * FROM documents ORDER BY priority DESC, id)"
    )
    database.run("DROP TABLE documents")


def _copies(database: Database, settings: DedupSettings) -> None:
    """Table `copies`: nodes with the URL, or the normalised text, of an earlier node; the kept node; the kind of copy."""
    database.run("CREATE TABLE copies (node BIGINT, first BIGINT, kind VARCHAR)")
    compared = {
        "url": (settings.url, "SELECT url_lo AS lo, url_hi AS hi, node FROM ranked WHERE url_lo <> 0 OR url_hi <> 0"),
        "exact": (settings.exact, "SELECT lo, hi, node FROM ranked ANTI JOIN copies USING (node)"),
    }
    for kind, (on, query) in compared.items():
        if on:
            database.run(
                f"INSERT INTO copies WITH compared AS MATERIALIZED ({query}) SELECT node, first, '{kind}' FROM compared "  # noqa: S608
                "JOIN (SELECT lo, hi, min(node) AS first FROM compared GROUP BY lo, hi HAVING count(*) > 1) USING (lo, hi) "
                "WHERE node <> first"
            )
    if settings.url and settings.exact:  # the first of an URL may be a copy itself
        database.run("UPDATE copies SET first = kept.first FROM (SELECT * FROM copies) kept WHERE kept.node = copies.first")


def _near(database: Database, files: Sequence[Path], settings: MinHashSettings) -> None:
    """Add the pairs (low, high) of near copies to `edges`."""
    verify = settings.verify
    database.run("CREATE TABLE bands (hash UBIGINT, node BIGINT)")
    firsts = "SELECT CASE WHEN copies.node IS NULL THEN ranked.node ELSE -1 END FROM ranked LEFT JOIN copies USING (node) ORDER BY place"
    for lists, nodes in _alongside(database, firsts, files, "bands"):
        counts = np.where(nodes >= 0, np.diff(lists.offsets.to_numpy()), 0)
        keep = np.repeat(nodes >= 0, np.diff(lists.offsets.to_numpy()))
        database.insert("bands", {"hash": lists.values.to_numpy()[keep], "node": np.repeat(nodes, counts)})
    database.run("CREATE TABLE found (low BIGINT, high BIGINT)")
    for low, high in _candidates(database, verify.window if verify else 1):
        database.insert("found", {"low": low, "high": high})
    database.run("DROP TABLE bands")
    database.run("CREATE TABLE candidates AS SELECT DISTINCT low, high FROM found")
    database.run("DROP TABLE found")
    if verify:
        _verify(database, files, verify)
    else:
        database.run("INSERT INTO edges SELECT low, high FROM candidates")


def _candidates(database: Database, window: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of nodes with equal band hashes, at most `window` apart in their group."""
    tail = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for hashes, nodes in database.arrays("SELECT hash, node FROM bands ORDER BY hash, node"):
        hashes, nodes, old = np.concatenate((tail[0], hashes)), np.concatenate((tail[1], nodes)), len(tail[0])
        for distance in range(1, min(window, len(hashes) - 1) + 1):
            equal = np.flatnonzero(hashes[distance:] == hashes[:-distance])
            if not len(equal):
                break
            equal = equal[equal + distance >= old]
            pairs = np.unique(np.stack((nodes[equal], nodes[equal + distance]), axis=1), axis=0)
            if len(pairs):
                yield pairs[:, 0].copy(), pairs[:, 1].copy()
        tail = hashes[-window:], nodes[-window:]


def _verify(database: Database, files: Sequence[Path], verify: VerifySettings) -> None:
    """Move candidates with the similarity asked for, by their samples, to `edges`."""
    database.run("CREATE TABLE wanted AS SELECT low AS node FROM candidates UNION SELECT high FROM candidates")
    database.run("CREATE TABLE samples (node BIGINT, start BIGINT, size BIGINT)")
    wanted = "SELECT CASE WHEN wanted.node IS NULL THEN -1 ELSE ranked.node END FROM ranked LEFT JOIN wanted USING (node) ORDER BY place"
    store, start = database.folder / "samples.bin", 0
    with system_errors(), store.open("wb") as file:
        for lists, nodes in _alongside(database, wanted, files, "sample"):
            sizes = np.diff(lists.offsets.to_numpy())
            keep = nodes >= 0
            file.write(np.ascontiguousarray(lists.values.to_numpy()[np.repeat(keep, sizes)]).data)
            ends = start + np.cumsum(sizes[keep])
            database.insert("samples", {"node": nodes[keep], "start": ends - sizes[keep], "size": sizes[keep].astype(np.int64)})
            start = int(ends[-1]) if len(ends) else start
    query = (
        "SELECT low, high, a.start, a.size, b.start, b.size FROM candidates "
        "JOIN samples a ON a.node = low JOIN samples b ON b.node = high ORDER BY low, high"
    )
    for low, high, *spans in database.arrays(query):
        near = _similarities(store, spans, verify.sample) >= verify.jaccard
        if near.any():
            database.insert("edges", {"low": low[near], "high": high[near]})


def _similarities(store: Path, spans: list[np.ndarray], size: int) -> np.ndarray:
    """Jaccard similarity of pairs with samples at (start, size, start, size) in `store`."""
    costs = np.cumsum(spans[1] + spans[3])
    out, begin = np.zeros(len(costs)), 0
    while begin < len(costs):
        end = max(begin + 1, int(np.searchsorted(costs, (costs[begin - 1] if begin else 0) + VERIFY_VALUES, side="right")))
        values = np.memmap(store, np.uint32, "r")  # mapped anew, so that pages read before do not count as this process's memory
        sides = []
        for starts, sizes in ((spans[0][begin:end], spans[1][begin:end]), (spans[2][begin:end], spans[3][begin:end])):
            ends = np.cumsum(sizes)
            index = np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1])
            sides.append((np.asarray(values[index]), np.append(0, ends)))
        out[begin:end] = jaccard(sides[0], sides[1], size)
        begin = end
    return out


def _alongside(database: Database, query: str, files: Sequence[Path], column: str) -> Iterator[tuple[pa.ListArray, np.ndarray]]:
    """A list column of the signatures, each row with the number that `query` gives in order of arrival."""
    numbers = (array for (array,) in database.arrays(query))
    rest = np.zeros(0, np.int64)
    for path in files:
        for table in row_groups(path, [column]):
            parts = [rest]
            while sum(map(len, parts)) < len(table):
                parts.append(next(numbers))
            joined = np.concatenate(parts)
            lists = table.column(0).combine_chunks()
            yield lists, joined[: len(table)]
            rest = joined[len(table) :]


def _connect(database: Database) -> None:
    """Make table `labels` (node, root) from `edges` (low, high; low < high): for each node of an edge but the smallest of its component,
    that smallest node. Alternating large-star and small-star (Kiveris et al. 2014, doi 10.1145/2670979.2670997): a union-find needs memory
    for every node; here each round is a sort and a join on disk, and O(log^2 n) rounds end in stars.
    """
    database.run("CREATE TABLE links AS SELECT DISTINCT high AS child, low AS parent FROM edges")
    parents = "SELECT count(*) FROM links SEMI JOIN (SELECT child AS parent FROM links) USING (parent)"  # that have a parent
    while database.number("SELECT count(*) - count(DISTINCT child) FROM links") or database.number(parents):
        for step in (_LARGE_STAR, _SMALL_STAR):
            database.run(step)
            database.run("DROP TABLE links")
            database.run("ALTER TABLE next RENAME TO links")
    database.run("CREATE TABLE labels AS SELECT child AS node, parent AS root FROM links")


def _write(database: Database, output: Path) -> None:
    query = (
        "SELECT removed.id, least(kept.id, others.id), kept.id, kind, others.count + 1 FROM removed JOIN ranked kept ON kept.node = root "
        "JOIN (SELECT root, min(id) AS id, count(*) AS count FROM removed GROUP BY root) others USING (root) ORDER BY removed.id"
    )
    with parquet(output, REMOVED, compression="zstd", compression_level=1) as writer:
        waiting: list[pa.Table] = []
        for table in database.tables(query):
            waiting.append(table.rename_columns(REMOVED.names).cast(REMOVED))
            if sum(map(len, waiting)) >= BATCH_ROWS:
                joined = pa.concat_tables(waiting)
                writer.write_table(joined.slice(0, BATCH_ROWS).combine_chunks())
                waiting = [joined.slice(BATCH_ROWS)]
        if sum(map(len, waiting)):
            writer.write_table(pa.concat_tables(waiting).combine_chunks())
