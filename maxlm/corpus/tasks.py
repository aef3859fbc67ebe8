"""The division of a corpus into tasks: by its input files alone, so that the number of workers changes no byte of the output."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from maxlm.documents.files import SourceFile


class Task(NamedTuple):
    """Files that one process reads, one after the other; `number` is from 0."""

    number: int
    paths: tuple[str, ...]
    size: int  # bytes

    @property
    def name(self) -> str:
        """Name of its shards: numbers of equal length, so that names sort as tasks do."""
        return f"{self.number:06}"


def divide(inputs: Iterable[SourceFile], task_bytes: int) -> list[Task]:
    """Tasks of about `task_bytes`, of whole files in the order of `inputs`; a larger file is a task by itself."""
    tasks: list[Task] = []
    paths: list[str] = []
    size = 0
    for one in inputs:
        if paths and size + one.size > task_bytes:
            tasks.append(Task(len(tasks), tuple(paths), size))
            paths, size = [], 0
        paths.append(one.path)
        size += one.size
    if paths:
        tasks.append(Task(len(tasks), tuple(paths), size))
    return tasks


def fingerprint(*parts: Any) -> str:
    """A hash of values that JSON has, such as settings, files and versions."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def largest_first(tasks: Sequence[Task]) -> list[int]:
    """Numbers of the tasks in the order in which they begin: the largest first, so that none is left alone at the end."""
    return [task.number for task in sorted(tasks, key=lambda task: (-task.size, task.number))]
