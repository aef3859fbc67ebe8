"""Extensions: which modules may be loaded, how they fail, and how they become part of a run's identity."""

import importlib
import io
import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from maxlm.api.configs import load_config
from maxlm.base.errors import ExitCode
from maxlm.cli import app
from maxlm.cluster import progress_file
from maxlm.config import UserError, choices, extension_files, extensions, load, show, table
from maxlm.config.loader import dump, load_saved, saved_text
from maxlm.diagnostics.doctor import extension_findings
from maxlm.reference.settings_pages import settings_pages
from maxlm.run import frozen
from maxlm.run.resume_checks import changed_extensions, lacking_extensions

IMPORTS = """import maxlm
from maxlm.config.capability import Capability
from maxlm.config.fields import Positive, Section
"""
SECTION = """
class Mine(Section):
    '''A section of a stranger.'''

    every: Positive = 10
    '''Updates between two of something. Unit: updates.'''
"""
REGISTER = "maxlm.register(Capability(key='mine', section=Mine))\n"
GOOD = IMPORTS + SECTION + REGISTER
LINE = GOOD.count("\n")  # of REGISTER


@pytest.fixture(autouse=True)
def process(monkeypatch, tmp_path):
    """A process that has loaded no extension, started in an empty folder that is first on sys.path, as `python -m` has it."""
    monkeypatch.setattr(extensions, "_state", extensions._State())
    monkeypatch.setattr(choices, "registered", [])
    modules = set(sys.modules)
    start = tmp_path / "start"
    start.mkdir()
    monkeypatch.chdir(start)
    monkeypatch.setattr(sys, "path", [str(start), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    yield
    monkeypatch.undo()
    table.clear()
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in ("ext", "dep", "other"):
            del sys.modules[name]
    importlib.invalidate_caches()


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def installed(folder: Path, files: dict[str, str | bytes], declares: str = "", distribution: str = "my-ext", editable: str = "") -> Path:
    """Write an installed distribution with these files into a folder, which is put on sys.path behind the others."""
    info = f"{distribution.replace('-', '_')}-1.5.dist-info"
    record = "".join(f"{name},,\n" for name in files)
    about = {"METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n", "RECORD": record}
    about |= {"entry_points.txt": f"[maxlm.extensions]\nmine = {declares}\n"} if declares else {}
    about |= {"direct_url.json": json.dumps({"url": f"file://{editable}", "dir_info": {"editable": True}})} if editable else {}
    write(folder, {**files, **{f"{info}/{name}": text for name, text in about.items()}})
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return folder


def load_it(*names: str, settings: tuple[str, ...] = ()):
    return load("runs/quickstart", [f"extensions=[{', '.join(names)}]", *settings])


# Nothing of the extension may run: each of these files would leave a mark.
MARK = "open('ran', 'w')\n"


def in_start(site):
    write(Path(), {"ext.py": MARK})


def in_python_path(site):
    sys.path.insert(1, str(write(site, {"ext.py": MARK})))
    os.environ["PYTHONPATH"] = str(site)


def declared_in_python_path(site):
    in_python_path(installed(site, {}, "ext"))


def declared_in_start(site):
    installed(Path().resolve(), {"ext.py": MARK}, "ext")


def hidden_by_start(site):
    installed(site, {"ext.py": MARK}, "ext")
    in_start(site)


def package_hidden_by_start(site):
    installed(site, {"ext/__init__.py": MARK, "ext/mod.py": MARK}, "ext.mod")
    write(Path(), {"ext/__init__.py": MARK, "ext/mod.py": MARK})


def beside_the_config(site):
    write(site, {"ext.py": MARK, "mine.yml": "extends: runs/quickstart\nextensions: [ext]\n"})
    load(str(site / "mine.yml"))


def archived(site):
    installed(site / "unpacked", {"ext.py": MARK}, "ext")
    sys.path[-1] = shutil.make_archive(str(site / "ext"), "zip", site / "unpacked")


def dangling(site):
    installed(site, {"ext/__init__.py": MARK}, "ext")
    (site / "ext/part.py").symlink_to(site / "nowhere.py")


def hidden_by_python(site):
    extensions.accept(paths=[str(write(site, {"json.py": MARK}))])


FOUND = {  # set-up, extensions, error: the module is not found, or may not be loaded
    "not installed": (None, "[ext]", "extensions = ext .*: is not found: no installed package has it; install the package"),
    "of Python": (None, "[antigravity]", "is a part of Python; name a module of a package"),
    "built in": (None, "[sys]", "is a part of Python"),
    "of a library": (None, "[yaml]", "the package PyYAML holds it and does not declare it .*if you trust it, add --extension yaml"),
    "in the current directory": (in_start, "[ext]", "start/ext.py belongs to no installed package; install its package"),
    "in PYTHONPATH": (in_python_path, "[ext]", "site/ext.py belongs to no installed package"),
    "declared by a package in PYTHONPATH": (declared_in_python_path, "[ext]", "ext.py belongs to no installed package"),
    "declared by a package in the current directory": (declared_in_start, "[ext]", "ext.py belongs to no installed package"),
    "hidden by a module in the current directory": (hidden_by_start, "[ext]", "my-ext declares it, and Python would import .*start/ext.py"),
    "hidden by a package there": (package_hidden_by_start, "[ext.mod]", "would import .*start/ext/mod.py; start in another folder"),
    "beside the config": (beside_the_config, "[ext]", "ext .from .*mine.yml.: is not found"),
    "undeclared": (lambda site: installed(site, {"ext.py": MARK}), "[ext]", "the package my-ext holds it and does not declare it"),
    "declared with an object": (lambda site: installed(site, {"ext.py": MARK}, "ext:go"), "[ext]", "my-ext holds it and does not"),
    "declared and absent": (lambda site: installed(site, {}, "ext"), "[ext]", "my-ext 1.5 declares it and does not hold it"),
    "in folders without __init__.py": (
        lambda site: installed(site, {"ext/deep/mod.py": MARK}), "[ext.deep.mod]", "my-ext holds it and does not declare it",
    ),
    "a folder in a folder": (lambda site: installed(site, {"ext/deep/mod.py": MARK}), "[ext.deep]", "is a folder without __init__.py"),
    "in an archive": (archived, "[ext]", "cannot be read: .*; mend the file"),
    "a file that leads nowhere": (dangling, "[ext]", "cannot be read: No such file or directory .*part.py.; mend the file"),
    "another module of a package": (
        lambda site: installed(site, {"ext/__init__.py": MARK, "ext/a.py": MARK, "ext/b.py": MARK}, "ext.a"),
        "[ext.b]",
        "my-ext holds it and does not declare it",
    ),
    "a folder": (lambda site: installed(site, {"ext/a.py": MARK}, "ext"), "[ext]", "is a folder without __init__.py; name a module in"),
    "not in the list of files": (
        lambda site: write(installed(site, {}, "ext"), {"ext.py": MARK}), "[ext]", "my-ext declares it, and Python would import",
    ),
    "hidden by Python": (hidden_by_python, "[json]", "Python would import .*json/__init__.py in place of the one in .*; rename it"),
    "no list": (None, "ext", "extensions = ext .*must be a list"),
    "a file": (None, "[./ext.py]", "must hold names of Python modules; write them as in"),
    "a number": (None, "[5]", "extensions.0 = 5 .*must be text"),
    "twice": (None, "[ext, ext]", "must name each module once"),
    "many": (None, str([f"e{n}" for n in range(33)]), "name at most 32 modules"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_module_that_no_person_has_accepted_is_refused_and_not_run(name, tmp_path):
    prepare, names, error = FOUND[name]
    site = tmp_path / "site"
    site.mkdir()
    with pytest.raises(UserError, match=error) as caught:
        if prepare is not None:
            prepare(site)
        load("runs/quickstart", [f"extensions={names}"])
    assert one_line(caught.value)
    assert not Path("ran").exists() and not {"ext", "ext.mod", "antigravity"} & set(sys.modules)


IMPORTED = {  # source of the module, error: it is imported, and fails
    "a library is missing": ("import numpyy\n", r"Error: No module named 'numpyy' \(line 1 of .*ext.py\); install the package"),
    "a name is missing": ("from maxlm.config import Nope\n", r"ImportError: cannot import name 'Nope'.* \(line 1 of .*ext.py\); mend it"),
    "syntax": ("x = 1\ndef f(:\n", r"SyntaxError: invalid syntax \(line 2 of .*ext.py\)"),
    "no text": (b"x = '\xff'\n", r"SyntaxError: .*\(line \d+ of .*ext.py\)"),
    "NUL": (b"x = 1\0\n", r"SyntaxError: .*null bytes"),
    "an error": ("x = 1\n\ny = x / 0\n", r"ZeroDivisionError: division by zero \(line 3 of .*ext.py\)"),
    "an error with lines": ("raise ValueError('one\\ntwo\\x1b[31m' + 'x' * 2000)\n", r"ValueError: one two.*\(line 1 of .*ext.py\)"),
    "an error in a library": ("import json\njson.loads('{')\n", r"JSONDecodeError: .* \(line 2 of .*ext.py\)"),
    "an error of an odd kind": ("class Stop(BaseException): ...\nraise Stop('no')\n", r"Stop: no \(line 2 of"),
    "sys.exit": ("import sys\nsys.exit(0)\n", r"it calls sys.exit\(0\) \(line 2 of .*ext.py\)"),
    "no end": ("def f():\n    return f()\nf()\n", r"RecursionError: .* \(line 2 of"),
    "registers nothing": ("x = 1\n", r"registers nothing with maxlm \(.*ext.py\); call maxlm.register in it"),
    "registers twice": (GOOD + REGISTER, rf"has mine already; .*\(line {LINE + 1} of .*ext.py\)"),
    "registers ours": (GOOD.replace("'mine'", "'ema'"), r"has ema already; .*\(line \d+ of .*ext.py\)"),
    "registers a string": (IMPORTS + "maxlm.register('mine')\n", r"Error: register\('mine'\): give a Capability or a Part \(line 4 of"),
    "an unknown field": (GOOD.replace("key=", "name="), r"TypeError: .*unexpected keyword argument 'name'.*\(line \d+ of"),
    "a section of another kind": (GOOD.replace("(Section)", "(dict)"), "is no class derived from maxlm.config.fields.Section"),
    "a rule that asks for nothing": (
        GOOD.replace("Mine))", "Mine, rules=(lambda mine, train_sede: iter(()),)))"), r"asks for train_sede, which is no setting.*\(line",
    ),
    "fails after it has registered": (GOOD + "1 / 0\n", rf"ZeroDivisionError.*\(line {LINE + 1} of .*ext.py\)"),
    "is replaced": ("import sys\nsys.modules['ext'] = sys\n", "Python imported None in its place"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPORTED)
def test_an_extension_that_fails_is_one_line_with_its_file_and_line_and_leaves_nothing(name, tmp_path):
    source, error = IMPORTED[name]
    installed(tmp_path / "site", {"ext.py": source}, "ext")
    for _ in range(2):  # the second attempt runs it again
        with pytest.raises(UserError, match=error) as caught:
            load_it("ext")
        assert one_line(caught.value)
    assert choices.registered == [] and "ext" not in sys.modules
    assert not hasattr(load("runs/quickstart").config, "mine")


def one_line(error: UserError) -> bool:
    return str(error).isprintable() and len(str(error)) <= 1000 and error.exit_code == ExitCode.WRONG_INPUT


def test_an_error_in_a_submodule_is_located_there(tmp_path):
    installed(tmp_path, {"ext/__init__.py": "", "ext/mod.py": "from ext import part\n", "ext/part.py": "\nimport nope\n"}, "ext.mod")
    with pytest.raises(UserError, match=r"extensions = ext.mod .*No module named 'nope' \(line 2 of .*part.py\)"):
        load_it("ext.mod")


OPTIONS = {
    "no folder": (["--extension-path", "nowhere"], "--extension-path nowhere is no folder"),
    "a file": (["--extension-path", __file__], "is no folder: give the folder that holds the module"),
    "no module": (["--extension", "my ext"], "--extension 'my ext' is no name of a Python module"),
    "a file as module": (["--extension", "./ext.py"], "is no name of a Python module"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_is_one_line(name):
    words, error = OPTIONS[name]
    result = CliRunner().invoke(app, [*words, "path", "configs"])
    assert error in str(result.exception) and one_line(result.exception)


def test_options_stand_before_or_after_the_command():
    words = ["train", "runs/x", "--extension-path", "a", "--devices", "2", "--extension=b", "--", "--extension", "c"]
    expected = ["--extension-path", "a", "--extension=b", "train", "runs/x", "--devices", "2", "--", "--extension", "c"]
    assert extensions.options_first(words) == expected
    with pytest.raises(UserError, match="--extension needs a value: the name of a module"):
        extensions.options_first(["train", "--extension"])


def test_a_declared_module_is_loaded_and_its_section_is_one_of_ours(tmp_path, capsys):
    installed(tmp_path / "site", {"ext.py": GOOD + "print('hello')\n"}, "ext")
    loaded = load_it("ext", settings=("mine.every=3",))
    assert capsys.readouterr() == ("", "hello\n"), "--json prints nothing else"
    assert loaded.config.mine.every == 3 and loaded.source("mine.every") == "command line"
    assert (
        "| `every` | whole number, in updates, at least 1 | `10` | Updates between two of something. |"
        in settings_pages()["settings/mine.md"]
    )
    (one,) = extensions.of(loaded.config.extensions)
    assert (one.distribution, one.version, one.records) == ("my-ext", "1.5", ("mine",)) and len(one.digest) == 12
    text = show.as_text(lambda *_: {}, loaded)
    assert f"ext: my-ext 1.5, digest {one.digest}; registers mine" in text
    assert json.loads(show.as_json_text(lambda *_: {}, loaded))["extension ext"][1] == "command line"
    with pytest.raises(UserError, match=r"mine.every = 0 .*must be at least 1"):
        load_it("ext", settings=("mine.every=0",))


def test_an_editable_package_counts_as_installed(tmp_path):
    project = write(tmp_path / "project", {"src/ext.py": GOOD})
    installed(tmp_path / "site", {}, "ext", editable=str(project))
    sys.path.append(str(project / "src"))
    assert load_it("ext").config.extensions == ("ext",)


def test_the_command_line_accepts_an_undeclared_module_and_a_folder(tmp_path):
    installed(tmp_path / "site", {"ext.py": GOOD}, distribution="undeclared")
    extensions.accept(["ext"])
    loaded = load("runs/quickstart")
    assert loaded.config.extensions == ("ext",) and loaded.source("extensions") == "command line"
    folder = write(tmp_path / "folder", {"other.py": GOOD.replace("mine", "other"), "dep.py": ""})
    extensions.accept(paths=[str(folder)])
    assert load_it("other").config.extensions == ("other", "ext")
    assert extensions.arguments() == ["--extension", "ext", "--extension-path", str(folder)]
    assert sys.path[-1] == str(folder), "behind what is installed"


def test_a_config_does_not_use_what_another_config_has_loaded(tmp_path):
    part = "from maxlm.config.part import Part\nmaxlm.register(Part(kind='optimizer', name='mine', place='ext:Rule'))\n"
    installed(tmp_path, {"ext.py": GOOD + part}, "ext")
    load_it("ext")
    with pytest.raises(UserError, match=r"extensions = \[\]: mine is registered by the extension ext, .*; add it"):
        load("runs/quickstart", ["mine={}"])
    with pytest.raises(UserError, match=r"optimizer.mine is registered by the extension ext"):
        load("runs/quickstart", ["optimizer.name=mine"])
    assert load_it("ext", settings=("optimizer.name=mine",)).config.optimizer.name == "mine"


def test_what_a_config_means_does_not_depend_on_what_was_loaded_before(tmp_path):
    part = "from maxlm.config.part import Part\nmaxlm.register(Part(kind='optimizer', name='{0}', place='ext:Rule'))\n"
    labels = SECTION + "    label: str = ''\n"
    later, first = ((IMPORTS + labels + REGISTER + part.format("mine")).replace("mine", name) for name in ("zeta", "alpha"))
    installed(tmp_path, {"ext.py": later, "other.py": first}, "ext\nsecond = other")
    values = {"extends": "runs/quickstart", "extensions": ["ext"]}
    for _ in range(2):  # text is text before the extension is loaded, too
        assert load_config(values, "zeta.label=5").zeta.label == "5"
    config = load_config({"extends": "runs/quickstart"}, "extensions=[other, ext]", "alpha.label=7")
    assert config.alpha.label == "7" and config.extensions == ("other", "ext")
    assert [one.key for one in table.capabilities()][-2:] == ["alpha", "zeta"]
    assert [one.name for one in choices.parts("optimizer")][-2:] == ["alpha", "zeta"]


def test_two_extensions_that_register_one_name_are_told_apart(tmp_path):
    installed(tmp_path, {"ext.py": GOOD, "other.py": GOOD}, "ext\nsecond = other")
    load_it("ext")
    with pytest.raises(
        UserError, match=r"= other .*has mine already \(from the extension ext, which this process has loaded\); choose"
    ) as caught:
        load_it("other")
    assert one_line(caught.value)


def test_a_module_in_folders_without_init_is_loaded(tmp_path):
    extensions.accept(paths=[str(write(tmp_path / "folder", {"ext/deep/mod.py": GOOD}))])
    assert extensions.of(load_it("ext.deep.mod").config.extensions)[0].records == ("mine",)


def test_an_extension_may_import_another_one(tmp_path):
    files = {"ext.py": "import other\n" + GOOD, "other.py": GOOD.replace("mine", "other")}
    installed(tmp_path, files, "ext\nsecond = other")
    assert extensions.of(load_it("ext").config.extensions)[0].records == ("other", "mine")
    assert load_it("other", settings=("other={}",)).config.extensions == ("other",)


def test_the_digest_covers_the_package_and_what_lies_beside_a_module_and_is_imported(tmp_path):
    def digest() -> str:
        return extension_files.digest(extension_files.find("ext.mod", [], [tmp_path]))

    sys.path.append(str(tmp_path))
    write(tmp_path, {"ext/__init__.py": "", "ext/mod.py": "import dep\n", "ext/deep/table.toml": "a = 1", "dep.py": "", "other.py": ""})
    seen = [digest()]
    for changed in ("ext/mod.py", "ext/__init__.py", "ext/deep/table.toml", "ext/new.py", "dep.py"):
        write(tmp_path, {changed: "import dep  # changed\n"})
        seen.append(digest())
    assert len(set(seen)) == 6
    write(tmp_path, {"apart/part.py": ""})
    (tmp_path / "ext/link").symlink_to(tmp_path / "apart")
    (tmp_path / "apart/circle").symlink_to(tmp_path / "ext")
    seen.append(digest())
    write(tmp_path, {"apart/part.py": "# changed, behind a link"})
    assert digest() not in seen
    seen.append(digest())
    write(tmp_path, {"data/deep/table.json": ""})
    (tmp_path / "ext/data").symlink_to(tmp_path / "data")
    write(tmp_path, {"other.py": "# changed", "ext/__pycache__/mod.pyc": "x", "ext/.mod.py.swp": "x", "ext/notes.md": "x"})
    assert digest() == seen[-1]


def test_a_saved_config_names_its_extensions_and_runs_without_them_say_so(tmp_path, monkeypatch):
    site = installed(tmp_path / "site", {"ext.py": GOOD}, "ext")
    config = load_it("ext", settings=("mine={}",)).config
    assert dump(config).count("extensions:\n- ext\n") == 1
    run = write(tmp_path / "run", {"config.yml": saved_text(config).replace("maxlm 0", "maxlm 9")})
    copied = pickle.loads(pickle.dumps(config))
    assert copied == config and copied.mine.every == 10
    monkeypatch.setattr(extensions, "_state", extensions._State())
    del sys.modules["ext"]
    choices.registered.clear()
    table.clear()
    assert load_saved(run).mine.every == 10
    monkeypatch.setattr(extensions, "_state", extensions._State())
    del sys.modules["ext"]
    sys.path.remove(str(site))
    with pytest.raises(UserError, match=r"extensions = ext \(from .*config.yml\): is not found.* --extension-path DIR\.$"):
        load_saved(run)


def test_a_resumed_run_needs_its_extensions_and_reports_those_that_changed(tmp_path):
    installed(tmp_path, {"ext.py": GOOD}, "ext")
    config, plain = load_it("ext").config, load("runs/quickstart").config
    now = extensions.identities(config.extensions)
    position = {extensions.FIELD: now}
    assert lacking_extensions(position, config.extensions) == "" and changed_extensions(position, config.extensions) == {}
    assert lacking_extensions({}, plain.extensions) == lacking_extensions({extensions.FIELD: "damaged"}, None) == ""
    lacking = "written with the extension ext, which this config does not name: add extensions=[ext]"
    assert lacking in lacking_extensions(position, plain.extensions)
    older = {extensions.FIELD: {"ext": "1.4 (0123)"}}
    assert changed_extensions(older, config.extensions) == {"extension ext": ["1.4 (0123)", now["ext"]]}


def test_launch_gives_its_extensions_to_every_attempt(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("maxlm.supervision.launch.Supervisor.run", lambda self: started.append(self._command) or 0)
    words = extensions.options_first(["launch", "--extension", "ext", "--extension-path", str(tmp_path), "--", "train", "x"])
    assert CliRunner().invoke(app, words).exit_code == 0
    options = ["--extension", "ext", "--extension-path", str(tmp_path)]
    assert started == [[sys.executable, "-m", "maxlm", *options, "train", "x"]]


def test_an_attempt_that_goes_on_loads_the_extensions_of_the_first(tmp_path, monkeypatch):
    installed(tmp_path, {"ext.py": GOOD}, "ext")
    values = load_it("ext", settings=("mine.every=7",)).config.model_dump(mode="json")
    kept = {"asked": ["runs/quickstart", "extensions=[ext]"], "config": values}
    monkeypatch.setattr(progress_file, "current", lambda: progress_file.Progress(frozen=kept))
    monkeypatch.setattr(extensions, "_state", extensions._State())
    del sys.modules["ext"]
    choices.registered.clear()
    table.clear()
    assert frozen.load_frozen("runs/quickstart", ["extensions=[ext]"]).config.mine.every == 7


def test_a_slow_import_is_named(tmp_path, monkeypatch):
    installed(tmp_path, {"ext.py": GOOD + "import time\ntime.sleep(0.1)\n"}, "ext")
    monkeypatch.setattr(extensions, "SLOW_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())
    load_it("ext")
    assert told.getvalue() == "maxlm: the extension ext is still being imported after 0.01 s; Ctrl-C stops it.\n"


def test_doctor_lists_installed_extensions_and_what_is_wrong_with_them(tmp_path):
    installed(tmp_path / "a", {"ext.py": MARK}, "ext\nbad = ext:go")
    installed(tmp_path / "b", {"other.py": MARK}, "other", "second")
    installed(tmp_path / "c", {"other.py": MARK}, "other", "third")
    found = [(one.state, one.found) for one in extension_findings(extension_files.declared())]
    assert found[0] == ("ok", "ext (my-ext 1.5)") and found[1] == ("warning", "ext:go of my-ext is no plain name of a module")
    assert found[2] == ("warning", "other is declared by second and by another package") and len(found) == 4
    assert not Path("ran").exists()
