"""Check what `maxlm corpus run` finds and leaves, on corpora of known content.

    python tests/faults/corpus_checks.py right       copies, near copies and test items that are found; the same clusters as datatrove
    python tests/faults/corpus_checks.py same        the same bytes for 1, 2 and 7 workers, for Ray, and after kill -9 at random moments
    python tests/faults/corpus_checks.py shuffled    shuffled text that the perplexity filter rejects: a checkpoint of ours against KenLM

Prints a table: what is asked, and what was found. Exit code 1 if anything asked is not reached.
"""

import argparse
import importlib.metadata
import importlib.util
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from corpora_made.against_datatrove import check_same_clusters
from corpora_made.made_corpus import make
from corpora_made.right import check_right
from corpora_made.runs import Row
from corpora_made.same import check_same
from corpora_made.shuffled import check_shuffled

PACKAGES = ("datatrove", "ray", "kenlm", "jax", "pyarrow", "duckdb", "backports.zstd")


def main() -> None:
    arguments = _arguments()
    began = time.monotonic()
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="corpus-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {_versions()}; seed {arguments.seed}", flush=True)
    failed = 0
    for rows in _CHECKS[arguments.check](folder, arguments):
        for row in rows:
            mark = {True: "yes", False: "NO", None: ""}[row.good]
            print(f"{row.name:<60} {row.asked:<20} {mark:<4} {row.found}", flush=True)
            failed += row.good is False
    print(f"{time.monotonic() - began:.0f} s; {'all is reached' if not failed else f'{failed} not reached; files in {folder}'}")
    if not failed and arguments.folder is None:
        shutil.rmtree(folder)
    sys.exit(failed > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=_CHECKS)
    parser.add_argument("--documents", type=int, help="of the made corpus (right: 12,000; same: 2,500), or real texts to score (4,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="new or empty; kept. Without it a temporary one, removed if all is reached")
    has_datatrove = all(importlib.util.find_spec(name) for name in ("datatrove", "regex"))
    parser.add_argument("--datatrove", default=sys.executable if has_datatrove else None, help="a Python that has datatrove, for `right`")
    parser.add_argument("--kills", type=int, default=20, help="of each kind, for `same`")
    parser.add_argument("--lmplz", default=shutil.which("lmplz"), help="KenLM's program that trains, for `shuffled`")
    parser.add_argument("--steps", type=int, default=1500, help="for which the model of `shuffled` is trained")
    parser.add_argument("--checkpoint", help="run or model of ours instead of one trained by `shuffled`")
    return parser.parse_args()


def _versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _right(folder: Path, arguments: argparse.Namespace) -> Iterator[list[Row]]:
    corpus = make(folder / "made", arguments.seed, arguments.documents or 12_000)
    formats = sorted({one.format.partition(".")[0] for one in corpus.written.values()})
    yield [Row("made corpus", "", f"{len(corpus.documents):,} documents in {', '.join(formats)}", None)]
    yield check_right(folder / "made", corpus)
    yield check_same_clusters(folder / "datatrove", arguments.datatrove, arguments.seed, 6000)


def _same(folder: Path, arguments: argparse.Namespace) -> Iterator[list[Row]]:
    corpus = make(folder / "made", arguments.seed, arguments.documents or 2500)
    yield check_same(folder / "made", corpus, arguments.kills, arguments.seed)


def _shuffled(folder: Path, arguments: argparse.Namespace) -> Iterator[list[Row]]:
    yield from check_shuffled(folder / "shuffled", arguments)


_CHECKS: dict[str, Callable[[Path, argparse.Namespace], Iterator[list[Row]]]] = {"right": _right, "same": _same, "shuffled": _shuffled}

if __name__ == "__main__":
    main()
