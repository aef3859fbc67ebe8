"""A step that is only scheduled is that of its machine code: the same program, arguments and results, in a process that is ended."""

import contextlib
import importlib.util
import re
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from maxlm.compiler import aot, program_cache, schedule
from maxlm.config import UserError, load
from maxlm.cost import verify as verify_module
from maxlm.cost.verify import Compiler, step_of
from maxlm.hardware.topologies import parse

TINY = """
model: {vocab_size: 256, d_model: 128, n_layers: 2, n_heads: 1, head_dim: 128, d_ff: 256}
data: {store: unused, seq_len: 256}
train: {steps: 10, global_batch: 8}
cluster: {topology: "v5e:2x2"}
"""
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'")
PLACE = parse("v5e:2x2")
PROGRAM = "HloModule step\n\nENTRY %main () -> f32[] {\n}\n"
TOTAL = "Memory Space: default (color=0)\nTotal bytes: 8742 (8.5KiB)\n"
BUFFERS = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <2 reduce @0> (size=512,offset=0): s32[]
allocation 1: size 1000, parameter 10, shape |f32[250]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 200, parameter 11, shape |f32[50]| at ShapeIndex {}:
allocation 3: size 4000, color 5, parameter 12, shape |f32[1000]| at ShapeIndex {}, maybe-live-out:
allocation 4: size 30, maybe-live-out:
allocation 5: size 7000, preallocated-temp:
allocation 6: size 9000, color 1, preallocated-temp:
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("schedule")


@pytest.fixture(autouse=True)
def place(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MAXLM_CACHE_DIR", str(folder / "cache"))
    (folder / "tiny.yml").write_text(TINY, encoding="utf-8")


def without_settings(text: str) -> str:
    return re.sub(r", backend_config=.*", "", text)


@pytest.mark.soak
@needs_libtpu
def test_the_schedule_is_that_of_the_machine_code(tmp_path, monkeypatch):
    config = load("tiny").config
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    program = aot.build(config, PLACE)
    with Compiler(machine_code=False) as compiler:
        first = compiler(config, PLACE)
        assert (first.cached, compiler._process) == (False, None), "the compiler that runs on is ended"
    assert not list(temporary.iterdir()), "nothing is left behind"
    step, whole = step_of(program, PLACE), aot.compile_program(program, PLACE)
    assert step.cached and (step.machine_code, whole.machine_code) == (False, True)
    again, exact = (verify_module._verdict(program, PLACE, one) for one in (step, whole))
    assert (again.step_s, again.needed) == (first.step_s, first.needed)
    assert without_settings(step.text) == without_settings(whole.text)
    parts = "argument", "output", "alias"
    assert [getattr(step.memory, part) for part in parts] == [getattr(whole.memory, part) for part in parts]
    assert step.memory.argument < step.needed < whole.needed, "without its code"
    assert exact.parts is not None and first.parts is not None
    assert first.parts[3] == pytest.approx(exact.parts[3], rel=0.1), "communication"
    assert 0.5 * exact.step_s < first.step_s < 1.5 * exact.step_s, "of arrays so small"


def read(program: str, buffers: str, total: str, available: int) -> aot.CompiledStep:
    job = aot.Job(lowered=None, topology=PLACE, options={}, key="", resident=50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot, "available_hbm", lambda topology: available)
        return schedule._read(program, buffers, total, job, 1.0)


def test_memory_is_what_is_allocated():
    """Of an array that is read and returned once, nothing of other memories than HBM, but that of hosts."""
    step, refused = (read(PROGRAM, BUFFERS, TOTAL, available) for available in (8280, 8279))
    assert vars(step.memory) == {"argument": 1250, "output": 1030, "alias": 1000, "temp": 7000, "code": 0, "peak": 0, "host": 4000}
    assert (step.needed, step.fits, refused.fits, refused.needed) == (8280, True, False, 8280)


@pytest.mark.parametrize(
    "files",
    [
        (PROGRAM[:-3], BUFFERS, TOTAL),
        (PROGRAM, BUFFERS[: BUFFERS.index("allocation 5")], TOTAL),
        (PROGRAM, "", TOTAL),
        (PROGRAM, BUFFERS, ""),
    ],
    ids=["program", "buffers", "no buffers", "no total"],
)
def test_what_is_cut_short_is_no_schedule(files):
    with pytest.raises(UserError, match="incomplete; give TMPDIR a folder"):
        read(*files, 10**6)


@pytest.mark.soak
@needs_libtpu
def test_a_full_disk_ends_the_compiler_and_nothing_is_kept(tmp_path, monkeypatch):
    """As XLA does, which goes on in silence when it cannot write."""
    config = load("tiny").config
    monkeypatch.setenv("MAXLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("maxlm.cost.verify._serve", serve_on_a_full_disk)
    with Compiler(machine_code=False) as compiler:
        with pytest.raises(UserError, match="incomplete; give TMPDIR a folder"):
            compiler(config, PLACE)
        assert compiler._process is None
    assert not list(program_cache.folder().glob("*")), "nothing is kept"


def serve_on_a_full_disk(line, log) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024, 100 * 1024))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    schedule._WRITES_S = 1.0
    verify_module._serve(line, log)


