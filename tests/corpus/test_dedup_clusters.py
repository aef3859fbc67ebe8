"""Clusters: connected components, a keep rule that nothing but the documents decides, and the rates of near copies."""

import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from maxlm.base.errors import UserError
from maxlm.corpus.document import Document

pytest.importorskip("duckdb")
import pyarrow.parquet as pq

from maxlm.corpus.dedup import clusters, words
from maxlm.corpus.dedup.settings import DedupSettings, MinHashSettings, VerifySettings
from maxlm.corpus.dedup.signatures import signatures, write_signatures
from maxlm.corpus.dedup.tables import Priority, open_database
from maxlm.corpus.urls import url_key

NO_VERIFY = DedupSettings(minhash=MinHashSettings(verify=None))
SETTINGS = [DedupSettings(), NO_VERIFY, DedupSettings(exact=False), DedupSettings(minhash=None)]


def corpus(count: int, seed: int) -> list[Document]:
    """Documents with exact copies, chains of near copies at Jaccard 0.5 to 0.95, and short and empty ones."""
    rng, out = random.Random(seed), []
    for index in range(count):
        text = [f"w{rng.randrange(10**6)}" for _ in range(rng.randrange(3, 120))]
        out.append(Document(f"é{index}", " ".join(text)))
        for copy in range(rng.choice((0, 0, 1, 3))):
            text = list(text)
            for _ in range(rng.randrange(3)):
                text[rng.randrange(len(text))] = f"v{rng.randrange(10**6)}"
            out.append(Document(f"{rng.randrange(10**9)}.{index}.{copy}", rng.choice((" ", ", ")).join(text)))
    return [*out, Document("none", ""), Document("dots", "..."), Document("dots2", "..."), Document("other", "!")]


def run(documents: Sequence[Document], folder: Path, settings: DedupSettings, shards: int = 1, threads: int = 2) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{shard}.parquet" for shard in range(shards)]
    for shard, path in enumerate(files):
        write_signatures(documents[shard::shards], path, settings)
    clusters.cluster(files, folder / "removed", settings, work=folder / "work", threads=threads)
    assert not list((folder / "work").iterdir())
    return (folder / "removed").read_bytes()


def rows(documents: Sequence[Document], folder: Path, settings: DedupSettings) -> list[dict[str, str]]:
    run(documents, folder, settings)
    return pq.read_table(folder / "removed").to_pylist()


def ngrams(text: str) -> set[tuple[str, ...]]:
    parts = words.normalise(text).split()
    return {tuple(parts[i : i + 5]) for i in range(len(parts) - 4)}


def oracle(documents: Sequence[Document], settings: DedupSettings) -> list[dict[str, str]]:
    """The same by comparing every pair."""
    order = sorted(documents, key=lambda one: (-len(one.text), one.id.encode()))
    table = signatures(order, settings)
    hashes = list(zip(table["exact_lo"].to_pylist(), table["exact_hi"].to_pylist(), strict=True))
    bands, parent = [set(row) for row in table["bands"].to_pylist()], list(range(len(order)))
    verify = settings.minhash.verify if settings.minhash else None

    def find(node: int) -> int:
        while parent[node] != node:
            node = parent[node]
        return node

    for one, two in combinations(range(len(order)), 2):
        copy = settings.exact and hashes[one] == hashes[two]
        near = bool(bands[one] & bands[two])
        if near and verify:
            left, right = ngrams(order[one].text), ngrams(order[two].text)
            near = len(left & right) / len(left | right) >= verify.jaccard
        if copy or near:
            low, high = sorted((find(one), find(two)))
            parent[high] = low
    out = []
    for node, one in enumerate(order):
        if find(node) != node:
            members = [order[other].id for other in range(len(order)) if find(other) == find(node)]
            exact = settings.exact and hashes[node] in hashes[:node]
            smallest = min(members, key=str.encode)
            kind, size = "exact" if exact else "near", len(members)
            out.append({"id": one.id, "cluster": smallest, "kept": order[find(node)].id, "kind": kind, "size": size})
    return sorted(out, key=lambda row: row["id"].encode())


@pytest.mark.parametrize("settings", SETTINGS, ids=["verified", "bands", "near alone", "exact alone"])
def test_clusters_are_the_connected_components(settings: DedupSettings, tmp_path: Path):
    documents = corpus(60, 5)
    found = rows(documents, tmp_path, settings)
    assert found == oracle(documents, settings)
    assert len(found) > 5


def test_order_shards_and_threads_change_no_byte(tmp_path: Path):
    documents = corpus(40, 6)
    reference = run(documents, tmp_path / "0", DedupSettings())
    for number, (shards, threads) in enumerate(((2, 2), (7, 7)), 1):
        random.Random(number).shuffle(documents)
        assert run(documents, tmp_path / str(number), DedupSettings(), shards, threads) == reference


