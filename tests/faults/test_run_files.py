"""Damage to the small files of a run: each is read again at its next start, and none of them may end that with a traceback or hang it."""

import ast
import json
import os
import random
import signal
from pathlib import Path

import pytest
from tiny import tiny_config

from maxlm.base.atomic import AppendFile
from maxlm.cluster import progress_file
from maxlm.config import UserError, load
from maxlm.config.loader import load_saved, saved_text
from maxlm.config.sections.watchdog import WatchdogConfig
from maxlm.cost import calibration
from maxlm.ladder import recommend
from maxlm.run import frozen, resume_checks
from maxlm.supervision import limits, watchdog
from maxlm.telemetry.alert_delivery import Limit
from maxlm.telemetry.bill import rates_of, spent_before
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.ledger import read_ledger
from maxlm.telemetry.lifetime import Process, append_process, read_beat, read_processes
from maxlm.telemetry.observer import Event, StepRecord
from maxlm.telemetry.report import write_report
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.report.samples import append_samples
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.unhealthy_hosts import to_replace
from maxlm.training import findings
from maxlm.training.rollback import Journal
from maxlm.training.saved_run import open_run
from maxlm.training.session import Start

CONFIG = tiny_config(run={"name": "run"})
PROCESS = Process("a", 1000.0, 1004.0, 4.0, 1, False, False, "a line")
SECONDS = 120  # in which anything is read, on a busy machine


def make_run(folder):
    """The files that a run of a few steps leaves, by what writes them."""
    run = RunDirectory(folder / "run", primary=True)
    run.path.mkdir()
    run.write_config(saved_text(CONFIG))
    observer = FileObserver(run)
    observer.on_event(Event("start", 0, data={"attempt": "a", "metrics": {"loss": {"title": "loss", "unit": "nats"}}}))
    for step in (1, 2, 3):
        values = {"loss": 3.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 512, "tokens_per_s": 5e3, "step_time_s": 0.1, "mfu": None}
        observer.on_step(StepRecord(step=step, **values, tflops_per_device=0.01, data_wait_s=0.001, time=1000.0 + step))
    observer.on_event(Event("save", 3))
    observer.close()
    run.heartbeat.write_text(json.dumps({"attempt": "a", "time": 1003.0, "goodput": {"step": 2.0}}))
    append_process(run.supervisor, PROCESS)
    run.lengths.write_text(json.dumps(limits.Limits(WatchdogConfig()).to_json()))
    Limit(2, run.alerts).admit("crash")
    append_samples(run.samples, 3, {"once": "upon"})
    run.log.write_text("a line\n")
    run.routing.write_text('{"step": 1}\n')
    assert Journal(run.roll_backs).add(9, 5, [7], "spike", "the loss") == ""
    record = {"findings": [{"step": 1}], "strikes": {"host0:1": 2}, "hosts": {}, "unsettled": None}
    run.integrity.write_text(json.dumps(record, indent=1))
    run.unhealthy_hosts.write_text(json.dumps({"hosts": {"host0": {"strikes": 2, "reason": "a reason"}}}))
    kept = {"config": CONFIG.model_dump(mode="json"), "facts": {"train data": "1"}}
    progress_file.write(run.path / "progress.json", progress_file.Progress(hosts=("a",), step=3, frozen=kept))
    (run.path / recommend.RESULT).write_text(json.dumps({"form": {}, "parameters": {}, "runs": [], "base": "b", "assumed": {}}))
    (run.path / "calibration.json").write_text(json.dumps({"chip": None, "device_kind": "cpu"}))
    return run


def goes_on(run):
    """What a start reads: a damaged config of before is reported, and kept as it is."""
    before = run.config.read_bytes() if run.config.is_file() else None
    state = type("State", (), {"skipped": 0})()
    changed = resume_checks.changed_settings(run, CONFIG, Start(state, 3, restored={}), "fingerprint")
    if before is not None and before != saved_text(CONFIG).encode():
        assert changed
        assert run.config_until(3).read_bytes() == before
        run.config_until(3).unlink()


def frozen_facts(run):
    os.environ[progress_file.VARIABLE] = str(run.path / "progress.json")
    progress_file._known.clear()
    try:
        frozen.is_restart()
        frozen.check_unchanged({"train data": "1"})
    finally:
        del os.environ[progress_file.VARIABLE]


