"""Run the stages of a corpus: passes over tasks, each task by one process, with a mark for each that is done.

The result is a pure function of the input files and the settings of the stages: not of the number of workers, nor of interruptions. A run
that was cut off goes on where it was when the same command is given again.
"""

import bisect
import hashlib
import json
import os
import re
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from maxlm.base import directory_lock
from maxlm.base.atomic import write_text
from maxlm.base.errors import UnavailableError, UserError, shorten, system_errors
from maxlm.base.paths import read_file, user_path
from maxlm.config import conditions
from maxlm.corpus import files
from maxlm.corpus.document import Document, Removed, is_tagged, tag
from maxlm.corpus.files import read
from maxlm.corpus.filters import Filter, ScorerSource, build_filters, removed, run_together, takes_many
from maxlm.corpus.page import page
from maxlm.corpus.settings import CorpusSettings
from maxlm.corpus.stages import KINDS, PARQUET, Resources, Stage, Stream, build_stages
from maxlm.corpus.tasks import Tally, Task, add, divide, fingerprint, total
from maxlm.documents.files import SourceFile, find_once, folders, version_of
from maxlm.documents.records import REASONS

FORMAT = 11  # of the output: raise it when the same settings would give other documents
FIRST = "filter"  # name of the first pass, which reads and filters
OURS = ("marks", "removed", "slurm")  # folders of which a run makes one first
REPORTS = ("report.json", "report.html")
_OWN = re.compile(r"\d{6,}(\.jsonl\.zst|\.parquet|\.json)|\.\d{6,}\.[a-z.]+\.[0-9a-f]{16}")  # of a task; the latter a kill leaves
_PASS = re.compile(r"\d+-.*")  # folder of a pass
COMBINED = "combined.json"  # mark of a search that is done
TOGETHER = 64  # documents that filters get at once, where one of them is faster so
EXAMPLES = 10  # of each reason, by a hash of the id: a sample that does not depend on the division


@dataclass(frozen=True)
class Plan:
    """All that a process needs to know to run any task of any pass. `origins`: the source of each input file."""

    settings: CorpusSettings
    tasks: tuple[Task, ...]
    origins: dict[str, str]
    states: dict[str, list[Any]]  # size and time or version of each input file, when the plan was made
    fingerprints: tuple[tuple[str, ...], ...]  # of each pass, of each task
    scorer: ScorerSource | None = None  # of the perplexity filter's checkpoint
    lock: directory_lock.Lock | None = None  # of the output, for the processes that run tasks

    @property
    def output(self) -> Path:
        """Folder of the result."""
        return user_path(self.settings.output)

    @property
    def stages(self) -> list[Stage]:
        """Stages after the first pass."""
        return build_stages(self.settings, self.origins)

    @property
    def names(self) -> list[str]:
        """Names of the passes, in order."""
        return [FIRST, *(stage.name for stage in self.stages)]

    def folder(self, number: int) -> Path:
        """Folder of a pass, for what only the next passes need."""
        return self.output / "stages" / f"{number}-{self.names[number]}"

    def documents(self, number: int, task: Task) -> Path:
        """The shard of documents that a pass writes."""
        last = number == len(self.names) - 1
        ending = files.PARQUET if last and self.settings.format == "parquet" else files.ENDING
        return (self.output if last else self.folder(number)) / "documents" / f"{task.name}{ending}"

    def shard(self, number: int, task: Task) -> AbstractContextManager[files.ShardWriter]:
        """A writer of that shard."""
        path = self.documents(number, task)
        if path.name.endswith(files.PARQUET):
            return files.parquet_shard(path, json.loads(read_file(self.folder(number) / KINDS)))
        return files.shard(path)

    def removed(self, number: int, task: Task) -> Path:
        """Shard of removed documents that a pass writes."""
        return self.output / "removed" / self.names[number] / f"{task.name}{files.ENDING}"

    def collected(self, number: int, task: Task) -> Path:
        """File in which a pass collects what the next search needs."""
        return self.folder(number) / "collected" / task.name

    def mark(self, number: int, task: Task) -> dict[str, Any] | None:
        """Counts of a finished task; None if it is to be done."""
        written = [self.documents(number, task), self.removed(number, task)]
        if number + 1 < len(self.names):
            written.append(self.collected(number, task))
        return self.counts(number, task) if all(file.is_file() for file in written) else None

    def counts(self, number: int, task: Task) -> dict[str, Any] | None:
        """Counts of a finished task, whether or not what only the next passes need is still there."""
        return files.finished(self.mark_path(number, task), self.fingerprints[number][task.number])

    def is_combined(self, number: int) -> bool:
        """True if the search before pass `number` is done."""
        return files.finished(self.folder(number) / COMBINED, self.fingerprints[number][0]) is not None

    def mark_path(self, number: int, task: Task) -> Path:
        """Mark of a finished task."""
        return self.output / "marks" / self.names[number] / f"{task.name}.json"


