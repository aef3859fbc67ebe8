"""Contents of a checkpoint: `STEP/manifest/manifest.json`, written in the same atomic save as the arrays, with its own checksum."""

import asyncio
import dataclasses
import hashlib
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

import maxlm
from maxlm.base.paths import irregular, is_remote
from maxlm.checkpoint.errors import CheckpointError, DamagedError

NAME = "manifest"
_FILE = "manifest.json"
_FORMAT = 2
NEXT_STEP = "next_step"  # entry of a data position: the number of the next batch
STEP_LEAF = "step"  # leaf of the state: how many batches it has consumed


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array: dtype by name, global shape, and the two sums of `digest`."""

    dtype: str
    shape: tuple[int, ...]
    digest: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Step, identity, data position and leaves of a checkpoint: all that is known without reading an array."""

    step: int
    identity: dict[str, str]
    data_position: dict[str, Any]
    leaves: dict[str, Leaf]
    maxlm: str = maxlm.__version__  # version that wrote it

    def disagreement(self, folder: str) -> str:
        """Name the steps where the folder's name, the manifest, the data position and the state differ; "" if they agree.

        The state's step is the plain sum of the digest of an int32 scalar, its bit pattern. A data position without `next_step`
        does not count batches, and then only the name is compared.
        """
        steps = {f"the folder is named {folder}": folder, f"its manifest is of step {self.step}": str(self.step)}
        if NEXT_STEP in self.data_position:
            steps[f"its data position is {self.data_position[NEXT_STEP]}"] = str(self.data_position[NEXT_STEP])
            leaf = self.leaves.get(STEP_LEAF)
            if leaf is not None and (leaf.dtype, leaf.shape) == ("int32", ()):
                steps[f"its state holds {leaf.digest[0]} updates"] = str(leaf.digest[0])
        return ", ".join(steps) if len(set(steps.values())) > 1 else ""

    def to_text(self) -> str:
        """JSON with a checksum. Raises TypeError for a `data_position` that is not JSON."""
        body = {"format": _FORMAT, **dataclasses.asdict(self)}
        return json.dumps({**body, "sha256": _checksum(body)}, indent=1)


def parse(text: str) -> Manifest:
    """Parse a manifest. Raises DamagedError if its bytes have changed, CheckpointError if it has another format."""
    try:
        body = json.loads(text)
        checksum, version = body.pop("sha256"), body.pop("format")
        matches = checksum == _checksum({"format": version, **body})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedError("its manifest is unreadable") from error
    if not matches:
        raise DamagedError("its manifest does not match its checksum")
    if version != _FORMAT:
        raise CheckpointError(
            f"the checkpoint is of format {version}, written by maxlm {body.get('maxlm', 'of an unknown version')}, and this is maxlm "
            f"{maxlm.__version__}, which reads format {_FORMAT}: use that version"
        )
    leaves = {name: Leaf(leaf["dtype"], tuple(leaf["shape"]), tuple(leaf["digest"])) for name, leaf in body.pop("leaves").items()}
    return Manifest(leaves=leaves, **body)


def read(checkpoint: ocp.path.Path) -> Manifest:
    """Read the manifest of the checkpoint in this folder. Raises as `parse` does, and DamagedError if there is none."""
    check_regular(checkpoint / NAME)
    try:
        text = (checkpoint / NAME / _FILE).read_text()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError) as error:
        raise DamagedError("its manifest is missing or not text") from error
    return parse(text)


def check_regular(folder: ocp.path.Path) -> None:
    """Raise DamagedError for a pipe or a device below a local folder: reading it would never end."""
    for place, _, names in () if is_remote(str(folder)) else os.walk(folder):
        for name in names:
            if kind := irregular(Path(place) / name):
                raise DamagedError(f"{name} in it is {kind}, and not a regular file")


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


DeferredText = Callable[[], str]  # makes a text in the background, once the devices have finished the sums in it


class DeferredTextHandler:
    """Writes a `DeferredText` within an Orbax save (the protocol `ocp.handlers.CheckpointableHandler`). `read` does the reading."""

    async def save(self, directory: ocp.path.PathAwaitingCreation, checkpointable: DeferredText) -> Awaitable[None]:
        """Return at once; the awaitable runs in Orbax's background thread."""
        return self._write(directory, checkpointable)

    async def _write(self, directory: ocp.path.PathAwaitingCreation, checkpointable: DeferredText) -> None:
        folder = await directory.await_creation()
        if jax.process_index() == 0:
            text = await asyncio.to_thread(checkpointable)  # waits for the devices while the arrays are written
            (folder / _FILE).write_text(text)

    async def load(self, directory: ocp.path.Path, abstract_checkpointable: None = None) -> Awaitable[str]:
        """The text as it was saved."""

        async def text() -> str:
            return (directory / _FILE).read_text()

        return text()

    async def metadata(self, directory: ocp.path.Path) -> None:
        """None: a text has no metadata."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """True for a `DeferredText`."""
        return callable(checkpointable)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """None: decided by the name of the item."""
        return None
