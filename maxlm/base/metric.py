"""Declarations of the figures that an update reports."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Reduction = Literal["mean", "sum", "max"]


@dataclass(frozen=True)
class Metric:
    """Declaration of a figure of every update. A new metric needs this and the line that computes its value, no more: microbatches and
    devices are reduced as it says, and metrics.jsonl, TensorBoard, the console and the report show it.

    A value that is a vector [N] is recorded as `name_1` ... `name_N`.
    """

    name: str  # key in metrics.jsonl, tag in TensorBoard
    title: str  # of the report's chart
    unit: str = ""
    reduce: Reduction = "mean"  # over microbatches and devices; mean: a sum over tokens, divided by the tokens of the whole update
    per: str = ""  # of a mean: the sum that divides it, if not the tokens of the whole update
    entries: tuple[str, ...] = ()  # of a vector: what the report calls its entries, if not by number
    held_out: bool = False  # also computed of held-out documents, as the loss is
    console: str = ""  # format of its text on the console, such as "load {:.2f}" or "drop {percent}", where it is not 0; "": none


def records(values: Mapping[str, Any]) -> dict[str, float]:
    """Values on the host by name -> figures by key: scalars as they are, vectors entry by entry."""
    figures: dict[str, float] = {}
    for name, value in values.items():
        if getattr(value, "ndim", 0) == 0:
            figures[name] = int(value) if getattr(value, "dtype", None) is not None and value.dtype.kind in "iu" else float(value)
        else:
            figures |= {f"{name}_{i}": float(entry) for i, entry in enumerate(value, 1)}
    return figures


def charts_of(metrics: Iterable[Metric]) -> dict[str, dict[str, Any]]:
    """Name -> title, unit and entries, as the `start` event keeps them for the report."""
    return {
        metric.name: {"title": metric.title, "unit": metric.unit} | ({"entries": metric.entries} if metric.entries else {})
        for metric in metrics
    }
