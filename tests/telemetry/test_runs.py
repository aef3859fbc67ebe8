"""`maxlm runs` and `maxlm query`: runs found, listed, filtered, sorted and asked; bad input is one line, damaged runs are rows."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import maxlm
from maxlm import cli
from maxlm.base.installing import install_command
from maxlm.telemetry.observer import Event
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.runs import query, tables
from maxlm.telemetry.runs.folder import RunFolder, last_object
from maxlm.telemetry.runs.listing import find_runs, rows_of

CONFIG = (
    "# Written by maxlm {version}\nmodel: {{d_model: {width}}}\noptimizer: {{peak_lr: {lr}, name: adamw}}\nrun: {{name: r, dir: runs}}\n"
)
NASTY = "x\x1b[31m<b>"


def write_run(path, record, *, lr=0.001, width=64, steps=5, loss=3.0, version=maxlm.__version__, end="done", extra=()):
    path.mkdir(parents=True)
    (path / "config.yml").write_text(CONFIG.format(version=version, width=width, lr=lr))
    records = [json.dumps({**record(step).to_dict(), "loss": loss - 0.1 * step, "time": 1000.0 + step}) for step in range(1, steps + 1)]
    (path / "metrics.jsonl").write_text("\n".join([*records, *extra]) + "\n")
    events = [Event("start", 0, 1000.0, {"total_steps": steps, "parameters": 1000, "attempt": "a"})]
    events += [Event("eval", 2, 1002.0, {"eval_loss": loss - 0.1}), Event("eval", 4, 1004.0, {"eval_loss": loss})]
    events += [Event("stop", steps, 1000.0 + steps, {"reason": end})] if end else []
    (path / "events.jsonl").write_text("".join(event.to_json() + "\n" for event in events))
    (path / "checkpoints" / "4").mkdir(parents=True)
    return path


@pytest.fixture
def runs(tmp_path, record):
    """Five runs below a folder: two of one name, one of another version, one damaged, one with a name that a terminal would obey."""
    write_run(tmp_path / "a" / "small", record, lr=0.001, loss=3.0)
    write_run(tmp_path / "b" / "small", record, lr=0.01, loss=2.0, width=128, end="")
    write_run(tmp_path / "old", record, lr=0.1, loss=4.0, version="0.0.1")
    write_run(tmp_path / NASTY, record, loss=5.0)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.yml").write_bytes(b"# Written by maxlm 9\n[\xff\x00: {")
    (damaged / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": NaN}\n\xff\xfe{"step"\n[1]\n{"step": 2, "loss": 1e999, "odd": [1, 2]}\n{"ste'
    )
    (damaged / "events.jsonl").symlink_to("events.jsonl")  # a circle
    return tmp_path


def command(monkeypatch, capsys, *words):
    """(exit code, output, errors) of a command."""
    monkeypatch.setattr(sys, "argv", ["maxlm", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, captured.err


@pytest.fixture
def ask(monkeypatch, capsys):
    return lambda *words: command(monkeypatch, capsys, *words)


def test_every_run_is_a_row_whatever_its_state(ask, runs):
    code, out, _ = ask("runs", runs)
    rows = out.splitlines()
    assert (code, len(rows)) == (0, 6)
    assert {row.split("  ")[0] for row in rows[1:]} == {"a/small", "b/small", "old", "damaged", "x\\x1b[31m<b>"}
    assert "written by maxlm 0.0.1" in next(row for row in rows if row.startswith("old"))
    damaged = next(row for row in rows if row.startswith("damaged"))
    assert "events.jsonl" in damaged and "written by maxlm 9" in damaged
    assert "\x1b" not in out


def test_runs_are_filtered_and_sorted_by_figures_and_settings(ask, runs):
    def names(*words):
        code, out, err = ask("runs", runs, *words, "--json")
        assert code == 0, err
        return [run["run"] for run in json.loads(out)["runs"]]

    assert names("--where", "optimizer.peak_lr>=0.01", "--sort", "optimizer.peak_lr", "--reverse") == ["old", "b/small"]
    assert names("--where", "state=finished", "--sort", "loss", "--limit", "2") == ["a/small", "old"]
    assert names("--where", "run~SMALL", "--where", "model.d_model=128") == ["b/small"]
    assert names("--sort", "loss")[-1] == "damaged"  # it has no finite loss
    assert names("--sort", "loss", "--reverse")[-1] == "damaged"
    assert set(names("--where", "optimizer.peak_lr!=0.1")) == {"a/small", "b/small", "damaged", NASTY}


def test_figures_are_those_of_the_report(runs):
    for path in (runs / "a" / "small", runs / "old"):
        (row,), report = rows_of([path]), load_run(path)
        assert (row["step"], row["eval_loss"]) == (report.last_step, report.eval_loss.values_N[-1])
        assert row["loss"] == report.get("loss").values_N[-1]
        assert row["seconds"] == report.ledger.wall_s
        assert row["best_eval_loss"] == report.eval_loss.values_N.min()


def test_the_python_api_and_the_tables_read_the_same(ask, runs):
    path = runs / "a" / "small"
    run = maxlm.Run(path)
    rows = rows_for(ask, "select step, loss from metrics order by step", path)
    assert [(row["step"], row["loss"]) for row in rows] == list(zip(run.metrics["step"], run.metrics["loss"], strict=True))
    assert [row["eval_loss"] for row in run.evaluations] == [2.9, 3.0]
    assert [event.kind for event in run.events] == ["start", "eval", "eval", "stop"]


def test_columns_are_chosen(ask, runs):
    _, out, _ = ask("runs", runs / "a", "--columns", "run,optimizer.peak_lr")
    assert [line.split() for line in out.splitlines()] == [["run", "optimizer.peak_lr"], ["small", "0.001"]]
    _, out, _ = ask("runs", runs / "a", "--columns", "+model.d_model")
    assert {"loss", "model.d_model"} < set(out.splitlines()[0].split())


def rows_for(ask, sql, *places):
    code, out, err = ask("query", sql, *places, "--json")
    assert code == 0, err
    return json.loads(out)["rows"]


def test_tables_hold_what_the_files_hold(ask, runs):
    a = runs / "a"
    assert rows_for(ask, "select count(*) as n, min(loss) as least, max(tokens) as tokens from metrics", a) == [
        {"n": 5, "least": 2.5, "tokens": 2560}
    ]
    assert rows_for(ask, "select step, value from evaluations where name = 'eval_loss' order by step", a) == [
        {"step": 2, "value": 2.9},
        {"step": 4, "value": 3.0},
    ]
    assert rows_for(ask, "select kind, undone, data->>'total_steps' as steps from events order by time limit 1", a) == [
        {"kind": "start", "undone": False, "steps": "5"}
    ]
    assert rows_for(ask, "select step from checkpoints", a) == [{"step": 4}]
    joined = "select run, optimizer.peak_lr as lr, model.d_model from metrics join configs using (run) group by all order by lr"
    found = [(row["run"], row["lr"], row["d_model"]) for row in rows_for(ask, joined, runs)]
    assert found[-3:] == [("b/small", 0.01, 128), ("old", 0.1, 64), ("damaged", None, None)]
    assert rows_for(ask, "select state from runs where run = 'old'", runs) == [{"state": "finished"}]
    assert rows_for(ask, "select * from query('select count(*) as n from metrics')", a) == [{"n": 5}]


def test_values_that_are_not_finite_are_null_and_lists_are_json(ask, runs):
    assert rows_for(ask, "select step, loss, odd from metrics order by step", runs / "damaged") == [
        {"step": 1, "loss": None, "odd": None},
        {"step": 2, "loss": None, "odd": "[1,2]"},
    ]
    _, _, err = ask("query", "select step from metrics", runs / "damaged")
    assert "3 lines could not be read" in err


def test_records_come_in_batches_and_the_last_of_a_step_counts(monkeypatch, ask, tmp_path, record):
    monkeypatch.setattr(tables, "BATCH", 3)
    late = [json.dumps({"step": step, "loss": 9.0, "late": step}) for step in (6, 7, 7, 6)]
    write_run(tmp_path / "r", record, extra=late, end="")
    assert rows_for(ask, "select step, loss, late from metrics where step > 4 order by step", tmp_path) == [
        {"step": 5, "loss": 2.5, "late": None},
        {"step": 6, "loss": 9.0, "late": 6.0},
        {"step": 7, "loss": 9.0, "late": 7.0},
    ]


def test_the_end_of_a_large_file_is_read_alone(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with file.open("wb") as written:
        written.write(b'{"step": 1}\n')
        written.seek(2**40)  # a sparse file, which no program reads whole
        written.write(b'\n{"step": 7, "loss": 2.0}\n{"torn')
    assert last_object(file) == {"step": 7, "loss": 2.0}


def test_forms_of_a_result(ask, runs):
    sql = "select run, 1.5 as half, null as nothing from runs order by run desc limit 1"
    _, out, _ = ask("query", sql, runs)
    assert out.split() == ["run", "half", "nothing", "x\\x1b[31m<b>", "1.5", "–"]
    _, out, _ = ask("query", sql, runs, "--csv")
    assert list(csv.reader(io.StringIO(out))) == [["run", "half", "nothing"], ["x\\x1b[31m<b>", "1.5", ""]]
    _, out, _ = ask("query", sql, runs, "--json")
    assert "\x1b" not in out
    assert json.loads(out)["rows"][0]["run"] == NASTY


ATTACKS = {
    "select * from '{secret}'": "reads no file",
    "select * from read_csv('{secret}')": "reads no file",
    "select * from read_text('{secret}')": "reads no file",
    "select * from glob('/etc/*')": "reads no file",
    "select * from read_parquet('https://localhost/x')": "reads no file",
    "copy runs to '{out}'": "a statement COPY",
    "attach '{out}'": "a statement ATTACH",
    "install httpfs": "one SELECT",
    "load httpfs": "one SELECT",
    "set enable_external_access = true": "a statement SET",
    "pragma database_list": "a statement PRAGMA",
    "select getenv('HOME')": "getenv does not exist",
    "select 1; select 2": "2 statements",
    "select 1; drop table runs": "2 statements",
    "drop table runs": "a statement DROP",
    "with x as (delete from runs returning *) select * from x": "read-only",
    "export database '{out}'": "a statement EXPORT",
    "select * from query('copy runs to ''{out}''')": "Expected a single SELECT",
    "select secret from runs, (select 1 as secret) where secret = variable": "not found",
    "": "no statement",
    "/* nothing */": "no statement",
    "select 1 frm runs where": "syntax error",
    "select lss from metrics": '"loss"',
    "select * from metric": "does not exist",
    "select sum(a.range + b.range) from range(10000000) a, range(10000000) b": "took longer than",
    "select '{long}'": "longer than",
}


@pytest.mark.parametrize("sql", ATTACKS)
def test_a_query_that_is_refused_is_one_line(ask, tmp_path, record, sql):
    (tmp_path / "secret.csv").write_text("secret\n42\n")
    write_run(tmp_path / "r", record)
    out = tmp_path / "out"
    text = sql.replace("{secret}", str(tmp_path / "secret.csv")).replace("{out}", str(out)).replace("{long}", "x" * 100_000)
    code, printed, err = ask("query", text, tmp_path, "--timeout", "0.5")
    assert code == 2 and printed == ""
    assert "lists the columns" not in err or "syntax error" not in err
    assert len(err.splitlines()) == 1 and ATTACKS[sql] in err, err
    assert not out.exists() and "Traceback" not in err


MISTAKES = {
    ("runs", "{runs}", "--sort", "optimizer.peak"): "optimizer.peak_lr",
    ("runs", "{runs}", "--where", "loss"): "is no condition",
    ("runs", "{runs}", "--where", "nothing=1"): "no run here has",
    ("runs", "{runs}", "--where", "loss<abc"): "is no number",
    ("runs", "{runs}", "--columns", "run,,loss"): "commas",
    ("runs", "{runs}", "--columns", "\x1b[31m"): "no run here has",
    ("runs", "{runs}", "--limit", "0"): "--limit",
    ("runs", "{runs}/nowhere"): "does not exist",
    ("runs", "{runs}/old/config.yml"): "is a file",
    ("runs", "{runs}/old/checkpoints"): "no run was found",
    ("runs", "a\0b"): "null byte",
    ("query", "select 1", "{runs}", "--json", "--csv"): "exclude each other",
    ("query", "select 1", "{runs}", "--timeout", "0"): "--timeout",
    ("query", "select 1", "{runs}/nowhere"): "does not exist",
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line(ask, runs, words):
    code, out, err = ask(*(word.replace("{runs}", str(runs)) for word in words))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and MISTAKES[words] in err, err
    assert "\x1b" not in err


def test_without_duckdb_it_says_what_to_install(ask, monkeypatch, runs):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = ask("query", "select 1", runs)
    assert code == 2
    assert err == f"maxlm: maxlm query needs DuckDB, which is not installed: run {install_command('query')}.\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_a_note(ask, runs):
    (runs / "a").chmod(0)
    try:
        code, out, err = ask("runs", runs)
    finally:
        (runs / "a").chmod(0o700)
    assert code == 0 and "old" in out and "cannot be read" in err


def test_a_run_within_a_link_is_found_once(runs):
    (runs / "latest").symlink_to(runs / "old")
    found = find_runs([runs, runs / "old"], [])
    assert sum(path.name in ("old", "latest") for path in found) == 1


def test_undone_records_do_not_count(tmp_path, record):
    path = write_run(tmp_path / "r", record, end="")
    with (path / "events.jsonl").open("a") as file:
        file.write(Event("rollback", 2, 1006.0, {"from_step": 5}).to_json() + "\n")
    (path / "metrics.jsonl").write_text("".join((path / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]))
    folder = RunFolder(path)
    assert folder.last_step == 2
    assert [item["step"] for item in folder.records()] == [1, 2]
    assert [one.step for one in folder.evaluations] == [2]


def test_a_listing_imports_no_jax(runs):
    code = "import sys; from maxlm import cli; sys.argv[0] = 'maxlm'\ntry: cli.main()\nfinally: assert 'jax' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(Path(maxlm.__file__).resolve().parents[1])}
    answer = subprocess.run([sys.executable, "-c", code, "runs", str(runs)], capture_output=True, text=True, env=environment, check=False)
    assert answer.returncode == 0, answer.stderr


def test_a_query_that_needs_more_memory_than_it_may_is_one_line(ask, monkeypatch, tmp_path, record):
    write_run(tmp_path / "r", record)
    monkeypatch.setattr(query, "host_memory", lambda: 2 * 60e6)
    code, out, err = ask("query", "select count(distinct repeat(i::varchar, 1000)) from range(10000000) t(i)", tmp_path)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and "name fewer runs" in err, err