def make_plan(settings: CorpusSettings, scorer: ScorerSource | None = None) -> Plan:
    """Find the input files and divide them. `scorer`: of `filters.perplexity.checkpoint`. Raises UserError."""
    inputs: list[SourceFile] = []
    origins: dict[str, str] = {}
    owners: dict[str, str] = {}  # real path -> name of the source
    for name in sorted(settings.sources):
        for one in find_once(settings.sources[name].paths):
            if (owner := owners.setdefault(one.real_path, name)) != name:
                raise UserError(f"sources.{name}.paths: {shorten(one.path)} is a file of sources.{owner}, too; list it once.")
            origins[one.path] = name
            inputs.append(one)
    _check_output(settings, inputs)
    tasks = tuple(divide(inputs, settings.run.task_bytes))
    stages = build_stages(settings, origins)
    names = [name for name, section in settings.filters or () if section is not None and name != "rules"]
    names += [stage.name for stage in stages if stage.name != PARQUET]
    for name in settings.tag:
        if name not in names:
            raise UserError(f"tag: {shorten(name)} is no stage of this file ({', '.join(names) or 'it has none'}); name one of them.")
    keys = [[stage.key(), stage.name in settings.tag] for stage in stages]
    reading = TypeAdapter(type(settings.read)).dump_python(settings.read, mode="json")
    filters = _filters_key(settings, scorer)
    states: dict[str, list[Any]] = {one.path: _state(one.path) or [one.size, *([one.version] if one.version else [])] for one in inputs}
    origin = {name: source.model_dump(mode="json", exclude={"paths"}) for name, source in settings.sources.items()}
    first = [
        fingerprint(FORMAT, reading, filters, [[path, states[path], origins[path], origin[origins[path]]] for path in task.paths], keys[:1])
        for task in tasks
    ]
    later = [fingerprint(first, keys[: number + 2]) for number in range(len(stages))]
    return Plan(settings, tasks, origins, states, (tuple(first), *((one,) * len(tasks) for one in later)), scorer)


def _check_output(settings: CorpusSettings, inputs: list[SourceFile]) -> None:
    """Refuse a folder in which files would be lost: another program's, one with the input in it, or one below a folder of the input."""
    output = user_path(settings.output)
    with system_errors():
        ours = not output.exists() or any((output / name).is_dir() for name in OURS)
        ours = ours or all(entry.name == directory_lock.NAME for entry in output.iterdir())
        foreign = _foreign(output) if ours and output.exists() else ""
    if foreign or not ours:
        which = f", such as {shorten(foreign)}, which would be lost" if foreign else ""
        raise UserError(
            f"output = {shorten(str(output))}: there are files in it that are not of `maxlm corpus run`{which}; give a new or empty folder."
        )
    for one in inputs:
        if "://" not in one.path and Path(os.path.realpath(one.path)).is_relative_to(os.path.realpath(output)):  # resolve() refuses loops
            raise UserError(
                f"output = {shorten(str(output))}: the input {shorten(one.path)} lies in it and would be overwritten; give another."
            )
    real = Path(os.path.realpath(output))
    for name, source in settings.sources.items():
        for folder in folders(source.paths):
            below = Path(os.path.relpath(real, os.path.realpath(folder))).parts
            if not any(part.startswith(".") for part in below):  # ".." is outside, and hidden folders are left out
                raise UserError(  # the next run of the same command would read this output as input
                    f"output = {shorten(str(output))}: it lies in the folder {shorten(folder)} of sources.{name}.paths, all files of which "
                    "are read, so that what is written would be input; give a folder outside."
                )


def _foreign(output: Path) -> str:
    """A file that a run would remove or replace, and that none can have written; "" if there is none. Hidden ones are left alone."""
    folders = [
        folder for kind in ("removed", "marks") if (output / kind).is_dir() for folder in (output / kind).iterdir() if folder.is_dir()
    ]
    wanted = [file for folder in folders for file in folder.iterdir()]
    if (output / "documents").is_dir():
        wanted += [file for file in (output / "documents").iterdir() if file.name.endswith((files.ENDING, files.PARQUET))]
    strange = [file for file in wanted if not _OWN.fullmatch(file.name) and not file.name.startswith(".")]
    if (output / "stages").is_dir():
        strange += [entry for entry in (output / "stages").iterdir() if not (entry.is_dir() and _PASS.fullmatch(entry.name))]
    report = output / REPORTS[0]
    try:
        known = not report.exists() or {"format", "passes"} <= json.loads(read_file(report)).keys()
    except (ValueError, AttributeError):
        known = False
    return next((str(file.relative_to(output)) for file in [*strange, *([] if known else [report])]), "")


