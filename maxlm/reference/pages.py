"""Pages about commands, exit codes, events, metrics and the environment, and the list of all generated files."""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from maxlm.base.errors import ExitCode
from maxlm.base.metric import Metric
from maxlm.cli import app
from maxlm.command_examples import EXAMPLES, commands_of
from maxlm.config.descriptions import parsed, strings_of
from maxlm.config.json_schema import schema_text
from maxlm.config.loader import PACKAGE
from maxlm.config.table import config_class
from maxlm.corpus.settings import CorpusSettings
from maxlm.ladder.settings import LadderSettings
from maxlm.reference.environment import environment_page
from maxlm.reference.settings_pages import settings_pages
from maxlm.telemetry.event_fields import FIELDS
from maxlm.telemetry.observer import StepRecord

SCHEMAS: dict[str, tuple[Callable[[], type[BaseModel]], str]] = {
    "maxlm": (config_class, "config"),
    "ladder": (lambda: LadderSettings, "ladder file"),
    "corpus": (lambda: CorpusSettings, "corpus file"),
}
_TYPES: dict[Any, str] = {int: "N", float: "NUMBER", Path: "PATH"}
EVENTS = """# Events

A run appends one JSON object a line to `events.jsonl` in its folder. Each has `kind`, `step` and `time` (seconds since 1970), and the
fields below where they apply. Prometheus, alerts and the report read the same events.
"""
METRICS = """# Metrics

A run appends one JSON object to `metrics.jsonl` in its folder every `run.log_every` updates. TensorBoard, Weights & Biases, Prometheus and
the report show the same names. Means are over the updates since the record before.

## Every record

| name | unit | |
|---|---|---|
"""
DECLARED = """
## Metrics of objectives, experts and measurements

These are declared as `Metric` where they are computed, and recorded where the config asks for them. `NAME_N` stands for the
entries of a vector, `NAME_1` and so on.

| name | unit | | declared in |
|---|---|---|---|
"""
# Figures of a record that no declaration describes.
FIGURES = {
    "batch_digest": "Fingerprint of the tokens of the last update's batch; equal batches have the same on any mesh.",
    "skipped": "Updates that were not applied, since the start of the run. Unit: updates.",
    "global_batch": "Sequences of the update's batch, with `train.batch_ramp`. Unit: sequences.",
    "data_read_s": "Part of `data_wait_s` in which the store was read. Unit: seconds.",
    "data_pack_s": "Part of `data_wait_s` in which rows were packed. Unit: seconds.",
    "data_transfer_s": "Part of `data_wait_s` in which the batch moved to the devices. Unit: seconds.",
    "memory_bytes": "Memory in use on a device, the largest of this host; null where the backend does not count. Unit: bytes.",
    "memory_peak_bytes": "Largest memory in use on a device since the process began; null as above. Unit: bytes.",
    "process_memory_bytes": "Peak of the memory that the process holds on a CPU, beyond what it held at the start. Unit: bytes.",
    "cost": "Cost of the run so far, in `currency` of the `cost` section. Unit: currency units.",
    "energy_kwh": "Energy of the run so far, of the whole data centre. Unit: kWh.",
    "energy_estimated": "True if a part of the chips' energy was not counted by them.",
}


def generated() -> dict[str, str]:
    """File name in docs/reference/ -> text, of every generated file."""
    return {
        **settings_pages(),
        "commands.md": "".join(_commands()),
        "exit-codes.md": "".join(_exit_codes()),
        "events.md": "".join(_events()),
        "metrics.md": "".join(_metrics()),
        "environment.md": environment_page(),
        **{f"{name}.schema.json": schema_text(of(), f"A {title} of maxlm") + "\n" for name, (of, title) in SCHEMAS.items()},
    }


