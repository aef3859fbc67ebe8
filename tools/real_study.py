"""Held-out loss before and after cleaning: runs of `maxlm corpus`, the choice of held-out documents, training, and the table.

Paths inside are relative to the folder of the study, so that ids of documents, and the choice by their hash, are the same anywhere.
"""

import hashlib
import heapq
import io
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ROOT = Path(__file__).resolve().parent.parent
BEFORE, AFTER = "raw", "clean"
RECORD_BYTES = 64 * 2**20  # the largest dictionaries are documents of 40 MB
CLEANING: dict[str, Any] = {
    "filters": {
        "length": {"min_words": 5},
        "language": {},
        "gopher_quality": {"min_alphabetic_words": 0.6},  # the published 0.8 takes "*" and "--" of changelogs and "1.2.3" for bad words
        "gopher_repetition": {},
    },
    "deduplicate": {"lines": {"max_documents": 6}},
}
SHARE, LEAST, MOST = 0.01, 100, 0.25  # of a source's documents that are held out: a hundredth or LEAST, at most a quarter
EXCERPT, EVERY, EXCERPTS = 4000, 100_000, 16  # characters of a held-out document that are scored, so that long ones do not count for all
EVAL_BATCHES = 20  # of 2,048 tokens, of each held-out set
TRAIN_BYTES = 16_000_000  # of each source that become tokens, before and after: a run of 500 steps reads 0.3 MB of each
PIECE = 1_000_000  # characters of a document from which it is cut for that choice
TOKENIZER_BYTES = 1_000_000  # of each source, before and after, that the tokenizer is trained on


def corpus_run(folder: Path, name: str, sources: dict[str, list[str]], stages: dict[str, Any]) -> None:
    """`maxlm corpus run` with its output in FOLDER/corpus/NAME."""
    settings = {
        "output": f"corpus/{name}",
        "sources": {source: {"paths": paths} for source, paths in sources.items()},
        "read": {"max_record_bytes": RECORD_BYTES * (2 if name == "copies" else 1)},  # JSON escapes
        "run": {"workers": 2, "task_bytes": 32 * 2**20},
        **stages,
    }
    (folder / "corpus").mkdir(exist_ok=True)
    _write_yaml(folder / f"corpus/{name}.yaml", settings)
    maxlm(folder, "corpus", "run", f"corpus/{name}.yaml")


def clean(folder: Path) -> None:
    """The corpus before cleaning (read, and nothing removed), after cleaning, and the clusters of copies before cleaning."""
    sources = {path.name: [f"raw/{path.name}"] for path in sorted((folder / "raw").iterdir()) if path.is_dir()}
    corpus_run(folder, BEFORE, sources, {})
    corpus_run(folder, AFTER, sources, CLEANING)
    corpus_run(folder, "copies", {"raw": [f"corpus/{BEFORE}/documents"]}, {"deduplicate": {}})


