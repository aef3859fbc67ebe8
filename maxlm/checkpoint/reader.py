"""Read one checkpoint: refuse it if it belongs to another run, and verify its arrays."""

from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from maxlm.base.errors import UserError, some
from maxlm.base.paths import is_remote
from maxlm.base.transient import first_line, is_out_of_memory, is_transient, retried
from maxlm.checkpoint import manifest
from maxlm.checkpoint.digest import digest
from maxlm.checkpoint.errors import CheckpointError, DamagedError, UnreachableError, Verdict, verdict_of
from maxlm.checkpoint.manifest import Leaf
from maxlm.checkpoint.tree_paths import OPTIONAL, PARAMS
from maxlm.cluster import agree

STATE = "state"  # the item of a checkpoint that holds the arrays
_METADATA = "_CHECKPOINT_METADATA"  # times and items of a checkpoint, written by Orbax
_LISTED = "_METADATA"  # names, shapes and dtypes of the arrays, written by Orbax


def read_checkpoint(
    folder: ocp.path.Path, wanted: dict[str, jax.ShapeDtypeStruct], identity: dict[str, str] | None
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Load the arrays named in `wanted` onto their shardings, and the data position.

    With an `identity` the checkpoint must be of that experiment and hold exactly `wanted`; without, it may hold more. Optional leaves that
    it lacks are zeros. All processes call this and all get the same outcome. Raises DamagedError if the bytes are wrong, CheckpointError
    if the checkpoint is refused, UnreachableError if storage still fails after several tries.
    """
    arrays: dict[str, jax.Array] = {}
    absent: dict[str, jax.ShapeDtypeStruct] = {}
    saved = None
    problem: Exception | None = None
    try:
        saved = retried(lambda: manifest.read(folder), f"reading {folder}")
        if reason := saved.disagreement(folder.name):
            raise DamagedError(reason)
        retried(lambda: check_metadata(folder), f"reading {folder}")
        if identity is not None:
            check_identity(saved.identity, identity, str(folder))
        absent = {name: leaf for name, leaf in wanted.items() if name.startswith(OPTIONAL) and name not in saved.leaves}
        wanted = {name: leaf for name, leaf in wanted.items() if name not in absent}
        check_leaves(saved.leaves, wanted, str(folder), saved.maxlm, whole=identity is not None)
        arrays = retried(lambda: _load(folder, wanted), f"reading {folder}")
    except Exception as error:  # any: damage raises many kinds of errors, and the other processes must learn of it
        problem = error
    _agree(folder, problem)
    assert saved is not None, "no problem, so it was read"
    digests = digest(arrays)
    changed = [name for name in wanted if digests[name] != saved.leaves[name].digest]
    if agree.max_over_processes(int(bool(changed))):
        names = ", ".join(changed[:3]) or "leaves of another process"
        raise DamagedError(f"the bytes of {names} are not the ones that were written ({len(changed)} of {len(wanted)} leaves)")
    zeros = {name: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding) for name, leaf in absent.items()}
    return arrays | zeros, saved.data_position


def holds(file: ocp.path.Path) -> bool:
    """True if there is such a file. Raises what the storage raises if it fails: `exists` and `is_dir` are False then."""
    try:
        with file.open("rb"):
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_metadata(folder: ocp.path.Path) -> None:
    """Raise DamagedError if Orbax cannot read its metadata of the checkpoint in `folder`, or if a file of it is none."""
    manifest.check_regular(folder)
    try:
        _read_metadata(folder)
    except DamagedError:  # or Orbax's search has found nothing, since the storage failed for a moment: damage stays
        holds(folder / _METADATA)
        _read_metadata(folder)


def _read_metadata(folder: ocp.path.Path) -> None:
    try:
        _ = ocp.path.step.standard_name_format().find_step(folder.parent, int(folder.name)).commit_timestamp_nsecs
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if is_transient(error):
            raise
        raise DamagedError(f"its metadata is damaged: {first_line(error)}") from error


def _load(folder: ocp.path.Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    if not holds(folder / STATE / _LISTED):  # Orbax would assume an older layout
        raise DamagedError(f"{STATE}/{_LISTED} is missing")
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    # Orbax would wait at a barrier, until it times out, for a process that finds damaged files; `_agree` is immediate.
    context.multiprocessing.primary_host = jax.process_index()
    context.multiprocessing.active_processes = {jax.process_index()}
    with context:
        arrays = ocp.load(folder, wanted, checkpointable_name=STATE)
    for name, leaf in wanted.items():  # Orbax trusts its own metadata, which may be damaged too
        array = arrays.get(name) if isinstance(arrays, dict) else None
        if not isinstance(array, jax.Array) or array.shape != leaf.shape or array.dtype != leaf.dtype:
            kind = f"{array.dtype}{list(array.shape)}" if isinstance(array, jax.Array) else type(array).__name__
            raise DamagedError(f"{name} was loaded as {kind}, not as {leaf.dtype}{list(leaf.shape)}")
    return arrays


def _agree(folder: ocp.path.Path, problem: Exception | None) -> None:
    """Raise the same kind of error in every process if any of them has a problem."""
    verdict = Verdict.GOOD if problem is None else verdict_of(problem, remote=is_remote(str(folder)))
    common = agree.max_over_processes(verdict)
    if common == Verdict.GOOD:
        return
    reason = first_line(problem) if problem is not None and verdict == common else "another process could not read it"
    if common == Verdict.DAMAGED:
        raise DamagedError(str(problem) if isinstance(problem, DamagedError) else reason) from problem
    if isinstance(problem, UserError):
        raise problem
    if problem is not None and is_out_of_memory(problem):
        raise CheckpointError(f"{folder} does not fit here ({reason}): use more devices, or split it further.") from problem
    kind = UnreachableError if common == Verdict.UNREACHABLE else CheckpointError
    raise kind(f"{folder} could not be read: {reason}; try again when the cause is gone. Nothing was changed.") from problem


def check_identity(saved: dict[str, str], current: dict[str, str], where: str) -> None:
    """Raise CheckpointError naming the first fields that differ, with both values. `where` names the checkpoint."""
    differing = [
        f"{field} is {saved.get(field, 'not set')} there and {current.get(field, 'not set')} here"
        for field in [*current, *(field for field in saved if field not in current)]
        if saved.get(field) != current.get(field)
    ]
    if differing:
        raise CheckpointError(
            f"{where} was written by another experiment: {some(differing)}; use another run.name, or go back to the settings of that one."
        )


def check_leaves(saved: dict[str, Leaf], wanted: dict[str, jax.ShapeDtypeStruct], where: str, version: str, *, whole: bool) -> None:
    """Raise CheckpointError naming leaves that are missing or have another shape or dtype, and if `whole`, leaves not in `wanted`
    (optional ones may be). `version`: of the maxlm that wrote it.
    """
    params_first = sorted(wanted, key=lambda name: not name.startswith(PARAMS))  # leaves of the optimizer differ as a consequence
    problems = [_difference(name, saved.get(name), wanted[name]) for name in params_first]
    if whole:
        problems += [
            f"{name} is there and not in this run's state" for name in saved if name not in wanted and not name.startswith(OPTIONAL)
        ]
    if problems := [problem for problem in problems if problem]:
        raise CheckpointError(
            f"{where}, written by maxlm {version}, does not fit this run's state: {some(problems)}; restore it with the settings and the "
            "maxlm it was written with, begin another run from its parameters (train.start_from), or use another run.name."
        )


def _difference(name: str, saved: Leaf | None, wanted: jax.ShapeDtypeStruct) -> str:
    if saved is None:
        return f"{name} is missing there"
    if saved.shape != tuple(wanted.shape):
        return f"{name} has shape {list(saved.shape)} there and {list(wanted.shape)} here"
    if saved.dtype != str(wanted.dtype):
        return f"{name} is {saved.dtype} there and {wanted.dtype} here (it is never cast silently)"
    return ""
