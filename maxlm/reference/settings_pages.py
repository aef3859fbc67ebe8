"""Pages of settings: one for each section of a config, and one for each other kind of settings file."""

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from maxlm.config.descriptions import about, first_sentence
from maxlm.config.rule_texts import RuleText, all_rules
from maxlm.config.settings import Setting, settings_of
from maxlm.config.table import config_class
from maxlm.corpus.settings import CorpusSettings
from maxlm.evaluation.task import ExactMatchTask, MultipleChoiceTask, PerplexityTask
from maxlm.ladder.settings import LadderSettings
from maxlm.planning.price_file import PriceFile

# File -> title, first paragraph, sections by name.
FILES: Mapping[str, tuple[str, str, Mapping[str, type[BaseModel]]]] = {
    "ladder-file": (
        "Ladder files",
        "Settings of a file for `maxlm ladder`: which sizes are trained, for how long, and how the losses are fitted.",
        {"": LadderSettings},
    ),
    "corpus-file": ("Corpus files", "Settings of a file for `maxlm corpus run`: sources, filters and stages.", {"": CorpusSettings}),
    "task-file": (
        "Task files",
        "Settings of a file for `maxlm eval` and `evaluation.tasks`: what is asked, of which data, and how items become prompts.",
        {
            "kind: perplexity": PerplexityTask,
            "kind: multiple_choice": MultipleChoiceTask,
            "kind: exact_match": ExactMatchTask,
        },
    ),
    "price-file": ("Price files", "Settings of a file for `maxlm plan --prices`: prices of chips, each with its origin.", {"": PriceFile}),
}
INDEX = """# Settings

A config is a YAML file with the sections below; what it does not set has its default. Every setting can be given on the command line as
well, by its dotted key: `maxlm train runs/quickstart train.steps=100`. `null` switches an optional section off, and `{}` turns it on with
its defaults.

`maxlm config --explain mesh.fsdp` prints what is known of a setting: description, unit, range, rules, the configs that set it, and its
value in a config that is named before it.

**Editors** complete and check configs by their JSON schema, [maxlm.schema.json](../maxlm.schema.json). `maxlm config --schema` prints it,
with the sections of registered extensions. An editor with a YAML language server reads it where the first line of a config names it:

```yaml
# yaml-language-server: $schema=maxlm.schema.json
extends: models/llama3-8b
```

| section | |
|---|---|
"""


def settings_pages() -> dict[str, str]:
    """File name -> page, the table of contents first."""
    config, rules = config_class(), all_rules()
    sections = settings_of(config)
    index = INDEX + "".join(f"| [{one.key}]({one.key}.md) | {_cell(one.description.text)} |\n" for one in sections)
    index += "\nOther files of settings:\n\n" + "".join(f"- [{title}]({name}.md): {text}\n" for name, (title, text, _) in FILES.items())
    listed = "".join(f"{name}\n" for name in (*(one.key for one in sections), *FILES))
    pages = {"settings/index.md": f"{index}\n```{{toctree}}\n:hidden:\n\n{listed}```\n"}
    for one in sections:
        first = f"# {one.key}\n\n{one.description.text}{' Every config has this section.' if one.info.is_required() else ''}\n"
        text = "".join((first, *_groups(one, {}), *_rules(one.key, rules)))
        pages[f"settings/{one.key}.md"] = text
    for name, (title, text, kinds) in FILES.items():
        body = "".join(part for heading, section in kinds.items() for part in _file(heading, section))
        pages[f"settings/{name}.md"] = f"# {title}\n\n{text}\n{body}"
    return pages


def _file(heading: str, section: type[BaseModel]) -> Iterator[str]:
    """Tables of a settings file."""
    yield f"\n## {heading}\n" if heading else ""
    yield f"\n{about(section)}\n" if heading else ""
    yield from _table(settings_of(section))
    for setting in settings_of(section):
        yield from _groups(setting, {section: ""})


def _groups(setting: Setting, seen: dict[type[BaseModel], str]) -> Iterator[str]:
    """Tables of the sections that a setting holds, and of the sections in them. `seen`: sections listed before, with their keys."""
    for section in setting.sections:
        settings = settings_of(section, setting.key)
        kind = settings[0].kind if settings else ""
        if seen or len(setting.sections) > 1:
            yield f"\n## {setting.key}{f', kind: {kind}' if kind else ''}\n\n{about(section)}\n"
        elif more := about(section).removeprefix(first_sentence(section)).strip():
            yield f"\n{more}\n"
        if section in seen:
            yield f"\nIt has the settings of `{seen[section]}`.\n"
            continue
        seen[section] = setting.key
        yield from _table([one for one in settings if not (kind and one.name == "kind")])
        for inner in settings:
            yield from _groups(inner, seen)


def _table(settings: list[Setting]) -> Iterator[str]:
    if settings:
        yield "\n| setting | value | default | |\n|---|---|---|---|\n"
    for one in settings:
        default = one.default if one.default in ("required", "its defaults") or one.description.default else f"`{one.default}`"
        yield f"| `{one.name}` | {_cell(value_in_words(one))} | {_cell(default)} | {_cell(one.description.text)} |\n"


def value_in_words(setting: Setting) -> str:
    """Type, unit and bounds of a setting, or its choices."""
    choices = ", ".join(f"`{choice}`" for choice in setting.choices)
    words = setting.type
    if choices:
        for kind in ("one of these words", "one of these numbers", "these words"):
            words = words.replace(kind, choices)
        words = f"{choices}, one or a list" if words.count(choices) > 1 else words
    facts = (words, f"in {setting.description.unit}" if setting.description.unit else "", setting.range)
    return ", ".join(filter(None, facts)) + (" or `null`" if setting.nullable else "")


def _rules(section: str, rules: list[RuleText]) -> Iterator[str]:
    """Rules that refuse settings of a section."""
    found = [rule for rule in rules if rule.field == section or rule.field.startswith(f"{section}.")]
    if found:
        yield "\n## Rules\n\nA config is refused, with one line that names the value, where\n\n"
    for rule in sorted(found, key=lambda rule: rule.field):
        yield f"- `{rule.field}` {_cell(rule.rule)} ({_cell(rule.fix)})\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*") if "`" not in text else text.replace("|", "\\|")
