"""Pages of docs/: links and anchors lead somewhere, every page is in one table of contents, commands, options and settings exist."""

import re
import runpy
import shlex
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from ruamel.yaml import YAML, YAMLError
from source_files import ROOT

from maxlm.cli import app
from maxlm.config.explain import sections_of
from maxlm.config.extensions import OPTIONS
from maxlm.config.table import config_class

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md") if (ROOT / name).exists())]
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
FENCE = re.compile(r"^( *)(`{3,}|:{3,})([^\n`]*)\n(.*?)^\1\2`*:* *$", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+=\S+")
DAY = re.compile(r"\b20\d\d-\d\d-\d\d\b|\b(January|February|March|April|June|July|August|September|October|November|December) 20\d\d\b")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its fenced blocks and inline code."""
    return re.sub(r"`+[^`]*`+", "", FENCE.sub("", text_of(page)))


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of headings, as code hosts and MyST make them, and of explicit targets."""
    text = FENCE.sub("", text_of(page))
    found: Counter[str] = Counter()
    names = set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        names.add(slug if not found[slug] else f"{slug}-{found[slug]}")
        found[slug] += 1
    return names


def broken_links(page: Path) -> list[str]:
    found = []
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text_of(page)))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


def test_links_and_anchors_exist():
    assert {name_of(page): broken for page in PAGES if (broken := broken_links(page))} == {}


def test_pages_that_the_source_names_exist():
    """Comments, help and messages name pages as `docs/NAME.md`."""
    files = [
        path for folder in ("maxlm", "kernels", "tools", "gcp", "slurm", "configs") for path in (ROOT / folder).rglob("*") if path.is_file()
    ]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix in {"", ".py", ".sh", ".toml", ".tsv", ".yml"}}
    named = {(name_of(path), page) for path, text in texts.items() for page in re.findall(r"(?<![\w./])docs/[\w/-]+\.md", text)}
    assert len(named) > 20
    assert {(file, page) for file, page in named if not (ROOT / page).exists() and not re.search(r"_rows\.yml$", file)} == set()


def test_every_page_is_in_one_table_of_contents():
    listed: Counter[Path] = Counter()
    for page in DOCS.rglob("*.md"):
        for _, _, kind, body in FENCE.findall(text_of(page)):
            if kind.strip() == "{toctree}":
                names = [line.strip() for line in body.splitlines() if line.strip() and not line.startswith(":")]
                for name in names:
                    files = [path for suffix in (".md", ".ipynb") if (path := (page.parent / f"{name}{suffix}").resolve()).exists()]
                    assert files, f"{name_of(page)} lists {name}, which is no page"
                    listed[files[0]] += 1
    pages = {path for path in DOCS.rglob("*") if path.suffix in {".md", ".ipynb"} and path.name != "README.md"}
    assert pages - set(listed) == {DOCS / "index.md"}
    assert [name_of(path) for path, times in listed.items() if times > 1] == []


def test_pages_begin_with_a_title_and_a_sentence():
    bad = [name_of(page) for page in PAGES if not re.match(r"# \S.*\n\n", text_of(page))]
    assert bad == []


def test_tutorials_guides_and_explanations_have_no_dated_measurements():
    """They are lab notes, in docs/lab."""
    kinds = ("tutorials", "how-to", "explanation")
    dated = {name_of(page): days for page in PAGES if page.parent.name in kinds and (days := [m[0] for m in DAY.finditer(prose(page))])}
    assert dated == {}


@cache
def commands() -> Any:
    return typer.main.get_command(app)


def lines_of_code(page: Path) -> list[str]:
    """Lines of shell blocks, continued lines joined, and inline code."""
    found = []
    for _, _, kind, body in FENCE.findall(text_of(page)):
        if kind.strip() in {"", "sh", "bash", "console", "text"}:
            found += body.replace("\\\n", " ").splitlines()
    return [*found, *re.findall(r"`([^`\n]+)`", FENCE.sub("", text_of(page)))]


def words_of(line: str) -> list[str]:
    """Words of a command of maxlm, without its name; [] if the line is none."""
    line = re.sub(r"^\$ ", "", line.strip())
    line = re.sub(r"^(\S*/)?(python\S* -m )?", "", line) if re.match(r"(\S*/)?(python\S* -m )?maxlm ", line) else line
    if not re.match(r"maxlm [a-z]", line):
        return []
    line = re.split(r" [|>&]|&&|;", line)[0]
    try:
        return shlex.split(line, comments=True)[1:]
    except ValueError:
        return line.split()[1:]


def wrong_words(words: list[str]) -> list[str]:
    """Words that no command of this name takes: a command, an option or a setting that does not exist."""
    group = commands()
    while hasattr(group, "commands") and words and not words[0].startswith("-"):
        if words[0] not in group.commands:
            return [words[0]] if re.fullmatch(r"[a-z][a-z-]*", words[0]) else []
        group, words = group.commands[words[0]], words[1:]
    known = {option for parameter in group.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help", "-h", *OPTIONS}
    if group.name == "launch" and "--" in words:
        place = words.index("--")
        words, inner = words[:place], words[place + 1 :]
    else:
        inner = []
    wrong = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word) and word.partition("=")[0] not in known]
    ours = group.name not in {"run", "report", "inspect", "sweep"}
    wrong += wrong_words(inner) if inner else []
    return wrong + [key for word in words if ours and SETTING.fullmatch(word) and not is_setting(key := word.partition("=")[0])]