def _state(path: str) -> list[int]:
    """Size and time of change of a local file: another one there is another input."""
    try:
        status = Path(path).stat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns]


Tell = Callable[[int, int], None]  # bytes of a task's input, as stored, that are read, and documents that came out of them


def run_task(plan: Plan, number: int, task: Task, tell: Tell = lambda size, documents: None) -> dict[str, Any]:
    """Run one task of a pass; returns its mark. `tell`: how far it is. Raises UserError, UnavailableError."""
    tally = Tally(plan.origins)
    examples: dict[str, list[tuple[str, str]]] = {}

    def show(one: Removed) -> None:
        rank = _rank(one.id)
        best = examples.setdefault(f"{one.stage}/{one.reason}", [])
        if len(best) < EXAMPLES or rank < best[-1][0]:
            bisect.insort(best, (rank, json.dumps(asdict(one))))
            del best[EXAMPLES:]

    def survivors(stream: Stream, kept: files.ShardWriter, dropped: files.ShardWriter) -> Iterator[Document]:
        for one in stream:
            if isinstance(one, Document):
                kept.write(one)
                tally.keep(one)
                for cut in one.cuts:
                    show(cut)
                yield one
                continue
            dropped.write(one)
            tally.remove(one)
            show(one)

    stream = _read(plan, task, tally, tell) if number == 0 else _apply(plan, number, task, tell)
    with system_errors(), directory_lock.working_for(plan.lock):
        directory_lock.check(plan.output)
        plan.mark_path(number, task).unlink(missing_ok=True)  # it vouches for files that are about to be replaced
        for folder in (plan.output / "marks").glob("*/") if number == len(plan.names) - 1 else ():
            if folder.name not in plan.names:  # the last pass of another run may have written the same shard
                (folder / f"{task.name}.json").unlink(missing_ok=True)
        with files.shard(plan.removed(number, task)) as dropped, plan.shard(number, task) as kept:
            documents = survivors(stream, kept, dropped)
            if number + 1 < len(plan.names):
                collected = plan.collected(number, task)
                collected.parent.mkdir(parents=True, exist_ok=True)
                stage = plan.stages[number]
                tags = () if stage.name == PARQUET else plan.settings.tag
                stage.collect((one for one in documents if not is_tagged(one, tags)), collected)
            for _ in documents:
                pass
        mark = {
            "fingerprint": plan.fingerprints[number][task.number],
            **tally.as_json(),
            "examples": {reason: [json.loads(text) for _, text in best] for reason, best in sorted(examples.items())},
            "sha256": kept.digest,
            "facts": plan.stages[number - 1].facts(plan.folder(number)) if number else {},
        }
        files.finish(plan.mark_path(number, task), mark)
    return mark


_built: tuple[Any, list[Filter]] = (None, [])  # key and filters of this process's last task: models and lists are loaded once


def _read(plan: Plan, task: Task, tally: Tally, tell: Tell) -> Stream:
    global _built
    key = _filters_key(plan.settings, plan.scorer)
    if plan.settings.filters is not None and _built[0] != key:
        _built = key, build_filters(plan.settings.filters, plan.scorer.open() if plan.scorer else None, plan.settings.tag)
    filters = _built[1] if key is not None else []
    size = TOGETHER if any(map(takes_many, filters)) else 1
    group: list[Document | Removed] = []
    wheres = {name: [(text, conditions.parse(text)) for text in source.where] for name, source in plan.settings.sources.items()}
    for one in _records(plan, task, tell):
        if isinstance(one, Document):
            tally.come(one)
            one = _selected(one, wheres[_origin(plan, one.id)])
        group.append(one)
        if len(group) == size:
            yield from _filtered(filters, group)
            group = []
    yield from _filtered(filters, group)


def _selected(document: Document, where: list[tuple[str, conditions.Condition]]) -> Document | Removed:
    """The document if it meets all conditions; else the first that it does not meet, and what its field holds."""
    for text, condition in where:
        value = document.metadata.get(condition.field)
        met = condition.meets(value)
        if not met:
            kind = {str: "text", bool: "true or false", type(None): "nothing"}.get(type(value), "a number")
            return removed(document, "where", "not_comparable" if met is None else "not_met", condition=text, field=kind)
    return document


