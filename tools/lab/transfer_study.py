"""The best learning rate of models of several widths and depths, with and without `model.parametrization`, on this machine.

    python tools/lab/transfer_study.py --out FOLDER [--widths 64 128 256 512] [--depths 2 4 8 16] [--steps 100] [--seeds 2] [--minutes 60]
        [--init-std 0.02]
    python tools/lab/transfer_study.py --out FOLDER [the same] --plot docs/lab/transfer.png

Each line of FOLDER/results.jsonl is one trial. Learning rates lie on a grid with step sqrt(2); the loss of a rate is the mean of `--seeds`
trials, of which each has its own first weights and its own text. The search of a model begins around the rate `--first`, and goes on until
the best rate has `MARGIN` worse ones on either side; the best is the minimum of the parabola through it and its neighbours. A trial that is
in the file is not repeated, so a study may be stopped at any time and started again; the smallest models come first. Widths are studied at
depth 2, depths at width 64, against a base model of width 64 and depth 2. Heads are 16 wide. Text: bytes of Python's standard library.
"""

import argparse
import json
import math
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxlm.base.strict_json import read_objects

BASE_WIDTH, BASE_DEPTH, HEAD_DIM = 64, 2, 16
SEQ_LEN, BATCH, VOCABULARY = 64, 16, 256
FIELDS = {"axis", "kind", "width", "depth", "steps", "first", "place", "seed", "loss"}  # of a trial
INIT_STD = 0.02  # of trials that name none
MARGIN = 2  # worse rates on either side of the best one
LOWEST = -24  # place, 1 / 4096 of the first rate: a model that diverges there is given up
PACKAGES = (
    "asyncio",
    "email",
    "unittest",
    "importlib",
    "http",
    "logging",
    "json",
    "concurrent/futures",
    "ctypes",
    "xml",
    "multiprocessing",
)


