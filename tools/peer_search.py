"""Tune MaxText for one model and machine: candidates among its own settings, each scheduled once, and a descent by one setting at a time.

tools/tuned_peer.py runs it. A choice is one option of each knob. A candidate that does not fit, or that XLA could only fit by recomputing
operations of its own choice, takes infinitely long.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from maxtext_schedule import schedule
from ruamel.yaml import YAML
from truth import REPOSITORY, Row

from maxlm.config.schema import ModelConfig
from maxlm.hardware.topologies import Topology, parse
from maxlm.hardware.xla_flags import FLAGS, VMEM, Flag
from maxlm.models import count_parameters

Choice = Mapping[str, str]  # option of each knob
Knobs = Mapping[
    str, Mapping[str, tuple[str, ...]]
]  # arguments of each option of each knob; of "keep" and "steps" from little memory to much

PROJECTIONS = ("query_proj", "key_proj", "value_proj")
GATES = {False: ("mlpwi_0", "mlpwi_1"), True: ("mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1")}  # with experts
ATTENTION = {
    "two backward passes, blocks of 512": (),
    "one backward pass, blocks of 512": ("sa_use_fused_bwd_kernel=True",),
    "one backward pass, blocks of 1,024": (
        *("sa_use_fused_bwd_kernel=True", "sa_block_q=1024", "sa_block_kv=1024", "sa_block_kv_compute=1024"),
        *("sa_block_q_dkv=1024", "sa_block_kv_dkv=2048", "sa_block_kv_dkv_compute=512"),
    ),
}
BF16, STATE = 2, 12  # bytes of an activation; of a parameter and its two moments
RECOMPUTED = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+\.remat[\w.]* = ", re.MULTILINE)  # operations that XLA recomputes by its own choice
BUDGET = 8  # programs a case
DESCENT = ("keep", "vocabulary", "steps", "mesh", "flags", "attention")


@dataclass(frozen=True)
class Case:
    """One step of both: `batch` sequences a chip, `ours` a config with `settings` over it; `model`: MaxText's name of it."""

    name: str
    title: str
    topology: str
    model: str
    batch: int
    sequence: int
    ours: str
    settings: tuple[str, ...] = ()
    experts: bool = False
    expert_groups: tuple[int, ...] = ()  # sizes of the axis `expert` to try

    @property
    def machine(self) -> Topology:
        return parse(self.topology)

    @property
    def knobs(self) -> Knobs:
        """Options of each knob that the search tries: MaxText settings or XLA flags by the option's name."""
        flags = _flags(self.machine.chip.name)
        steps = [count for count in (4, 2, 1) if self.batch % count == 0]
        meshes = {f"expert {size}": (f"ici_expert_parallelism={size}", "allow_split_physical_axes=True") for size in self.expert_groups}
        return {
            "keep": _kept(self.experts),
            "steps": {
                str(count): (f"per_device_batch_size={self.batch // count}", f"gradient_accumulation_steps={count}") for count in steps
            },
            "flags": flags,
            "vocabulary": {str(tiles): (f"num_vocab_tiling={tiles}",) for tiles in (8, 1)},
            "attention": ATTENTION,
            "mesh": {"fsdp": (), **meshes},
        }

    @property
    def start(self) -> Choice:
        """First choice of the search: the settings that an expert would try first."""
        knobs = self.knobs
        return {
            "keep": "q, k, v, attention, its projection, gate, up",
            "steps": "2" if "2" in knobs["steps"] else "1",
            "flags": list(knobs["flags"])[-1],
            "vocabulary": "8",
            "attention": list(ATTENTION)[-1],
            "mesh": "fsdp",
        }

    def row(self, choice: Choice) -> Row:
        """MaxText's step with `choice`."""
        knobs = self.knobs
        options = {knob: knobs[knob][option] for knob, option in choice.items()}
        flags = options.pop("flags")
        given = (f"model_name={self.model}", f"max_target_length={self.sequence}", "use_iota_embed=True")
        settings = (*given, *(argument for knob in sorted(options) for argument in options[knob]))
        groups = int(choice["mesh"].removeprefix("expert ")) if choice["mesh"] != "fsdp" else 1
        devices = self.machine.devices
        mesh = {"fsdp": devices // groups, "expert": groups} if groups > 1 else {"fsdp": devices}
        return Row(self.name, self.topology, mesh, settings, flags, "docs/lab/benchmarks.md")


@dataclass(frozen=True)
class Candidate:
    """A program of MaxText's step, or why there is none; `needed`: bytes of HBM that it allocates."""

    row: Row
    program: Path
    needed: int = 0
    error: str = ""

    def problem(self, available: int) -> str:
        """Reason to leave the candidate out; empty if it may be taken."""
        if self.error:
            return f"refused: {self.error.strip().splitlines()[-1][:160]}"
        if self.needed > available:
            return f"needs {self.needed / 2**30:.1f} of {available / 2**30:.1f} GiB"
        recomputed = len(RECOMPUTED.findall(self.program.read_text(encoding="utf-8")))
        return f"XLA recomputes {recomputed} operations of its own choice" if recomputed else ""


class Memory:
    """Bytes that a choice needs, by the candidates of a case that were scheduled: they differ by the activations that are kept."""

    def __init__(self, case: Case, model: ModelConfig) -> None:
        self._case, self._model, self._widths = case, model, kept_widths(model)
        self._known: dict[str, tuple[Choice, int]] = {}

    def learn(self, choice: Choice, needed: int) -> None:
        """Take the bytes of a candidate for the measure of others on its mesh."""
        if needed:
            self._known[choice["mesh"]] = choice, needed

    def expected(self, choice: Choice) -> int:
        """Bytes that `choice` should need: state, activations, and temporaries as a known one of its mesh has for as many tokens."""
        state = STATE * count_parameters(self._model) // self._case.machine.devices
        like, needed = self._known.get(choice["mesh"], (choice, state + self._kept(choice)))
        temporaries = (needed - state - self._kept(like)) * int(like["steps"]) // int(choice["steps"])
        return state + self._kept(choice) + temporaries

    def _kept(self, choice: Choice) -> int:
        tensors = (argument.removesuffix("=device") for argument in self._case.knobs["keep"][choice["keep"]])
        a_token = self._widths["decoder_layer_input"] + sum(self._widths.get(tensor, 0) for tensor in tensors)
        return BF16 * self._model.n_layers * a_token * self._case.batch * self._case.sequence // int(choice["steps"])


def kept_widths(model: ModelConfig) -> dict[str, int]:
    """Elements a token of the tensors that MaxText can keep of a layer."""
    heads, pairs = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    widths = {"decoder_layer_input": model.d_model, "context": heads, "query_proj": heads, "out_proj": model.d_model}
    moe = model.moe
    hidden = model.d_ff if moe is None else moe.n_shared * moe.d_ff
    widths |= {"key_proj": pairs, "value_proj": pairs, "mlpwi_0": hidden, "mlpwi_1": hidden}
    if moe is not None:
        widths |= dict.fromkeys(("moe_mlpwi_0", "moe_mlpwi_1"), moe.top_k * moe.d_ff) | {"moe_mlpwo": moe.top_k * model.d_model}
    return widths


Compile = Callable[[Path, Sequence[str], Sequence[str], Path], int]


class Peer:
    """MaxText's programs in `folder`, each under a digest of its settings and scheduled by `compiles` where it is missing."""

    def __init__(self, python: Path | None, folder: Path, compiles: Compile = schedule) -> None:
        self._python, self._folder, self._compiles = python, folder / "maxtext", compiles

    def path(self, row: Row) -> Path:
        """Where the scheduled program of `row` is."""
        digest = hashlib.sha256(json.dumps(row.to_compile).encode()).hexdigest()[:16]
        return self._folder / f"{digest}.hlo"

    def missing(self, row: Row) -> bool:
        return not self.path(row).with_suffix(".json").exists()

    def candidate(self, row: Row) -> Candidate:
        """The program of `row`; a failure is kept, too. Raises RuntimeError if it is missing and there is no Python with MaxText."""
        program = self.path(row)
        settings, flags = row.to_compile
        if self.missing(row):
            if self._python is None:
                raise RuntimeError(f"{row.name} has no program for its settings yet: give --maxtext-python")
            self._folder.mkdir(parents=True, exist_ok=True)
            found: dict[str, object] = {"row": row.name, "settings": settings, "flags": flags}
            try:
                found["needed"] = self._compiles(self._python, settings, flags, program)
            except RuntimeError as error:
                found["error"] = str(error) or "no message"
            program.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        kept = json.loads(program.with_suffix(".json").read_text(encoding="utf-8"))
        return Candidate(row, program, kept.get("needed", 0), kept.get("error", ""))


def search(
    knobs: Knobs, start: Choice, seconds: Callable[[Choice], float], budget: int, hopeless: Callable[[Choice], bool]
) -> tuple[Choice, int]:
    """(the fastest choice found, number of choices tried): from `start` by one knob at a time, until no neighbour is faster or `budget`
    choices were tried. `seconds`: of a choice, infinite for one that is not to be taken; of `hopeless` ones it is not asked.
    """
    tried: dict[tuple[str, ...], float] = {}

    def price(choice: Choice) -> float:
        key = tuple(choice[knob] for knob in knobs)
        if key not in tried and len(tried) < budget and not hopeless(choice):
            tried[key] = seconds(choice)
        return tried.get(key, math.inf)

    best, before = start, None
    while best != before:
        before = best
        for knob in (knob for knob in DESCENT if knob in knobs):
            for line in _lines(knobs, best, knob, fits=price(best) < math.inf):
                for choice in line:
                    if price(choice) < price(best):
                        best = choice
                    elif price(choice) < math.inf:
                        break
    return best, len(tried)


def _lines(knobs: Knobs, best: Choice, knob: str, *, fits: bool) -> Iterator[list[Choice]]:
    """Lists of choices that change `knob` of `best`: a list ends at its first choice that fits and is no faster than `best`."""
    options, keeps = list(knobs[knob]), list(knobs["keep"])
    place, rung = options.index(best[knob]), keeps.index(best["keep"])
    if knob == "keep":
        if fits:
            yield [{**best, knob: option} for option in options[place + 1 :]]
        yield [{**best, knob: option} for option in reversed(options[:place])]
    for option in options if knob != "keep" else ():
        if option != best[knob]:  # accumulation and experts change what fits: the most that does
            tops = reversed(keeps) if knob == "steps" else reversed(keeps[: rung + 1]) if knob == "mesh" else (best["keep"],)
            yield [{**best, knob: option, "keep": keep} for keep in tops]


def _kept(experts: bool) -> dict[str, tuple[str, ...]]:
    """Lists of activations to keep, from few to many. Without experts the last is what MaxText's minimal_with_context keeps."""
    gate, *ups = GATES[experts][::2] if experts else GATES[experts][:1]
    lists = {
        "attention": ("context",),
        "attention, its projection": ("context", "out_proj"),
        "q, k, v, attention": ("context", *PROJECTIONS),
        "q, k, v, attention, its projection": ("context", *PROJECTIONS, "out_proj"),
        "q, k, v, attention, its projection, gate": ("context", *PROJECTIONS, "out_proj", gate, *ups),
        "q, k, v, attention, its projection, gate, up": ("context", *PROJECTIONS, "out_proj", *GATES[experts]),
    }
    if experts:
        lists["q, k, v, attention, its projection, gate, up, down"] = (*list(lists.values())[-1], "mlpwo", "moe_mlpwo")
    custom = {name: ("remat_policy=custom", *(f"{tensor}=device" for tensor in kept)) for name, kept in lists.items()}
    return {"full": ("remat_policy=full",), **custom}


def _flags(chip: str) -> dict[str, tuple[str, ...]]:
    """Sets of XLA's flags; the last is ours for the chip."""
    vmem = tuple(flag_text(flag) for flag in VMEM)
    rest = tuple(flag_text(flag) for flag in FLAGS[chip] if flag not in VMEM)
    name = "SparseCore" if any("sparse_core" in flag for flag in rest) else "asynchronous reductions"
    sets = {"defaults": (), "VMEM": vmem, name: rest}
    if chip == "v5e":  # flags of MaxText's own runs on v5e
        groups = YAML(typ="safe", pure=True).load(REPOSITORY / "tools" / "truth_rows.yml")["flags"]
        sets["VMEM, gathers in fusions"] = (*vmem, *groups["data"].split(), *groups["fuse_gather"].split())
    return {**sets, f"VMEM, {name}": (*vmem, *rest)}


def flag_text(flag: Flag) -> str:
    """A compiler option as XLA's command line takes it."""
    return f"--{flag.name}={str(flag.value).lower() if isinstance(flag.value, bool) else flag.value}"
