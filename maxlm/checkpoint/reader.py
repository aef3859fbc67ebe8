"""Reading one checkpoint and judging it."""

from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from maxlm.checkpoint import cluster, manifest
from maxlm.checkpoint.digest import digest
from maxlm.checkpoint.errors import CheckpointError, DamagedError, UnreachableError, Verdict, verdict_of
from maxlm.checkpoint.refusal import check_identity, check_leaves
from maxlm.config.errors import UserError
from maxlm.config.transient import first_line, is_transient, retried

STATE = "state"  # the item of a checkpoint that holds the arrays
_LISTED = "_METADATA"  # the names, shapes and dtypes of the arrays, as Orbax keeps them


def read_checkpoint(
    folder: ocp.path.Path, wanted: dict[str, jax.ShapeDtypeStruct], identity: dict[str, str] | None
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """The arrays named in `wanted`, on their shardings, and the data position.

    With an `identity` the checkpoint must be of that experiment and hold exactly `wanted`; without, it may hold more. All
    processes call this and all get the same outcome. Raises DamagedError if the bytes are bad, CheckpointError if the checkpoint
    is refused, UnreachableError if storage still fails after some tries.
    """
    arrays: dict[str, jax.Array] = {}
    page = None
    problem: Exception | None = None
    try:
        page = retried(lambda: manifest.read(folder), f"reading {folder}")
        if reason := page.disagreement(folder.name):
            raise DamagedError(reason)
        check_metadata(folder)
        if identity is not None:
            check_identity(page.identity, identity, str(folder))
        check_leaves(page.leaves, wanted, str(folder), whole=identity is not None)
        arrays = retried(lambda: _load(folder, wanted), f"reading {folder}")
    except Exception as error:  # any: a damaged file shows itself in many ways, and the other processes must hear of it
        problem = error
    _agree(folder, problem)
    assert page is not None, "no problem, so it was read"
    found = digest(arrays)
    changed = [name for name in wanted if found[name] != page.leaves[name].digest]
    if changed:
        raise DamagedError(
            f"the bytes of {', '.join(changed[:3])} are not the ones that were written ({len(changed)} of {len(wanted)} leaves)"
        )
    return arrays, page.data_position


def check_metadata(folder: ocp.path.Path) -> None:
    """Raises DamagedError if Orbax cannot read what it keeps on the checkpoint in `folder`."""
    try:
        _ = ocp.path.step.standard_name_format().find_step(folder.parent, int(folder.name)).commit_timestamp_nsecs
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if is_transient(error):
            raise
        raise DamagedError(f"its metadata is damaged: {first_line(error)}") from error


def _load(folder: ocp.path.Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    if not (folder / STATE / _LISTED).exists():  # Orbax would take it for a layout of old
        raise DamagedError(f"{STATE}/{_LISTED} is missing")
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    # Orbax would wait at a barrier for a process whose files are bad until it times out; we agree ourselves, at once.
    context.multiprocessing.primary_host = jax.process_index()
    context.multiprocessing.active_processes = {jax.process_index()}
    with context:
        arrays = ocp.load(folder, wanted, checkpointable_name=STATE)
    for name, leaf in wanted.items():  # Orbax goes by its own metadata, of which a bit may be wrong
        found = arrays.get(name) if isinstance(arrays, dict) else None
        if not isinstance(found, jax.Array) or found.shape != leaf.shape or found.dtype != leaf.dtype:
            raise DamagedError(f"{name} came back as {_kind(found)}, not as {leaf.dtype}{list(leaf.shape)}")
    return arrays


def _kind(found: Any) -> str:
    return f"{found.dtype}{list(found.shape)}" if isinstance(found, jax.Array) else type(found).__name__


def _agree(folder: ocp.path.Path, problem: Exception | None) -> None:
    """Raises the same kind of error in every process if any of them met a problem."""
    verdict = Verdict.GOOD if problem is None else verdict_of(problem)
    common = cluster.worst(verdict)
    if common == Verdict.GOOD:
        return
    reason = first_line(problem) if problem is not None and verdict == common else "another process could not read it"
    if common == Verdict.DAMAGED:
        raise DamagedError(str(problem) if isinstance(problem, DamagedError) else reason) from problem
    if isinstance(problem, UserError):
        raise problem
    kind = UnreachableError if common == Verdict.UNREACHABLE else CheckpointError
    raise kind(f"{folder} could not be read: {reason}; try again when the cause is gone. Nothing was changed.") from problem
