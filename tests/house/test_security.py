"""Nothing that maxlm reads can run code: no pickle, no eval, no unsafe YAML, no shell, no remote code, on any path."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest
from source_files import ROOT, SOURCES, nodes_of

from maxlm.base.host import python_command

BANNED_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "pty", "commands"}
BANNED_NAMES = {"eval", "exec", "compile", "__import__"}  # as builtins; methods such as jax's .compile() are something else
BANNED_CALLS = {"os.system", "os.popen", "os.execv", "os.spawnv", "subprocess.getoutput", "subprocess.getstatusoutput", "builtins.eval"}
BANNED_ATTRIBUTES = {name.rpartition(".")[2] for name in BANNED_CALLS}
BANNED_ARGUMENTS = {"shell", "allow_pickle", "trust_remote_code"}  # unless they are False


def problems(nodes: Iterable[ast.AST]) -> list[str]:
    """Parts of a module that could run somebody else's code."""
    return [f"line {node.lineno}: {what}" for node in nodes for what in problems_of(node)]


def problems_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"imports {a.name}" for a in node.names if a.name.partition(".")[0] in BANNED_MODULES)
    elif isinstance(node, ast.ImportFrom):
        names = {f"{node.module}.{a.name}" for a in node.names} & BANNED_CALLS
        if (node.module or "").partition(".")[0] in BANNED_MODULES or names or {a.name for a in node.names} & BANNED_MODULES:
            yield f"imports from {node.module}"
    elif isinstance(node, ast.Name) and node.id in BANNED_NAMES and isinstance(node.ctx, ast.Load):  # a setting may be named so
        yield f"uses {node.id}"
    elif isinstance(node, ast.Attribute) and node.attr in BANNED_ATTRIBUTES and ast.unparse(node) in BANNED_CALLS:
        yield f"uses {ast.unparse(node)}"
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            harmless = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in BANNED_ARGUMENTS and not harmless:
                yield f"passes {keyword.arg}={ast.unparse(keyword.value)}"
        if getattr(node.func, "attr", getattr(node.func, "id", "")) == "YAML" and not any(
            k.arg == "typ" and isinstance(k.value, ast.Constant) and k.value.value == "safe" for k in node.keywords
        ):
            yield f'makes a YAML reader that is not `typ="safe"`: {ast.unparse(node)}'


def test_there_is_something_to_look_at():
    folders = {path.relative_to(ROOT).parts[0] for path in SOURCES}
    assert folders == {"maxlm", "kernels", "tools"}
    assert len(SOURCES) > 50


def test_no_path_runs_foreign_code():
    found = {str(path.relative_to(ROOT)): problems(nodes_of(path)) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import os, shelve as s",
        "from marshal import loads",
        "from dill import load as harmless",
        "import numpy.lib; from cloudpickle import dumps",
        "eval('1')",
        "f = exec",
        "compile('1', 'x', 'eval')",
        "__import__('pic' + 'kle')",
        "import yaml",
        "from ruamel import yaml",
        "YAML(typ='unsafe')",
        "ruamel.yaml.YAML()",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=wanted)",
        "import os\nos.system('ls')",
        "from os import system",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
    ],
)
def test_the_look_sees_what_is_planted(planted):
    assert problems(ast.walk(ast.parse(f"def f(wanted, flag, path, name):\n    {'; '.join(planted.splitlines())}"))) != []


@pytest.mark.parametrize(
    "harmless",
    [
        "lowered.compile()",
        "re.compile('x')",
        "np.load(path, allow_pickle=False)",
        "YAML(typ='safe', pure=True)",
        "model.eval()",
        "eval: int = 3",
        "run([1], shell=False)",
    ],
)
def test_the_look_lets_the_harmless_pass(harmless):
    assert problems(ast.walk(ast.parse(harmless))) == []


# A printed command with arguments, up to a backtick or the end of its sentence; a NUL is a value.
COMMAND = re.compile(
    r"maxlm (?:train|compile|plan|ladder|generate|import|export|eval|average|report|profile|launch|data|corpus)(?: [a-z]+)? "
    r"(?=[A-Z\0-])((?:(?![`;]|: |\. ).)*)",
    re.DOTALL,
)


def unquoted(nodes: Iterable[ast.AST]) -> list[str]:
    """Values in printed commands that a shell would read otherwise: neither by shlex nor named `typed`, which says that they were."""
    found = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            values = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
            text = "".join("\0" if isinstance(part, ast.FormattedValue) else part.value for part in node.values)
            for match in COMMAND.finditer(text):
                first = text[: match.start(1)].count("\0")
                printed = map(ast.unparse, values[first : first + match[1].count("\0")])
                found += [value for value in printed if not value.startswith(("shlex.", "shell_command(")) and value != "typed"]
    return found


def test_names_in_commands_to_type_are_quoted_for_the_shell():
    for path in SOURCES:
        assert unquoted(nodes_of(path)) == [], path
    planted = (
        """f"Use it: maxlm train {a}; or `maxlm plan CONFIG --topology {b} --calibration {c}`, {d}. maxlm report {shlex.quote(e)} {f}" """
    )
    assert unquoted(ast.walk(ast.parse(planted))) == ["a", "b", "c", "f"]


def test_no_command_of_python_finds_modules_where_it_is_started_unless_this_process_does(tmp_path, monkeypatch):
    ours = [path for path in SOURCES if path.is_relative_to(ROOT / "maxlm") and path.name != "host.py"]
    lists = [(path, node) for path in ours for node in nodes_of(path) if isinstance(node, ast.List)]
    assert [f"{path}:{node.lineno}" for path, node in lists if _begins_with_python(node)] == [], "use maxlm.base.host.python_command"
    (tmp_path / "yaml.py").write_text("raise SystemExit('a file of the folder')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    ended = subprocess.run(python_command("-c", "import yaml; print(yaml.__name__)"), capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "yaml\n"), ended.stderr
    sys.path.insert(0, "")
    assert python_command("-m", "maxlm") == [sys.executable, "-m", "maxlm"], "a clone that is not installed works where it lies"


def _begins_with_python(node: ast.List) -> bool:
    return bool(node.elts) and ast.unparse(node.elts[0]) == "sys.executable"
