"""Attack the config loader and the command line with mutated input; prints how it ended, and exits with 1 if any case failed.

    python tests/faults/attack_config.py [--configs 5000] [--commands 500] [--seed 0]

A case passes if it is refused by one line (exit code 2, no traceback, within 2 seconds of processor time), or if it is accepted and every
value that was written is the value in the resolved config, or differs from it for a reason in `ACCEPTED`.
"""

import contextlib
import functools
import io
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from maxlm import cli
from maxlm.base.errors import LONGEST
from maxlm.config import UserError, load
from maxlm.config.explain import holds_text, section_of
from maxlm.config.fields import flatten
from maxlm.config.loader import SHIPPED, dump
from maxlm.config.schema import Config

SECONDS = 2.0  # of processor time for a refusal
ACCEPTED = {
    "null is the default, or derived": "null means that a setting is not used, or follows from others",
    "a whole number is a number": "1 is read as 1.0 where a number is wanted",
    "a number typed where text is wanted": "the shell has taken the quotes of run.name='5'",
    "~ is the home of the user": "a path is written out",
    "an empty section": "a section without settings has its defaults",
    "no mixture": "runs of before sources had names wrote data.mixture: []",
    "as it was": "what was written is what the config said before",
}
BIG = 2**63 - 1
POOL: tuple[Any, ...] = (
    *("null", "true", "false", "yes", "0", "1", "-1", "2", "3", "4", "7", "64", "1.0", "1.5", "-0.0", "1e3", "1e-300", "1e300", "3e38"),
    "1e-38",
    *f".nan nan .inf -.inf {BIG} {BIG + 1} {-BIG} 0x10 0o17 010 0b11 1_000 0x{'f' * 5000} {'9' * 5000}".split(),
    *("''", '""', "a", "auto", "none", "full", "[none]", "[]", "{}", "[[]]", "[1]"),
    *("[a, b]", "[null]", "{a: 1}", "{kind: linear}", "{kind: 5}"),
    *('"\\ud800"', '"\\0"', '"a\\nb"', '"\\u202e"', "日本", "é" * 300, "a" * 10**5),
    *("[" * 2000, "[" * 40 + "]" * 40, "{a: " * 30 + "1" + "}" * 30),
    *("2024-01-01", "12:30:45", "!!binary aGk=", "!!set {a}", "!!python/name:os.system", "&x [*x]", "*x"),
    *("- a", "a: b", "? a", "|", ">-", "%", "@"),
    *("~", "~/x", "~nobody-at-all/x", "s3://b/x", "http://h/x", "gs://b", "gs://B_/x", "gs://", "gs:/b", "file:///x", "../x", "/", "."),
    *("a/", "//"),
    *("adamw", "muon", "cosine", "constant", "float32", "bfloat16", "learned", "rope", "local", "[local]", "gelu", "v5p:4x4x4"),
    *("v5p-128", "banana"),
)
ODD_KEYS = (
    *("", ".", "foo", "train.steps", "a" * 10**5, "\ud800", "\0"),
    *("model.model", "ключ", "__class__", "model_config", "1", "kind", "extends"),
)
ODD_LINES = (
    *("\t", "---", "...", "%YAML 1.1", "a: b: c", "<<: {a: 1}", "? [a]\n: 1"),
    *("run: {seed: 1, seed: 2}", "null: 1", "1: 2", "{}", "- x", "\x00"),
)


class TookTooLongError(Exception):
    """A case had more than SECONDS of the processor."""


@dataclass(frozen=True)
class Case:
    """A config to load: files by name, the one to load, overrides, and the operator that made it."""

    operator: str
    name: str
    files: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    misspelt: bool = False  # must be refused