def maxlm(folder: Path, *arguments: str) -> None:
    """Run a command of maxlm in `folder`. Ends the program if it fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    print("maxlm", *arguments, flush=True)
    done = subprocess.run([sys.executable, "-m", "maxlm", *arguments], cwd=folder, env=environment)
    if done.returncode:
        raise SystemExit(done.returncode)


def split(folder: Path) -> None:
    """Write FOLDER/text/{train,held}-{raw,clean}/SOURCE.jsonl.zst. No cluster of copies is on both sides."""
    clusters = _clusters(folder)
    limits = _limits(folder)
    facts: dict[str, Counter[str]] = {}
    sizes = {state: _bytes_left(folder, state) for state in (BEFORE, AFTER)}
    for state in (BEFORE, AFTER):
        writer, held = _Writer(folder / "text", state), dict[str, dict[str, Any]]()
        for record in _documents(folder / "corpus" / state / "documents"):
            source, cluster = source_of(record["id"]), clusters.get(record["id"], record["id"])
            of_source = facts.setdefault(f"{state} {source}", Counter())
            of_source.update(documents=1, bytes=len(record["text"].encode()))
            if _rank(cluster) >= limits[source_of(cluster)]:
                of_source.update(train_documents=1)
                for number, piece in enumerate(_pieces(record["text"])):
                    if _rank(f"{record['id']}?{number}") * sizes[state][source] < TRAIN_BYTES:
                        writer.write("train", source, piece)
                        of_source["train_bytes"] += len(piece.encode())
            elif source_of(cluster) == source and (cluster == record["id"] or cluster not in held):  # one of each cluster
                held[cluster] = {"source": source, "texts": excerpts(record["text"], cluster)}
        for cluster in sorted(held, key=_rank):
            one = held[cluster]
            facts[f"{state} {one['source']}"]["held_documents"] += 1
            for text in one["texts"]:
                writer.write("held", one["source"], text)
                facts[f"{state} {one['source']}"]["held_bytes"] += len(text.encode())
        writer.close()
    (folder / "text/facts.json").write_text(json.dumps(facts, indent=1, sort_keys=True))


def excerpts(text: str, key: str) -> list[str]:
    """EXCERPT characters of each EVERY of a text, up to EXCERPTS times, each from a line that a hash of `key` chooses."""
    parts = max(1, min(len(text) // EVERY, EXCERPTS))
    length = len(text) // parts
    if length <= EXCERPT:
        return [text]
    found = []
    for part in range(parts):
        start = part * length + int(_rank(f"{key}!{part}") * (length - EXCERPT))
        start = text.find("\n", start, start + EXCERPT // 4) + 1 or start
        found.append(text[start : start + EXCERPT])
    return found


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


def source_of(id: str) -> str:
    """raw/SOURCE/FILE#NUMBER -> SOURCE"""
    return id.split("/")[1]


def _rank(text: str) -> float:
    """A hash in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:6]) / 2**48


def _limits(folder: Path) -> dict[str, float]:
    """Share of each source's clusters that are held out."""
    report = json.loads((folder / f"corpus/{BEFORE}/report.json").read_text())
    return {source: min(max(SHARE, LEAST / count), MOST) for source, (count, _) in report["passes"][-1]["left"].items()}


def _bytes_left(folder: Path, state: str) -> dict[str, int]:
    report = json.loads((folder / f"corpus/{state}/report.json").read_text())
    return {source: size for source, (_, size) in report["passes"][-1]["left"].items()}


def _clusters(folder: Path) -> dict[str, str]:
    """Document that is a copy -> the document that stands for its cluster."""
    where: dict[str, str] = {}
    for path in sorted((folder / f"corpus/{BEFORE}/documents").glob("*.zst")):
        for number, line in enumerate(read_lines(path), 1):
            where[f"{path.name}#{number}"] = json.loads(line)["id"]
    removed = (
        json.loads(line) for path in sorted((folder / "corpus/copies/removed/deduplicate").glob("*.zst")) for line in read_lines(path)
    )
    return {where[Path(one["id"]).name]: where[Path(one["detail"]["cluster"]).name] for one in removed}


