"""Files of extensions: where a module lies, which installed distribution holds it, and the digest of its sources. Imports no module."""

import ast
import hashlib
import importlib
import importlib.util
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from maxlm.base.errors import shorten
from maxlm.base.paths import read_file

GROUP = "maxlm.extensions"  # of entry points
SOURCES = (".py", ".toml", ".json", ".yml", ".yaml", *EXTENSION_SUFFIXES)  # suffixes of the files that a digest covers
DIGITS = 12  # of a digest, in hex

_PYTHONS_OWN = ("is a part of Python", "name a module of a package that registers with maxlm")


class RefusedError(Exception):
    """A module that is not loaded: the rule and a fix."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(rule, fix)
        self.rule, self.fix = rule, fix


@dataclass(frozen=True)
class Place:
    """A module's file, the `root` folder from which it is imported, and the distribution that holds it ("": none)."""

    name: str
    file: Path
    root: Path
    distribution: str = ""
    version: str = ""

    @property
    def package(self) -> str:
        """Name of the outermost package, or of the module itself."""
        return self.name.partition(".")[0]

    @property
    def installed(self) -> bool:
        """True if `root` is shared by many distributions."""
        return bool(self.distribution) and str(self.root) in _folders_of_python()

    def holds(self, file: Path) -> bool:
        """True if `file` is part of the extension."""
        return any(file == own or own in file.parents for own in (_sources_of(self.root, self.package), self.file))


class Declared(NamedTuple):
    """An entry point of an installed distribution. `module`: "" if it names no plain module."""

    module: str
    value: str
    distribution: Distribution

    @property
    def owner(self) -> str:
        """The distribution with its version."""
        return f"{self.distribution.name} {self.distribution.version}"


def declared() -> list[Declared]:
    """Extensions that installed distributions declare, by module."""
    found = [
        Declared(point.value.strip() if ":" not in point.value and "[" not in point.value else "", point.value, one)
        for one in _installed()
        for point in one.entry_points
        if point.group == GROUP
    ]
    return sorted(found, key=lambda one: one.value)


def find(name: str, accepted: Sequence[str], paths: Sequence[Path]) -> Place:
    """The place of a module that may be loaded: in one of the folders `paths`, in an installed distribution that declares it under the
    group, or in an installed distribution if the person has `accepted` the name. Raises RefusedError.
    """
    importlib.invalidate_caches()  # a module may have been written since Python listed its folder
    for folder in paths:
        if (spec := _walk(name, PathFinder.find_spec(name.partition(".")[0], [str(folder)]))) is not None:
            file = _file_of(spec).resolve()
            _check_not_hidden(name, file, f"the one in {folder}", "rename it")
            return Place(name, file, folder)
    declaring = [one.distribution for one in declared() if one.module == name]
    spec = _walk(name, _top(name))
    if spec is None:
        holder = "no installed package has it"
        if declaring:
            holder = f"{declaring[0].name} {declaring[0].version} declares it and does not hold it"
        near = [one.module for one in declared() if one.module]
        known = f" (installed extensions: {', '.join(near[:6])})" if near and not declaring else ""
        raise RefusedError(
            f"is not found: {holder}{known}", "install the package that has it, or give its folder with --extension-path DIR"
        )
    if name.partition(".")[0] in sys.stdlib_module_names:
        raise RefusedError(*_PYTHONS_OWN)
    origin = _file_of(spec)
    file = origin.resolve()
    owner = next((one for one in declaring or _installed() if _owns(one, file)), None)
    if owner is None:
        why = f"{declaring[0].name} declares it, and Python would import {file}" if declaring else f"{file} belongs to no installed package"
        if declaring:
            raise RefusedError(why, "start in another folder or unset PYTHONPATH, so that the installed module is not hidden")
        raise RefusedError(why, "install its package (pip install -e DIR), or give its folder with --extension-path DIR")
    if not declaring and name not in accepted:
        rule = f'the package {owner.name} holds it and does not declare it under the entry points "{GROUP}"'
        raise RefusedError(rule, f"if you trust it, add --extension {name} to the command line; its author can declare it")
    return Place(name, file, _root(name, origin), owner.name, owner.version)


def imported_place(name: str) -> Place:
    """The place of a module that this program has imported itself. Raises RefusedError."""
    found = getattr(sys.modules[name], "__file__", None)
    if not found:
        raise RefusedError("has no file, so that no other process could load it", "put it into a module of a package")
    file, root = Path(found).resolve(), _root(name, Path(found).absolute())
    owner = next((one for one in _installed() if _owns(one, file)), None)
    return Place(name, file, root) if owner is None else Place(name, file, root, owner.name, owner.version)


