"""Speed and memory of `maxlm corpus run`, beside datatrove's on the same text.

    python tools/bench_corpus.py [--megabytes 40] [--rounds 3] [--source PATH ...] [--parts PART,...] [--datatrove PYTHON]

speed      JSON lines in zstd through the engine: read, language and all published quality rules, clean documents and removed ones written,
           MinHash signatures; then each filter by itself. CPU seconds (user and system) of one worker, the best of the rounds.
memory     peak resident memory of whole runs, clustering included, on two sizes of the same kind of text.
substrings the same of runs that only look for repeated substrings.
cluster    a million documents' signatures, some of them copies: seconds and peak memory of the clustering.
datatrove  the same file, rules, thresholds and MinHash parameters through datatrove, with spaCy's words as it asks for them by default and
           with words by a regular expression. PYTHON has datatrove: `pip install 'datatrove>=0.10' 'xxhash<4' nltk orjson spacy zstandard`.

Two corpora are made in a temporary folder: prose drawn from a seed (words by Zipf's law, documents of log-normal length), which passes all
filters, and real text: docstrings of Python's library and of the installed packages, a document a module (or what maxlm.documents finds
at --source), most of which the rules remove. Megabytes (10^6 bytes) are of text as UTF-8. Every measurement is a process of its own, warmed
up with a small file first: loading and compiling are reported apart. Exit code 1 if a goal is missed.
"""

import ast
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import numpy as np
import orjson
import typer
from rich.console import Console
from rich.table import Table

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

GOAL_SPEED, GOAL_CLUSTER, GOAL_MEMORY = 20.0, 60.0, 1000.0  # MB/s of a core, seconds, MB
DOMAINS = 100_000
RULES = ("urls", "length", "language", "boilerplate", "c4", "gopher_quality", "gopher_repetition", "fineweb")
SHARED = ("c4", "gopher_quality", "gopher_repetition", "fineweb")  # rules that datatrove has, too
MINHASH = {"ngram": 5, "bands": 20, "rows": 8}
COPIES = 0.05, 0.15  # shares of exact copies, and of these and near copies, among the documents to cluster
WORDS = 200  # of a document to cluster
DATATROVE = Path(__file__).with_name("bench_corpus_datatrove.py")


