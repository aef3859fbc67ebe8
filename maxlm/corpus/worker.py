"""Worker process of the local executor: ends with its parent and tells it how far a task is.

Imports only what Python starts with, so that the parent is watched before all that a task needs is loaded, which takes seconds on a busy
machine.
"""

import multiprocessing
import os
import threading
from collections.abc import MutableSequence

_reached: MutableSequence[int] | None = None  # memory shared with the parent: bytes and documents of each task


def begin(reached: MutableSequence[int]) -> None:
    """Prepare this process. It ends when its parent has ended, however that was."""
    global _reached
    _reached = reached
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def tell(number: int, size: int, documents: int) -> None:
    """Note that task `number` has read `size` bytes of its input, and `documents` from them."""
    if _reached is not None:
        _reached[2 * number], _reached[2 * number + 1] = size, documents
