"""The shape of the house in figures: each has a bound, which is its value today, so that no change makes it worse."""

import ast
import re
import shutil
import statistics
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import pytest
from source_files import ROOT, SOURCES, nodes_of
from test_size import all_sections, plain

from maxlm.config.schema import Config

BOUNDS = {  # a figure -> its largest value; the comment has the figure that the house is to reach
    "settings": 305,  # of all sections, nested ones included; a new setting replaces one, or is argued for here
    "functions that take the whole Config": 82,  # 90; eleven are the Python API, which is a door for whole configs
    "files with functions that take the whole Config": 37,  # 35
    "files below 60 lines with one importer": 3,  # 0; two are the definition and the shapes of a kernel, which tests import, too
    "vague words a thousand lines": 0.1,  # 2
    "public functions without docstring": 0,  # 0
    "modules that a feature touches": 13.4,  # 2: the mean of the last five features
}
MEDIAN_LINES = (130, 200)  # of a file; 130 to 200
OF_ONE_SETTING = {  # sections that hold one setting, and the reason why each is a section
    "Int8Compression": "one kind of `compression`, in which others have more settings",
    "SignCompression": "one kind of `compression`",
    "LinearScaling": "one kind of `model.rope.scaling`",
    "IndependentDecayConfig": "the second form of `optimizer.weight_decay`, told apart by the name of its setting",
    "MetricsConfig": "a package adds a section for each metric that it registers",
    "EmaConfig": "there, it turns the average on; its setting has a default",
    "NoiseScaleConfig": "there, it turns the measurement on; its setting has a default",
    "SkipConfig": "there, damaged chunks are skipped; its setting has a default",
    "TrackioConfig": "there, figures go to trackio",
    "WandbConfig": "there, figures go to Weights & Biases",
    "LearnedPositionsConfig": "there, positions are learned",
}
VAGUE = re.compile(r"\b(that of|those of|whose|nobody|beside|which there)\b", re.IGNORECASE)
ON_USE = re.compile(r"\"(maxlm[\w.]+):\w+\"")  # a module that a record names, imported on use
WHOLE_CONFIG = re.compile(r"(?<![A-Za-z])Config(?![A-Za-z])")
HOUSE = [path for path in SOURCES if not path.is_relative_to(ROOT / "tools")]
FEATURES = tomllib.loads((Path(__file__).parent / "features.toml").read_text(encoding="utf-8"))["feature"]
Function = ast.FunctionDef | ast.AsyncFunctionDef


NAMES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in HOUSE}  # module -> file


@lru_cache
def texts() -> dict[str, str]:
    """Module -> source."""
    return {name: path.read_text(encoding="utf-8") for name, path in NAMES.items()}


def nodes_of_all() -> dict[str, Sequence[ast.AST]]:
    return {name: nodes_of(path) for name, path in NAMES.items()}


def lines(name: str) -> int:
    return texts()[name].count("\n")


def takes_config(function: Function) -> bool:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    parts = (node for one in arguments if one.annotation is not None for node in ast.walk(one.annotation))
    return any(WHOLE_CONFIG.search(str(getattr(part, "id", getattr(part, "attr", getattr(part, "value", ""))))) for part in parts)


def with_config(nodes: Iterable[ast.AST]) -> int:
    """Functions with a parameter of the type `Config`."""
    return sum(isinstance(node, Function) and takes_config(node) for node in nodes)


def classes(modules: Iterable[Iterable[ast.AST]]) -> dict[str, list[ast.ClassDef]]:
    """Name -> classes of it."""
    found = defaultdict[str, list[ast.ClassDef]](list)
    for nodes in modules:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(node)
    return found


def inherits_text(owner: ast.ClassDef, name: str, known: dict[str, list[ast.ClassDef]], seen: tuple[ast.ClassDef, ...] = ()) -> bool:
    """True if a base class documents the method, whose text `help` then shows."""
    bases = [
        inner.attr if isinstance(inner, ast.Attribute) else inner.id
        for base in owner.bases
        if isinstance(inner := base.value if isinstance(base, ast.Subscript) else base, ast.Attribute | ast.Name)
    ]
    above = [one for base in bases for one in known.get(base, ()) if one not in seen]
    own = (node for one in above for node in one.body if isinstance(node, Function) and node.name == name)
    return any(map(ast.get_docstring, own)) or any(inherits_text(one, name, known, (*seen, one)) for one in above)


