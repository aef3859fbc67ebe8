"""A real corpus of at least 1 GB from packages: documentation in 40 languages, changelogs, manual pages, dictionaries.

    python tools/real_corpus.py all FOLDER            the steps below, those that are done left out
    python tools/real_corpus.py fetch FOLDER          packages -> FOLDER/download, raw text -> FOLDER/raw, FOLDER/manifest.json
    python tools/real_corpus.py clean FOLDER          FOLDER/corpus: read only, cleaned, and clusters of copies
    python tools/real_corpus.py split FOLDER          FOLDER/text: training and held-out texts of each source, before and after
    python tools/real_corpus.py train FOLDER          FOLDER/stores, FOLDER/runs: the quickstart on either, with equal tokens
    python tools/real_corpus.py table FOLDER          the tables of docs/data_real.md

Needs apt-get (`apt-get update` run before), dpkg-deb, pip and npm, and 8 GB of disk. 1.5 GB of packages give 1.5 GB of text.
"""

import json
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import real_study
import real_table
import typer
from real_packages import Package, digest, fetch, licence, members
from real_sources import Sources
from ruamel.yaml import YAML

LIST = Path(__file__).parent / "corpora" / "packages.yaml"
KINDS = ("debian", "python", "npm")
app = typer.Typer(add_completion=False, help=__doc__)


@app.command("fetch")
def fetch_corpus(folder: Path, only: Annotated[str, typer.Option(help="Groups, with commas between them.")] = "") -> None:
    """Fetch the packages of tools/corpora/packages.yaml and write their text to FOLDER/raw/SOURCE."""
    groups = YAML(typ="safe").load(LIST.read_text())["groups"]
    chosen = {name: group for name, group in groups.items() if not only or name in only.split(",")}
    mandoc = _mandoc(folder / "bin")
    shutil.rmtree(folder / "raw", ignore_errors=True)
    sources = Sources(folder / "raw", mandoc)
    packages: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    seen: set[str] = set()
    for name, group in chosen.items():
        began = time.monotonic()
        for kind in KINDS:
            fetched = fetch(kind, [one for one in group.get(kind, "").split() if f"{kind}:{one}" not in seen], folder / "download" / kind)
            missing |= {f"{kind}:{one}": answer for one, answer in fetched.missing.items()}
            for package in fetched.packages:
                seen.add(package.url)
                packages.append(_unpack(package, group, sources))
        print(f"{name}: {time.monotonic() - began:.0f} s, {sum(sources.bytes.values()) / 1e6:.0f} MB of raw text in all", flush=True)
    sources.close()
    _write_manifest(folder, packages, missing, sources)


@app.command("clean")
def clean_corpus(folder: Path) -> None:
    """Run `maxlm corpus run` on FOLDER/raw: without stages, with all of them, and for copies alone."""
    real_study.clean(folder)


@app.command("split")
def split_corpus(folder: Path) -> None:
    """Choose held-out documents by a hash of their cluster of copies, and write the texts of either side."""
    real_study.split(folder)


@app.command("train")
def train_models(
    folder: Path,
    steps: Annotated[int, typer.Option(help="Updates of 2,048 tokens.")] = 500,
    seeds: Annotated[int, typer.Option(help="Pairs of runs.")] = 2,
) -> None:
    """Prepare token stores and train the quickstart on the corpus before and after cleaning."""
    real_study.train(folder, steps, seeds)


@app.command("table")
def show_tables(folder: Path) -> None:
    """Print the tables."""
    print(real_table.tables(folder))


@app.command("all")
def run_all(folder: Path) -> None:
    """Every step that is not done yet."""
    if not (folder / "manifest.json").exists():
        fetch_corpus(folder)
    real_study.clean(folder)  # `maxlm corpus run` itself leaves out what is done, as `data prepare` and `train` do
    if not (folder / "text/facts.json").exists():
        real_study.split(folder)
    train_models(folder)
    show_tables(folder)


def _mandoc(folder: Path) -> Path:
    """The program that shows manual pages, from its package."""
    program = folder / "usr/bin/mandoc"
    if not program.exists():
        (package,) = fetch("debian", ["mandoc"], folder).packages
        subprocess.run(["dpkg-deb", "-x", str(package.file), str(folder)], check=True)
    return program


def _unpack(package: Package, group: dict[str, str], sources: Sources) -> dict[str, Any]:
    stated = None
    for path, content in members(package):
        stated = licence(path, content) if path.endswith(("/copyright", "PKG-INFO", "package/package.json")) else None
        if stated is not None:
            break
    for path, content in members(package):
        sources.add(package, path, content, group, stated)
    return {
        "kind": package.kind,
        "name": package.name,
        "version": package.version,
        "bytes": package.file.stat().st_size,
        "sha256": digest(package.file),
        "licence": stated,
        "sources": {
            source: {"files": count, "bytes": sources.bytes[source, url]}
            for (source, url), count in sorted(sources.files.items())
            if url == package.url
        },
    }


def _write_manifest(folder: Path, packages: list[dict[str, Any]], missing: dict[str, str], sources: Sources) -> None:
    files, size = Counter[str](), Counter[str]()
    for (source, _), count in sources.files.items():
        files[source] += count
    for (source, _), count in sources.bytes.items():
        size[source] += count
    totals = {source: {"files": files[source], "bytes": size[source]} for source in sorted(files)}
    manifest = {"packages": packages, "missing": missing, "sources": totals, "not_shown": dict(sources.failed)}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False))
    for source, total in totals.items():
        print(f"{source:18} {total['files']:8,} files {total['bytes'] / 1e6:10.1f} MB")
    print(
        f"{'all':18} {sum(files.values()):8,} files {sum(size.values()) / 1e6:10.1f} MB, {len(packages)} packages, {len(missing)} missing"
    )


if __name__ == "__main__":
    app()
