"""The background part of a copy in memory: a thread that brings tiles from the devices to the host, and writes them."""

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np

from maxlm.checkpoint import digest, manifest, multihost
from maxlm.checkpoint.host_copies import Draft, Layout, RunFolder, Tile
from maxlm.checkpoint.snapshot import Group, Snapshots


class CopyJob:
    """One copy: groups of tiles that the main thread has started to copy, and the thread that writes them."""

    def __init__(self, folder: RunFolder, step: int, agreed: Any) -> None:
        self.step, self._groups = step, SimpleQueue[tuple[Group, Sequence[jax.Array], Sequence[jax.Array | None]] | None]()
        self.error: Exception | None = None
        self.seconds = 0.0
        self._folder, self._agreed = folder, agreed
        self._on_device, self._changed = 0, threading.Condition()
        self._finish: Any = None
        self._thread = threading.Thread(target=self._work, name="maxlm-memory-copy", daemon=True)
        self._thread.start()

    def finish(self, sums: digest.Sums, snapshots: Snapshots, identity: dict[str, str], position: dict[str, Any]) -> None:
        """All groups are queued: complete the copy once they are written."""

        def layout() -> str:
            done = digest.fetch(sums)
            described = {name: manifest.Leaf(dtype, shape, done[name]) for name, (dtype, shape) in snapshots.kinds.items()}
            return Layout(manifest.Manifest(self.step, identity, position, described), snapshots.tilings).to_text()

        self._finish = layout
        self._groups.put(None)

    def put(self, group: Group, copies: Sequence[jax.Array], sent: Sequence[jax.Array | None]) -> None:
        """Queue a group, which takes memory of the devices until it is fetched."""
        with self._changed:
            self._on_device += group.bytes
        self._groups.put((group, copies, sent))

    def abandon(self, error: Exception) -> None:
        """No more groups come, and the copy is not completed."""
        self.error = error
        self._groups.put(None)

    def wait_for_room(self, most: float) -> None:
        """Wait until earlier groups take no more than `most` bytes of a device."""
        with self._changed:
            self._changed.wait_for(lambda: self._on_device <= max(most, 0))

    def join(self) -> np.ndarray:
        """Wait for the end of the copy. Returns the figures on which all processes agree."""
        self._thread.join()
        return multihost.fetched(self._agreed)

    def _work(self) -> None:
        began, draft = time.monotonic(), None
        try:
            self._remove_older(-int(multihost.fetched(self._agreed)[0]))
            draft = self._folder.draft()
        except Exception as error:  # any: training goes on without the copy
            self.error = error
        while (queued := self._groups.get()) is not None:
            size = queued[0].bytes
            try:
                if draft is not None and self.error is None:
                    _write(draft, queued[0].tiles(*queued[1:]))
            except Exception as error:
                self.error = error
            del queued  # and with it the arrays
            with self._changed:
                self._on_device -= size
                self._changed.notify_all()
        try:
            if draft is not None and self.error is None:
                draft.commit(self._finish(), f"{self.step}-{jax.process_index()}")
        except Exception as error:
            self.error = error
        if self.error is not None and draft is not None:
            draft.discard()
        self.seconds = time.monotonic() - began

    def _remove_older(self, common: int) -> None:
        """Keep one complete copy: of step `common`, the newest that every process has, or else the newest of this host."""
        steps = self._folder.steps()
        kept = common if common >= 0 else max((step for step, _ in steps), default=-1)
        for step, process in steps:
            if step < kept or (step != kept and process == jax.process_index()):
                self._folder.delete(step, process)


def _write(draft: Draft, tiles: list[tuple[Tile, jax.Array]]) -> None:
    """Bring tiles to the host, and write them. Raises OSError."""
    for _, array in tiles:
        array.copy_to_host_async()
    for tile, array in tiles:
        draft.add(tile, np.asarray(array))
