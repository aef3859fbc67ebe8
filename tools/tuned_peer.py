"""Our step and MaxText's, tuned for each case, by three rulers: the table of docs/lab/benchmarks.md.

    python tools/tuned_peer.py FOLDER --neutral RULER --maxtext-python ENV/bin/python --search [CASE ...]
    python tools/tuned_peer.py FOLDER --neutral RULER [CASE ...]                     price the programs in FOLDER, and write the page
    python tools/tuned_peer.py FOLDER --neutral RULER --maxtext-python ENV/bin/python --machine-code [CASE ...]

RULER is the folder with the neutral ruler, hlo_cost_scheduled.py; without it the table is printed without its columns, and the page stays
as it is. ENV is a virtual environment of its own, of Python 3.12, with MaxText in it: `pip install 'maxtext[tpu]==0.2.5'`. Cases are in
tools/tuned_peer_rows.yml. Programs are made where FOLDER lacks them, half a minute each; `--machine-code` makes those with XLA's cycles,
minutes each. `--search` tunes MaxText by the neutral ruler.
"""

import argparse
import importlib
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from maxtext_schedule import compile_whole
from peer_search import BUDGET, Candidate, Case, Choice, Memory, Peer, search
from ruamel.yaml import YAML
from truth import REPOSITORY, read_program

from maxlm.compiler.aot import leave_chips_alone

leave_chips_alone()

from jax.experimental.mesh_utils import create_device_mesh  # noqa: E402 - jax reads the environment when it is imported
from jax.sharding import Mesh  # noqa: E402

from maxlm.base.atomic import write_text  # noqa: E402 - jax reads the environment when it is imported
from maxlm.compiler.aot import available_hbm, build, devices  # noqa: E402
from maxlm.config import load, rules  # noqa: E402
from maxlm.cost import step_cost  # noqa: E402
from maxlm.cost.mesh_links import axis_links  # noqa: E402
from maxlm.cost.network import AxisLinks  # noqa: E402
from maxlm.cost.verify import Compiler  # noqa: E402
from maxlm.hlo import parser as hlo  # noqa: E402
from maxlm.kernels.platform import RARELY  # noqa: E402

