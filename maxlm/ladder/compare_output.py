"""A comparison of optimizers as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from maxlm.ladder.compare import SHARE, Entry, difference, interval
from maxlm.telemetry.formatting import count, duration


def table(entries: Sequence[Entry], baseline: str) -> Table:
    """One row an optimizer and size; differences are to `baseline` at the same size."""
    found = Table(title=f"Held-out loss over {len(entries[0].losses)} seeds, with {SHARE:.0%} intervals; differences to {baseline}")
    for head in ("size", "optimizer", "best settings", "equal FLOPs", "difference", "equal time", "difference", "a step"):
        found.add_column(head, no_wrap=head in ("size", "optimizer"))
    for one in entries:
        other = next(entry for entry in entries if entry.size == one.size and entry.optimizer == baseline)
        settings = ", ".join(f"{key} {value:g}" for key, value in one.best.items())
        cells = [f"{one.size} ({count(one.parameters)})", one.optimizer, settings + (" (at the edge)" if one.at_edge else "")]
        for losses, reference in ((one.losses, other.losses), (one.losses_at_equal_time, other.losses_at_equal_time)):
            cells += [_with(*interval(losses), sign=False), "" if one is other else _with(*difference(losses, reference), sign=True)]
        found.add_row(*cells, duration(one.step_s))
    return found


def to_json(entries: Sequence[Entry], baseline: str) -> dict[str, Any]:
    return {"baseline": baseline, "share": SHARE, "entries": [asdict(one) for one in entries]}


def _with(mean: float, half: float, *, sign: bool) -> str:
    return f"{mean:+.4f} ± {half:.4f}" if sign else f"{mean:.4f} ± {half:.4f}"