def _filters_key(settings: CorpusSettings, scorer: ScorerSource | None) -> Any:
    """Return everything that decides the results of the filters, as JSON has it."""
    if settings.filters is None:
        return None
    lists = [[path, _state(path)] for path in settings.filters.files]
    tagging = [name for name in type(settings.filters).model_fields if name in settings.tag]
    return [settings.filters.model_dump(mode="json"), lists, scorer and scorer.key, tagging]


def _records(plan: Plan, task: Task, tell: Tell) -> Stream:
    before, documents = 0, 0

    def reach(place: int) -> None:
        tell(before + place, documents)

    for path in task.paths:
        version = version_of(path) if "://" in path else None
        if version is None:
            _check_unchanged(plan, path, version)
        name = plan.origins[path]
        source = plan.settings.sources[name]
        added = {"source": name, **({"license": source.license} if source.license else {}), **source.metadata}
        for one in read(path, plan.settings.read, reach, text_field=source.text_field):
            documents += 1
            if isinstance(one, Document):
                stale = [name for name in one.metadata if name.partition(".")[0] in plan.settings.tag]  # tags of an earlier run
                one = Document(one.id, one.text, {**added, **{k: v for k, v in one.metadata.items() if k not in stale}})
            yield one
        before += plan.states[path][0]
        _check_unchanged(plan, path, version)


def _check_unchanged(plan: Plan, path: str, version: str | None) -> None:
    """Refuse a file that changes while it is read: what was read of it would be of no state that it ever had.

    `version`: of a remote file, before it was read.
    """
    if _state(path) != plan.states[path] != [0] if version is None else version_of(path) != version:
        raise UnavailableError(f"{shorten(path)}: it changed since this command began; give the same command again when it is whole.")


def _filtered(filters: list[Filter], group: list[Document | Removed]) -> Stream:
    results = iter(run_together(filters, [one for one in group if isinstance(one, Document)]))
    for one in group:
        yield one if isinstance(one, Removed) else next(results)