class Model(NamedTuple):
    """A model of the study. `kind`: of its parametrization, or "standard"."""

    axis: str  # that is studied: width or depth
    kind: str
    width: int
    depth: int

    def settings(self, init_std: float) -> dict[str, Any]:
        """The section `model` of its config. `init_std`: the base's."""
        shape = {"vocab_size": VOCABULARY, "d_model": self.width, "n_layers": self.depth, "d_ff": 4 * self.width}
        base = {"kind": self.kind, "base_width": BASE_WIDTH} | ({"base_depth": BASE_DEPTH} if self.kind == "completep" else {})
        own = {"n_heads": self.width // HEAD_DIM, "init_std": init_std}
        return {**shape, **own, "parametrization": None if self.kind == "standard" else base}


def models(widths: list[int], depths: list[int]) -> Iterator[Model]:
    """All models of the study, the ones that take least time first."""
    found = [Model("width", kind, width, BASE_DEPTH) for width in widths for kind in ("standard", "mup")]
    found += [Model("depth", kind, BASE_WIDTH, depth) for depth in depths for kind in ("standard", "completep")]
    return iter(sorted(found, key=lambda model: model.width**2 * model.depth))


def rate_of(place: int, first: float) -> float:
    """Learning rate of a place on the grid, whose step is sqrt(2)."""
    return first * 2 ** (place / 2)


def next_place(losses: Mapping[int, float]) -> int | None:
    """The next place to try, given the losses so far; None if the best one has `MARGIN` worse ones on either side, or nothing trains."""
    if not losses:
        return 0
    best = min(losses, key=lambda place: losses[place])
    if losses[best] == math.inf:  # all diverged: lower
        return min(losses) - 1 if min(losses) > LOWEST else None
    wanted = [best + sign * distance for distance in range(1, MARGIN + 1) for sign in (1, -1)]
    return next((place for place in wanted if place not in losses), None)


def best_place(losses: Mapping[int, float]) -> float:
    """The place of the minimum, between places of the grid: of the parabola through the best one and its neighbours, where both ended."""
    best = min(losses, key=lambda place: losses[place])
    left, middle, right = (losses.get(place, math.inf) for place in (best - 1, best, best + 1))
    bend = left - 2 * middle + right
    return best + (left - right) / (2 * bend) if math.isfinite(bend) and bend > 0 else float(best)


def text() -> np.ndarray:
    """Bytes of the standard library, the same order on any machine with this Python."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for package in PACKAGES for path in (library / package).rglob("*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)


def windows(data: np.ndarray, steps: int, seed: int) -> np.ndarray:
    """[steps, batch, length + 1] windows of text, drawn without replacement."""
    length = SEQ_LEN + 1
    count = len(data) // length
    assert steps * BATCH <= count, f"there are {count} windows of text, and {steps} steps read {steps * BATCH}"
    chosen = np.random.default_rng(seed).permutation(count)[: steps * BATCH]
    return data[: count * length].reshape(count, length)[chosen].reshape(steps, BATCH, length).astype(np.int32)


def trainer(model: Model, steps: int, init_std: float) -> Callable[[float, int], float]:
    """(learning rate, seed) -> mean loss of the last fifth of a run. One program for all rates and seeds: they are arguments of it."""
    import jax
    import jax.numpy as jnp
    import optax

    from maxlm.config import rules
    from maxlm.config.schema import Config
    from maxlm.data.batch import Batch
    from maxlm.models import init_parameters
    from maxlm.parallel import build_mesh
    from maxlm.run.jax_setup import select_platform
    from maxlm.training.program import build_program

    select_platform()

    config = Config.model_validate(
        {
            "model": model.settings(init_std),
            "data": {"store": "none", "seq_len": SEQ_LEN},
            "train": {"steps": steps, "global_batch": BATCH, "loss_chunks": 1},
            "optimizer": {"peak_lr": 1.0, "schedule": "constant"},  # updates are multiplied below
            "memory": {"remat": "none"},
            "precision": {"compute": "float32"},
        }
    )
    rules.check(config)
    program = build_program(config, build_mesh(config, jax.devices()[:1]))
    data = text()
    whole = np.ones((BATCH, SEQ_LEN), np.int32)
    places = np.tile(np.arange(SEQ_LEN, dtype=np.int32), (BATCH, 1))
    shape = np.minimum((np.arange(steps) + 1) / (0.1 * steps), 1.0) * np.linspace(1, 0.1, steps)  # warm-up and linear decay

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: Batch, rate: jax.Array) -> tuple[Any, Any, jax.Array]:
        count = program.objective.denominator(batch)
        sums, grads = program.gradients(params, {}, batch, count)
        norm = optax.global_norm(grads)
        grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)  # as optimizer.clip_norm = 1
        updates, state = program.optimizer.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
        return params, state, sums.added["loss"] / sums.denominator

    init = jax.jit(lambda seed: program.update.init(init_parameters(config.model, seed), {}))

    def run(rate: float, seed: int) -> float:
        first = init(seed)
        params, state, losses = first.params, first.opt_state, []
        for window_BT, now in zip(windows(data, steps, seed), rate * shape, strict=True):
            batch = Batch(window_BT[:, :-1], window_BT[:, 1:], whole.astype(np.float32), whole, places)
            params, state, loss = step(params, state, batch, jnp.float32(now))
            losses.append(loss)
        final = float(np.mean([float(loss) for loss in losses[-steps // 5 :]]))
        return final if math.isfinite(final) else math.inf

    def in_mesh(rate: float, seed: int) -> float:
        with jax.set_mesh(program.mesh):
            return run(rate, seed)

    return in_mesh


def read(path: Path) -> list[dict[str, Any]]:
    """The trials so far, without lines that are none, such as one that was half written when the study was killed."""
    lines = list(read_objects(path)) if path.is_file() else []
    trials = [line for line in lines if line.keys() >= FIELDS]
    if len(trials) < len(lines):
        print(f"{path}: {len(lines) - len(trials)} of {len(lines)} lines are no trials, and count as not made", flush=True)
    return trials


def add(path: Path, trial: dict[str, Any]) -> None:
    """Append a trial as a line of its own, also after half a line."""
    with path.open("ab+") as file:
        file.seek(max(file.tell() - 1, 0))
        torn = file.read(1) not in (b"", b"\n")
        file.write((b"\n" if torn else b"") + json.dumps(trial).encode() + b"\n")


def losses_of(trials: list[dict[str, Any]], model: Model, steps: int) -> dict[int, list[float]]:
    """Place on the grid -> losses by seed, of the trials of this model. A base model is the same with and without, and tried once."""
    base = (model.width, model.depth) == (BASE_WIDTH, BASE_DEPTH)
    found: dict[int, list[float]] = {}
    for trial in sorted(trials, key=lambda trial: trial["seed"]):
        if (trial["width"], trial["depth"], trial["steps"]) == (model.width, model.depth, steps) and (base or trial["kind"] == model.kind):
            found.setdefault(trial["place"], []).append(math.inf if trial["loss"] is None else trial["loss"])
    return found


def means(losses: Mapping[int, list[float]], seeds: int) -> dict[int, float]:
    """Place -> mean loss, of places all of whose `seeds` trials are there."""
    return {place: float(np.mean(own[:seeds])) for place, own in losses.items() if len(own) >= seeds}


def study(out: Path, wanted: Iterator[Model], steps: int, seeds: int, first: float, minutes: float, init_std: float = INIT_STD) -> None:
    """Try rates of every model until its best is known, or the time is over."""
    out.mkdir(parents=True, exist_ok=True)
    path, end = out / "results.jsonl", time.monotonic() + 60 * minutes
    trials = read(path)
    if other := {t["first"] for t in trials} - {first}:
        raise SystemExit(f"{path} holds trials around the rate {other.pop():g}: give --first as it was, or another --out")
    if other := {t.get("init_std", INIT_STD) for t in trials} - {init_std}:
        raise SystemExit(f"{path} holds trials of models with init_std {other.pop():g}: give --init-std as it was, or another --out")
    for model in wanted:
        train = None
        while (place := next_place(means(losses := losses_of(trials, model, steps), seeds))) is not None:
            if time.monotonic() > end:
                print("the time is over; the same command goes on", flush=True)
                return
            train, seed, began = train or trainer(model, steps, init_std), len(losses.get(place, [])), time.monotonic()
            loss = train(rate_of(place, first), seed)
            trial = {**model._asdict(), "steps": steps, "first": first, "place": place, "rate": rate_of(place, first), "seed": seed}
            trial |= {"init_std": init_std, "loss": loss if math.isfinite(loss) else None, "seconds": round(time.monotonic() - began, 1)}
            trials.append(trial)
            add(path, trial)
            print(json.dumps(trial), flush=True)


def table(
    trials: list[dict[str, Any]], wanted: Iterator[Model], steps: int, seeds: int, first: float
) -> list[tuple[Model, dict[int, float], bool]]:
    """(model, its losses, whether its best is known) of every model that was tried; prints a line for each, and how far the best moves."""
    rows, best_of = [], defaultdict[tuple[str, str], list[float]](list)
    for model in sorted(wanted):
        losses = means(losses_of(trials, model, steps), seeds)
        if min(losses.values(), default=math.inf) < math.inf:
            known, best = next_place(losses) is None, best_place(losses)
            found = f"best rate {first * 2 ** (best / 2):.2e} (place {best:+.2f}), loss {min(losses.values()):.4f}, {len(losses)} rates"
            print(f"{model.axis} {model.kind:>9} {model.width:>4} x {model.depth:<2} {found}{'' if known else ', not ended'}")
            rows.append((model, losses, known))
            best_of[model.axis, model.kind].append(best)
    for (axis, kind), places in best_of.items():
        print(f"{axis} {kind}: the best rate moves by {max(places) - min(places):.2f} steps of {2**0.5:.2f}")
    return rows


def plot(path: Path, rows: list[tuple[Model, dict[int, float], bool]], first: float) -> None:
    """Loss over learning rate: a row for widths and one for depths, without at the left and with at the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7.5), sharey="row", sharex="row", layout="constrained")
    panels = [("width", "standard"), ("width", "mup"), ("depth", "standard"), ("depth", "completep")]
    for panel, (axis, kind) in zip(axes.flat, panels, strict=True):
        own = [row for row in rows if (row[0].axis, row[0].kind) == (axis, kind)]
        for number, (model, losses, known) in enumerate(own):
            places = sorted(place for place in losses if math.isfinite(losses[place]))
            colour = pyplot.get_cmap("viridis")(number / max(len(own) - 1, 0.5) * 0.85)
            label = f"{axis} {getattr(model, axis)}{'' if known else ' (not ended)'}"
            panel.plot([rate_of(p, first) for p in places], [losses[p] for p in places], "o-", color=colour, markersize=3, label=label)
            panel.plot(first * 2 ** (best_place(losses) / 2), min(losses.values()), "*", color=colour, markersize=13)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.2g}")
        panel.set(xlabel="peak learning rate", ylabel="loss (nats a byte)", title=f"{axis}: {kind}")
        panel.grid(alpha=0.3)
        if own:
            panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Study or plot, as the arguments say."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2, help="trials of each rate; of a plot: those that count")
    parser.add_argument("--first", type=float, default=2**-8, help="learning rate at which searches begin")
    parser.add_argument("--init-std", type=float, default=INIT_STD, help="deviation of first weights, at the base's width and depth")
    parser.add_argument("--minutes", type=float, default=60, help="no trial begins after as many")
    parser.add_argument("--plot", type=Path, help="plot what there is, and try nothing")
    given = parser.parse_args()
    if given.plot is None:
        study(given.out, models(given.widths, given.depths), given.steps, given.seeds, given.first, given.minutes, given.init_std)
    rows = table(read(given.out / "results.jsonl"), models(given.widths, given.depths), given.steps, given.seeds, given.first)
    if given.plot is not None and not rows:
        raise SystemExit(f"{given.out}: no rate has {given.seeds} trials with --steps {given.steps}, so there is nothing to plot")
    if given.plot is not None:
        plot(given.plot, rows, given.first)


if __name__ == "__main__":
    main()