def undocumented(tree: ast.AST, known: dict[str, list[ast.ClassDef]]) -> list[str]:
    """Public functions and methods without docstring, of their own or of a base class."""
    assert isinstance(tree, ast.Module)
    owners = [None, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    pairs = ((owner, node) for owner in owners for node in (owner or tree).body if isinstance(node, Function))
    bare = (
        (owner, node.name)
        for owner, node in pairs
        if not node.name.startswith("_") and not is_overload(node) and ast.get_docstring(node) is None
    )
    return [name for owner, name in bare if owner is None or not inherits_text(owner, name, known)]


def is_overload(node: Function) -> bool:
    """True for a signature alone: its implementation has the docstring."""
    return any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)


def importers(modules: dict[str, Sequence[ast.AST]]) -> dict[str, set[str]]:
    """Module -> modules that import it, or a name from it."""
    found = defaultdict[str, set[str]](set)
    for name, nodes in modules.items():
        for node in nodes:
            for wanted in imported(node):
                module = next((one for one in (wanted, wanted.rpartition(".")[0]) if one in modules and one != name), None)
                if module is not None:
                    found[module].add(name)
    return found


def imported(node: ast.AST) -> list[str]:
    """Dotted names that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}".replace("maxlm.kernels", "kernels") for alias in node.names]
    return []


def cupboards() -> list[str]:
    """Small files with one importer. Sections of settings and implementations that a record names are files by the plan of the house."""
    named = {name for text in texts().values() for name in ON_USE.findall(text)}
    small = (name for name in texts() if lines(name) < 60 and not name.endswith("__init__"))
    others = (name for name in small if name not in named and not name.startswith("maxlm.config.sections."))
    return [name for name in others if len(importers_of_all().get(name, ())) == 1]


@lru_cache
def importers_of_all() -> dict[str, set[str]]:
    return importers(nodes_of_all())


def modules_of(feature: dict[str, object]) -> int:
    """Modules of the product that the commits of a feature touch."""
    git = ["git", "show", "--format=", "--name-only", *feature["commits"], "--", "maxlm", "kernels"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("the history of this clone does not reach back to the feature")
    return len({name for name in listed.stdout.splitlines() if name.endswith(".py")})


def figure(name: str) -> float:
    if name == "settings":
        return sum(map(plain, all_sections(Config)))
    if name == "functions that take the whole Config":
        return sum(map(with_config, nodes_of_all().values()))
    if name == "files with functions that take the whole Config":
        return sum(with_config(nodes) > 0 for nodes in nodes_of_all().values())
    if name == "files below 60 lines with one importer":
        return len(cupboards())
    if name == "vague words a thousand lines":
        return 1000 * sum(len(VAGUE.findall(text)) for text in texts().values()) / sum(map(lines, texts()))
    if name == "public functions without docstring":
        known = classes(nodes_of_all().values())
        return sum(len(undocumented(nodes[0], known)) for nodes in nodes_of_all().values())
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git")
    return statistics.mean(map(modules_of, FEATURES[-5:]))


@pytest.mark.parametrize("name", BOUNDS)
def test_figure_stays_within_its_bound(name):
    assert figure(name) <= BOUNDS[name]


def test_median_file_is_neither_a_cupboard_nor_a_hall():
    low, high = MEDIAN_LINES
    assert low <= statistics.median(lines(name) for name in texts() if not name.endswith("__init__")) <= high


def test_no_section_holds_one_setting():
    """`kind` names a section of several, and is no setting of it."""
    found = {section.__name__ for section in all_sections(Config) if len(set(section.model_fields) - {"kind"}) == 1}
    assert found == set(OF_ONE_SETTING)


def test_figures_are_counted():
    tree = ast.parse(
        "import x.a\nfrom x import b\nfrom x.c import d\ndef f(one: 'Config', two: RunConfig): ...\n"
        "def g(*, one: Config | None = None):\n    'Said.'\nclass C:\n    def h(self, one: RunConfig): ...\n    def _i(self): ...\n"
        "class B:\n    def k(self):\n        'Said.'\nclass D(B[int]):\n    def k(self): ...\n    def l(self): ...\n"
    )
    assert with_config(ast.walk(tree)) == 2 and undocumented(tree, classes([ast.walk(tree)])) == ["f", "h", "l"]
    assert ON_USE.findall('transforms=("maxlm.training.ema:MovingAverage",)') == ["maxlm.training.ema"]
    others = dict.fromkeys(("x.a", "x.b", "x.c"), ())
    assert importers({"x": [*ast.walk(tree)], **others}) == {name: {"x"} for name in others}
    assert len(VAGUE.findall("a boat whose sail is besides that of others")) == 2
    assert {len(one["commits"]) > 0 for one in FEATURES} == {True} and len(FEATURES) >= 5
