"""The command line as a whole: help and version, what ends it in one line, and what it says of a model alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxlm import __version__, cli
from maxlm.config import load
from maxlm.config.errors import ExitCode
from maxlm.config.loader import SHIPPED

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
    monkeypatch.setattr(cli, "_close_output", lambda: None)
    code, _, err = end(monkeypatch, capsys, "report", "somewhere")
    assert code == (ExitCode.WRONG_INPUT if isinstance(raised, PermissionError) else ExitCode.STOPPED)
    assert err.startswith("maxlm: ") and err.count("\n") == 1


def test_an_interrupt_is_said_once_by_the_program(monkeypatch, capsys):
    """`maxlm.__main__` knows the signal; what a command prints of it would be a second line."""
    monkeypatch.setattr("maxlm.telemetry.report.write_report", _interrupted)
    assert end(monkeypatch, capsys, "report", "somewhere") == (cli.CTRL_C, "", "")
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
