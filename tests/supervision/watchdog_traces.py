"""The watchdog's learned limits on made-up traces of step times: runs ended although they did not hang, and seconds until a hang is found.

    python tests/supervision/watchdog_traces.py --steps 2000000

Each trace is millions of healthy steps. A run that is ended wrongly starts again with what the run directory keeps, as a real one would.
"""

import json
from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from maxlm.config.sections.watchdog import WatchdogConfig
from maxlm.supervision.limits import PHASES, Limits

STEP_S = 6.0
Trace = Callable[[np.random.Generator, int], np.ndarray]


class Found(NamedTuple):
    """`wrong`: runs ended without a hang; `learned_s`, `last_s`: limit of a step after 200 steps, and at the end; `fixed`: `wrong` with
    300 s for ever.
    """

    wrong: int
    learned_s: float
    last_s: float
    fixed: int


def steady(dice: np.random.Generator, steps: int, step_s: float = STEP_S) -> np.ndarray:
    """Log-normal around `step_s`, by a tenth."""
    return step_s * dice.lognormal(0.0, 0.1, steps)


def with_stalls(dice: np.random.Generator, steps: int, share: float = 1e-3, mean_s: float = 10.0) -> np.ndarray:
    """Some steps take longer by an exponential time."""
    return steady(dice, steps) + np.where(dice.random(steps) < share, dice.exponential(mean_s, steps), 0.0)


def heavy_tail(dice: np.random.Generator, steps: int, share: float = 1e-3, power: float = 3.0) -> np.ndarray:
    """Some steps take longer by a Pareto time of at least a step."""
    return steady(dice, steps) + np.where(dice.random(steps) < share, STEP_S * (1 + dice.pareto(power, steps)), 0.0)


def drift(dice: np.random.Generator, steps: int) -> np.ndarray:
    """Ten times slower by the end."""
    return steady(dice, steps) * np.geomspace(1, 10, steps)


def bursts(dice: np.random.Generator, steps: int) -> np.ndarray:
    """Every 10,000 steps a shared file system makes 50 of them ten times slower."""
    return steady(dice, steps) * np.where(np.arange(steps) % 10_000 >= 9950, 10.0, 1.0)


def slower_host(dice: np.random.Generator, steps: int) -> np.ndarray:
    """From the middle on a host that replaces another makes all steps five times slower."""
    return steady(dice, steps) * np.where(np.arange(steps) >= steps // 2, 5.0, 1.0)


def quick(dice: np.random.Generator, steps: int) -> np.ndarray:
    """Steps of 0.2 s, every thousandth 20 s longer."""
    return steady(dice, steps, 0.2) + np.where(np.arange(steps) % 1000 == 999, 20.0, 0.0)


TRACES: dict[str, Trace] = {
    "steady": steady,
    "a step in 1,000 longer by 10 s, exponential": with_stalls,
    "a step in 1,000 longer by 30 s, exponential": lambda dice, steps: with_stalls(dice, steps, mean_s=30.0),
    "a step in 1,000 longer by 6 s and more, Pareto 3": heavy_tail,
    "a step in 1,000 longer by 6 s and more, Pareto 1.5": lambda dice, steps: heavy_tail(dice, steps, power=1.5),
    "ten times slower by the end": drift,
    "bursts of 50 steps, ten times slower": bursts,
    "five times slower from the middle on": slower_host,
    "0.2 s, every thousandth 20 s longer": quick,
}


def follow(lengths: np.ndarray) -> Found:
    """Follow a trace with learned limits."""
    limits, wrong, learned = Limits(WatchdogConfig()), 0, 0.0
    fixed, enough = int((lengths > PHASES["step"].first_s).sum()), PHASES["step"].enough
    for number, seconds in enumerate(lengths.tolist()):
        if seconds > PHASES["step"].floor_s and seconds > limits.seconds("step"):  # never longer than the floor
            wrong += 1
            limits.ended("step", limits.seconds("step"))
            limits = Limits(WatchdogConfig(), json.loads(json.dumps(limits.to_json())))
        else:
            limits.observe({"step": seconds})
        if number == enough:
            learned = limits.seconds("step")
    return Found(wrong, learned, limits.seconds("step"), fixed)


def main(
    steps: Annotated[int, typer.Option(min=1000, help="Steps of each trace.")] = 2_000_000,
    seed: Annotated[int, typer.Option(help="Of the traces.")] = 0,
) -> None:
    """Print wrong ends and limits by trace."""
    table = Table(
        "steps of 6 s", "ended wrongly", "with 300 s for ever", "limit after 200 steps", "limit at the end", title=f"{steps:,} steps each"
    )
    for name, trace in TRACES.items():
        found = follow(trace(np.random.default_rng(seed), steps))
        table.add_row(name, f"{found.wrong}", f"{found.fixed}", f"{found.learned_s:.0f} s", f"{found.last_s:.0f} s")
    Console(width=None if Console().is_terminal else 160).print(table)


if __name__ == "__main__":
    typer.run(main)