def prose(megabytes: float, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Names and texts: sentences of 5 to 30 words of Python's documentation, drawn by Zipf's law."""
    rng, words = np.random.default_rng(seed), vocabulary()
    size, number = 0, 0
    while size < megabytes * 1e6:
        drawn = words[np.minimum(rng.zipf(1.2, int(rng.lognormal(6.0, 1.0)) + 60), len(words)) - 1]
        ends = np.cumsum(rng.integers(5, 30, len(drawn)))
        sentences = [" ".join(part).capitalize() + "." for part in np.split(drawn, ends[ends < len(drawn) - 5])]
        lines = [" ".join(sentences[start : start + 4]) for start in range(0, len(sentences), 4)]
        text = "\n\n".join(lines)
        yield f"prose {number}", text
        size, number = size + len(text.encode()), number + 1


def vocabulary() -> np.ndarray:
    """Words, the most frequent first."""
    known = sorted({word.strip(".,;:()").lower() for text in topics.values() for word in text.split()})
    return np.array(["the", "of", "and", "to", "that", "with", *(word for word in known if word.isalpha() and len(word) < 15)])


def docstrings() -> Iterator[tuple[str, str]]:
    """Names and texts: the docstrings of each module of Python's library and of the installed packages."""
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    for path in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        try:
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        except (SyntaxError, ValueError, RecursionError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        found = [text for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]
        if found:
            yield path.name, "\n\n".join(found).encode("utf-8", "replace").decode()


def given(sources: list[str]) -> Iterator[tuple[str, str]]:
    """Names and texts of the documents at `sources`."""
    from maxlm.corpus.document import Document
    from maxlm.corpus.files import read
    from maxlm.documents.files import find_once

    for file in find_once(sources):
        yield from ((found.id, found.text) for found in read(file.path) if isinstance(found, Document))


def write_corpus(texts: Iterable[tuple[str, str]], path: Path, megabytes: float) -> None:
    """JSON lines with text, name and URL, up to about `megabytes` of text; longer ones are cut at 100,000 characters."""
    size, rng = 0, random.Random(0)
    with zstd.ZstdFile(path, "w", level=3) as file:
        for name, text in texts:
            text = text[:100_000]
            url = f"https://www.site{rng.randrange(10**6)}.example.org/{len(text)}/page.html"
            file.write(orjson.dumps({"text": text, "name": name, "url": url, "score": rng.random()}) + b"\n")
            size += len(text.encode())
            if size >= megabytes * 1e6:
                return


def sections(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """These filters with their published thresholds."""
    listed = folder / "domains.txt"
    if not listed.exists():
        listed.write_text("\n".join(f"blocked{number}.example.com" for number in range(DOMAINS)), encoding="utf-8")
    return {name: {"domain_files": [str(listed)]} if name == "urls" else {} for name in names}


def in_process(program: list[str], *arguments: Any) -> dict[str, Any]:
    """JSON that a program prints in its last line; with `peak`, its largest resident memory in MB, and `user`, its CPU seconds."""
    command = [*program, json.dumps(arguments, default=str)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"bench_corpus: {' '.join(program)} ended with {process.returncode}: {errors.read()[-2000:]}")
    scale = 1024 if sys.platform == "linux" else 1
    return {**json.loads(output.splitlines()[-1]), "peak": usage.ru_maxrss * scale / 1e6, "user": usage.ru_utime + usage.ru_stime}


def child(kind: str, *arguments: Any) -> dict[str, Any]:
    """Run one of CHILDREN in a process of its own."""
    return in_process([sys.executable, __file__, "--child", kind], *arguments)


def run_corpus(paths: list[str], small: str | None, settings: dict[str, Any], folder: str, rounds: int) -> dict[str, Any]:
    """Run the engine on `paths`, `rounds` times; CPU and wall seconds of each pass (best of the rounds), and bytes of text in and left.

    `small`: a file for a first run, whose seconds are `start`: importing, loading what is compiled, or compiling it.
    """
    begin = time.process_time()
    from maxlm.corpus import engine
    from maxlm.corpus.engine import Plan
    from maxlm.corpus.executors.local import LocalExecutor
    from maxlm.corpus.settings import CorpusSettings
    from maxlm.corpus.tasks import Task

    class Measured(LocalExecutor):
        """Notes the seconds of each part."""

        def __init__(self) -> None:
            super().__init__(1, lambda _: None)
            self.cpu: dict[str, float] = {}
            self.wall: dict[str, float] = {}

        def note(self, name: str, cpu: float, wall: float) -> None:
            self.cpu[name], self.wall[name] = time.process_time() - cpu, time.perf_counter() - wall

        def run_tasks(self, plan: Plan, number: int, tasks: list[Task]) -> None:
            start = time.process_time(), time.perf_counter()
            super().run_tasks(plan, number, tasks)
            self.note(plan.names[number], *start)

        def combine(self, plan: Plan, number: int) -> None:
            start = time.process_time(), time.perf_counter()
            super().combine(plan, number)
            self.note(f"search before {plan.names[number]}", *start)

    def once(files: list[str], number: int) -> tuple[Measured, dict[str, Any]]:
        output = str(Path(folder) / f"run {os.getpid()} {number}")
        values = {"output": output, "sources": {"text": {"paths": files}}, **settings}
        executor = Measured()
        report = engine.run(engine.make_plan(CorpusSettings.model_validate(values)), executor)
        return executor, report

    if small is not None:
        once([small], -1)
    started = time.process_time() - begin
    runs = [once(paths, number) for number in range(rounds)]
    first = runs[0][1]["passes"][0]
    best = {name: [min(getattr(run, kind)[name] for run, _ in runs) for kind in ("cpu", "wall")] for name in runs[0][0].cpu}
    came = [sum(value[part] for value in first["came"].values()) for part in (0, 1)]
    return {"passes": best, "start": started, "documents": came[0], "bytes": came[1], "left": first["bytes"], "kept": first["documents"]}


def make_signatures(folder: str, documents: int, files: int) -> dict[str, Any]:
    """Signatures of documents of WORDS words, of which COPIES are copies of others, in `files` files."""
    from maxlm.corpus.dedup.settings import DedupSettings
    from maxlm.corpus.dedup.signatures import write_signatures
    from maxlm.corpus.document import Document

    rng, words, settings = np.random.default_rng(0), vocabulary(), DedupSettings.model_validate({"minhash": MINHASH})
    originals: list[np.ndarray] = []

    def drawn(start: int, end: int) -> Iterator[Document]:
        for number in range(start, end):
            kind = rng.random()
            if kind < COPIES[1] and originals:
                chosen = originals[rng.integers(len(originals))].copy()
                if kind > COPIES[0]:
                    chosen[rng.integers(len(chosen), size=2)] = rng.integers(len(words), size=2)
            else:
                chosen = rng.integers(len(words), size=WORDS)
                if len(originals) < documents // 20:
                    originals.append(chosen)
            yield Document(f"documents#{number}", " ".join(words[chosen]))

    begin = time.process_time()
    for file in range(files):
        bounds = documents * file // files, documents * (file + 1) // files
        write_signatures(drawn(*bounds), Path(folder) / f"{file:03}.parquet", settings)
    return {"seconds": time.process_time() - begin}


def cluster_signatures(folder: str) -> dict[str, Any]:
    """Cluster the signatures in `folder`."""
    from maxlm.corpus.dedup.clusters import cluster
    from maxlm.corpus.dedup.settings import DedupSettings

    settings = DedupSettings.model_validate({"minhash": MINHASH})
    begin, cpu = time.perf_counter(), time.process_time()
    cluster(sorted(Path(folder).glob("*.parquet")), Path(folder) / "copies.result", settings, work=Path(folder) / "work", threads=2)
    return {"wall": time.perf_counter() - begin, "cpu": time.process_time() - cpu}


CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {"run": run_corpus, "signatures": make_signatures, "cluster": cluster_signatures}


class Bench:
    """The measurements, and the goals that they missed."""

    def __init__(self, folder: Path, megabytes: float, rounds: int) -> None:
        self.folder, self.megabytes, self.rounds, self.console = folder, megabytes, rounds, Console(width=140)
        self.missed: list[str] = []
        self.small = folder / "small.jsonl.zst"
        write_corpus(prose(0.3, seed=9), self.small, 0.3)

    def run(self, paths: list[Path], settings: dict[str, Any], rounds: int | None = None, *, warm: bool = True) -> dict[str, Any]:
        """run_corpus() in a process of its own."""
        return child("run", paths, self.small if warm else None, settings, self.folder, rounds or self.rounds)

    def speed(self, label: str, path: Path) -> None:
        """All filters and signatures together, then each alone."""
        whole = self.run([path], {"filters": sections(self.folder, RULES), "deduplicate": {"minhash": MINHASH}})
        size = whole["bytes"] / 1e6
        title = f"{label}: {whole['documents']:,} documents, {size:.1f} MB, {whole['kept']:,} kept by the filters"
        table = Table("through the engine, one worker", "CPU s", "MB/s", "s more than without filter", title=title)
        plain = self.run([path], {"filters": None})["passes"]["filter"][0]
        table.add_row("no filter: read, write", f"{plain:.2f}", f"{size / plain:.1f}", "")
        for name in RULES:
            seconds = self.run([path], {"filters": sections(self.folder, [name])})["passes"]["filter"][0]
            table.add_row(f"{name} alone", f"{seconds:.2f}", f"{size / seconds:.1f}", f"{seconds - plain:.2f}")
        seconds = self.run([path], {"deduplicate": {"minhash": MINHASH}})["passes"]["filter"][0]
        table.add_row("signatures of all documents, no filter", f"{seconds:.2f}", f"{size / seconds:.1f}", f"{seconds - plain:.2f}")
        seconds = whole["passes"]["filter"][0]
        table.add_row("all filters and signatures", f"{seconds:.2f}", f"{size / seconds:.1f}", f"{seconds - plain:.2f}", style="bold")
        every = sum(cpu for cpu, _ in whole["passes"].values())
        table.add_row("the same with clustering and the second pass", f"{every:.2f}", f"{size / every:.1f}", "")
        self.console.print(table)
        if size / seconds < GOAL_SPEED:
            self.missed.append(f"{label}: {size / seconds:.1f} MB/s, and the goal is {GOAL_SPEED:.0f}")

    def first_use(self) -> None:
        """Seconds of a process that has to compile."""
        os.environ["NUMBA_CACHE_DIR"] = str(self.folder / "compiled")
        settings = {"filters": sections(self.folder, RULES), "deduplicate": {"minhash": MINHASH}}
        start = [self.run([self.small], settings, 1)["start"] for _ in range(2)]
        del os.environ["NUMBA_CACHE_DIR"]
        self.console.print(
            f"start of the first process on a machine, which compiles: {start[0]:.1f} CPU s; of the next: {start[1]:.1f} CPU s"
        )

    def memory(self, title: str, settings: dict[str, Any]) -> None:
        """Peak memory at two sizes."""
        table = Table("text, MB", "documents", "peak resident MB", "CPU s", "wall s", title=title)
        paths: list[Path] = []
        for times in (1, 4):
            while len(paths) < times:
                paths.append(self.folder / f"part{len(paths)}.jsonl.zst")
                write_corpus(prose(self.megabytes, seed=len(paths)), paths[-1], self.megabytes)
            found = self.run(paths, {**settings, "run": {"workers": 1, "task_bytes": 1}}, 1, warm=False)
            sizes = f"{found['bytes'] / 1e6:.0f}", f"{found['documents']:,}", f"{found['peak']:.0f}"
            table.add_row(*sizes, f"{found['user']:.1f}", f"{sum(wall for _, wall in found['passes'].values()):.1f}")
            if found["peak"] > GOAL_MEMORY:
                self.missed.append(f"memory: {found['peak']:.0f} MB, and the goal is {GOAL_MEMORY:.0f}")
        self.console.print(table)

    def cluster(self, documents: int) -> None:
        """Cluster a million documents."""
        folder = self.folder / "signatures"
        folder.mkdir()
        child("signatures", folder, documents, 8)
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        found = child("cluster", folder)
        self.console.print(
            f"clustering of {found['documents']:,} documents ({WORDS} words each, {size:.0f} MB of signatures, 2 threads): "
            f"{found['wall']:.1f} s, {found['cpu']:.1f} CPU s, peak {found['peak']:.0f} MB; {found['exact']:,} exact and {found['near']:,} "
            f"near copies in {found['clusters']:,} clusters, {found['candidates']:,} candidate pairs"
        )
        if found["wall"] > GOAL_CLUSTER:
            self.missed.append(f"clustering: {found['wall']:.1f} s, and the goal is {GOAL_CLUSTER:.0f}")
        if found["peak"] > GOAL_MEMORY:
            self.missed.append(f"clustering: {found['peak']:.0f} MB, and the goal is {GOAL_MEMORY:.0f}")

    def datatrove(self, label: str, path: Path, python: str) -> None:
        """Equal rules and parameters, without language identification: datatrove downloads its model."""
        ours = self.run([path], {"filters": sections(self.folder, SHARED), "deduplicate": {"minhash": MINHASH}})
        size, seconds = ours["bytes"] / 1e6, ours["passes"]["filter"][0]
        kept = f"{ours['kept'] / ours['documents']:.1%}"
        table = Table("read, C4, Gopher, FineWeb, write, signatures", "CPU s", "MB/s", "kept", title=f"{label}: {size:.1f} MB")
        table.add_row("maxlm", f"{seconds:.2f}", f"{size / seconds:.1f}", kept)
        for words in ("regex", "spacy"):
            work = self.folder / f"datatrove {words} {label}"
            found = in_process([python, str(DATATROVE)], path, work, words, MINHASH)
            table.add_row(
                f"datatrove {found['version']}, words by {words}",
                f"{found['cpu']:.2f}",
                f"{size / found['cpu']:.2f}",
                f"{found['kept'] / found['documents']:.1%}",
            )
        self.console.print(table)


def main(
    megabytes: Annotated[float, typer.Option(help="Of text in each corpus.")] = 40.0,
    rounds: int = 3,
    source: Annotated[list[str] | None, typer.Option(help="Real text instead of docstrings.")] = None,
    parts: str = "speed,memory,substrings,cluster",
    datatrove: Annotated[str | None, typer.Option(help="A Python that has datatrove; adds the part.")] = None,
    documents: Annotated[int, typer.Option(help="To cluster.")] = 1_000_000,
) -> None:
    """Measure; exit with 1 if a goal is missed."""
    wanted = {*parts.split(","), *(["datatrove"] if datatrove else [])}
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), megabytes, rounds)
        corpora = {"prose": prose(megabytes), "real text": given(source) if source else docstrings()}
        for label, texts in corpora.items() if wanted & {"speed", "datatrove"} else ():
            path = bench.folder / f"{label.split()[0]}.jsonl.zst"
            write_corpus(texts, path, megabytes)
            if "speed" in wanted:
                bench.speed(label, path)
            if "datatrove" in wanted:
                bench.datatrove(label, path, datatrove or sys.executable)
        if "speed" in wanted:
            bench.first_use()
        if "memory" in wanted:
            rules = {"filters": sections(bench.folder, RULES), "deduplicate": {"minhash": MINHASH}}
            bench.memory("whole runs: filters, signatures, clustering, second pass", rules)
        if "substrings" in wanted:
            bench.memory("repeated substrings", {"deduplicate": {"exact": False, "minhash": None, "substrings": {}}})
        if "cluster" in wanted:
            bench.cluster(documents)
    for line in bench.missed:
        print(f"missed: {line}")
    raise typer.Exit(bool(bench.missed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(CHILDREN[sys.argv[2]](*json.loads(sys.argv[3]))))
    else:
        typer.run(main)
