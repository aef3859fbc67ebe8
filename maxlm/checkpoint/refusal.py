"""Reasons to refuse a checkpoint that is whole: it belongs to another run, or its arrays are not the ones asked for."""

import jax

from maxlm.checkpoint.errors import CheckpointError
from maxlm.checkpoint.manifest import Leaf
from maxlm.checkpoint.tree_paths import MODEL_STATE, PARAMS

_SHOWN = 3  # differences named before the rest is only counted


def check_identity(saved: dict[str, str], current: dict[str, str], where: str) -> None:
    """Raises CheckpointError naming the first fields that differ, with both values. `where` names the checkpoint."""
    differing = [
        f"{field} is {saved.get(field, 'not set')} there and {current.get(field, 'not set')} here"
        for field in [*current, *(field for field in saved if field not in current)]
        if saved.get(field) != current.get(field)
    ]
    if differing:
        raise CheckpointError(
            f"{where} was written by another experiment: {_some(differing)}; use another run.name, or go back to the settings of that one."
        )


def check_leaves(saved: dict[str, Leaf], wanted: dict[str, jax.ShapeDtypeStruct], where: str, *, whole: bool) -> None:
    """Raises CheckpointError naming leaves that are missing or have another shape or dtype, and if `whole`, ones too many."""
    moved = [name for name in wanted if name.startswith(f"{MODEL_STATE}.") and name not in saved and _as_parameter(name) in saved]
    if moved:
        raise CheckpointError(
            f"{where} was written by an earlier maxlm, which kept {_some([_as_parameter(name) for name in moved])} among the parameters; "
            f"here they are in {MODEL_STATE}: continue that run with the maxlm that wrote it, or use another run.name."
        )
    telling_first = sorted(wanted, key=lambda name: not name.startswith(PARAMS))  # the optimizer's leaves only follow suit
    problems = [_difference(name, saved.get(name), wanted[name]) for name in telling_first]
    if whole:
        problems += [f"{name} is there and not in this run's state" for name in saved if name not in wanted]
    found = [problem for problem in problems if problem]
    if found:
        raise CheckpointError(
            f"{where} does not fit this run's state: {_some(found)}; restore it with the settings it was written with, "
            "or use another run.name."
        )


def _as_parameter(name: str) -> str:
    """Name that a leaf of the model state would have as a parameter."""
    return PARAMS + name.removeprefix(MODEL_STATE)


def _difference(name: str, saved: Leaf | None, wanted: jax.ShapeDtypeStruct) -> str:
    if saved is None:
        return f"{name} is missing there"
    if saved.shape != tuple(wanted.shape):
        return f"{name} has shape {list(saved.shape)} there and {list(wanted.shape)} here"
    if saved.dtype != str(wanted.dtype):
        return f"{name} is {saved.dtype} there and {wanted.dtype} here (it is never cast silently)"
    return ""


def _some(texts: list[str]) -> str:
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f", and {more} more" if more > 0 else "")