def _apply(plan: Plan, number: int, task: Task, tell: Tell) -> Stream:
    before = plan.mark(number - 1, task)
    count = max(1, total(before["left"])[0]) if before else 1
    stage, tagging, waiting = plan.stages[number - 1], plan.settings.tag, deque[Document]()

    def documents() -> Iterator[Document]:
        for place, document in enumerate(files.read_documents(plan.documents(number - 1, task)), start=1):
            tell(task.size * place // count, place)
            waiting.append(document)
            if not is_tagged(document, tagging):
                yield document

    for result in stage.apply(documents(), plan.folder(number), task):
        while is_tagged(waiting[0], tagging):
            yield waiting.popleft()
        document = waiting.popleft()
        yield tag(document, result, stage.name) if stage.name in tagging else result
    yield from waiting


def combine(plan: Plan, number: int, threads: int) -> None:
    """Search over the whole corpus before pass `number`."""
    folder = plan.folder(number)
    work = folder / "work"
    with system_errors(), directory_lock.working_for(plan.lock):
        directory_lock.check(plan.output)
        (folder / COMBINED).unlink(missing_ok=True)  # it vouches for the results that are about to be replaced
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        collected = [plan.collected(number - 1, task) for task in plan.tasks]
        plan.stages[number - 1].combine(collected, folder, plan.tasks, Resources(work, plan.settings.run.memory_mb, threads))
        files.finish(folder / COMBINED, {"fingerprint": plan.fingerprints[number][0]})
        shutil.rmtree(work, ignore_errors=True)


class Executor(Protocol):
    """Runs the parts of a pass, in any order and anywhere."""

    def run_tasks(self, plan: Plan, number: int, tasks: list[Task]) -> None:
        """Run `tasks` of pass `number` by run_task()."""

    def combine(self, plan: Plan, number: int) -> None:
        """Run combine() for pass `number`."""


def run(plan: Plan, executor: Executor) -> dict[str, Any]:
    """Run all passes and write `report.json`, which is returned, and `report.html`. Raises UserError."""
    last = len(plan.names) - 1
    if all(plan.mark(last, task) and all(plan.counts(number, task) for number in range(last)) for task in plan.tasks):
        _check_sources(plan)
    else:
        with system_errors():
            for name in REPORTS:  # of an earlier run: a folder that is not whole has no report
                (plan.output / name).unlink(missing_ok=True)
        for number in range(last + 1):
            left = [task for task in plan.tasks if plan.mark(number, task) is None]
            if left and number and not plan.is_combined(number):
                executor.combine(plan, number)
            if left:
                executor.run_tasks(plan, number, left)
            if number == 0:
                _check_sources(plan)
    report = summarize(plan)
    with system_errors():
        directory_lock.check(plan.output)
        _remove_stale(plan)
        write_text(plan.output / "report.json", json.dumps(report, indent=1, sort_keys=True, ensure_ascii=True) + "\n")
        write_text(plan.output / "report.html", page(report))
        shutil.rmtree(plan.output / "stages", ignore_errors=True)
    return report


def _check_sources(plan: Plan) -> None:
    """Refuse sources that gave no document at all: their paths or the field of their text, or their conditions, are wrong."""
    marks = [mark for task in plan.tasks if (mark := plan.counts(0, task)) is not None]
    for name, source in plan.settings.sources.items():
        came = sum(mark["came"].get(name, (0,))[0] for mark in marks)
        unmet = Counter[str]()
        for mark in marks:
            unmet.update({key: count for key, count in mark["unmet"].items() if key.startswith(f"{name}: ")})
        if came and unmet.total() == came:
            said = ", ".join(f"{key.removeprefix(f'{name}: ')} in {count:,}" for key, count in unmet.most_common(3))
            raise UserError(f"sources.{name}.where: none of {came:,} documents meets it: {shorten(said)}; change the condition.")
        if came:
            continue
        of_source = [one for mark in marks for some in mark["examples"].values() for one in some if _origin(plan, one["id"]) == name]
        raise UserError(f"sources.{name}.paths: no document in {shorten(', '.join(source.paths))}: {_reasons(of_source, name)}.")


def _origin(plan: Plan, id: str) -> str:
    return plan.origins.get(id) or plan.origins[id.rpartition("#")[0]]


def _reasons(removed: list[dict[str, Any]], name: str) -> str:
    """Faults of the records of a source, from the examples of removed records."""
    for one in removed:
        if one["reason"] == "missing_field":
            rows = f" ({one['detail']['rows']:,} rows)" if "rows" in one["detail"] else ""
            field = f"no field {one['detail']['field']}; set sources.{name}.text_field to one of its fields: {one['example']}"
            return f"{shorten(one['id'])}{rows} has {field}"
    said = {one["reason"]: one["id"] for one in reversed(removed)}
    return (
        "; ".join(f"{shorten(id)}: {REASONS[reason]}" for reason, id in list(said.items())[:3]) or "its files hold none; removed/ says why"
    )


def _remove_stale(plan: Plan) -> None:
    """Remove shards of an earlier run with more tasks or other stages, which would be taken for a part of this one."""
    folders = {plan.output / "documents": files.PARQUET if plan.settings.format == "parquet" else files.ENDING}
    for kind, ending in (("removed", files.ENDING), ("marks", ".json")):
        for folder in (plan.output / kind).iterdir():
            if folder.is_dir() and folder.name not in plan.names:
                shutil.rmtree(folder)
            elif folder.is_dir():
                folders[folder] = ending
    for folder, ending in folders.items():
        wanted = {f"{task.name}{ending}" for task in plan.tasks}
        for file in folder.iterdir():
            if file.name not in wanted and _OWN.fullmatch(file.name):
                file.unlink()
    for name in REPORTS:
        for file in plan.output.glob(f".{name}.*"):
            file.unlink()


def summarize(plan: Plan) -> dict[str, Any]:
    """Documents and bytes after each pass, and what each removed, with examples. Every task must be done."""
    passes = []
    for number, name in enumerate(plan.names):
        marks = []
        examples: dict[str, list[dict[str, Any]]] = {}
        facts: dict[str, Any] = {}
        for task in plan.tasks:
            mark = plan.counts(number, task)
            if mark is None:
                path = shorten(str(plan.mark_path(number, task)))
                raise UserError(f"{path}: the mark of a finished task is missing or of other settings; remove it and run again.")
            for reason, some in mark.pop("examples").items():
                examples.setdefault(reason, []).extend(some)
            facts = mark["facts"]  # the same for each task
            marks.append(mark)
        chosen = {reason: sorted(some, key=lambda one: _rank(one["id"]))[:EXAMPLES] for reason, some in sorted(examples.items())}
        tally = add(marks)
        documents, size = total(tally["left"])
        passes.append({"name": name, "documents": documents, "bytes": size, **tally, **facts, "examples": chosen})
    counts = {"tasks": len(plan.tasks), "input_files": len(plan.origins)}
    return {"format": FORMAT, "settings": plan.settings.decisive, "passes": passes, **counts}


def _rank(id: str) -> str:
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()