def _commands() -> Iterator[str]:
    yield "# Commands\n\nEvery command prints its options with `--help`. Arguments that are settings come last, as `key=value`.\n"
    group: Any = typer.main.get_command(app)
    yield "\n## Options of every command\n\nThey stand before the command or after it, as in `maxlm doctor --extension my_loss`.\n"
    yield from _parameters(group.params)
    for path, info in commands_of(app):
        command: Any = group
        for word in path.split():
            command = command.commands[word]
        text = " ".join(inspect.cleandoc((info.callback.__doc__ if info.callback else "") or "").split())
        yield f"\n## maxlm {path}\n\n{_cell(text)}\n"
        yield "\n```sh\n" + "".join(f"{example}\n" for example in EXAMPLES.get(path, ())) + "```\n"
        yield from _parameters(command.params)


def _parameters(parameters: list[Any]) -> Iterator[str]:
    shown = [one for one in parameters if not getattr(one, "hidden", False) and "--help" not in one.opts]
    if shown:
        yield "\n| argument or option | default | |\n|---|---|---|\n"
    for one in shown:
        if one.param_type_name == "argument":
            name, default = one.metavar or one.name.upper(), "required" if one.required else ""
        else:
            value = "" if one.is_flag else f" {one.metavar or _TYPES.get(one.type_descriptor.annotation, 'TEXT')}"
            name, default = f"{', '.join(one.opts)}{value}", "required" if one.required else "" if one.is_flag else one.default
        shown_default = default if default in ("", "required") or default is None else f"`{default}`"
        yield f"| `{_cell(name)}` | {_cell(str(shown_default or ''))} | {_cell(one.help or '')} |\n"


def _exit_codes() -> Iterator[str]:
    yield "# Exit codes\n\nEvery command ends with one of these codes. `maxlm launch` starts a run again after 1, 5, 6 and 7.\n"
    yield "\n| code | name | |\n|---|---|---|\n"
    texts = strings_of(ExitCode)
    yield from (f"| {code.value} | `{code.name.lower()}` | {texts[code.name]} |\n" for code in ExitCode)


def _events() -> Iterator[str]:
    yield EVENTS
    for kind, (about, fields) in FIELDS.items():
        yield f"\n## {kind}\n\n{about}\n\n| field | |\n|---|---|\n"
        yield from (f"| `{name}` | {_cell(text)} |\n" for name, text in fields.items())


def _metrics() -> Iterator[str]:
    yield METRICS
    strings = strings_of(StepRecord)
    for name, text in (*strings.items(), *FIGURES.items()):
        description = parsed(text)
        yield f"| `{name}` | {description.unit} | {_cell(description.text)} |\n"
    yield DECLARED
    for metric, module in declared_metrics():
        yield f"| `{metric.name}{'_N' * bool(metric.entries)}` | {metric.unit} | {_cell(metric.title)}. | `{module}` |\n"


def declared_metrics() -> list[tuple[Metric, str]]:
    """Metrics that are declared in the source of maxlm, each with its module. A name or title that is no constant is looked up there."""
    found: dict[tuple[str, str, str], tuple[Metric, str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "Metric(" in text and file.name != "metric.py" and "reference" not in file.parts:
            module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
            for metric in _declared_in(ast.parse(text), vars(import_module(module))):
                if metric.title:
                    found.setdefault((metric.name, metric.title, metric.unit), (metric, module))
    return list(found.values())


def _declared_in(tree: ast.AST, names: Mapping[str, Any]) -> Iterator[Metric]:
    """Metrics of the calls in a syntax tree; the entries of a vector, which depend on the model, are `N`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Metric":
            known = {word.arg: word.value for word in node.keywords if word.arg and word.arg != "entries"}
            entries = ("N",) if any(word.arg == "entries" for word in node.keywords) else ()
            values = {name: _value(one, names) for name, one in known.items()} | {"entries": entries}
            yield Metric(*(_value(one, names) for one in node.args), **values)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Value of a constant, or of a name in a module."""
    return names[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write(folder: Path) -> list[Path]:
    """Write every generated file that differs; return the written files."""
    written = []
    for name, text in generated().items():
        file = folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            written.append(file)
    return written
