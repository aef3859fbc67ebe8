"""Measure what the stages of a corpus find in real text with planted cases: precision and recall by kind.

    python tools/corpus_quality.py                         every measure
    python tools/corpus_quality.py encodings languages     some of them

The real text is of Debian packages (`package_files` of tools/corpora/quality.py), downloaded into --folder once. A measure is a function
`measure(folder, seed) -> Iterable[Row]` in a module of its own under tools/corpora, and an entry of MEASURES below: `folder` holds the
downloads, `seed` decides what is planted, and a Row counts one kind of case. Exit code 1 if a row is below what it asks for.
"""

import argparse
import importlib
import importlib.metadata
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from corpora.quality import Row, table

MEASURES = {  # name -> module of tools/corpora that has `measure`
    "encodings": "quality_encodings",
    "languages": "quality_languages",
    "decontamination": "quality_decontamination",
    "masking": "quality_masking",
}
PACKAGES = ("chardet", "ftfy", "resiliparse", "py3langid", "datatrove")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"of {', '.join(MEASURES)}; none: all")
    parser.add_argument("--folder", type=Path, help="of downloaded packages, kept; without it a temporary one")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if unknown := set(arguments.measures) - set(MEASURES):
        parser.error(f"no such measure: {', '.join(sorted(unknown))}; there are {', '.join(MEASURES)}")
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {_versions()}; seed {arguments.seed}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="corpus-quality-") as temporary:
        folder = arguments.folder or Path(temporary)
        good = [_measured(name, folder, arguments.seed) for name in MEASURES if not arguments.measures or name in arguments.measures]
    sys.exit(not all(good))


def _measured(name: str, folder: Path, seed: int) -> bool:
    """Print the table of one measure; False if a row is below what it asks for."""
    began = time.monotonic()
    measure: Callable[[Path, int], Iterable[Row]] = importlib.import_module(f"corpora.{MEASURES[name]}").measure
    rows = list(measure(folder, seed))
    print(f"{table(name, rows)}\n{time.monotonic() - began:.0f} s\n", flush=True)
    return all(row.good for row in rows)


def _versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    main()
