"""The background part of a copy in memory: a thread that brings tiles from the devices to the host, and writes them."""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np

from maxlm.checkpoint import digest, manifest, tags
from maxlm.checkpoint.host_copies import Draft, Layout, RunFolder
from maxlm.checkpoint.snapshot import Group, Kept, Snapshots
from maxlm.checkpoint.tags import Agreed, PartTag, Written

_THREADS = 4  # that compute tags of what goes to the peer and comes from it, while the tiles are written
_SMALL = 1 << 18  # bytes of a tile, below which it is not worth handing it to one of them


class CopyJob:
    """One copy: groups of tiles that the main thread has started to copy, and the thread that writes them."""

    def __init__(self, folder: RunFolder, step: int, before: Written, agreed: Any, secret: bytes) -> None:
        """`before`: the copy before; `agreed`: what `tags.start_agreement` has returned for it; `secret`: of the run."""
        self.step, self._groups = step, SimpleQueue[tuple[Group, Sequence[jax.Array], Sequence[jax.Array | None]] | None]()
        self.error: Exception | None = None
        self.written = Written()  # once it is
        self.refused = ""  # why what a peer has sent of the copy before is not used
        self.seconds = 0.0
        self._folder, self._before, self._agreed = folder, before, agreed
        self._sent, self._received = PartTag(secret), PartTag(secret)
        self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "maxlm-memory-tags")
        self._on_device, self._changed = 0, threading.Condition()
        self._finish: Any = None
        self._thread = threading.Thread(target=self._work, name="maxlm-memory-copy", daemon=True)
        self._thread.start()

    def finish(self, sums: digest.Sums, snapshots: Snapshots, identity: dict[str, str], position: dict[str, Any]) -> None:
        """All groups are queued: complete the copy once they are written."""

        def complete(draft: Draft) -> Written:
            done = digest.fetch(sums)
            described = {name: manifest.Leaf(dtype, shape, done[name]) for name, (dtype, shape) in snapshots.kinds.items()}
            layout = Layout(manifest.Manifest(self.step, identity, position, described), snapshots.tilings)
            draft.commit(layout.to_text(), f"{self.step}-{jax.process_index()}")
            if snapshots.sender is None:
                return Written(self.step)
            state, run = layout.content, self._folder.path.name
            return Written(self.step, self._sent.of(state, run, jax.process_index()), self._received.of(state, run, snapshots.sender))

        self._finish = complete
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

    def join(self) -> Agreed:
        """Wait for the end of the copy. Returns what all processes agree on."""
        self._thread.join()
        return tags.agreed(self._agreed)

    def _work(self) -> None:
        began, draft = time.monotonic(), None
        try:
            agreed = tags.agreed(self._agreed)
            self._check(agreed.sent_here)
            self._remove_older(agreed.complete)
            draft = self._folder.draft()
        except Exception as error:  # any: training goes on without the copy
            self.error = error
        while (queued := self._groups.get()) is not None:
            size = queued[0].bytes
            try:
                if draft is not None and self.error is None:
                    self._write(draft, queued[0].tiles(*queued[1:]))
            except Exception as error:
                self.error = error
            del queued  # and with it the arrays
            with self._changed:
                self._on_device -= size
                self._changed.notify_all()
        try:
            if draft is not None and self.error is None:
                self.written = self._finish(draft)
        except Exception as error:
            self.error = error
        if self.error is not None and draft is not None:
            draft.discard()
        self._pool.shutdown()
        self.seconds = time.monotonic() - began

    def _write(self, draft: Draft, kept: list[Kept]) -> None:
        """Bring tiles to the host, and write them. Raises OSError."""
        for one in kept:
            one.array.copy_to_host_async()
        tagged = []
        for tile, on_device, received, shared in kept:
            array = np.asarray(on_device)
            if received or shared:
                add = (self._received if received else self._sent).add
                if array.nbytes < _SMALL:
                    add(tile, array)
                else:
                    tagged.append(self._pool.submit(add, tile, array))
            draft.add(tile, array, received=received)
        for done in tagged:
            done.result()

    def _check(self, sent_here: np.ndarray) -> None:
        """Mark what was received with the copy before as proven, if its tag is the one that was sent. Raises OSError."""
        step = self._before.step
        if step < 0 or not sent_here.any():  # nothing was received, or its sender has not written its copy and says why
            return
        if tags.proven(self._before, sent_here):
            self._folder.mark_proven(step, jax.process_index())
        else:
            self.refused = f"what another process sent of the copy of step {step:,} has not arrived as it was sent: the one before is kept"

    def _remove_older(self, common: int) -> None:
        """Keep one complete copy: of step `common`, the newest that every process has, or else the newest of this host."""
        steps = self._folder.steps()
        kept = common if common >= 0 else max((step for step, _ in steps), default=-1)
        for step, process in steps:
            if step < kept or (step != kept and process == jax.process_index()):
                self._folder.delete(step, process)
