"""Task files: what is asked, of which data, and how items become prompts."""

import json
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from maxlm.base.errors import UserError, error_kind, shorten, show
from maxlm.base.paths import check_run_name, open_regular, user_path
from maxlm.config.fields import Positive, Section, Seed, StoredPath, Text
from maxlm.config.loader import SHIPPED
from maxlm.documents.formats import COMPRESSED, facts_of, format_by_name
from maxlm.evaluation import template

MOST_BYTES = 2**16  # of a task file
MOST_LINE = 2**26  # bytes of an item
FOLDER = "tasks"  # under configs/
JSONL = (*facts_of("jsonl").suffixes, ".json")


class Item(NamedTuple):
    """A line of a JSONL file."""

    values: dict[str, Any]
    where: str  # file and line


class FewShot(Section):
    """Solved items before each prompt, drawn anew for every item, never the item itself nor one with the same prompt."""

    shots: Positive
    """Solved items before each prompt. Unit: items."""
    seed: Seed = 0
    """Seed by which the solved items are drawn. Unit: seed."""
    data: Text | None = None
    """JSONL file that solved items are drawn from; null: the task's own items."""
    separator: str = "\n\n"
    """Text between two solved items, and before the prompt."""


class TaskConfig(Section):
    """Settings of every task. Files are named from the task file's folder."""

    name: Text = ""
    """Name of the task in results and metrics. Default: the file name of the task."""
    description: str = ""
    """Text about the task, which is shown with its results."""
    limit: Positive | None = None
    """Only the first items are asked, up to this number; null: all of them. Unit: items."""

    def templates(self) -> dict[str, str]:
        """Field -> template."""
        return {}


class PerplexityTask(TaskConfig):
    """Perplexity and bits per byte of texts: a file as one text, JSONL with a text a line, or documents of a token store."""

    kind: Literal["perplexity"]
    data: Text | None = None
    """File to score: one text, or JSONL with a text in each line; null: `store` is given."""
    store: StoredPath | None = None
    """Token store to score, in place of `data`; null: `data` is given."""
    split: Literal["train", "eval"] = "eval"
    """Documents of the store that are scored. train: documents that are trained on; eval: documents that are held out."""
    text_field: Text = "text"
    """Field of the JSONL file that holds the text."""
    prompt: Text | None = None
    """Template of a text before each text of JSONL, which is read and not scored, but for white space at its end; null: none."""
    stride: Positive | None = None
    """Tokens by which windows over a long text move on; null: half of the context. Unit: tokens."""

    def templates(self) -> dict[str, str]:
        return {} if self.prompt is None else {"prompt": self.prompt}


class PromptTask(TaskConfig):
    """Items of a JSONL file, rendered as prompts."""

    data: Text
    """JSONL file of the items."""
    prompt: Text
    """Template of the prompt, with fields of the item in braces."""
    fewshot: FewShot | None = None
    """Solved items before each prompt; null: none."""


class MultipleChoiceTask(PromptTask):
    """The choice with the most likely text as continuation of the prompt."""

    kind: Literal["multiple_choice"]
    choices: Text | Annotated[tuple[Text, ...], Field(min_length=2)]
    """Field of an item that holds the list of choices, or the choices themselves where all items have the same."""
    gold: Text
    """Field of an item that holds the right choice: its number from 0, or its text."""
    continuation: Text = " {choice}"
    """Template of the text that is scored after the prompt."""
    unconditional: str | None = None
    """Context without the question, such as "Answer:"; with it, accuracy is also computed by the difference of the likelihoods with and
    without the question. null: not computed.
    """

    def templates(self) -> dict[str, str]:
        return {"prompt": self.prompt, "continuation": self.continuation, "unconditional": self.unconditional or ""}


class ExactMatchTask(PromptTask):
    """The most likely continuation of the prompt, compared with the answer after both are stripped of spaces."""

    kind: Literal["exact_match"]
    answer: Text
    """Template of the right text, with fields of the item in braces."""
    stop: Annotated[tuple[Text, ...], Field(min_length=1)] = ("\n",)
    """Texts at which the continuation ends."""
    max_new_tokens: Positive = 32
    """Longest continuation that is generated. Unit: tokens."""
    ignore_case: bool = False
    """Compare continuation and answer without regard to case."""

    def templates(self) -> dict[str, str]:
        return {"prompt": self.prompt, "answer": self.answer}


AnyTask = PerplexityTask | MultipleChoiceTask | ExactMatchTask
_ADAPTER: TypeAdapter[AnyTask] = TypeAdapter(Annotated[AnyTask, Field(discriminator="kind")])