def append(path):
    file = AppendFile(path)
    file.append(b"{}\n")
    file.close()


def report(run):
    load_run(run.path)
    write_report([run.path], run.path / "report.html")


def start(run):
    FileObserver(run).close()
    resume_checks.lost_checkpoints(run, "checkpoints", ())
    spent_before(run, rates_of(None, "cpu", 1))
    read_ledger(run)


READERS = {
    "config.yml": (goes_on, lambda run: load(str(run.path)), lambda run: load_saved(run.path), lambda run: open_run(run.path), report),
    "events.jsonl": (start, report),
    "metrics.jsonl": (start, report),
    "heartbeat.json": (lambda run: read_beat(run.heartbeat), start),
    "supervisor.jsonl": (lambda run: read_processes(run.supervisor), lambda run: append_process(run.supervisor, PROCESS), start),
    "watchdog.json": (lambda run: watchdog._read_kept(run.lengths),),
    "log.txt": (lambda run: append(run.log),),
    "routing.jsonl": (start, lambda run: append(run.routing)),
    "alerts.json": (lambda run: Limit(2, run.alerts).admit("crash"),),
    "samples.jsonl": (report,),
    "roll_backs.json": (lambda run: Journal(run.roll_backs), lambda run: open_run(run.path).unfit),
    "integrity.json": (findings.read,),
    "unhealthy_hosts.json": (to_replace,),
    "progress.json": (lambda run: progress_file.read(run.path / "progress.json"), frozen_facts),
    recommend.RESULT: (lambda run: recommend.recommend(run.path, "models/llama3-8b", [], 1e18),),
    "calibration.json": (lambda run: calibration.read(run.path / "calibration.json"),),
}


hung = []  # also where a reader takes the error of the alarm for one of the file


def read_all(run, name, readers=()):
    """Only one line of an error may come, for the file that is damaged: no traceback, and no wait."""
    for reader in readers or READERS[name]:
        hung.clear()
        signal.alarm(SECONDS)
        try:
            reader(run)
        except UserError as error:
            assert "\n" not in str(error)
        except OSError as error:
            assert error.errno, f"{name}: the command line has no line for {error!r}"
        finally:
            signal.alarm(0)
        assert not hung, "it waits"


@pytest.fixture
def run(tmp_path):
    def hangs(*_):
        hung.append(1)
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    yield make_run(tmp_path)
    signal.signal(signal.SIGALRM, before)


def flipped(run, name, places, bits=(7,), readers=()):
    path = run.path / name
    whole = path.read_bytes()
    for place in places(len(whole)):
        for bit in bits:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            read_all(run, name, readers)
    path.write_bytes(whole)


@pytest.mark.parametrize("name", READERS)
def test_flipped_bits(run, name):
    read_all(run, name)
    rng = random.Random(name)
    flipped(run, name, lambda size: [0, size - 1, *(rng.randrange(size) for _ in range(4))])


@pytest.mark.soak
@pytest.mark.parametrize("name", READERS)
def test_every_flipped_bit(run, name):
    starts = [reader for reader in READERS[name] if reader is not report]  # a report of a config that is YAML still takes long
    flipped(run, name, range, readers=starts)
    flipped(run, name, lambda size: range(0, size, 97), bits=(0, 1, 2, 3, 4, 5, 6), readers=starts)


