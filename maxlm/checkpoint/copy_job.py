"""Background part of a copy in memory: a thread that fetches tiles from the devices and writes them."""

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np

from maxlm.checkpoint import digest, manifest
from maxlm.checkpoint.host_copies import Draft, Layout, RunFolder
from maxlm.checkpoint.snapshot import Group, Snapshots
from maxlm.cluster import agree


class CopyJob:
    """One copy: groups of tiles, which the main thread has begun to copy on the devices, and the thread that writes them."""

    def __init__(self, folder: RunFolder, step: int, agreed: Any) -> None:
        """`agreed`: result of `agree.start_largest`; its first number is minus the step of the newest copy that all processes have."""
        self.step, self._groups = step, SimpleQueue[tuple[Group, Sequence[jax.Array], Sequence[jax.Array | None]] | None]()
        self.error: Exception | None = None
        self.complete = False
        self.seconds = 0.0
        self._folder, self._agreed = folder, agreed
        self._on_device, self._changed = 0, threading.Condition()
        self._layout: Any = None  # a function that waits for the digests
        self._thread = threading.Thread(target=self._work, name="maxlm-memory-copy", daemon=True)
        self._thread.start()

    def finish(self, sums: digest.Sums, snapshots: Snapshots, identity: dict[str, str], position: dict[str, Any]) -> None:
        """Complete the copy once the queued groups are written: no more come."""

        def layout() -> Layout:
            done = digest.fetch(sums)
            described = {name: manifest.Leaf(dtype, shape, done[name]) for name, (dtype, shape) in snapshots.kinds.items()}
            return Layout(manifest.Manifest(self.step, identity, position, described), snapshots.tilings)

        self._layout = layout
        self._groups.put(None)

    def put(self, group: Group, copies: Sequence[jax.Array], sent: Sequence[jax.Array | None]) -> None:
        """Queue a group, which occupies device memory until it is fetched."""
        with self._changed:
            self._on_device += group.bytes
        self._groups.put((group, copies, sent))

    def abandon(self, error: Exception) -> None:
        """End without completing the copy."""
        self.error = error
        self._groups.put(None)

    def wait_for_room(self, most: float) -> None:
        """Wait until earlier groups take at most `most` bytes of a device."""
        with self._changed:
            self._changed.wait_for(lambda: self._on_device <= max(most, 0))

    def join(self) -> np.ndarray:
        """Wait for the end of the copy. Returns the numbers that all processes agree on."""
        self._thread.join()
        return agree.fetched(self._agreed)

    def _work(self) -> None:
        began, draft = time.monotonic(), None
        try:
            self._remove_older(-int(agree.fetched(self._agreed)[0]))
            draft = self._folder.draft()
        except Exception as error:  # any: training continues without the copy
            self.error = error
        while (queued := self._groups.get()) is not None:
            size = queued[0].bytes
            try:
                if draft is not None and self.error is None:
                    self._write(draft, *queued)
            except Exception as error:
                self.error = error
            del queued  # releases the arrays
            with self._changed:
                self._on_device -= size
                self._changed.notify_all()
        try:
            if draft is not None and self.error is None:
                draft.commit(self._layout().to_text(), f"{self.step}-{jax.process_index()}")
                self.complete = True
        except Exception as error:
            self.error = error
        if self.error is not None and draft is not None:
            draft.discard()
        self.seconds = time.monotonic() - began

    def _write(self, draft: Draft, group: Group, copies: Sequence[jax.Array], sent: Sequence[jax.Array | None]) -> None:
        """Fetch the tiles of a group, and write them. Raises OSError."""
        kept = group.tiles(copies, sent)
        for one in kept:
            one.array.copy_to_host_async()
        for one in kept:
            draft.add(one.tile, np.asarray(one.array), received=one.received)

    def _remove_older(self, common: int) -> None:
        """Keep one complete copy: step `common`, the newest that every process has, or else the newest of this host."""
        steps = self._folder.steps()
        kept = common if common >= 0 else max((step for step, _ in steps), default=-1)
        for step, process in steps:
            if step < kept or (step != kept and process == jax.process_index()):
                self._folder.delete(step, process)