CASES, CHOSEN = (Path(__file__).with_name(f"tuned_peer_{kind}.yml") for kind in ("rows", "chosen"))
PAGE = REPOSITORY / "docs" / "lab" / "benchmarks.md"
BEGIN, END = "<!-- tools/tuned_peer.py writes from here -->", "<!-- to here -->"
SURE = 1.05  # of the memory there is: what should need more is not tried
PALLAS_CALL = f'custom_call_target="{hlo.PALLAS}"'
END_OF = re.compile(r"\}\s*$|\}, execution_thread")  # a computation
HEADER = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
OP = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)")
CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
USED = re.compile(r"%([\w.\-]+)")
KERNELS = ("attention", "grouped", "matmul", "other")
UNKNOWN = {**dict.fromkeys((*KERNELS, "total_s", "dot", "memory", "exposed"), math.nan), "kernels": {}}
HEAD = (
    "| step | neutral: maxlm | MaxText | ratio | XLA's cycles: maxlm | MaxText | ratio | ours: maxlm | MaxText | ratio |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)

PARTS = "| matmuls, attention, other kernels, memory, exposed | neutral: maxlm | MaxText | ours: maxlm | MaxText |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Times:
    """Seconds of a step by the rulers. `five`: neutral, with five matmuls charged to a fused backward pass of attention; `cycles`: None
    without machine code; `once`: neutral and ours, with experts' loops for uneven loads counted once; `parts`: neutral and ours.
    """

    neutral: float
    five: float
    cycles: float | None
    ours: float
    once: tuple[float, float]
    parts: tuple[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="CASE")
    parser.add_argument("--neutral", type=Path, help="folder of the neutral ruler, by which --search compares")
    parser.add_argument("--maxtext-python", type=Path)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--budget", type=int, default=BUDGET, help="candidates a case")
    parser.add_argument("--machine-code", action="store_true")
    given = parser.parse_intermixed_args()
    cases = read_cases()
    if unknown := sorted({*given.names} - {*cases}):
        parser.error(f"{unknown[0]} is no case of {CASES.name}: give {', '.join(cases)}")
    names, peer = given.names or list(cases), Peer(given.maxtext_python, given.folder)
    ruler = None if given.neutral is None else neutral_ruler(parser, given.neutral)
    if given.search:
        if ruler is None:
            parser.error("--search compares by the neutral ruler: give --neutral")
        for name in names:
            keep_choice(name, *tune(cases[name][0], peer, ruler, given.budget))
    for name in names if given.machine_code else ():
        make_machine_code(*cases[name], peer, given.maxtext_python, given.folder)
    text = table(read_cases(), peer, given.folder, ruler)
    if ruler is not None:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        write_text(PAGE, f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    sys.stdout.write(f"{text}\n")


def read_cases() -> dict[str, tuple[Case, dict[str, Any]]]:
    """Each case and what was chosen for it; {} before its search."""
    yaml = YAML(typ="safe", pure=True)
    chosen = yaml.load(CHOSEN) if CHOSEN.exists() else {}
    found = {}
    for entry in yaml.load(CASES)["cases"]:
        lists = {key: tuple(entry[key]) for key in ("settings", "expert_groups") if key in entry}
        found[entry["name"]] = Case(**{**entry, **lists}), chosen.get(entry["name"], {})
    return found


def keep_choice(name: str, choice: Choice, tried: int) -> None:
    """Write what the search chose for a case."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    kept = {case: chosen for case, (_, chosen) in read_cases().items() if chosen} | {name: {**choice, "tried": tried}}
    with CHOSEN.open("w", encoding="utf-8") as file:
        file.write("# MaxText's fastest choices by the neutral ruler, of `tried`: tools/tuned_peer.py --search writes this file.\n")
        yaml.dump(kept, file)


def neutral_ruler(parser: argparse.ArgumentParser, folder: Path) -> ModuleType:
    """The neutral ruler's module."""
    if not (folder / "hlo_cost_scheduled.py").is_file():
        parser.error(f"--neutral {folder} has no hlo_cost_scheduled.py: give the folder of the neutral ruler")
    sys.path.insert(0, str(folder))
    return importlib.import_module("hlo_cost_scheduled")


def neutral(ruler: ModuleType | None, text: str, chip: str) -> dict[str, Any]:
    """Estimate of a program by the neutral ruler; not a number without it. The ruler reads one statement a line and misses kernels inside
    fusions, where XLA puts them next to a running collective on chips without a SparseCore: `kernels_alone` takes them out.
    """
    return UNKNOWN if ruler is None else ruler.estimate(kernels_alone(text), chip)


def kernels_alone(text: str) -> str:
    """`text` with each kernel's call in the place of the fusion that holds it."""
    lines: list[str] = []
    within = False
    for line in text.splitlines():
        if within and not OP.match(line) and not END_OF.match(line):
            lines[-1] += line  # frontend attributes may hold line breaks
        else:
            lines.append(line)
            within = bool(OP.match(line) or HEADER.match(line))
    inside, computation, renamed = {}, "", {}
    for line in lines:
        if header := HEADER.match(line):
            computation = header.group(1)
        elif PALLAS_CALL in line and (call := OP.match(line)):
            inside[computation] = call.group(1), call.group(2)
    for number, line in enumerate(lines):
        if " fusion(" in line and (called := CALLS.search(line)) and called.group(1) in inside and (fusion := OP.match(line)):
            kernel, statement = inside[called.group(1)]
            renamed[fusion.group(1)] = name = f"{kernel.partition('.')[0]}.{fusion.group(1)}"
            lines[number] = f"  %{name} = {statement}"
    return USED.sub(lambda found: f"%{renamed.get(found[1], found[1])}", "\n".join(lines))


def tune(case: Case, peer: Peer, ruler: ModuleType | None, budget: int) -> tuple[Choice, int]:
    """MaxText's fastest choice by the neutral ruler, and how many were tried. A line on stderr tells of each."""
    available, memory = available_hbm(case.machine), Memory(case, load(case.ours, case.settings, assume=True).config.model)

    def hopeless(choice: Choice) -> bool:
        return memory.expected(choice) > SURE * available and peer.missing(case.row(choice))

    def seconds(choice: Choice) -> float:
        began = time.monotonic()
        candidate = peer.candidate(case.row(choice))
        memory.learn(choice, candidate.needed)
        problem = candidate.problem(available)
        text = "" if problem else candidate.program.read_text(encoding="utf-8")
        found = math.inf if problem else neutral(ruler, text, case.machine.chip.name)["total_s"]
        size = f"{candidate.needed / 2**30:.1f} GiB"
        said = problem or f"{found:.3f} s, {size}"
        sys.stderr.write(f"{case.name}: {said} ({time.monotonic() - began:.0f} s): {'; '.join(choice.values())}\n")
        return found

    return search(case.knobs, case.start, seconds, budget, hopeless)


def make_machine_code(case: Case, chosen: dict[str, Any], peer: Peer, python: Path | None, folder: Path) -> None:
    """Compile both programs of `case` to machine code where they are missing."""
    if not (ours := _ours(case, folder, machine_code=True)).exists():
        began = time.monotonic()
        compile_ours(case, ours, machine_code=True)
        sys.stderr.write(f"{ours.name}: {time.monotonic() - began:.0f} s\n")
    row = case.row(_choice(chosen))
    if python is not None and not (whole := peer.path(row).with_suffix(".machine.hlo")).exists():
        began = time.monotonic()
        compile_whole(python, *row.to_compile, whole)
        sys.stderr.write(f"{case.name}, MaxText: {time.monotonic() - began:.0f} s\n")


def compile_ours(case: Case, out: Path, *, machine_code: bool) -> None:
    """Write our program, and a file with the mesh and links that price it. Raises UserError."""
    settings = list(case.settings)
    if case.ours.startswith("models/"):
        settings += [f"data.seq_len={case.sequence}", f"train.global_batch={case.batch * case.machine.chips}"]
        settings += [f"cluster.topology={json.dumps(case.topology)}", "cluster.accelerator="]
    config = load(case.ours, settings, assume=True).config
    machine = rules.topology_of(config)
    tokens = case.batch * case.sequence * case.machine.devices
    assert (config.tokens_per_step, machine.name) == (tokens, case.machine.name), f"{case.name}: both must train as many tokens in a step"
    program = build(config, machine)
    with Compiler(machine_code=machine_code) as compiler:
        step = compiler.step(program, machine)
    assert step.fits, f"{case.name}: our step does not fit"
    network = step_cost.program_network(program, machine)
    links = {axis: asdict(links) for axis, links in network.links.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps({"mesh": dict(network.mesh_sizes), "links": links}) + "\n", encoding="utf-8")
    out.write_text(step.text, encoding="utf-8")


def times(case: Case, program: Path, whole: Path, ruler: ModuleType | None, cost: step_cost.StepCost, once: step_cost.StepCost) -> Times:
    """Times of `program`; `whole`: the same with machine code; `cost`, `once`: by our own ruler."""
    text, chip = program.read_text(encoding="utf-8"), case.machine.chip
    found = neutral(ruler, text, chip.name)
    cycles = None
    if whole.exists():
        module = hlo.read(whole.read_text(encoding="utf-8"))
        assert module.has_cycles and case.machine.chip.clock_hz, whole
        seconds = module.cycles(module.entry) / case.machine.chip.clock_hz
        cycles = seconds + sum(found[kind] for kind in KERNELS) + found["exposed"]
    five = found["total_s"] + found["attention"] * (fifth_matmul(found["kernels"]) - 1)
    uneven = neutral(ruler, text.replace(RARELY, "counted_once"), chip.name)["total_s"]
    kernels = found["grouped"] + found["matmul"] + found["other"]
    counted = found.get("dot", 0.0), found["attention"], kernels, found.get("memory", 0.0), found["exposed"]
    own = cost.matmul_s, cost.attention_s, cost.kernel_s, cost.memory_s, cost.exposed_s
    return Times(found["total_s"], five, cycles, cost.total_s, (uneven, once.total_s), (_parts(counted), _parts(own)))


def _parts(seconds: Sequence[float]) -> str:
    return ", ".join(map(_number, seconds))


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def fifth_matmul(kernels: dict[str, int]) -> float:
    """Ratio of the matmuls of attention to the number that the neutral ruler charges: it charges four to a backward kernel called dkv, and
    without a kernel for dq that kernel has five.
    """
    counts = {part: sum(n for name, n in kernels.items() if name.startswith("attention") and part in name) for part in ("fwd", "dkv", "dq")}
    charged = 2 * counts["fwd"] + 4 * counts["dkv"] + 3 * counts["dq"]
    return 1.0 if counts["dq"] or not charged else (charged + counts["dkv"]) / charged


def table(cases: dict[str, tuple[Case, dict[str, Any]]], peer: Peer, folder: Path, ruler: ModuleType | None) -> str:
    """Markdown of the comparison, which the page holds between its marks."""
    rows, parts, notes = [], [], []
    for case, chosen in cases.values():
        if not chosen:
            notes.append(f"- {case.title}: not searched yet.")
            continue
        candidate = peer.candidate(case.row(_choice(chosen)))
        if problem := candidate.problem(available_hbm(case.machine)):
            notes.append(f"- {case.title}: none of {chosen['tried']} candidates is to be taken; the first one: {problem}.")
            continue
        ours, theirs = our_times(case, folder, ruler), peer_times(case, candidate, ruler)
        rows.append(f"| {case.title} | {' | '.join(_cells(ours, theirs))} |")
        parts.append(f"| {case.title} | {ours.parts[0]} | {theirs.parts[0]} | {ours.parts[1]} | {theirs.parts[1]} |")
        notes.append(f"- {case.title}: {_settings(chosen)}.{_uneven(case, ours)}")
    return "\n".join((HEAD, *rows, "", PARTS, *parts, "", *notes))


def our_times(case: Case, folder: Path, ruler: ModuleType | None) -> Times:
    """Times of our program, which is made where it is missing."""
    program = _ours(case, folder, machine_code=False)
    if not program.exists():
        compile_ours(case, program, machine_code=False)
    kept = json.loads(program.with_suffix(".json").read_text(encoding="utf-8"))
    links = {axis: AxisLinks(**{**value, "torus": tuple(value["torus"])}) for axis, value in kept["links"].items()}
    text = program.read_text(encoding="utf-8")
    cost, once = (
        step_cost.estimate(hlo.read(one), case.machine.chip, kept["mesh"], links) for one in (text, text.replace(RARELY, "counted_once"))
    )
    return times(case, program, _ours(case, folder, machine_code=True), ruler, cost, once)


def peer_times(case: Case, candidate: Candidate, ruler: ModuleType | None) -> Times:
    """Times of MaxText's program, on its mesh as jax lays it over the torus."""
    row, machine = candidate.row, case.machine
    laid = create_device_mesh(tuple(row.mesh.values()), devices(machine), allow_split_physical_axes=True)
    links = axis_links(Mesh(laid, tuple(row.mesh)), machine)
    cost = step_cost.estimate(read_program(row, candidate.program), machine.chip, row.mesh, links)
    return times(case, candidate.program, candidate.program.with_suffix(".machine.hlo"), ruler, cost, cost)


def _ours(case: Case, folder: Path, *, machine_code: bool) -> Path:
    return folder / "maxlm" / f"{case.name}{'.machine' if machine_code else ''}.hlo"


def _choice(chosen: dict[str, Any]) -> Choice:
    return {knob: option for knob, option in chosen.items() if knob != "tried"}


def _cells(ours: Times, theirs: Times) -> Iterator[str]:
    five = theirs.five > theirs.neutral
    yield _number(ours.neutral)
    yield _number(theirs.neutral) + (f" ({theirs.five:.2f})" if five else "")
    yield _number(ours.neutral / theirs.neutral) + (f" ({ours.five / theirs.five:.2f})" if five else "")
    yield from ("not compiled" if one.cycles is None else _number(one.cycles) for one in (ours, theirs))
    yield _number((ours.cycles or math.nan) / (theirs.cycles or math.nan))
    yield from map(_number, (ours.ours, theirs.ours, ours.ours / theirs.ours))


def _settings(chosen: dict[str, Any]) -> str:
    keeps = {"full": "nothing but layers' inputs kept"}.get(chosen["keep"], f"kept: {chosen['keep']}")
    steps = "one batch" if chosen["steps"] == "1" else f"{chosen['steps']} accumulation steps"
    vocabulary = "whole logits" if chosen["vocabulary"] == "1" else f"logits in {chosen['vocabulary']} tiles"
    parts = (keeps, steps, chosen["mesh"], f"flags: {chosen['flags']}", vocabulary, f"splash with {chosen['attention']}")
    return f"{'; '.join(parts)} ({chosen['tried']} candidates)"


def _uneven(case: Case, ours: Times) -> str:
    if not case.experts:
        return ""
    neutral, own = map(_number, ours.once)
    return f" With one turn of our loops for uneven loads ours takes {neutral} s by the neutral ruler, {own} s by our own."


if __name__ == "__main__":
    main()
