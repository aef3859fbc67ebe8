"""How far a pass is, on the console."""

import time
from collections.abc import Callable
from typing import Any

from maxlm.corpus.tally import total
from maxlm.corpus.tasks import Task


class Progress:
    """Tasks done, bytes of input a second, and time left."""

    def __init__(self, name: str, tasks: list[Task], say: Callable[[str], None]) -> None:
        self.name, self.say, self.began = name, say, time.monotonic()
        self.tasks, self.bytes = len(tasks), sum(task.size for task in tasks)
        self.done, self.done_bytes, self.documents, self.removed = 0, 0, 0, 0

    def add(self, task: Task, mark: dict[str, Any]) -> None:
        self.done += 1
        self.done_bytes += task.size
        self.documents += total(mark["left"])[0]
        self.removed += sum(mark["removed"].values())
        seconds = max(time.monotonic() - self.began, 1e-6)
        left = seconds * (self.bytes - self.done_bytes) / self.done_bytes if self.done_bytes else 0.0
        self.say(
            f"{self.name}: {self.done:,} of {self.tasks:,} tasks, {self.done_bytes / seconds / 1e6:,.1f} MB/s, "
            f"{self.documents:,} documents kept, {self.removed:,} removed, {left:,.0f} s left"
        )