def test_small_batches_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    documents = corpus(20, 7) + [Document(f"same{i}", f"a b c d e f g h {'!' * i}") for i in range(20)]
    reference = rows(documents, tmp_path / "0", DedupSettings())
    monkeypatch.setattr("maxlm.corpus.dedup.tables.BATCH_ROWS", 3)
    monkeypatch.setattr(clusters, "VERIFY_VALUES", 50)
    monkeypatch.setattr("maxlm.corpus.dedup.signatures.GROUP_ROWS", 5)
    assert rows(documents, tmp_path / "1", DedupSettings()) == reference


def test_near_copies_at_known_similarity(tmp_path: Path):
    """With verification: >= 95% of the pairs at 0.8 and above are found, and no pair below."""
    rng, documents, truth = random.Random(8), [], {}
    for index in range(600):
        shared = rng.uniform(0.5, 0.95)
        left = [f"w{rng.randrange(10**7)}" for _ in range(rng.randrange(60, 300))]
        cut = round((len(left) - 4) * 2 * shared / (1 + shared)) + 4
        right = left[:cut] + [f"v{rng.randrange(10**7)}" for _ in range(len(left) - cut)]
        documents += [Document(f"{index}a", " ".join(left)), Document(f"{index}b", " ".join(right))]
        one, two = ngrams(documents[-2].text), ngrams(documents[-1].text)
        truth[index] = len(one & two) / len(one | two)
    found = {int(row["id"][:-1]) for row in rows(documents, tmp_path, DedupSettings())}
    near = {index for index, value in truth.items() if value >= 0.8}
    assert len(found & near) >= 0.95 * len(near) > 100
    assert not found - near


def test_exact_copies_are_all_found(tmp_path: Path):
    base = corpus(50, 9)
    copies = [Document(f"copy{i}", f"  {one.text.upper()} ,") for i, one in enumerate(base) if words.normalise(one.text)]
    for settings in (DedupSettings(), NO_VERIFY, DedupSettings(minhash=None)):
        found = rows(base + copies, tmp_path / str(SETTINGS.index(settings)), settings)
        removed = {row["id"] for row in found if row["kind"] == "exact"}
        texts = {words.normalise(one.text) for one in base + copies if words.normalise(one.text)}
        assert sum(1 for one in base + copies if words.normalise(one.text)) - len(texts) <= len(removed)


@pytest.mark.parametrize("seed", range(4))
def test_components_of_any_graph(seed: int, tmp_path: Path):
    """Chains, stars and random graphs; a long chain takes few rounds."""
    rng = np.random.default_rng(seed)
    chain = rng.permutation(500)
    edges = [
        np.stack((chain[:-1], chain[1:]), 1),
        rng.integers(500, 1500, (400, 2)),
        np.stack((np.full(50, 1600), np.arange(1601, 1651)), 1),
    ]
    pairs = np.concatenate(edges)
    pairs = np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1)
    label = np.arange(1700)
    while True:
        new = label.copy()
        np.minimum.at(new, pairs[:, 0], label[pairs[:, 1]])
        np.minimum.at(new, pairs[:, 1], label[pairs[:, 0]])
        if (new == label).all():
            break
        label = new
    with open_database(tmp_path, 200, 1) as database:
        database.run("CREATE TABLE edges (low BIGINT, high BIGINT)")
        database.insert("edges", {"low": pairs[:, 0], "high": pairs[:, 1]})
        clusters._connect(database)
        found = list(database.arrays("SELECT node, root FROM labels ORDER BY node"))
    changed = np.flatnonzero(label != np.arange(1700))
    assert np.array_equal(found[0][0], changed)
    assert np.array_equal(found[0][1], label[changed])


def test_bad_input_is_one_line(tmp_path: Path):
    write_signatures([Document("a", "x")], tmp_path / "a", NO_VERIFY)
    write_signatures([Document("a", "y y")], tmp_path / "b", NO_VERIFY)
    with pytest.raises(UserError, match="two documents have this id"):
        clusters.cluster([tmp_path / "a", tmp_path / "b"], tmp_path / "out", NO_VERIFY, work=tmp_path / "w")
    with pytest.raises(UserError, match="No such file"):
        clusters.cluster([tmp_path / "missing"], tmp_path / "out", NO_VERIFY, work=tmp_path / "w")
    assert not (tmp_path / "out").exists()
    clusters.cluster([], tmp_path / "out", NO_VERIFY, work=tmp_path / "w")
    assert pq.read_table(tmp_path / "out").num_rows == 0


def test_large_group_is_joined_whole(tmp_path: Path):
    """Copies that share a band's group larger than the window are one cluster."""
    documents = [Document(f"{i:03d}", "one two three four five six seven " * 3 + "x" * (i % 2 + 1) * (i + 1)) for i in range(100)]
    settings = DedupSettings(minhash=MinHashSettings(verify=VerifySettings(jaccard=0.3, window=2), ngram=2))
    assert {row["kept"] for row in rows(documents, tmp_path, settings)} == {"099"}


