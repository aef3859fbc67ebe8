"""Progress: one line a second at most, the last one always; bytes and documents of tasks that are under way count."""

import json
import re

from maxlm.corpus import engine
from maxlm.corpus.executors import progress
from maxlm.corpus.executors.local import LocalExecutor
from maxlm.corpus.settings import CorpusSettings
from maxlm.corpus.tasks import Task

MARK = {"left": {"made": [90, 5000]}, "removed": {"length/short": 10}}


def test_lines_of_a_pass(monkeypatch):
    clock, lines = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    tasks = [Task(number, (f"{number}",), 10_000_000) for number in range(3)]
    shown = progress.Progress("filter", tasks, lines.append)
    clock[0] = 1.0
    shown.reach(0, 1000, 1)
    assert lines.pop() == "filter: 0 of 3 tasks, 0.0 MB/s, 1 documents, 0 removed, time left unknown"  # 30,000 s, while models are loaded
    for step in range(1, 81):
        clock[0] = step / 8
        shown.reach(0, 125_000 * step, step)
    assert len(lines) == 9
    assert lines[-1] == "filter: 0 of 3 tasks, 1.0 MB/s, 80 documents, 0 removed, 20 s left"
    for number, task in enumerate(tasks):
        clock[0] += 0.1
        shown.add(task, MARK)
        assert len(lines) == 9 + (number == 2)
    assert lines[-1] == "filter: 3 of 3 tasks, 2.9 MB/s, 300 documents, 30 removed, 0 s left"


def test_a_task_tells_how_far_it_is(tmp_path, monkeypatch):
    """In one process or two, bytes read never fall and end at the size of the input."""
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {number} " * 200}) + "\n" for number in range(2000)))
    for workers in (1, 2):
        said: list[str] = []
        config = {"output": str(tmp_path / f"out{workers}"), "sources": {"made": {"paths": [str(tmp_path / "a.jsonl")]}}, "deduplicate": {}}
        engine.run(engine.make_plan(CorpusSettings.model_validate(config)), LocalExecutor(workers, said.append))
        for name in ("filter", "deduplicate"):
            found = [
                re.search(r"(\d) of 1 tasks, .* MB/s, ([\d,]+) documents, ([\d,]+) removed", line) for line in said if line.startswith(name)
            ]
            documents = [int(match[2].replace(",", "")) for match in found]
            assert documents == sorted(documents) and documents[-1] == 2000 and found[-1][1] == "1"
            assert len(found) > 100 or workers == 2