def digest(place: Place) -> str:
    """Digest of all source files of the extension's package; outside of Python's own folders also of the modules next to it that it
    imports, and those import.
    """
    packages, left = dict[str, Path](), [place.package]
    while left:
        name = left.pop()
        own = _sources_of(place.root, name)
        if name in packages or not own.exists():
            continue
        packages[name] = own
        left += [] if place.installed else [one for file in _files(own) if file.suffix == ".py" for one in _imports(file)]
    files = {file.relative_to(place.root).as_posix(): file for own in packages.values() for file in _files(own)} or {place.name: place.file}
    lines = [f"{name} {hashlib.sha256(read_file(files[name])).hexdigest()}" for name in sorted(files)]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:DIGITS]


def _root(name: str, file: Path) -> Path:
    """The folder from which the module `name` in `file` is imported."""
    return file.parents[len(name.split(".")) - (file.stem != "__init__")]


def _sources_of(root: Path, package: str) -> Path:
    """The folder of a package, or the file of a module."""
    folder = root / package
    return folder if folder.is_dir() else root / f"{package}.py"


def _files(own: Path) -> Iterator[Path]:
    """Source files of a package or a module, without hidden ones and compiled copies."""
    if own.is_file():
        yield own
    seen = set[str]()  # links to folders of modules are followed, as Python does, and not in circles; links to data are not
    for folder, folders, names in os.walk(own, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        visible = sorted(one for one in folders if one != "__pycache__" and not one.startswith("."))
        folders[:] = [one for one in visible if not (at := Path(folder, one)).is_symlink() or any(at.glob("*.py"))]
        yield from (Path(folder) / one for one in sorted(names) if one.endswith(SOURCES) and not one.startswith("."))


def _imports(file: Path) -> Iterator[str]:
    """Outermost names of the modules that a Python file imports; none for a file that is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(read_file(file))))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _top(name: str) -> ModuleSpec | None:
    """Spec of the outermost package, as Python would import it."""
    try:
        return importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):  # a module without a spec
        return None


def _walk(name: str, spec: ModuleSpec | None) -> ModuleSpec | None:
    """Spec of a submodule from the spec of its outermost package; no package on the way is imported."""
    for part in name.split(".")[1:]:  # by its last name: with dots Python would look for the package, which is not imported
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _file_of(spec: ModuleSpec) -> Path:
    """The file that would run. Raises RefusedError for a module that is built in, or a folder without one."""
    if spec.origin is None or not spec.has_location:
        if spec.submodule_search_locations is None:
            raise RefusedError(*_PYTHONS_OWN)
        raise RefusedError("is a folder without __init__.py", "name a module in it, such as my_package.my_module")
    return Path(spec.origin).absolute()


def _check_not_hidden(name: str, file: Path, which: str, fix: str) -> None:
    """Raise RefusedError if Python would import another module than `file` under this name."""
    spec = _walk(name, _top(name))
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != file:
        other = "a part of Python" if spec is None or not spec.has_location else f"{spec.origin}"
        raise RefusedError(f"Python would import {shorten(other)} in place of {which}", fix)


def _installed() -> Iterable[Distribution]:
    """Installed distributions: found where Python's installation keeps packages, and not in the current directory or `PYTHONPATH`."""
    return distributions(path=_search_path())


def _search_path() -> list[str]:
    """Entries of sys.path, without the current directory, the folder of the program and `PYTHONPATH`."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep) if not sys.flags.ignore_environment else []
    outside = {os.path.realpath(entry) for entry in ("", *sys.path[:1], *entries)} - _folders_of_python()
    return [entry for entry in sys.path if entry and os.path.realpath(entry) not in outside]


@lru_cache
def _folders_of_python() -> frozenset[str]:
    """Folders in which pip installs packages."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    folders += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return frozenset(os.path.realpath(folder) for folder in folders)


def _owns(distribution: Distribution, file: Path) -> bool:
    """True if a distribution holds `file`: by its list of files or, for an editable one, in its folder."""
    if (folder := _editable(distribution)) is not None:
        return folder in file.parents and not any(str(parent) in _folders_of_python() for parent in file.parents)
    base = Path(str(distribution.locate_file(""))).resolve()
    if base not in file.parents:
        return False
    relative, record = file.relative_to(base), distribution.read_text("RECORD")
    if record is None:  # a system's package manager keeps the list
        return relative.parts[0].removesuffix(".py") in (distribution.read_text("top_level.txt") or "").split()
    return relative.as_posix() in record and any(relative.as_posix() == path.as_posix() for path in distribution.files or ())


def _editable(distribution: Distribution) -> Path | None:
    """Folder of a distribution that is installed in editable mode."""
    try:
        stated = json.loads(distribution.read_text("direct_url.json") or "{}")
        if stated.get("dir_info", {}).get("editable") is not True:
            return None
        return Path(unquote(urlsplit(stated["url"]).path)).resolve()
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
