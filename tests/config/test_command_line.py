"""The command line as a whole: help and version, what ends it in one line, and what it says of a model alone."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from maxlm import __version__, cli, command_line
from maxlm.base.errors import ExitCode
from maxlm.base.installing import install_command
from maxlm.command_line import settings_named
from maxlm.config import load
from maxlm.config.fields import flatten
from maxlm.config.loader import SHIPPED

ROOT = SHIPPED.parent
PROGRAM = [sys.executable, "-m", "maxlm"]


def end(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `maxlm ARGUMENTS` in this process."""
    monkeypatch.setattr("sys.argv", ["maxlm", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0, *capsys.readouterr()


def test_version_and_help(monkeypatch, capsys):
    assert end(monkeypatch, capsys, "--version")[:2] == (0, f"maxlm {__version__}\n")
    for arguments in (["-h"], ["train", "-h"], ["data", "prepare", "-h"]):
        code, out, _ = end(monkeypatch, capsys, *arguments)
        assert code == 0 and "Usage" in out


def test_a_shell_can_complete_commands_and_names_of_configs():
    def completed(line: str, word: int) -> str:
        variables = {"_MAXLM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(word), "PATH": "/usr/bin:/bin"}
        program = [sys.executable, "-c", "import sys; sys.argv[0] = 'maxlm'; from maxlm.cli import main; main()"]
        return subprocess.run(program, env=variables, capture_output=True, text=True, check=False, cwd=SHIPPED.parent).stdout

    assert "train" in completed("maxlm tr", 1).split()
    assert "runs/quickstart" in completed("maxlm train runs/quick", 2).split()


@pytest.mark.parametrize(
    "verb", [["train"], ["config"], ["data", "inspect"], ["generate", "runs/x"], ["report"], ["launch", "train"], ["doctor"]]
)
def test_bytes_that_are_no_text_are_one_line(verb):
    ended = subprocess.run([*PROGRAM, *verb, b"a\xff"], capture_output=True, check=False)
    assert ended.returncode == ExitCode.WRONG_INPUT
    assert ended.stderr.count(b"\n") == 1 and b"not UTF-8" in ended.stderr, ended.stderr


def test_a_reader_that_goes_away_is_no_crash():
    # More than a pipe holds, so that the program is still writing when its reader has gone.
    pipe = subprocess.Popen(
        [sys.executable, "-c", "from maxlm import cli; cli.app.command('flood')(lambda: print('x' * 10**6)); cli.main()", "flood"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    pipe.stdout.read(1)
    pipe.stdout.close()
    assert pipe.wait(timeout=120) == ExitCode.STOPPED
    assert pipe.stderr.read().count(b"\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written_is_one_line():
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([*PROGRAM, "--version"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == ExitCode.UNAVAILABLE
    assert ended.stderr.count(b"\n") == 1 and b"No space left" in ended.stderr


@pytest.mark.parametrize("raised", [BrokenPipeError(), PermissionError(13, "Permission denied", "there")])
def test_what_stops_a_command_has_its_exit_code(monkeypatch, capsys, raised):
    def stop(*_, **__):
        raise raised

    monkeypatch.setattr("maxlm.telemetry.report.write_report", stop)
    monkeypatch.setattr(command_line, "_close_output", lambda: None)
    code, _, err = end(monkeypatch, capsys, "report", "somewhere")
    assert code == (ExitCode.WRONG_INPUT if isinstance(raised, PermissionError) else ExitCode.STOPPED)
    assert err.startswith("maxlm: ") and err.count("\n") == 1


def test_an_interrupt_is_said_once_by_the_program(monkeypatch, capsys):
    """`maxlm.__main__` knows the signal; what a command prints of it would be a second line."""
    monkeypatch.setattr("maxlm.telemetry.report.write_report", _interrupted)
    assert end(monkeypatch, capsys, "report", "somewhere") == (command_line.CTRL_C, "", "")
    code = "import maxlm.telemetry.report as r, os, signal; r.write_report = lambda *_: os.kill(os.getpid(), signal.SIGINT)"
    program = f"import sys; {code}; sys.argv = ['maxlm', 'report', 'x']; from maxlm.__main__ import main; main()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (ExitCode.STOPPED, "maxlm: stopped by SIGINT\n")


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def shown(monkeypatch, capsys, *arguments: str) -> dict[str, list]:
    code, out, err = end(monkeypatch, capsys, "config", *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("llama3-8b", 8_030_261_248, 8_030_261_248),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("gpt-oss-20b", 20_914_757_184, 4_187_440_704),
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
    ],
)
def test_a_model_alone_is_counted(monkeypatch, capsys, name, parameters, active):
    """gpt-oss and Mixtral state 3.6 and 12.9 billion that are active: the first without 0.58 billion of embeddings."""
    values = shown(monkeypatch, capsys, f"models/{name}")
    assert values["counted.parameters"] == [parameters, "counted"]
    assert values["counted.active_parameters"] == [active, "counted"]
    assert values["data.seq_len"] == [4096, "assumed"]
    assert "counted.tokens_per_update" not in values  # nobody has said how large a batch is
    assert not any(key.startswith("optimizer.") for key in values)


def test_a_run_is_counted(monkeypatch, capsys):
    values = shown(monkeypatch, capsys, "runs/quickstart")
    config = load("runs/quickstart").config
    assert values["counted.tokens_per_update"][0] == config.train.global_batch * config.data.seq_len
    assert values["counted.flops_per_token"][0] > 6 * (values["counted.parameters"][0] - config.model.vocab_size * config.model.d_model)


def test_absurd_sizes_are_counted_and_not_made(monkeypatch, capsys):
    values = shown(monkeypatch, capsys, "models/llama3-8b", "model.d_ff=1000000000000", "model.n_layers=1000000000")
    assert values["counted.parameters"][0] > 3 * 4096 * 10**21


def test_a_model_alone_gets_a_sequence_a_device(monkeypatch, capsys):
    values = shown(monkeypatch, capsys, "models/llama3-8b", "cluster.topology=v5p:4x4x4", "data.seq_len=8192")
    assert values["train.global_batch"] == [64, "assumed"]
    assert values["data.seq_len"] == [8192, "command line"]
    loaded = load("models/gpt2-124m", assume=True)
    assert loaded.config.data.seq_len == loaded.config.model.max_seq_len == 1024  # no longer than its positions


def test_training_assumes_nothing(monkeypatch, capsys):
    code, _, err = end(monkeypatch, capsys, "train", "models/llama3-8b")
    assert code == 2 and "data is missing" in err


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--live", "--out", "x.html"], "--out"), (["--port", "80"], "--port 80"), (["--live", "--port", "70000"], "--port")],
)
def test_options_of_a_report_that_contradict_are_one_line(monkeypatch, capsys, options, named):
    code, out, err = end(monkeypatch, capsys, "report", "somewhere", *options)
    assert (code, out, err.count("\n")) == (ExitCode.WRONG_INPUT, "", 1)
    assert named in err


def test_several_runs_have_a_report_of_their_own(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    written = []
    monkeypatch.setattr("maxlm.telemetry.report.write_report", lambda runs, out: written.append(str(out)) or out)
    for runs in (["a"], ["a", "b/c/"], ["a", "b", "c", "d"]):
        end(monkeypatch, capsys, "report", *runs)
    assert written[:2] == ["a/report.html", "report-a-c.html"]
    assert re.fullmatch(r"report-a-and-3-more-\w{8}\.html", written[2])


@pytest.mark.parametrize(("name", "content"), [("notes.html", "<title>mine</title>"), ("metrics.jsonl", "{}")])
def test_a_report_overwrites_nothing_but_reports(monkeypatch, capsys, tmp_path, name, content):
    monkeypatch.setattr("maxlm.telemetry.report.load_run", pytest.fail)
    out = tmp_path / name
    out.write_text(content)
    code, _, err = end(monkeypatch, capsys, "report", "somewhere", "--out", str(out))
    assert (code, out.read_text()) == (2, content)
    assert err == f"maxlm: --out {out} exists and is no report of maxlm: it stays as it is; choose another file.\n"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--steps", "5"], "use train.steps=5, a setting"),
        (["--steps=5"], "use train.steps=5, a setting"),
        (["--train.steps", "5"], "use train.steps=5, a setting"),
        (["--lr", "1e-3"], "use optimizer.peak_lr=1e-3 or"),
        (["--global-batch", "8"], "use train.global_batch=8"),
        (["--fsdp=8"], "use mesh.fsdp=8"),
        (["--name", "x"], "use optimizer.name=x or run.name=x"),
        (["--seed"], "use train.seed=VALUE"),
        (["--banana"], "settings of the config are key=value, without dashes, such as train.steps=100"),
    ],
)
@pytest.mark.parametrize("verb", [["train"], ["compile"], ["plan"], ["config"], ["data", "prepare"]])
def test_an_option_that_is_a_setting_is_answered_with_the_setting(monkeypatch, capsys, verb, option, said):
    code, _, err = end(monkeypatch, capsys, *verb, "runs/quickstart", *option)
    assert code == ExitCode.WRONG_INPUT and said in err and err.count("\n") == 1


def test_a_misspelt_option_is_answered_with_the_nearest(monkeypatch, capsys):
    assert "no option --device; the nearest is --devices." in end(monkeypatch, capsys, "train", "runs/quickstart", "--device", "8")[2]


def test_an_unknown_option_of_a_command_without_settings_is_not_taken_for_one(monkeypatch, capsys):
    assert "No such option: --seed" in end(monkeypatch, capsys, "report", "x", "--seed", "3")[2]


def test_every_setting_is_found_by_its_name():
    keys = [key for key, _ in flatten(load("runs/quickstart").config.model_dump())]
    for key in ("train.steps", "train.seed", "mesh.tensor", "checkpoint.keep", "data.seq_len", "model.d_model"):
        assert key in keys and key in settings_named(key) and key in settings_named(key.rpartition(".")[2])


def test_paths_of_what_is_installed_beside_the_program(monkeypatch, capsys):
    for name in ("gcp/maxlm-gcp", "slurm/train.sbatch", "configs/models/llama3-8b.yml"):
        assert Path(end(monkeypatch, capsys, "path", name)[1].strip()).is_file()
    for name in ("nothing", "../tests", "/etc"):
        code, _, err = end(monkeypatch, capsys, "path", name)
        assert code == ExitCode.WRONG_INPUT and "there are configs, gcp/maxlm-gcp" in err


@pytest.mark.parametrize("verb", [["run", "x.yml"], ["report", "x"]])
def test_packages_of_the_corpus_that_are_missing_are_named_together_before_anything_is_read(monkeypatch, capsys, verb):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in ("ftfy", "chardet") else find(name, *more))
    code, _, err = end(monkeypatch, capsys, "corpus", *verb)
    assert (code, err) == (2, f"maxlm: maxlm corpus needs the packages chardet, ftfy: {install_command('corpus')}.\n")


def test_every_package_that_the_corpus_imports_is_asked_for():
    files = [path for room in ("corpus", "documents") for path in (ROOT / "maxlm" / room).rglob("*.py")]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    found = re.findall(r"""^\s*(?:import|from) (\w+)|optional\("(\w+)""", sources, re.MULTILINE)
    imported = {name for pair in found for name in pair}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    optional = {re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in extras["corpus"]}
    assert imported & optional - {"py3langid", "backports"} == set(cli.CORPUS_PACKAGES)


@pytest.mark.parametrize(("prompts", "separators"), [(["a"], 0), (["a", "b\nc", "d"], 3)])
def test_texts_of_several_prompts_are_told_apart(monkeypatch, capsys, prompts, separators):
    monkeypatch.setattr("maxlm.inference.text.generate_from_run", lambda folder, texts, *_, **__: [" more"] * len(texts))
    code, out, _ = end(monkeypatch, capsys, "generate", "somewhere", *prompts)
    lines = [line for line in out.splitlines() if line.startswith("--- ")]
    assert code == 0 and len(lines) == separators and out.count(" more") == len(prompts)
    assert not lines or lines[1] == "--- 2 of 3: 'b\\nc'"