@pytest.mark.parametrize(
    ("url", "known"),
    [
        *(
            (one, False)
            for one in ("", "null", "N/A", "n.a.", "-", "none", "unknown", "about:blank", "http://", "mailto:a@b.ch", "urn:a.bc:1")
        ),
        *(
            (one, False)
            for one in ("No URL.", "see a.org for more", "1.25", "javascript:void(0)", "data:text/plain,abc", "localhost", "...")
        ),
        *(
            (one, True)
            for one in ("http://a.b", "a.org", "//a.org/x", "a.org:8080/x", "http://localhost:80/x", "file:///a/b", "münchen.de/ä")
        ),
    ],
)
def test_placeholders_are_no_urls(url: str, known: bool, tmp_path: Path):
    """Documents with one of them and other texts are no copies, and those of one URL are."""
    documents = [Document(f"{number}", f"The text of number {number} is its own.", {"url": url}) for number in range(3)]
    assert len(rows(documents, tmp_path, DedupSettings(url=True, minhash=None))) == (2 if known else 0)
    assert not url.startswith(("mailto:", "urn:")) or url_key(url) == url


def test_urls_are_compared_by_the_stated_rule():
    """Each list is one URL, and no two lists are the same."""
    same = [
        [
            "https://www.Example.org/a",
            "http://example.org:80/a/",
            "example.org/a#part",
            " https://EXAMPLE.org.:443/a?utm_source=x&UTM_b=1&gclid=2",
        ],
        ["https://example.org/a?b=1&c=2", "http://example.org/a/?utm_medium=m&b=1&c=2#f"],
        ["https://example.org/a?c=2&b=1"],
        ["https://example.org/A"],
        ["https://example.org:8080/a", "http://example.org:8080/a"],
        ["http://example.org:443/a"],
        ["https://example.org", "http://www.example.org/", "example.org/?fbclid=3"],
        ["ftp://example.org/a"],
        ["https://münchen.de/ä", "http://xn--mnchen-3ya.de/ä"],
        ["https://example.org/a?utm=1"],
        ["no url"],
    ]
    keys = [{url_key(url) for url in urls} for urls in same]
    assert all(len(one) == 1 for one in keys) and len(set.union(*keys)) == len(same), keys
    assert url_key("") == url_key(" ") == "" and url_key("http://[broken") == "http://[broken"


@pytest.mark.parametrize(
    "settings", [DedupSettings(url=True), DedupSettings(url=True, exact=False, minhash=None)], ids=["all kinds", "url alone"]
)
def test_of_documents_with_one_url_the_first_stays_and_texts_of_others_are_not_compared(settings: DedupSettings, tmp_path: Path):
    """As if the copies by URL were not there; those go to what stays of the first, which may be a copy of a text itself."""
    rng, documents = random.Random(3), corpus(40, 7)
    for one in documents:
        if rng.random() < 0.6:
            one.metadata["url"] = f"http{rng.choice(('', 's'))}://a.b/{rng.randrange(25)}{rng.choice(('', '/', '#x'))}"
    order = sorted(documents, key=lambda one: (-len(one.text), one.id.encode()))
    firsts: dict[str, str] = {}
    by_url = {
        one.id: firsts[key]
        for one in order
        if (url := one.metadata.get("url")) and firsts.setdefault(key := url_key(str(url)), one.id) != one.id
    }
    others = rows([one for one in documents if one.id not in by_url], tmp_path / "others", settings.model_copy(update={"url": False}))
    kept = {row["id"]: row["kept"] for row in others}
    found = {row["id"]: (row["kind"], row["kept"]) for row in rows(documents, tmp_path / "all", settings)}
    assert found == {row["id"]: (row["kind"], row["kept"]) for row in others} | {
        id: ("url", kept.get(first, first)) for id, first in by_url.items()
    }
    assert len(by_url) > 10 and (not settings.exact or any(first in kept for first in by_url.values()))
    assert run(documents[::-1], tmp_path / "reversed", settings, shards=3) == (tmp_path / "all" / "removed").read_bytes()


def test_the_preferred_source_stays(tmp_path: Path):
    """By the order of `prefer`, then sources that it does not name by length, whatever the kind of the copies."""
    priority = Priority(("best", "good"), {"b": "best", "g": "good", "x": "other", "y": "more"})
    texts = {"x#1": "one two three four five six seven", "g#1": "one two three four five six", "b#1": "one two three", "y#1": "one two"}
    settings = DedupSettings(url=True, prefer=priority.prefer)
    for left, stays in (("xgby", "b#1"), ("xgy", "g#1"), ("xy", "x#1")):
        documents = [Document(id, text, {"url": "http://a.b"}) for id, text in texts.items() if id[0] in left]
        write_signatures(documents, tmp_path / "a", settings, priority)
        clusters.cluster([tmp_path / "a"], tmp_path / "out", settings, work=tmp_path / "w")
        assert {row["kept"] for row in pq.read_table(tmp_path / "out").to_pylist()} == {stays}
