"""The same bytes for any number of workers, and after kills at random moments; nothing is lost and nothing is there twice."""

import importlib.util
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

from corpora_made.made_corpus import Corpus
from corpora_made.right import settings, write_items
from corpora_made.runs import Row, digest, records, run, save, start

WORKERS = (1, 2, 7)
KINDS = ("the whole group", "one worker", "the parent alone")
LIMIT = 600.0  # seconds of a run
FILTERS = {"length": {"min_words": 40}, "boilerplate": {}, "gopher_repetition": {}, "personal_data": {}}
LINES = {"lines": {"max_documents": 3}, "paragraphs": {"max_documents": 3}, "substrings": {"min_words": 20}}


def check_same(folder: Path, corpus: Corpus, kills: int, seed: int) -> list[Row]:
    """Run the made corpus in `folder` again and again with all stages. `kills`: of each kind."""
    write_items(folder / "exam.jsonl", corpus.items)
    save(folder, settings("-", filters=FILTERS, deduplicate=LINES))
    digests, seconds = {}, 0.0
    for workers in WORKERS:
        output = f"workers{workers}"
        ended = run(folder, "corpus.yaml", f"output={output}", f"run.workers={workers}")
        if ended.code:
            return [Row(f"run with {workers} workers", "exit code 0", f"{ended.code}: {ended.last}", False)]
        digests[workers] = digest(folder / output)
        seconds = ended.seconds if workers == 2 else seconds
    first = digests[WORKERS[0]]
    same = all(one == first for one in digests.values())
    rows = [
        Row(
            f"same bytes for {', '.join(map(str, WORKERS))} workers",
            "equal",
            f"{'equal' if same else 'not equal'}, {len(first)} files",
            same,
        )
    ]
    rows.append(_complete("  each document once", corpus, folder / f"workers{WORKERS[0]}"))
    rows.append(_by_ray(folder, first))
    draw = random.Random(seed)
    for kind in KINDS:
        rows += _killed(folder, kind, kills, seconds, draw, first)
    return rows


def _by_ray(folder: Path, expected: dict[str, str]) -> Row:
    """The same corpus by a Ray cluster of this machine."""
    name = "same bytes for Ray"
    if importlib.util.find_spec("ray") is None:
        return Row(name, "equal", "left out: pip install ray", None)
    ended = run(folder, "corpus.yaml", "output=ray", "ray.address=local", "ray.memory_gb=0.5", "ray.combine_cpus=1", limit=LIMIT)
    if ended.code:
        return Row(name, "equal", f"exit code {ended.code}: {ended.last}", False)
    same = digest(folder / "ray") == expected
    return Row(name, "equal", f"{'equal' if same else 'not equal'}, {ended.seconds:.0f} s", same)


def _complete(name: str, corpus: Corpus, output: Path) -> Row:
    ids = Counter(record["id"] for part in ("documents", "removed") for record in records(output / part))
    lost, twice = set(corpus.documents) - set(ids), [id for id, count in ids.items() if count > 1]
    return Row(name, "none lost or twice", f"{len(lost)} lost, {len(twice)} twice of {len(corpus.documents):,}", not lost and not twice)


def _killed(folder: Path, kind: str, kills: int, seconds: float, draw: random.Random, expected: dict[str, str]) -> list[Row]:
    """Runs that are killed one to four times, and then end by themselves."""
    done, runs, bad, slow = 0, 0, [], []
    while done < kills:
        output, code = f"killed{runs}", 1
        runs += 1
        for attempt in range(min(draw.randint(1, 4), kills - done)):
            began = time.monotonic()
            process = start(folder, "corpus.yaml", f"output={output}", f"run.workers={draw.choice((2, 3))}")
            hit = _kill(process, kind, draw.uniform(0.3, seconds), draw)
            done += hit
            code = process.wait(LIMIT)
            if not hit and not attempt:  # a whole run, which other work on the machine slows no more
                seconds = max(1.0, min(seconds, time.monotonic() - began))
            if kind == "one worker" and hit and code:
                bad.append(f"{output}: exit code {code} after a worker was killed: {(folder / 'log.txt').read_text()[-300:]}")
            if kind == "the parent alone":
                slow.append(_seconds_until_gone(process.pid))
        ended = run(folder, "corpus.yaml", f"output={output}", limit=LIMIT)
        found = digest(folder / output)
        if ended.code or found != expected:
            names = sorted(name for name in set(found) ^ set(expected) | {name for name in found if found[name] != expected.get(name)})
            bad.append(f"{output}: exit code {ended.code}, {names[:4]}, {ended.last}")
    text = f"{runs - len(bad)} of {runs} runs equal after {done} kills" + "".join(f"; {one}" for one in bad[:2])
    rows = [Row(f"same bytes after kill -9 of {kind}", "equal", text, not bad)]
    if slow:
        rows.append(Row("  workers outlive their parent by", "<= 2 s", f"{max(slow):.2f} s at most", max(slow) <= 2))
    return rows


def _kill(process: "subprocess.Popen[bytes]", kind: str, seconds: float, draw: random.Random) -> bool:
    """Kill after some seconds; False if the run has ended before, or has no workers then."""
    time.sleep(seconds)
    if process.poll() is not None:
        return False
    try:
        if kind == "the whole group":
            os.killpg(process.pid, signal.SIGKILL)
        elif kind == "the parent alone":
            process.kill()
        else:
            workers = _workers(process.pid)
            if not workers:
                return False
            os.kill(draw.choice(workers), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _stat(pid: str) -> list[str]:
    """Fields of /proc/PID/stat after the name: state, parent, process group, session ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _session(leader: int) -> list[int]:
    """Processes of a session that are not zombies."""
    found = {name: _stat(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208
    return [int(name) for name, fields in found.items() if fields and fields[3] == str(leader) and fields[0] != "Z"]


def _workers(leader: int) -> list[int]:
    out = []
    for pid in _session(leader):
        try:
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                out.append(pid)
        except OSError:
            continue
    return out


def _seconds_until_gone(leader: int) -> float:
    began = time.monotonic()
    while _session(leader) and time.monotonic() - began < LIMIT:
        time.sleep(0.02)
    return time.monotonic() - began
