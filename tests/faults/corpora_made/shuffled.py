"""Shuffled text against real text: what the perplexity filter rejects of the first at 5% of the second, by a model of ours and by KenLM.

The real text is the documentation of Python and of the packages that are installed beside it. Texts of one module are all of one part: the
models are trained on one part, and texts of the other are scored as they are and shuffled. The limit is chosen on one half of these and
the rejected are counted on the other.
"""

import argparse
import ast
import hashlib
import importlib.util
import json
import random
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from corpora_made.ngram_model import write_model
from corpora_made.runs import Row, environment, records, run, save
from maxlm.corpus.filters.perplexity import kenlm_units

PACKAGES = ("numpy", "scipy", "jax", "pyarrow", "duckdb", "matplotlib", "flax", "optax")
FALSE = 0.05  # share of real texts that may be rejected
ANY = 1e6  # bits per byte that no text has
SHUFFLES = ("words of the text", "words of each line")
ORDER = 5  # of KenLM's n-grams
Scores = dict[str, list[float]]  # bits per byte of the real texts, and of each way to shuffle them
MODEL = {
    "extends": "runs/quickstart",
    "data": {"store": "store", "prepare": {"sources": ["train.jsonl"]}},
    "run": {"name": "scorer", "dir": "runs", "log_every": 100},
}


def check_shuffled(folder: Path, options: argparse.Namespace) -> Iterator[list[Row]]:
    """Train the models, score, compare. `options`: documents, seed, steps, lmplz, checkpoint. `folder`: new."""
    folder.mkdir(parents=True)
    train, rest = _parts(_documentation())
    draw = random.Random(options.seed)
    real = draw.sample(sorted(rest), min(options.documents or 4000, len(rest)))
    texts = {"real": real, **{name: [_shuffle(draw, one, by_line=name == SHUFFLES[1]) for one in real] for name in SHUFFLES}}
    for name, some in {"train": train, **texts}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in some))
    sizes = [sum(map(len, some)) / 1e6 for some in (train, real)]
    yield [
        Row("documentation", "", f"{len(train):,} texts ({sizes[0]:.1f} MB) to train on, {len(real):,} ({sizes[1]:.1f} MB) to score", None)
    ]
    if importlib.util.find_spec("kenlm") is None:
        yield [Row("KenLM", "", "left out: pip install kenlm", None)]
        best = 0.0
    else:
        how = _kenlm(folder, train, options.lmplz)
        rows, best = _rows(f"KenLM, {ORDER}-grams of words ({how})", _scored(folder, {"kenlm": "words.arpa"}, texts))
        yield rows
    checkpoint = options.checkpoint or _trained(folder, options.steps)
    rows, ours = _rows("a checkpoint of ours", _scored(folder, {"checkpoint": str(checkpoint)}, texts), asked=True)
    yield rows
    if best and options.lmplz:
        scores = _by_pieces(folder, Path(checkpoint), options.lmplz, train, texts)
        rows, pieces = _rows(f"KenLM, {ORDER}-grams of the pieces of our tokenizer", scores)
        yield rows
        best = max(best, pieces)
    if best:
        yield [Row("shuffled text rejected, ours against the better KenLM", "more", f"{ours:.1%} against {best:.1%}", ours > best)]


def _kenlm(folder: Path, train: list[str], lmplz: str | None) -> str:
    """Write words.arpa; says by what."""
    if lmplz is None:
        write_model(train, folder / "words.arpa", ORDER)
        return "Kneser-Ney by tests/faults/corpora_made/ngram_model.py"
    lines = [kenlm_units(line, characters=False) for text in train for line in text.split("\n")]
    _by_lmplz(folder, lmplz, "words", lines)
    return "lmplz"


def _by_lmplz(folder: Path, lmplz: str, name: str, lines: list[str]) -> None:
    """Train on sentences of units and write `name`.arpa."""
    (folder / f"{name}.txt").write_text("".join(line + "\n" for line in lines if line))
    command = [lmplz, "-o", str(ORDER), "-S", "1G", "-T", str(folder), "--text", f"{name}.txt", "--arpa", f"{name}.arpa"]
    done = subprocess.run(command, cwd=folder, capture_output=True)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-1000:]


def _trained(folder: Path, steps: int) -> Path:
    """Train a model of ours on the same texts; the folder of its run."""
    model = {**MODEL, "train": {"steps": steps, "eval_every": steps}, "checkpoint": {"every_steps": steps}}
    save(folder, model, "scorer.yml")
    for words in (["data", "prepare"], ["train"]):
        done = subprocess.run([sys.executable, "-m", "maxlm", *words, "scorer.yml"], cwd=folder, capture_output=True, env=environment())
        assert done.returncode == 0, done.stderr.decode(errors="replace")[-1000:]
    return folder / "runs" / "scorer"


def _scored(folder: Path, model: dict[str, Any], texts: dict[str, list[str]]) -> Scores:
    """Bits per byte by a run of the perplexity filter that rejects nothing."""
    sources = {kind.replace(" ", "_"): {"paths": [f"{kind}.jsonl"]} for kind in texts}
    filters = {"perplexity": {**model, "max_bits_per_byte": ANY}}
    output = f"scored-{next(iter(model))}"
    ended = run(folder, save(folder, {"sources": sources, "output": output, "filters": filters, "run": {"workers": 1}}))
    assert ended.code == 0, ended.errors
    found = {one["id"]: one["metadata"]["bits_per_byte"] for one in records(folder / output / "documents")}
    return {kind: [found[f"{kind}.jsonl#{number + 1}"] for number in range(len(some))] for kind, some in texts.items()}


def _by_pieces(folder: Path, checkpoint: Path, lmplz: str, train: list[str], texts: dict[str, list[str]]) -> Scores:
    """Bits per byte by KenLM over what our tokenizer gives: each text is a sentence."""
    import kenlm

    from maxlm.corpus.filters.perplexity import BITS_PER_DIGIT
    from maxlm.evaluation.opening import open_model

    model = open_model(checkpoint, []).model

    def pieces(text: str) -> str:
        return " ".join(map(str, model.encode(text)))

    _by_lmplz(folder, lmplz, "pieces", [pieces(text) for text in train])
    grams = kenlm.Model(str(folder / "pieces.arpa"))
    return {kind: [-BITS_PER_DIGIT * grams.score(pieces(one)) / len(one.encode()) for one in some] for kind, some in texts.items()}


def _rows(name: str, scores: Scores, asked: bool = False) -> tuple[list[Row], float]:
    """Rejected of the second half by a limit from the first, and the share of texts with all words shuffled among them."""
    half = len(scores["real"]) // 2
    limit = sorted(scores["real"][:half])[int(half * (1 - FALSE))]
    shares = {kind: sum(not one <= limit for one in some[half:]) / len(some[half:]) for kind, some in scores.items()}
    bits = " and ".join(f"{sum(scores[kind]) / len(scores[kind]):.2f}" for kind in ("real", SHUFFLES[0]))
    found = f"{shares[SHUFFLES[0]]:.1%} at {shares['real']:.1%} ({shares[SHUFFLES[1]]:.1%} shuffled within lines; {bits} bits per byte)"
    good = shares[SHUFFLES[0]] >= 0.95 if asked else None
    return [Row(name, f">= 95% at {FALSE:.0%}" if asked else "", found, good)], shares[SHUFFLES[0]]


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