def is_open(info: Any) -> bool:
    """True if a setting has names of the user's own, as `data.eval` has."""
    return "dict" in str(info.annotation) or any(section.model_config.get("extra") == "allow" for section in sections_of(info))


def is_setting(key: str) -> bool:
    """True if a config has this dotted key."""
    sections: list[type[BaseModel]] = [config_class()]
    for place, part in enumerate(key.split(".")):
        infos = [section.model_fields[part] for section in sections if part in section.model_fields]
        if not infos:
            return False
        sections = [inner for info in infos for inner in sections_of(info)]
        if not sections or any(is_open(info) for info in infos):
            return any(is_open(info) for info in infos) or place == key.count(".")
    return True


def test_commands_options_and_settings_that_pages_name_exist():
    wrong = {}
    for page in PAGES:
        bad = [(line, word) for line in lines_of_code(page) for word in wrong_words(words_of(line))]
        if bad and name_of(page) != "CHANGELOG.md":  # which tells of former commands
            wrong[name_of(page)] = bad
    assert wrong == {}


def test_settings_that_pages_name_exist():
    """Inline code such as `train.steps` or `mesh.zero: 1`; the first column of a table on another library has names of that library."""
    wrong, sections = {}, config_class().model_fields
    for page in PAGES:
        if page.name in {"CHANGELOG.md", "clean-text.md", "corpus.md"}:  # former settings; settings of corpus files
            continue
        text = FENCE.sub("", text_of(page)).replace("`train.swa`", "")  # an example of a section of another package
        if page.name.startswith("from-"):
            text = re.sub(r"^\| [^|]* \|", "|", text, flags=re.MULTILINE)
        names = re.findall(r"`([a-z][a-z_0-9]*(?:\.[a-z_0-9]+)+)(?::[^`]*|=[^`]*)?`", text)
        named = [
            name
            for name in names
            if name.split(".")[0] in sections and not re.search(r"\.(py|md|json|jsonl|yml|toml|txt|html|safetensors)$", name)
        ]
        if bad := [name for name in named if not is_setting(name)]:
            wrong[name_of(page)] = bad
    assert wrong == {}


def wrong_keys(section: list[type[BaseModel]], value: object, key: str) -> list[str]:
    """Keys of a YAML block that no section has."""
    if not isinstance(value, dict) or not section:
        return []
    wrong = []
    for name, inner in value.items():
        infos = [one.model_fields[name] for one in section if name in one.model_fields]
        if not infos:
            wrong.append(f"{key}{name}")
        elif not any(is_open(info) for info in infos):
            wrong += wrong_keys([one for info in infos for one in sections_of(info)], inner, f"{key}{name}.")
    return wrong


def test_settings_in_blocks_of_yaml_exist():
    """Blocks with the section of a config in them; a block of another format names none at its top, or only keys that are none."""
    wrong, seen = {}, 0
    for page in PAGES:
        for _, _, kind, body in FENCE.findall(text_of(page)):
            if kind.strip() != "yaml":
                continue
            try:
                value = YAML(typ="safe", pure=True).load(body)
            except YAMLError as error:
                pytest.fail(f"{name_of(page)}: {error}")
            sections = set(config_class().model_fields) | {"extends"}
            if isinstance(value, dict) and set(value) <= sections:
                seen += 1
                value.pop("extends", None)
                if bad := wrong_keys([config_class()], value, ""):
                    wrong[name_of(page)] = bad
    assert wrong == {}
    assert seen > 20


def test_what_is_wrong_is_seen():
    """The checks above find a wrong command, option, setting and key."""
    assert wrong_words(words_of("$ maxlm trane runs/mine")) == ["trane"]
    assert wrong_words(words_of("maxlm train runs/mine --device 8 model.d_modle=4  # x")) == ["--device", "model.d_modle"]
    assert wrong_words(words_of("maxlm launch --restarts 3 -- train runs/mine --colour train.steps=3")) == ["--colour"]
    assert wrong_words(words_of(".venv/bin/maxlm train runs/mine train.steps=3 mesh.fsdp=2")) == []
    assert wrong_keys([config_class()], {"train": {"steps": 3, "stepz": 3}}, "") == ["train.stepz"]


def test_the_markdown_copy_of_a_page_has_no_directive():
    """Sphinx renders grids and lists of pages; a copy of the text has lists of links in their place."""
    site = runpy.run_path(str(DOCS / "_ext" / "maxlm_site.py"))
    for page in sorted(DOCS.rglob("*.md")):
        copy = site["markdown_of"](page, DOCS)
        assert not re.search(r"^:|^```\{", copy, re.MULTILINE), name_of(page)
    assert "- [Tutorials](tutorials/index.md): Lessons to follow" in site["markdown_of"](DOCS / "index.md", DOCS)
    assert "- [from-maxtext](from-maxtext.md)" in site["markdown_of"](DOCS / "how-to" / "index.md", DOCS)
