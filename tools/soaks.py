"""Run the slow tests (marked `soak`): all of them, the part of a day, so that each is run once in two weeks, or the random cases of a day.

Usage: python tools/soaks.py [--part N | --today | --fuzz] [--limit MINUTES] [--list]
A test that fails is run once more by itself; if it fails again, so does the command.
"""

import argparse
import datetime
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = ROOT / "tests" / "soak_seconds.json"  # a test function -> seconds of one of its cases
PARTS = 14
DRAWN = "tests/fuzz/"  # tests that draw other cases each day: in no part, as a change must not fail for a fault that another has made
WORKERS = 2
UNMEASURED_S = 120.0  # assumed for a test that the table does not have
PYTEST = (sys.executable, "-m", "pytest", "-m", "soak", "-o", "timeout=0", "-o", "faulthandler_timeout=0")


class OutOfTimeError(Exception):
    """The limit has passed."""


def collect(folder: Path, arguments: tuple[str, ...] = ()) -> list[str]:
    """Node ids of all soaks below `folder`."""
    command = [*PYTEST, "-o", "addopts=", "-p", "no:cacheprovider", "--strict-markers", "--collect-only", "-q", *arguments]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"The tests cannot be collected:\n{answer.stdout}{answer.stderr}")
    return [line for line in answer.stdout.splitlines() if ".py::" in line]


def split(tests: list[str], seconds: dict[str, float]) -> list[list[str]]:
    """Split tests with fixed cases into fourteen parts of about the same length: the longest first, each to the shortest part so far."""
    parts: list[list[str]] = [[] for _ in range(PARTS)]
    lengths = [0.0] * PARTS

    def length(test: str) -> float:
        return seconds.get(test.partition("[")[0], UNMEASURED_S)

    fixed = [test for test in tests if not test.startswith(DRAWN)]
    for test in sorted(fixed, key=lambda test: (-length(test), hashlib.sha256(test.encode()).hexdigest())):
        shortest = lengths.index(min(lengths))
        parts[shortest].append(test)
        lengths[shortest] += length(test)
    return [sorted(part) for part in parts]


def part_of(day: datetime.date) -> int:
    """1 to 14; fourteen days in a row have all of them."""
    return day.toordinal() % PARTS + 1


def run(folder: Path, tests: list[str], until: float, workers: int = 0) -> list[str]:
    """Run `tests` and return those that did not pass. Raises OutOfTimeError at `until`, a time of the monotonic clock."""
    with tempfile.TemporaryDirectory() as scratch:
        listed, report = Path(scratch) / "tests", Path(scratch) / "report.xml"
        listed.write_text("".join(f"{test}\n" for test in tests), encoding="utf-8")
        spread = ("-n", str(workers), "--dist", "worksteal") if workers else ()
        process = subprocess.Popen(
            [*PYTEST, *spread, "--durations=20", f"--junitxml={report}", f"@{listed}"], cwd=folder, start_new_session=True
        )
        try:
            code = process.wait(timeout=None if until == float("inf") else max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            raise OutOfTimeError from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code == 0:
            return []
        passed = _passed(report) if code == 1 else set()  # any other code: pytest itself did not get through
        return [test for test in tests if _case(test) not in passed]


def _case(test: str) -> tuple[str, str]:
    """(classname, name) that JUnit's report has for a node id."""
    path, _, name = test.partition("::")
    return path.removesuffix(".py").replace("/", "."), name


def _passed(report: Path) -> set[tuple[str, str]]:
    """Cases of a JUnit report without failure or error; a skipped case counts as passed."""
    passed: dict[tuple[str, str], bool] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("classname", ""), case.get("name", "")
        passed[name] = passed.get(name, True) and case.find("failure") is None and case.find("error") is None
    return {name for name, well in passed.items() if well}


def run_with_second_try(folder: Path, tests: list[str], limit_s: float, workers: int) -> int:
    """Exit code 0 if every test passes, at once or when it is run again by itself, within the limit."""
    until = time.monotonic() + limit_s
    try:
        failed = run(folder, tests, until, workers)
        if failed:
            print(f"Run again, each by itself: {len(failed)} of {len(tests)} soaks", *failed, sep="\n  ", flush=True)
        failed = [test for test in failed if run(folder, [test], until)]
    except OutOfTimeError:
        print(f"Soaks: stopped at the limit of {limit_s / 60:g} minutes", flush=True)
        return 1
    if failed:
        print("Soaks that failed twice:", *failed, sep="\n  ", flush=True)
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--part", type=int, choices=range(1, PARTS + 1), metavar="N", help="one of fourteen parts, 1 to 14")
    which.add_argument("--today", action="store_true", help="the part of this day")
    which.add_argument("--fuzz", action="store_true", help="the random cases of this day: seven days have two hundred")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="MINUTES", help="stop and fail after this time")
    parser.add_argument("--list", action="store_true", help="print the tests and run nothing")
    options = parser.parse_args()
    tests = collect(ROOT)
    number = part_of(datetime.datetime.now(datetime.UTC).date()) if options.today else options.part
    if number:
        total = len(tests)
        tests = split(tests, json.loads(SECONDS.read_text(encoding="utf-8")))[number - 1]
        print(f"Soaks, part {number} of {PARTS}: {len(tests)} of {total} tests")
    if options.fuzz:
        tests = [test for test in tests if test.startswith(DRAWN)]
    print(*tests, sep="\n", flush=True)
    return 0 if options.list else run_with_second_try(ROOT, tests, 60 * options.limit, WORKERS)


if __name__ == "__main__":
    raise SystemExit(main())
