"""The frontier as a table, and a layout in a few words."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from maxlm.planning.frontier import Point
from maxlm.planning.layouts import Layout
from maxlm.telemetry.formatting import count, duration, percent

GIB = 2**30
WIDE = 100  # columns
SHORT = {"query": "q", "key": "k", "value": "v", "attention_out": "out", "layer_input": "input", "mlp_out": "mlp"}


@dataclass(frozen=True)
class Scale:
    """What turns seconds a step into the figures people compare. Of all devices together."""

    tokens_per_step: int
    model_flops: float  # of a step
    peak_flops: float
    tokens: float  # of the whole run
    chips: int

    def mfu(self, step_s: float) -> float:
        """Model FLOPs over what the devices could do meanwhile."""
        return self.model_flops / (step_s * self.peak_flops)

    def seconds(self, step_s: float) -> float:
        """Of the whole run, if nothing is lost."""
        return self.tokens / self.tokens_per_step * step_s

    def chip_hours(self, step_s: float) -> float:
        """Chips times hours of the whole run."""
        return self.seconds(step_s) / 3600 * self.chips


def frontier(points: Sequence[Point], scale: Scale, console: Console) -> None:
    """Print `points`, one a line, in their order; a narrow console gets fewer figures of each."""
    rates = ("tokens/s", "run") if console.width >= WIDE else ()
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("step", "MFU", *rates, "HBM"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("mesh; kept for the backward pass", overflow="fold")
    for point in points:
        mark = ("* " if point.frontier else "  ") + ("compiled" if point.compiled else "predicted")
        figures = [duration(point.step_s), percent(scale.mfu(point.step_s))]
        figures += [count(scale.tokens_per_step / point.step_s), duration(scale.seconds(point.step_s))] if rates else []
        if not point.fits:
            figures, mark = ["-"] * len(figures), "  too large"
        style = "" if point.compiled and point.fits else "dim"
        table.add_row(*figures, f"{point.needed / GIB:.1f} GiB", mark, words(point.layout), style=style)
    console.print(table)
    said = "*: no other is both faster and smaller. Seconds are XLA's estimates, or a model's that they correct; nothing was measured."
    console.print(said, style="dim", highlight=False)


def words(layout: Layout) -> str:
    """`fsdp 32 x tensor 2, 2 microbatches, loss in 4; attention out q k v, on the host: input`."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in layout.mesh if size > 1) or "one device"
    parts = f", {layout.microbatches} microbatches" if layout.microbatches > 1 else ""
    kept = layout.remat if isinstance(layout.remat, str) else " ".join(map(_short, layout.remat))
    host = f", on the host: {' '.join(map(_short, layout.offload))}" if layout.offload else ""
    return f"{mesh}{parts}, loss in {layout.loss_chunks}; {kept}{host}"


def _short(name: str) -> str:
    return SHORT.get(name, name)
