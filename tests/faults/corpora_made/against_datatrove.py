"""The same clusters as datatrove at equal parameters: n-grams of 5 words, 20 bands of 8 rows, no verification.

Hash functions differ, so that a pair is found by one and not by the other by chance, except where both find it with certainty (J >= 0.95:
missed once in 10^9) or neither (J < 0.2: found once in 10^4). On families of such pairs, clusters must be equal; between these bounds, the
shares of pairs found are shown beside the expected one.
"""

import json
import random
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from corpora_made.made_corpus import edited, jaccard
from corpora_made.made_text import Text, made_text
from corpora_made.runs import Row, records, run, save
from maxlm.corpus.dedup.settings import MinHashSettings

NGRAM, BANDS, ROWS = 5, 20, 8
BINS = ((0.5, 0.6), (0.6, 0.7), (0.7, 0.75), (0.75, 0.8), (0.8, 0.85), (0.85, 0.9))


def check_same_clusters(folder: Path, python: str | None, seed: int, count: int) -> list[Row]:
    """`python`: an interpreter with datatrove 0.10; None leaves the comparison out."""
    if python is None:
        return [Row("same clusters as datatrove", "equal", "left out: pip install 'datatrove[processing]' 'xxhash<4'", None)]
    draw = random.Random(seed)
    certain, between = _certain(draw, count), _between(draw, count)
    folder.mkdir(parents=True)
    ours, theirs, seconds = _clusters(folder, python, certain + between)
    split = len(certain)
    same = _partition(ours[:split]) == _partition(theirs[:split])
    sizes = [len(part) for part in _partition(ours[:split]) if len(part) > 1]
    rows = [Row(f"same clusters as datatrove ({split:,} texts, {len(sizes):,} clusters)", "equal", "equal" if same else "not equal", same)]
    found: dict[tuple[float, float], list[tuple[bool, bool, float]]] = defaultdict(list)
    for place in range(split, len(ours), 2):
        similar = jaccard((certain + between)[place : place + 2], MinHashSettings(ngram=NGRAM))[0][1]
        for low, high in BINS:
            if low <= similar < high:
                chance = 1 - (1 - similar**ROWS) ** BANDS
                found[low, high].append((ours[place] == ours[place + 1], theirs[place] == theirs[place + 1], chance))
    for (low, high), pairs in sorted(found.items()):
        shares = [sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
        text = f"ours {shares[0]:.1%}, datatrove {shares[1]:.1%}, expected {shares[2]:.1%} of {len(pairs)}"
        bound = 4 * (max(shares[2] * (1 - shares[2]), 1e-3) / len(pairs)) ** 0.5
        good = abs(shares[0] - shares[2]) <= bound
        rows.append(Row(f"  pairs at J {low} to {high} found without verification", "as expected", text, good))
    rows.append(Row("  seconds of datatrove, in one process", "", f"{seconds:.1f}", None))
    return rows


def _certain(draw: random.Random, count: int) -> list[str]:
    """Texts in families of one to four, all pairs at J >= 0.95 but those of two families."""
    texts: list[str] = []
    for _ in range(count // 3):
        original = made_text(draw, "en", draw.randint(300, 600))
        copies = [edited(draw, original, 0.985, draw.choice(("block", "cut", "added"))) for _ in range(draw.choice((0, 0, 1, 2, 3)))]
        texts += [_line(one) for one in (original, *copies)]
    draw.shuffle(texts)
    return texts


def _between(draw: random.Random, count: int) -> list[str]:
    """Pairs at J from 0.5 to 0.9, one text after the other."""
    texts: list[str] = []
    for _ in range(count // 3):
        original = made_text(draw, "en", draw.randint(200, 600))
        texts += [_line(original), _line(edited(draw, original, draw.uniform(0.5, 0.9), draw.choice(("scattered", "block", "cut"))))]
    return texts


def _line(text: Text) -> str:
    """Words in small letters without marks, for which both sides have the same n-grams."""
    return " ".join(text.words).lower()


def _clusters(folder: Path, python: str, texts: list[str]) -> tuple[list[str], list[int], float]:
    """The cluster of each text by us and by datatrove, and datatrove's seconds."""
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    minhash = {"ngram": NGRAM, "bands": BANDS, "rows": ROWS, "verify": None}
    sources = {"made": {"paths": ["texts.jsonl"]}}
    ended = run(folder, save(folder, {"output": "out", "sources": sources, "deduplicate": {"exact": False, "minhash": minhash}}))
    assert ended.code == 0, ended.errors
    ours = [f"texts.jsonl#{number + 1}" for number in range(len(texts))]
    for record in records(folder / "out" / "removed"):
        ours[int(record["id"].partition("#")[2]) - 1] = record["detail"]["kept"]
    (folder / "plain.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    script = Path(__file__).with_name("by_datatrove.py")
    numbers = [str(value) for value in (NGRAM, BANDS, ROWS)]
    done = subprocess.run([python, script, "plain.jsonl", "theirs.json", "work", *numbers], cwd=folder, env={}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-1000:]
    theirs = json.loads((folder / "theirs.json").read_text())
    return ours, theirs["clusters"], float(theirs["seconds"])


def _partition(labels: Sequence[str | int]) -> set[frozenset[int]]:
    out: dict[str | int, list[int]] = defaultdict(list)
    for place, label in enumerate(labels):
        out[label].append(place)
    return {frozenset(part) for part in out.values()}
