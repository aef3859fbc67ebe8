"""Shuffled text against real text: what the perplexity filter rejects of the first at 5% of the second.

The real text is the documentation of Python and of the packages that are installed beside it, or documents that are given. Texts of one
module are all of one part: the model is trained on one part, and texts of the other are scored as they are and shuffled.
"""

import ast
import hashlib
import importlib
import importlib.util
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from corpora.ngram_model import write_model
from corpora.runs import Row, records, run, save

PACKAGES = ("numpy", "scipy", "jax", "pyarrow", "duckdb", "matplotlib", "flax", "optax")
FALSE = 0.05  # share of real texts that may be rejected
ANY = 1e6  # bits per byte that no text has
SHUFFLES = ("words of the text", "words of each line")


def check_shuffled(folder: Path, text: Path | None, scorer: str | None, seed: int, count: int) -> list[Row]:
    """`text`: a folder of documents, the output of a run. `scorer`: MODULE:NAME of a callable that gives a Scorer; without it KenLM only."""
    folder.mkdir(parents=True)
    train, test = _parts(_given(text) if text else _documentation())
    draw = random.Random(seed)
    test = draw.sample(sorted(test), min(count, len(test)))
    shuffled = {name: [_shuffle(draw, one, by_line=name == SHUFFLES[1]) for one in test] for name in SHUFFLES}
    where = f"{len(test):,} texts" + ("" if text else " of documentation")
    rows = []
    if importlib.util.find_spec("kenlm") is None:
        rows.append(Row("shuffled text rejected, by KenLM", ">= 95%", "left out: pip install kenlm", None))
    else:
        write_model(train, folder / "model.arpa")
        rows += _by_command(folder, {"kenlm": "model.arpa"}, "KenLM of words, 3-grams", where, test, shuffled)
    if scorer is not None:
        module, _, name = scorer.partition(":")
        rows += _by_scorer(getattr(importlib.import_module(module), name)(), scorer, where, test, shuffled)
    return rows


def _by_command(folder: Path, model: dict[str, Any], name: str, where: str, real: list[str], shuffled: dict[str, list[str]]) -> list[Row]:
    """Score by one run that rejects nothing, and reject by another with the limit that the scores give."""
    texts = {"real": real, **shuffled}
    for kind, some in texts.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in some))
    base = {"sources": {kind.replace(" ", "_"): {"paths": [f"{kind}.jsonl"]} for kind in texts}}
    filters = {"perplexity": {**model, "max_bits_per_byte": ANY}}
    ended = run(folder, save(folder, {**base, "output": "scored", "filters": filters}))
    assert ended.code == 0, ended.errors
    scores = sorted(one["metadata"]["bits_per_byte"] for one in records(folder / "scored" / "documents") if one["id"].startswith("real"))
    filters = {"perplexity": {**model, "max_bits_per_byte": _limit(scores)}}
    ended = run(folder, save(folder, {**base, "output": "judged", "filters": filters}))
    assert ended.code == 0, ended.errors
    rejected = [one["id"].partition(".jsonl#")[0] for one in records(folder / "judged" / "removed")]
    shares = {kind: rejected.count(kind) / len(some) for kind, some in texts.items()}
    return _rows(name, where, shares)


def _by_scorer(scorer: Any, name: str, where: str, real: list[str], shuffled: dict[str, list[str]]) -> list[Row]:
    scores = {kind: scorer.score(some) for kind, some in {"real": real, **shuffled}.items()}
    limit = _limit(sorted(scores["real"]))
    return _rows(name, where, {kind: sum(not one <= limit for one in some) / len(some) for kind, some in scores.items()})


def _limit(scores: list[float]) -> float:
    """Bits per byte above which FALSE of the texts lie."""
    return scores[int(len(scores) * (1 - FALSE))]


def _rows(name: str, where: str, shares: dict[str, float]) -> list[Row]:
    asked = f">= 95% at {FALSE:.0%}"
    found = f"{shares[SHUFFLES[0]]:.1%} at {shares['real']:.1%} of {where}"
    good = shares[SHUFFLES[0]] >= 0.95 and shares["real"] <= FALSE
    harder = f"{shares[SHUFFLES[1]]:.1%}"
    return [Row(f"shuffled text rejected by {name}", asked, found, good), Row(f"  shuffled within each line, by {name}", "", harder, None)]


def _shuffle(draw: random.Random, text: str, by_line: bool) -> str:
    lines = [line.split() for line in text.split("\n")]
    if by_line:
        return "\n".join(" ".join(draw.sample(line, len(line))) for line in lines)
    words = [word for line in lines for word in line]
    draw.shuffle(words)
    rest = iter(words)
    return "\n".join(" ".join(next(rest) for _ in line) for line in lines)


def _parts(texts: Iterator[tuple[str, str]]) -> tuple[list[str], set[str]]:
    """Texts to train on and texts to score, by a hash of where they are from."""
    train: list[str] = []
    test: set[str] = set()
    for name, text in texts:
        for piece in _pieces(text):
            if hashlib.sha256(name.encode()).digest()[0] >= 64:
                train.append(piece)
            else:
                test.add(piece)
    return train, test


def _pieces(text: str) -> Iterator[str]:
    """Neighbouring paragraphs of running text, 60 to 250 words together. A paragraph is one line."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        words = paragraph.split()
        letters = sum(word.strip(".,;:()'\"`").isalpha() for word in words)
        if len(words) < 8 or letters < 0.85 * len(words) or ">>>" in paragraph:
            continue
        lines.append(" ".join(words[:250]))
        if sum(len(line.split()) for line in lines) >= 60:
            yield "\n".join(lines)
            lines = []


def _given(folder: Path) -> Iterator[tuple[str, str]]:
    return ((one["id"], one["text"]) for one in records(folder))


def _documentation() -> Iterator[tuple[str, str]]:
    """Topics of Python's manual, and docstrings."""
    import pydoc_data.topics

    yield from sorted(pydoc_data.topics.topics.items())
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        roots += [Path(spec.origin).parent] if spec and spec.origin else []
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if "site-packages" in str(path.relative_to(root)) or "test" in path.parts[-1]:
                continue
            yield from _docstrings(path)


def _docstrings(path: Path) -> Sequence[tuple[str, str]]:
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [(str(path), "\n\n".join(text for text in found if text))]