def _documents(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.zst")):
        for line in read_lines(path):
            yield json.loads(line)


def read_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file compressed with zstd."""
    with zstd.open(path, "rb") as file:
        yield from io.BufferedReader(file, 1 << 20)


class _Writer:
    """Texts by split and source."""

    def __init__(self, folder: Path, state: str) -> None:
        self.folder, self.state = folder, state
        self.files: dict[Path, Any] = {}

    def write(self, part: str, source: str, text: str) -> None:
        path = self.folder / f"{part}-{self.state}" / f"{source}.jsonl.zst"
        if path not in self.files:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.files[path] = zstd.open(path, "wb", level=1)
        self.files[path].write(json.dumps({"text": text}).encode() + b"\n")

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def train(folder: Path, steps: int, seeds: int) -> None:
    """Token stores of every source, and the quickstart's model on each corpus, with the same share of each source."""
    sources = sorted(path.name.removesuffix(".jsonl.zst") for path in (folder / f"text/train-{AFTER}").glob("*.zst"))
    _train_tokenizer(folder, sources)
    for state in (BEFORE, AFTER):
        for part in ("train", "held"):
            for source in sources:
                _prepare(folder, f"{part}-{state}", source)
    held = {
        f"{state}_{source.replace('-', '_')}": f"stores/held-{state}/{source}"
        for state in (BEFORE, AFTER)
        for source in sources
        if _held_out_tokens(folder / f"stores/held-{state}/{source}")
    }
    for seed in range(seeds):
        for state in (BEFORE, AFTER):
            config = {
                "extends": "runs/quickstart",
                "data": {
                    "store": None,
                    "prepare": None,
                    "mixture": {"sources": {source: {"store": f"stores/train-{state}/{source}", "weight": 1.0} for source in sources}},
                    "eval": held,
                },
                "train": {"steps": steps, "seed": seed, "eval_every": steps, "eval_batches": EVAL_BATCHES},
                "samples": {"prompts": ["NAME\n"]},
            }
            _write_yaml(folder / f"{state}-{seed}.yml", config)
            if not (folder / f"runs/{state}-{seed}/checkpoints/{steps}").exists():
                maxlm(folder, "train", f"{state}-{seed}.yml")


def _held_out_tokens(store: Path) -> int:
    """0 for a store that is missing, too: `data prepare` leaves the only document of a source to training."""
    return json.loads((store / "store.json").read_text())["splits"]["eval"]["tokens"] if store.exists() else 0


def _train_tokenizer(folder: Path, sources: list[str]) -> None:
    """One for both corpora, from as many bytes of each source before and after."""
    sample = folder / "text/tokenizer.jsonl"
    if not sample.exists():
        lines = []
        for state in (BEFORE, AFTER):
            for source in sources:
                texts = (
                    (_rank(line[:1000].decode("latin-1")), line) for line in read_lines(folder / f"text/train-{state}/{source}.jsonl.zst")
                )
                size = 0
                for _, line in heapq.nsmallest(2000, texts):
                    text = json.loads(line)["text"][: 5 * EXCERPT]
                    if size < TOKENIZER_BYTES:
                        lines.append(json.dumps({"text": text}))
                        size += len(text.encode())
        sample.write_text("\n".join(lines) + "\n")
    prepare = {"sources": [str(sample.relative_to(folder))], "tokenizer": {"vocab_size": 2048, "train_bytes": 10**8}}
    _write_yaml(folder / "tokenizer.yml", {"extends": "runs/quickstart", "data": {"store": "stores/tokenizer", "prepare": prepare}})
    maxlm(folder, "data", "prepare", "tokenizer.yml")


def _prepare(folder: Path, part: str, source: str) -> None:
    text = f"text/{part}/{source}.jsonl.zst"
    if not (folder / text).exists():
        return
    prepare = {
        "sources": [text],
        "eval_fraction": 0.9999999 if part.startswith("held") else 0.005,  # training asks for held-out documents of its own, too
        # Sizes at their defaults: nothing is trained.
        "tokenizer": {"path": "stores/tokenizer/tokenizer.json", "vocab_size": 4096, "train_bytes": 10**8},
    }
    _write_yaml(folder / "prepare.yml", {"extends": "runs/quickstart", "data": {"store": f"stores/{part}/{source}", "prepare": prepare}})
    maxlm(folder, "data", "prepare", "prepare.yml")


def _write_yaml(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))  # JSON is YAML


def losses(run: Path) -> dict[str, float]:
    """Last held-out loss of each set of a run, nats a token."""
    found: dict[str, float] = {}
    for line in (run / "events.jsonl").read_text().splitlines():
        found |= {key.removeprefix("eval_loss/"): value for key, value in json.loads(line).items() if key.startswith("eval_loss/")}
    if not found:
        raise SystemExit(f"{run}: its events.jsonl has no held-out loss; run `python tools/real_corpus.py train FOLDER` first")
    return found


def bits_per_byte(folder: Path, state: str, source: str, loss: float) -> float:
    """Loss in nats a token -> bits a byte, by the tokens and bytes of the held-out store."""
    facts = json.loads((folder / "text/facts.json").read_text())[f"{state} {source}"]
    store = json.loads((folder / f"stores/held-{state}/{source}/store.json").read_text())
    tokens = sum(size["tokens"] for size in store["splits"].values())  # `data prepare` leaves one document to training
    return loss / math.log(2) * tokens / facts["held_bytes"]
