"""Draw cases of a seed, check them, and reduce each failure to a small config.

python tests/fuzz/fuzz.py [--seed 2026-11-28] [--first 0] [--cases 29] [--checks same_on_the_mesh,resumed]
python tests/fuzz/fuzz.py --file FAILED.yml
"""

import argparse
import copy
import datetime
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import conftest  # noqa: F401 -- eight CPU devices

from compared_meshes import CHECKS, Case, Failure, draw_case, failures, forget
from drawn_configs import BASE, Values, get, problem, put
from pydantic import ValidationError
from ruamel.yaml import YAML

from maxlm.config import UserError

SEED = os.environ.get("MAXLM_FUZZ_SEED") or str(datetime.datetime.now(datetime.UTC).date())
FOLDER = Path(os.environ.get("MAXLM_FUZZ_FOLDER") or Path(tempfile.gettempdir()) / "maxlm-fuzz")  # of the configs of failures
REDUCING_S = 240.0  # for one failure
REDUCED = 2  # failures of one call that are reduced; the others are written as they were drawn


def leaves(values: Values, prefix: str = "") -> Iterator[str]:
    """Dotted keys of all settings that are not as in `BASE`: sections before their contents."""
    for name, value in values.items():
        key = prefix + name
        if value != get(BASE, key):
            if prefix or name not in BASE:
                yield key
            if isinstance(value, dict):
                yield from leaves(value, f"{key}.")


def reduced(case: Case, fails: Callable[[Case], bool], seconds: float = REDUCING_S) -> Case:
    """A smaller case that fails: settings as in `BASE` one by one and half of them at a time, and smaller meshes, until none can go."""
    until = time.monotonic() + seconds
    keys = list(leaves(case.values))
    size = max(len(keys) // 2, 1)
    while keys and time.monotonic() < until:
        for start in range(0, len(keys), size):
            smaller = _without(case, keys[start : start + size])
            if smaller is not None and time.monotonic() < until and fails(smaller):
                case, keys = smaller, list(leaves(smaller.values))
                size = min(size, max(len(keys) // 2, 1))
                break
        else:
            if size == 1:
                break
            size = size // 2
    for smaller in _smaller_meshes(case):
        if time.monotonic() < until and fails(smaller):
            return reduced(smaller, fails, until - time.monotonic())
    return case


def _without(case: Case, keys: Iterable[str]) -> Case | None:
    """The case without these settings, and without what only they allow. None if that is no valid config, or the same one."""
    values = copy.deepcopy(case.values)
    for key in keys:
        put(values, key, get(BASE, key))
    for _ in range(8):
        broken = problem(values)
        if broken is None:
            return Case(values, case.other) if values != case.values and problem(Case(values, case.other).moved) is None else None
        field = broken[0]
        while field and get(values, field) is None:
            field = field.rpartition(".")[0]
        if "." not in field and field in BASE:
            return None
        put(values, field, get(BASE, field))
    return None


def _smaller_meshes(case: Case) -> Iterator[Case]:
    for of_other in (False, True):
        mesh = (case.other if of_other else case.values).get("mesh", {})
        for axis, size in mesh.items():
            if isinstance(size, int) and size > 1 and axis != "zero":
                smaller = Case(copy.deepcopy(case.values), copy.deepcopy(case.other))
                put(smaller.other if of_other else smaller.values, f"mesh.{axis}", size // 2)
                if problem(smaller.values) is None and problem(smaller.moved) is None:
                    yield smaller


def text_of(case: Case, failure: Failure, seed: str) -> str:
    """The failure as a config file, which `--file` reads again."""
    text = StringIO()
    YAML().dump(case.values, text)
    moved = YAML(typ="safe")
    moved.default_flow_style, moved.width = True, 2**16
    other = StringIO()
    moved.dump(case.other, other)
    return f"# case {seed}\n# failed: {failure.check}: {failure.told}\n# other: {other.getvalue().strip()}\n{text.getvalue()}"


def read(path: Path) -> Case:
    """The case of a file of `text_of`."""
    text = path.read_text(encoding="utf-8")
    other = next(line for line in text.splitlines() if line.startswith("# other: "))
    yaml = YAML(typ="safe")
    return Case(yaml.load(text), yaml.load(other.removeprefix("# other: ")))


def still_fails(check: str) -> Callable[[Case], bool]:
    """True for a case that fails in the same check."""

    def fails(case: Case) -> bool:
        try:
            return any(True for _ in failures(case, (check,)))
        except (UserError, ValidationError):
            return False

    return fails


def run(seed: str, numbers: Iterable[int], checks: tuple[str, ...] = tuple(CHECKS), seconds: float = float("inf")) -> list[str]:
    """Check the cases of these numbers; returns the failures as config files, which are in `FOLDER` as well. After so many seconds of
    processor time no further case is begun.
    """
    found: list[str] = []
    began = time.process_time()
    for number in numbers:
        name, started = f"{seed}-{number}", time.process_time()
        if started - began > seconds:
            print(f"no time for case {name} and those after it", flush=True)
            break
        case = draw_case(name)
        try:
            failed = list(failures(case, checks))
        except (UserError, ValidationError) as error:
            print(f"case {name}: refused as its program is built: {error}", flush=True)
            continue
        print(f"case {name}: {len(failed)} failures, {time.process_time() - started:.0f} s of CPU; mesh {case.values['mesh']}", flush=True)
        for failure in failed:
            least = reduced(case, still_fails(failure.check)) if len(found) < REDUCED else case
            found.append(text_of(least, failure, name))
            FOLDER.mkdir(parents=True, exist_ok=True)
            (FOLDER / f"{name}-{failure.check}.yml").write_text(found[-1], encoding="utf-8")
            print(found[-1], flush=True)
        forget()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", default=SEED, help="text; today's date by default, as in the soak test")
    parser.add_argument("--first", type=int, default=0, metavar="N")
    parser.add_argument("--cases", type=int, default=29, metavar="N")
    parser.add_argument("--checks", default=",".join(CHECKS), help="names, with commas between")
    parser.add_argument("--file", type=Path, help="a failure that was written, to be checked again")
    options: Any = parser.parse_args()
    checks = tuple(options.checks.split(","))
    if options.file is not None:
        found = [f"{failure.check}: {failure.told}" for failure in failures(read(options.file), checks)]
        print(*found, sep="\n")
    else:
        found = run(options.seed, range(options.first, options.first + options.cases), checks)
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