KINDS = {
    "empty": lambda path, whole: path.write_bytes(b""),
    "zeros": lambda path, whole: path.write_bytes(bytes(len(whole))),
    "cut": lambda path, whole: path.write_bytes(whole[: len(whole) // 2]),
    "nested": lambda path, whole: path.write_bytes(b"[" * (500 if path.suffix == ".yml" else 5_000)),  # beyond both parsers' recursion
    "another type": lambda path, whole: path.write_bytes(b"[3]\n"),
    "a great number": lambda path, whole: path.write_bytes(b'{"hosts": 1' + b"0" * 5000 + b"}\n"),
    "folder": lambda path, whole: path.mkdir(),
    "pipe": lambda path, whole: os.mkfifo(path),
    "device": lambda path, whole: path.symlink_to("/dev/null"),  # one without end, read by mistake, would take all memory
    "link to itself": lambda path, whole: path.symlink_to(path),
    "link to nothing": lambda path, whole: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("name", READERS)
def test_another_thing_in_its_place(run, name):
    path = run.path / name
    whole = path.read_bytes()
    for make in KINDS.values():
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        make(path, whole)
        read_all(run, name)


NOT_READ = {"model.yml", "report.html"}  # by a start; doors of `test_kinds_of_files`, and a page that is only written
FOLDERS = {"tensorboard", "checkpoints", "evaluations", "profile"}


def test_every_file_of_a_run_is_damaged_here():
    entries = {entry._name for entry in vars(RunDirectory).values() if hasattr(entry, "_name")}
    assert entries - NOT_READ - FOLDERS <= set(READERS)


# Files that open others than through `config.paths`, which refuses pipes: why no pipe is there.
TRUSTED = {
    "of the kernel, or of a program that was just run": (
        *("base/host.py", "telemetry/device_memory.py", "telemetry/link_counters.py", "supervision/stacks.py"),
        *("cluster/accelerators.py", "diagnostics/comm/measure.py", "data/rendering.py", "compiler/hidden_stderr.py"),
        *("compiler/schedule.py", "kernel_lab/bundles.py", "kernel_lab/kernel_commands.py", "command_line.py"),
        *("supervision/launch.py", "cluster/deadline.py"),
    ),
    "of maxlm itself": (
        *("corpus/dedup/words.py", "corpus/filters/language_tags.py", "corpus/filters/scan.py", "corpus/filters/secret_keys.py"),
        "corpus/page.py",
        "corpus/filters/personal_data.py",
        "corpus/filters/quality.py",
        "telemetry/report/render.py",
        "telemetry/pages.py",
        "data/sources.py",
        *("config/explain_setting.py", "reference/pages.py"),
        *("hardware/chips.py", "hardware/published_runs.py"),
    ),
    "looked at first, with is_file, `irregular` or `check_regular`": (
        *("interop/published_files.py", "interop/exporting.py", "interop/tensor_files.py", "evaluation/task.py"),
        *("telemetry/report/__init__.py", "telemetry/report/load.py", "telemetry/files.py", "run/resume_checks.py"),
        *("run/reference_file.py", "run/ownership.py", "training/start_from.py", "checkpoint/memory.py", "checkpoint/manifest.py"),
        *("checkpoint/reader.py", "data/storage.py", "data/token_store.py", "documents/files.py", "documents/reader.py"),
        *("base/paths.py", "run/consistency.py", "base/directory_lock.py"),
    ),
    "written by this command before": ("interop/importing.py", "interop/new_folder.py", "corpus/executors/slurm.py"),
    "in the memory of this host, or checked by the library for buckets": ("checkpoint/host_copies.py", "checkpoint/folder.py"),
}
# Names whose `open`, `read_bytes` or `read_text` opens no file of ours.
LIBRARIES = {"ts", "KvStore", "storage", "scorer", "build_opener", "observer", "Run", "Data", "distribution"}


def opens(node):
    """True for a call that opens a file to read it or to add to it, by its own means."""
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    owner = getattr(node.func, "value", None)
    owner = owner.func if isinstance(owner, ast.Call) else owner
    if getattr(owner, "attr", getattr(owner, "id", "")) in LIBRARIES:
        return False
    if name == "open":
        texts = [one.value for one in [*node.args, *(word.value for word in node.keywords)] if isinstance(one, ast.Constant)]
        new = any(isinstance(text, str) and {"w", "x"} & set(text) and len(text) <= 3 for text in texts)
        made = any(getattr(one, "attr", "") == "O_EXCL" for one in ast.walk(node))
        return not new and not made and bool(node.args or node.keywords or isinstance(owner, ast.Name))
    return isinstance(node.func, ast.Attribute) and name in ("read_bytes", "read_text")


def test_files_are_opened_so_that_a_pipe_is_refused():
    """By `open_regular`, `read_file` or `append_regular`; a file of maxlm that does otherwise says above why it may."""
    root = Path(limits.__file__).parents[1]
    found = {
        str(path.relative_to(root)): [node.lineno for node in ast.walk(ast.parse(path.read_text())) if opens(node)]
        for path in root.rglob("*.py")
        if not path.is_relative_to(root / "kernels")
    }
    trusted = {name for names in TRUSTED.values() for name in names}
    assert {name: lines for name, lines in found.items() if lines and name not in trusted} == {}