@pytest.mark.parametrize("room", [True, False], ids=["room", "a full disk"])
def test_a_file_that_is_being_written_is_read_once_it_is_whole(room, tmp_path, monkeypatch):
    """XLA creates a file and writes to it bit by bit, on a busy machine for seconds. On a full disk it goes on in silence: nothing is kept.
    Without a cache, a step costs only time.
    """
    names = (schedule._PROGRAM, schedule._BUFFERS, schedule._LAST)
    files = [tmp_path / f"module_0000.jit_train_step.1.{name}" for name in names]
    answered, answers, kept = threading.Event(), [], []

    def compile_job(job):
        for file in reversed(files):
            file.write_text("")
        for file, text in zip(files, (PROGRAM, BUFFERS if room else BUFFERS[:300], TOTAL), strict=True):
            time.sleep(0.3)
            file.write_text(text)
        assert answered.wait(10)

    def then(answer, compiling):
        answers.append((answer, compiling))
        answered.set()

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MAXLM_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(aot, "available_hbm", lambda topology: 10**6)
    monkeypatch.setattr(schedule, "prepare", lambda program, topology: aot.Job(None, PLACE, {}, "a-key", 50))
    monkeypatch.setattr(schedule, "compile_job", compile_job)
    monkeypatch.setattr(schedule, "keep_step", lambda *entry: kept.append(entry) or aot.keep_step(*entry))
    if not room:
        monkeypatch.setattr(schedule, "_WRITES_S", 1.5)
    with contextlib.nullcontext() if room else pytest.raises(UserError):  # the process goes on here, which `then` should end
        schedule.schedule_program(None, PLACE, tmp_path, then)
    (answer, compiling), *_ = answers
    assert compiling
    if room:
        assert (answer.text, answer.fits, answer.cached, bool(kept)) == (PROGRAM, True, False, True)
    else:
        assert isinstance(answer, UserError) and "incomplete; give TMPDIR a folder" in str(answer) and kept == []


def test_a_step_that_is_refused_before_anything_is_written_is_compiled_once(tmp_path, monkeypatch):
    calls, answers = [], []

    def compile_job(job):
        calls.append(job)
        return aot.CompiledStep("", None, 9, 5, seconds=1.0)

    monkeypatch.setenv("MAXLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(schedule, "prepare", lambda program, topology: aot.Job(None, PLACE, {}, "a-key", 50))
    monkeypatch.setattr(schedule, "compile_job", compile_job)
    folder = tmp_path / "files"
    folder.mkdir()
    for _ in range(2):
        schedule.schedule_program(None, PLACE, folder, lambda step, compiling: answers.append((step.fits, step.needed, step.cached)))
    assert (answers, len(calls)) == ([(False, 9, False), (False, 9, True)], 1)


def test_no_step_finds_the_files_of_another(tmp_path, monkeypatch):
    """Where the compiler ends by itself, since a step does not fit, its process schedules the next one."""
    seen = []

    def schedule_program(program, topology, folder, then):
        seen.append((folder, list(folder.iterdir())))
        (folder / "module_0000.jit_train_step.txt").write_text("of this step")

    monkeypatch.setattr("maxlm.compiler.aot.build", lambda config, topology: None)
    monkeypatch.setattr(schedule, "schedule_program", schedule_program)
    for _ in range(2):
        verify_module._schedule(verify_module._Request(None, PLACE, str(tmp_path), steps=False), tmp_path, None)
    assert [files for _, files in seen] == [[], []] and seen[0][0] != seen[1][0]


def test_another_compiler_is_another_program(tmp_path, monkeypatch):
    """One that TPU_LIBRARY_PATH names, or a file that takes its place."""
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    keys = [aot._key("a program", [0], PLACE, {}, 0)]
    library = tmp_path / "libtpu.so"
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    for content in (None, "one", "another"):
        if content is not None:
            library.write_text(content)
        keys.append(aot._key("a program", [0], PLACE, {}, 0))
    assert len(set(keys)) == 4 and keys[-1] == aot._key("a program", [0], PLACE, {}, 0)
