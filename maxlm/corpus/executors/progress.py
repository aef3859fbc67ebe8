"""Progress of a pass, on the console."""

import time
from collections.abc import Callable
from typing import Any

from maxlm.corpus.tasks import Task, total

KNOWN, KNOWN_SECONDS = 0.01, 60.0  # share of a pass, or its seconds, from which time left is told: before, models are loaded
SECONDS = 1.0  # between two lines, at least; the last one of a pass is always shown


class Progress:
    """Tasks done, bytes of input a second, documents, and time left. Bytes and documents count tasks that are under way, too."""

    def __init__(self, name: str, tasks: list[Task], say: Callable[[str], None]) -> None:
        self.name, self.say, self.began = name, say, time.monotonic()
        self.tasks, self.bytes = len(tasks), sum(task.size for task in tasks)
        self.done, self.done_bytes, self.documents, self.removed = 0, 0, 0, 0
        self._sizes = {task.number: task.size for task in tasks}
        self._under_way: dict[int, tuple[int, int]] = {}
        self._shown = self.began

    def reach(self, number: int, size: int, documents: int) -> None:
        """Note that task `number` has read `size` bytes of its input, and `documents` from them."""
        self._under_way[number] = min(size, self._sizes[number]), documents
        self._show()

    def add(self, task: Task, mark: dict[str, Any]) -> None:
        """Note that `task` is done."""
        self._under_way.pop(task.number, None)
        removed = sum(mark["removed"].values())
        self.done += 1
        self.done_bytes += task.size
        self.documents += total(mark["left"])[0] + removed
        self.removed += removed
        self._show(last=self.done == self.tasks)

    def _show(self, last: bool = False) -> None:
        now = time.monotonic()
        if not last and now - self._shown < SECONDS:
            return
        self._shown = now
        size = self.done_bytes + sum(size for size, _ in self._under_way.values())
        documents = self.documents + sum(documents for _, documents in self._under_way.values())
        seconds = max(now - self.began, 1e-6)
        known = size >= KNOWN * self.bytes or seconds > KNOWN_SECONDS
        left = f"{seconds * (self.bytes - size) / size:,.0f} s left" if known and size else "time left unknown"
        self.say(
            f"{self.name}: {self.done:,} of {self.tasks:,} tasks, {size / seconds / 1e6:,.1f} MB/s, "
            f"{documents:,} documents, {self.removed:,} removed, {left}"
        )
