"""Copies, near copies and test items that a run finds, against what is known of a made corpus."""

import json
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

from corpora_made.made_corpus import Corpus, Made
from corpora_made.planted import NEGATIVES, PLANTS, Item
from corpora_made.runs import Row, records, run, save
from maxlm.corpus.dedup.words import normalise

NEAR = 0.8


def settings(output: str, **more: Any) -> dict[str, Any]:
    """A corpus file for a made corpus, with the defaults of every stage."""
    return {
        "output": output,
        "sources": {"made": {"paths": ["raw"], "license": "CC0"}},
        "deduplicate": {},
        "decontaminate": {"sets": {"exam": {"path": "exam.jsonl", "fields": ["question"], "options": ["choices"]}}},
        "run": {"task_bytes": 400_000, "memory_mb": 256},
        **more,
    }


def write_items(path: Path, items: list[Item]) -> None:
    """A set with the fields `question` and `choices`."""
    path.write_text("".join(json.dumps({"question": item.question, "choices": item.options}) + "\n" for item in items))


def check_right(folder: Path, corpus: Corpus) -> list[Row]:
    """Run the made corpus in `folder` and compare."""
    write_items(folder / "exam.jsonl", corpus.items)
    ended = run(folder, save(folder, settings("clean")))
    if ended.code:
        return [Row("run of the made corpus", "exit code 0", f"{ended.code}: {ended.last}", False)]
    kept = {record["id"]: record for record in records(folder / "clean" / "documents")}
    removed = {record["id"]: record for record in records(folder / "clean" / "removed")}
    rows = [_complete(corpus, kept, removed), _texts(corpus, kept)]
    rows += _copies(corpus, kept, removed)
    rows += _items(corpus, removed)
    return rows


def _complete(corpus: Corpus, kept: dict[str, Any], removed: dict[str, Any]) -> Row:
    total, both = set(kept) | set(removed), set(kept) & set(removed)
    good = total == set(corpus.documents) and not both
    return Row(
        "each document in the output or in one list", "all", f"{len(total):,} of {len(corpus.documents):,}, {len(both)} in both", good
    )


def _texts(corpus: Corpus, kept: dict[str, Any]) -> Row:
    """Texts that came out as they were written, in any format and encoding."""
    wrong: Counter[str] = Counter()
    for id, record in kept.items():
        made, written = corpus.documents[id], corpus.written[id]
        expected = unicodedata.normalize("NFC", made.text).replace("\r\n", "\n").strip()
        if written.format in ("html", "wiki"):  # paragraphs are set in another way, and a page has its title
            same = normalise(expected) in normalise(record["text"])
        else:
            same = record["text"].strip() == expected
        if not same:
            wrong[f"{written.format} {written.encoding} {made.language}"] += 1
    bad = sum(wrong.values())
    most = "".join(f"; {count} of {name}" for name, count in wrong.most_common(3))
    encodings = len({one.encoding for one in corpus.written.values()})
    formats = len({one.format for one in corpus.written.values()})
    share = 1 - bad / len(kept)
    return Row(f"texts as they were written ({formats} formats, {encodings} encodings)", ">= 99.5%", f"{share:.2%}{most}", share >= 0.995)


def clusters(kept: dict[str, Any], removed: dict[str, Any]) -> dict[str, str]:
    """The document that stayed of each document's cluster: itself where it has no copy."""
    out = {id: id for id in kept}
    for id, record in removed.items():
        out[id] = record["detail"]["kept"] if record["stage"] == "deduplicate" else id
    return out


def _copies(corpus: Corpus, kept: dict[str, Any], removed: dict[str, Any]) -> list[Row]:
    cluster = clusters(kept, removed)
    families: dict[int, list[str]] = {}
    for id, one in corpus.documents.items():
        if one.kind in ("exact", "copied"):
            families.setdefault(one.family, []).append(id)
    found = sum(cluster[id] == cluster[ids[0]] for ids in families.values() for id in ids[1:])
    total = sum(len(ids) - 1 for ids in families.values())
    pairs = {pair: similar for pair, similar in corpus.similar.items() if similar >= NEAR}
    near = sum(cluster[a] == cluster[b] for a, b in pairs)
    best: dict[str, float] = {}
    for (a, b), similar in corpus.similar.items():
        best[a], best[b] = max(best.get(a, 0.0), similar), max(best.get(b, 0.0), similar)
    called = [id for id, one in removed.items() if one["stage"] == "deduplicate" and one["reason"] == "near_copy"]
    false = [id for id in called if best.get(id, 0.0) < NEAR and corpus.documents[id].kind != "exact"]
    return [
        Row("exact copies found", "100%", f"{found:,} of {total:,}", found == total),
        Row(f"near copies at J >= {NEAR} found", ">= 95%", f"{near / len(pairs):.2%} of {len(pairs):,}", near >= 0.95 * len(pairs)),
        *_by_similarity(corpus, cluster),
        Row("false near copies", "<= 0.5%", f"{len(false)} of {len(called):,}", len(false) <= 0.005 * len(called)),
    ]


def _by_similarity(corpus: Corpus, cluster: dict[str, str]) -> list[Row]:
    """Pairs found by similarity. Below the threshold a pair may be joined through a third document."""
    rows = []
    for low, high in ((0.5, 0.7), (0.7, 0.75), (0.75, 0.8), (0.8, 0.85), (0.85, 0.9), (0.9, 1.01)):
        pairs = [pair for pair, similar in corpus.similar.items() if low <= similar < high]
        found = sum(cluster[a] == cluster[b] for a, b in pairs)
        rows.append(
            Row(f"  pairs at J {low} to {min(high, 1)}", "", f"{found:,} of {len(pairs):,} ({found / max(1, len(pairs)):.1%})", None)
        )
    return rows


def _items(corpus: Corpus, removed: dict[str, Any]) -> list[Row]:
    flagged = {id: record for id, record in removed.items() if record["stage"] == "decontaminate"}
    seen = {id: one for id, one in corpus.documents.items() if id in flagged or removed.get(id, {}).get("stage") != "deduplicate"}
    planted = {id for id, one in seen.items() if one.kind in PLANTS}
    right = planted & set(flagged)
    named = sum(_numbers(flagged[id], corpus.documents[id]) for id in right)
    recall, precision = len(right) / len(planted), len(right) / max(1, len(flagged))
    rows = [
        Row("planted test items found", ">= 99%", f"{recall:.2%} of {len(planted):,} (the right item: {named:,})", recall >= 0.99),
        Row("of what is taken for test items, is one", ">= 95%", f"{precision:.2%} of {len(flagged):,}", precision >= 0.95),
    ]
    for kind in (*PLANTS, *NEGATIVES):
        ids = [id for id, one in seen.items() if one.kind == kind]
        rows.append(Row(f"  {kind}", "", f"{sum(id in flagged for id in ids)} of {len(ids)} removed", None))
    return rows


def _numbers(record: dict[str, Any], made: Made) -> bool:
    return int(record["detail"]["item"]) == made.item