class Task:
    """A task file that was read and checked; its data are read when they are used."""

    def __init__(self, path: Path) -> None:
        """Raises UserError: the file cannot be read, or a setting or a template is wrong."""
        self.path = path
        values = _read(path)
        values = {"name": path.stem, **values} if isinstance(values, dict) else values
        try:
            self.config = _ADAPTER.validate_python(values)
        except ValidationError as error:
            raise UserError(f"{path}: {_problem(error)}.") from None
        self.name = self.config.name
        try:
            check_run_name(self.name)  # it becomes part of a file's name
        except UserError as error:
            raise UserError(f"{path}: {str(error).replace('run.name', 'name', 1)}") from None
        for field, text in self.config.templates().items():
            template.check(text, f"{path}: {field}")
        if isinstance(self.config, PerplexityTask):
            _check_used(self.config, path, self.has_items)

    @property
    def has_items(self) -> bool:
        """True if `data` is JSONL, not one text."""
        return self.config.data is not None and Path(self.config.data).suffix.lower() in JSONL

    def path_of(self, name: str) -> Path:
        """A file that the task names."""
        return self.path.parent / user_path(name)

    @cached_property
    def items(self) -> list[Item]:
        """Items of `data`, up to `limit`. Raises UserError naming the line that is wrong."""
        assert self.config.data is not None, "asked of a task with a store"
        path = self.path_of(self.config.data)
        found = list(islice(read_items(path), self.config.limit))
        if not found:
            raise UserError(f"{path} holds no item; {self.path} needs one at least.")
        return found

    def where(self, item: Item) -> str:
        """Name of an item in errors."""
        return f"task {self.name}, {item.where}"


def _check_used(config: PerplexityTask, path: Path, has_items: bool) -> None:
    """Raise UserError unless the task has one source, which all its settings apply to."""
    if (config.data is None) == (config.store is None):
        raise UserError(f"{path}: exactly one of data and store must be set: name a text file, JSONL or a token store.")
    one_text = config.data if not has_items else None
    if one_text is not None and (format_by_name(one_text) != "text" or one_text.lower().endswith(COMPRESSED)):
        rule = "is read as one text, and its suffix states another format or a compression"
        raise UserError(f"{path}: data = {show(one_text)}: {rule}; decompress it, or convert it to .txt or .jsonl.")
    stored = config.store is not None
    uses = {"prompt": has_items, "text_field": has_items, "split": stored, "limit": has_items or stored}
    for name, used in uses.items():
        if not used and getattr(config, name) != PerplexityTask.model_fields[name].default:
            of = {"split": "store", "limit": "data in JSONL, or store"}.get(name, "data in JSONL")
            raise UserError(f"{path}: {name} = {show(getattr(config, name))}: is used only with {of}; take it out.")


def find_tasks(names: str) -> list[Task]:
    """Tasks of a list, split by commas: paths, or names under `configs/tasks/` here or as shipped. Raises UserError."""
    tasks: dict[str, Task] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        task = Task(_find(name))
        if task.name in tasks:
            raise UserError(f"two tasks are named {task.name}: {tasks[task.name].path} and {task.path}; set another `name` in one of them.")
        tasks[task.name] = task
    if not tasks:
        raise UserError("--tasks names no task: give paths of task files, or names under configs/tasks/.")
    return list(tasks.values())


def _find(name: str) -> Path:
    folders = (Path(), Path("configs") / FOLDER, SHIPPED / FOLDER)
    if "\0" not in name:
        for candidate in (folder / f"{user_path(name)}{ending}" for folder in folders for ending in ("", ".yml", ".json")):
            if candidate.is_file():
                return candidate
    known = sorted({path.stem for folder in folders[1:] for path in folder.glob("*.yml")})
    raise UserError(f"task {show(name)} does not exist: give the path of a task file, or one of {', '.join(known[:12]) or 'your own'}.")


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path} has more than {MOST_BYTES:,} bytes, which no task file has: put the data into a file of its own.")
        text = path.read_text(encoding="utf-8")
        # JSON may write a character beyond 16 bits as two escapes, which YAML takes for two characters.
        return json.loads(text) if path.suffix == ".json" else YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        kind, said = "JSON" if path.suffix == ".json" else "YAML", getattr(error, "problem", None) or str(error)
        raise UserError(f"{path}{f', line {mark.line + 1}' if mark else ''}: not valid {kind}: {show(said)}.") from None


def _problem(error: ValidationError) -> str:
    """The first problem, an unknown key before others."""
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    first = details[0]
    kinds = {"perplexity", "multiple_choice", "exact_match"}
    key = ".".join(str(part) for part in first["loc"] if part not in kinds) or "the file"
    if first["type"] == "extra_forbidden":
        return f"{shorten(key)} is not a setting of such a task"
    if first["type"] in ("union_tag_not_found", "union_tag_invalid"):
        return f"kind must be one of {', '.join(sorted(kinds))}"
    if first["type"] == "missing":
        return f"{shorten(key)} is missing"
    rule = (first.get("ctx") or {}).get("rule")
    return f"{shorten(key)} = {show(first['input'])}: {f'must {rule}' if rule else first['msg'][0].lower() + first['msg'][1:]}"


def read_items(path: Path) -> Iterator[Item]:
    """Objects of a JSONL file. Raises UserError naming the line of one that is none."""
    number = 0
    try:
        with open_regular(path) as file:
            while line := file.readline(MOST_LINE):
                number += 1
                if line.strip():
                    yield Item(_object(line, f"{path}, line {number}"), f"line {number} of {path.name}")
    except OSError as error:
        raise error_kind(error)(f"{path}: cannot be read: {error.strerror or error}.") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {show(str(error))}.") from None
    if not isinstance(value, dict):
        raise UserError(f'{where}: {show(value)} is no object; write one a line, as in {{"question": "..."}}.')
    return value