@dataclass(frozen=True)
class Ending:
    """End of a case; `problem` is empty if that is right."""

    outcome: str
    problem: str = ""


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections included, also those that are absent by default."""
    for name, info in section.model_fields.items():
        yield f"{prefix}{name}"
        inner = section_of(info, {})
        if inner is not None and name != "mixture":
            yield from keys(inner, f"{prefix}{name}.")


# --- configs: the operators. Each makes one case out of a shipped config.

RUNS = sorted(str(path.relative_to(SHIPPED).with_suffix("")) for path in (SHIPPED / "runs").glob("*.yml"))
EVERY_KEY = tuple(keys())


@functools.cache
def text_of(name: str) -> str:
    """The resolved config."""
    return dump(load(name).config)


def override(rng: random.Random) -> Case:
    return Case("override", rng.choice(RUNS), overrides=(f"{rng.choice(EVERY_KEY)}={rng.choice(POOL)}",))


def overrides(rng: random.Random) -> Case:
    pairs = {rng.choice(EVERY_KEY): rng.choice(POOL) for _ in range(3)}
    return Case("three overrides", rng.choice(RUNS), overrides=tuple(f"{key}={value}" for key, value in pairs.items()))


def likely(rng: random.Random) -> Case:
    """An override with a value of the right kind, which often is accepted."""
    name = rng.choice(RUNS)
    key, value = rng.choice(list(flatten(load(name).config.model_dump(mode="json"))))
    if isinstance(value, bool):
        new: Any = str(not value).lower()
    elif isinstance(value, int | float):
        new = rng.choice((value * 2, value // 2, value + 1, value - 1, 1, 0.5, 0, value))
    else:
        new = rng.choice(POOL)
    return Case("likely override", name, overrides=(f"{key}={new}",))


def odd_override(rng: random.Random) -> Case:
    key = rng.choice((*ODD_KEYS, "a." * 800 + "b", "train.", "model.foo", "optimizer.lr", f"{rng.choice(EVERY_KEY)}x"))
    wrong = key not in (*EVERY_KEY, "extends")
    return Case("misspelt override", rng.choice(RUNS), overrides=(f"{key}={rng.choice(POOL)}",), misspelt=wrong)


def no_override(rng: random.Random) -> Case:
    text = rng.choice(("train.steps", "=", "", "=1", ".=1", "a..b=1", "--x", "\ud800"))
    return Case("no override", rng.choice(RUNS), overrides=(text,), misspelt=True)


def garbled(rng: random.Random) -> Case:
    text = list(text_of(rng.choice(RUNS)))
    for _ in range(rng.choice((1, 1, 3, 10))):
        text[rng.randrange(len(text))] = rng.choice((*"{}[]:,#&*!|>'\"%@`-? \n\t\0", "é", "\u2028", "\ufeff", "\x85"))
    return Case("characters changed", "case", {"case": "".join(text)})


def cut(rng: random.Random) -> Case:
    text = text_of(rng.choice(RUNS))
    return Case("cut short", "case", {"case": text[: rng.randrange(len(text))]})


def edited(edit: Callable[[list[str], random.Random], None], rng: random.Random) -> Case:
    """A file whose lines are edited by one of the functions below. A key that is misspelt or there twice must be refused."""
    lines = text_of(rng.choice(RUNS)).splitlines()
    edit(lines, rng)
    return Case(edit.__name__.replace("_", " "), "case", {"case": "\n".join(lines) + "\n"}, misspelt=edit in (misspell_key, double_key))


def replace_value(lines: list[str], rng: random.Random) -> None:
    """A setting, or a section, gets another value."""
    number = rng.randrange(len(lines))
    head, _, _ = lines[number].partition(":")
    indent = len(head) - len(head.lstrip())
    rest = number + 1
    while rest < len(lines) and (len(lines[rest]) - len(lines[rest].lstrip()) > indent or lines[rest].lstrip().startswith("- ")):
        rest += 1
    lines[number:rest] = [f"{head}: {rng.choice(POOL)}"]


def misspell_key(lines: list[str], rng: random.Random) -> None:
    number = rng.choice([n for n, line in enumerate(lines) if ":" in line and not line.lstrip().startswith("- ")])
    head = lines[number].partition(":")[0]
    name = head.strip()
    wrong = rng.choice((name + "x", name[:-1] or "q", name.upper(), name[::-1] + "_", f"{name} {name}", "é" * 50000))
    lines.insert(number, f"{head[: len(head) - len(name)]}{wrong}: {rng.choice(('null', '1', 'a'))}")


def remove_line(lines: list[str], rng: random.Random) -> None:
    del lines[rng.randrange(len(lines))]


def double_key(lines: list[str], rng: random.Random) -> None:
    number = rng.choice([n for n, line in enumerate(lines) if line.lstrip().partition(":")[2] and not line.lstrip().startswith("- ")])
    lines.insert(number, lines[number])


def insert_odd_line(lines: list[str], rng: random.Random) -> None:
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(ODD_LINES))


def extends(rng: random.Random) -> Case:
    """Circles, forks, chains, and what is no name."""
    base = rng.choice(RUNS)
    size = rng.choice((1, 2, 23, 40, 500))
    kind = rng.choice(("circle", "fork", "chain", "wide", "odd"))
    if kind == "circle":
        return Case("extends: circle", "f0", {f"f{n}": f"extends: f{(n + 1) % size}" for n in range(size)})
    if kind in ("fork", "chain"):
        parents = "[f{0}, f{0}]" if kind == "fork" else "f{0}"
        files = {f"f{n}": f"extends: {parents.format(n + 1)}" for n in range(size)} | {f"f{size}": f"extends: {base}"}
        return Case(f"extends: {kind}", "f0", files)
    if kind == "wide":
        return Case("extends: wide", "f0", {"f0": f"extends: [{', '.join([base] * size)}]"})
    odd = rng.choice(
        ("5", "{}", "[null]", "[[a]]", '"\\0"', '"\\ud800"', "~", "~/nowhere", "''", "/", "..", "s3://a/b", "a" * 9000, "[]", "/dev/zero")
    )
    return Case("extends: odd", "f0", {"f0": f"extends: {odd}\n"})


OPERATORS: tuple[Callable[[random.Random], Case], ...] = (
    *(override,) * 6,
    *(likely,) * 4,
    *(overrides, odd_override, no_override, garbled, cut, extends),
    *(functools.partial(edited, edit) for edit in (replace_value, replace_value, misspell_key, remove_line, double_key, insert_odd_line)),
)


# --- configs: the judgement


def judge(case: Case, folder: Path) -> Ending:
    """Load a case in `folder`, the current one."""
    for name, text in case.files.items():
        (folder / f"{name}.yml").write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        with at_most(SECONDS):
            loaded = load(case.name, case.overrides)
    except UserError as error:
        return Ending("refused", one_line(str(error)))
    except TookTooLongError:
        return Ending("too slow", f"more than {SECONDS} s")
    except Exception:
        return Ending("traceback", traceback.format_exc(limit=-3))
    finally:
        for name in case.files:
            (folder / f"{name}.yml").unlink()
    if case.misspelt:
        return Ending("silent", "a key that is misspelt, or no setting, was accepted")
    return accepted(case, dict(flatten(loaded.config.model_dump(mode="json"))))


def accepted(case: Case, values: Mapping[str, Any]) -> Ending:
    """Check that every value that was written is in the resolved config, or why not."""
    reasons = set()
    before = {} if case.files else dict(flatten(load(case.name).config.model_dump(mode="json")))
    for key, said, on_command_line in written(case):
        reason = explain(key, said, values, on_command_line)
        if reason == "" and before.get(key, ...) == said:
            reason = "as it was"
        if reason is None:
            return Ending("silent", f"{key}: {str(said)[:80]!r} was written and {str(values.get(key))[:80]!r} is meant")
        reasons.add(reason)
    reasons.discard("")
    return Ending(f"accepted: {' and '.join(sorted(reasons))}" if reasons else "accepted as written")


def written(case: Case) -> Iterator[tuple[str, Any, bool]]:
    """(dotted key, value, whether on the command line) of every leaf that the case sets and nothing later replaces."""
    yaml = YAML(typ="safe", pure=True)
    later: dict[str, tuple[Any, bool]] = {}
    if case.name in case.files:
        later |= {key: (value, False) for key, value in flatten(yaml.load(case.files[case.name])) if key.split(".")[0] != "extends"}
    for text in case.overrides:
        key, _, value = text.partition("=")
        leaves = dict(flatten(yaml.load(value) if value.strip() else None, key.strip()))
        later = {old: said for old, said in later.items() if not any(old.startswith(f"{new}.") or old == new for new in (*leaves, key))}
        later |= {new: (said, True) for new, said in leaves.items()}
    for key, (value, on_command_line) in later.items():
        yield key, value, on_command_line


def explain(key: str, said: Any, values: Mapping[str, Any], on_command_line: bool) -> str | None:
    """Why `said` may stand for what is meant: "" if it is the same, a reason of ACCEPTED, None if there is no reason."""
    if said == {} and any(name == key or name.startswith(f"{key}.") for name in values):
        return "an empty section"
    if key == "data.mixture" and said == [] and values.get(key) is None:
        return "no mixture"
    if key not in values:  # a section that is null, or whose parent was replaced
        return "null is the default, or derived" if said is None else None
    meant = values[key]
    if said is None:
        return "" if meant is None else "null is the default, or derived"
    if type(said) is type(meant) and said == meant:
        return ""
    if isinstance(said, int) and not isinstance(said, bool) and isinstance(meant, float) and float(said) == meant:
        return "a whole number is a number"
    if on_command_line and holds_text(key, Config) and isinstance(meant, str) and not isinstance(said, str | list | dict):
        return "a number typed where text is wanted"
    homes = [said] if isinstance(said, str) else said if isinstance(said, list) else []
    if any(str(one).startswith("~") for one in homes) and str(Path.home()) in str(meant):
        return "~ is the home of the user"
    if isinstance(said, list) and isinstance(meant, list) and [str(one) for one in said] == [str(one) for one in meant]:
        return "" if said == meant else None
    return None


def one_line(message: str) -> str:
    """Problem of a message; nothing if it is one printable line."""
    if not message.isprintable() or "Traceback" in message or len(message) > LONGEST:
        return f"not one printable line of {LONGEST} characters: {message[:200]!r}"
    return ""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TookTooLongError in the block after `seconds` of this process's processor time."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# --- command lines

COMMANDS: tuple[tuple[str, ...], ...] = (  # beginnings that end soon whatever follows
    *(("config",), ("config", "runs/quickstart"), ("config", "models/llama3-8b"), ("config", "runs/quickstart", "--json")),
    *(("train", "nowhere"), ("train", "runs/quickstart", "train.stepz=1"), ("train", "models/llama3-8b")),
    *(("data", "prepare", "models/gpt2-124m"), ("data", "inspect"), ("data", "inspect", "nowhere"), ("data",), ("kernels",)),
    *(("compile", "nowhere"), ("plan", "nowhere"), ("compile", "models/llama3-8b", "--topology", "v9")),
    *(("plan", "runs/quickstart", "--topology", "v9"), ("generate", "nowhere", "text"), ("report", "nowhere"), ("report",)),
    *(("launch", "--restarts=x"), ("doctor", "banana"), ("bench-comm", "--smallest", "banana"), ("trian",), ()),
)
ARGUMENTS = (
    "",
    *("--", "-", "--json", "-h", "--help", "--version", "--nonsense", "-x", "--out", "--out=/proc/x", "--topology", "--topology="),
    "--slices=0",
    *f"--slices=9{'9' * 30} --tokens=1000000000 --tokens=nan --tokens=-1 --seed=-1 --temperature=nan --top-k=x --step={'9' * 40}".split(),
    *("train.steps=5", "train.steps=x", "=", "a.b", "\udcff", "x=\udcff", "a" * 10**5, "k" * 10**5 + "=1", "日本=1"),
    *("a\nb", "\x1b[31m=1", "model=3", "mesh.zero=4", "data.prepare.workers=9223372036854775807", "data.store=s3://x/y"),
    *("run.name=5", "model.d_ff=1000000000000", "--diff", "--diff=nowhere", "--diff=\udc80"),
)


def command_line(rng: random.Random) -> list[str]:
    return [*rng.choice(COMMANDS), *rng.choices(ARGUMENTS, k=rng.choice((0, 1, 1, 2, 3)))]


def judge_command(arguments: list[str]) -> Ending:
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    before, sys.argv = sys.argv, ["maxlm", *arguments]
    try:
        with at_most(5 * SECONDS), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            started = time.process_time()
            cli.main()
    except SystemExit as ended:
        code = ended.code
    except TookTooLongError:
        return Ending("too slow", f"more than {5 * SECONDS} s")
    except BaseException:
        return Ending("traceback", traceback.format_exc(limit=-3))
    finally:
        sys.argv = before
    return judge_output(code or 0, err.getvalue(), time.process_time() - started, helped=out.getvalue().strip() != "")


def judge_output(code: int, err: str, seconds: float, *, helped: bool) -> Ending:
    """`helped`: something was printed to stdout, as help is for a command that lacks everything."""
    if code == 0:
        return Ending("done", "" if not err else f"done, with {err[:200]!r} on stderr")
    if code != 2:
        return Ending(f"exit code {code}", err[-300:] or "nothing was said")
    if seconds > SECONDS:
        return Ending("too slow", f"refused after {seconds:.1f} s of the processor")
    if not err and helped:
        return Ending("refused with help")
    if not err.startswith("maxlm: ") or err.count("\n") != 1:
        return Ending("refused", f"not one line: {err[:300]!r}")
    return Ending("refused", one_line(err.removeprefix("maxlm: ").rstrip("\n")))


def judge_process(arguments: list[str]) -> Ending:
    """Run `maxlm ARGUMENTS` as a process of its own."""
    program: list[str | bytes] = [sys.executable, "-m", "maxlm", *(argument.encode("utf-8", "surrogateescape") for argument in arguments)]
    ended = subprocess.run(program, capture_output=True, check=False, timeout=300)
    return judge_output(ended.returncode, ended.stderr.decode("utf-8", "replace"), 0.0, helped=bool(ended.stdout))


# --- all of it


def attack(configs: int, commands: int, processes: int, seed: int) -> list[tuple[str, str, Ending]]:
    """(what was attacked, the case, how it ended), of every case. The current folder must be one to write in."""
    rng, folder = random.Random(seed), Path.cwd()
    found: list[tuple[str, str, Ending]] = []
    for number in range(configs):
        case = rng.choice(OPERATORS)(rng)
        found.append((case.operator, f"case {number}: {case.name} {case.overrides} {list(case.files)[:3]}", judge(case, folder)))
    if commands:
        judge_command(["generate", "nowhere", "text"])  # imports jax, for which no later command is charged
    for _ in range(commands):
        arguments = command_line(rng)
        found.append(("command line", str(arguments), judge_command(arguments)))
    for _ in range(processes):
        arguments = [argument for argument in command_line(rng) if "\0" not in argument]
        found.append(("process", str(arguments), judge_process(arguments)))
    return found


def summary(found: list[tuple[str, str, Ending]]) -> Table:
    """Cases by what was attacked and how they ended."""
    table = Table("attack", "ending", "cases", "failed", title="mutated configs and command lines")
    cases = Counter((name, ending.outcome) for name, _, ending in found)
    failed = Counter((name, ending.outcome) for name, _, ending in found if ending.problem)

    def add(name: str, outcome: str, number: int, bad: int) -> None:
        table.add_row(name, outcome, f"{number:,}", f"[red]{bad}[/red]" if bad else "0")

    for key in sorted(cases):
        add(*key, cases[key], failed[key])
    table.add_section()
    add("all", "", cases.total(), failed.total())
    return table


def main(configs: int = 5000, commands: int = 500, processes: int = 20, seed: int = 0) -> None:
    """Attack the config loader and the command line with mutated input; print how it ended, and exit with 1 if any case failed."""
    console, started = Console(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = attack(configs, commands, processes, seed)
    failed = [one for one in found if one[2].problem]
    for name, case, ending in failed:
        console.print(f"{name}: {ending.outcome}: {case[:400]!r}\n    {ending.problem}", markup=False, highlight=False)
    console.print(summary(found))
    for reason, meaning in ACCEPTED.items():
        console.print(f"{reason}: {meaning}", markup=False, highlight=False)
    console.print(f"{math.ceil(time.monotonic() - started)} s")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
