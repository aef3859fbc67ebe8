"""log.txt holds what was logged before its folder was there, and nothing that was logged is lost without one."""

import logging
import subprocess
import sys
import time
import warnings

import pytest

from maxlm.base.errors import UserError
from maxlm.telemetry.log import RunLog


@pytest.fixture
def named():
    log, before = logging.getLogger("maxlm.somewhere"), list(logging.getLogger().handlers)
    yield log
    assert set(logging.getLogger().handlers) == set(before), "left behind"


def test_what_came_before_the_file_is_in_it(named, tmp_path):
    with RunLog() as log:
        named.info("early")
        logging.getLogger("another.library").info("not ours")
        log.write_to(tmp_path / "log.txt")
        named.info("late")
    named.info("after")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO maxlm.somewhere: early", "INFO maxlm.somewhere: late"]


def test_without_a_file_warnings_are_told(named, capsys):
    with RunLog():
        named.info("a detail")
        named.warning("a problem")
    assert capsys.readouterr().err == "a problem\n"


def test_an_error_for_the_user_is_all_that_is_told(named, capsys):
    """Also of a thread that still works when it is raised, such as the one that compiles."""
    with pytest.raises(UserError), RunLog():
        named.warning("what led to it")
        raise UserError("the checkpoint is damaged")
    console = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(console)
    try:
        named.info("attention: xla")
    finally:
        logging.getLogger().removeHandler(console)
    assert capsys.readouterr().err == ""


def test_another_process_writes_it(named, capsys):
    with RunLog() as log:
        log.write_to(None)
        named.warning("said elsewhere")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("where", ["", "some.library"])
def test_no_logger_writes_to_the_console_meanwhile(where, named, tmp_path, capsys):
    """Neither a handler that was there, nor the one that absl installs with its first line when the root logger has none."""
    library = logging.getLogger(where)
    before = logging.StreamHandler(sys.stderr)
    library.addHandler(before)
    try:
        with RunLog() as log:
            log.write_to(tmp_path / "log.txt")
            logging.basicConfig()
            library.error("a library fails")
            named.warning("a problem")
            warnings.warn("a warning", stacklevel=1)
        assert capsys.readouterr().err == ""
        library.error("after")
        assert "after" in capsys.readouterr().err
    finally:
        library.removeHandler(before)
    text = (tmp_path / "log.txt").read_text()
    assert "a library fails" in text
    assert "a problem" in text
    assert "a warning" in text


def test_a_file_that_cannot_be_written_delays_nobody_and_says_nothing(named, tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    began = time.monotonic()
    with RunLog() as log:
        log.write_to(tmp_path / "file" / "log.txt")
        for number in range(100):
            named.warning("line %d", number)
        assert time.monotonic() - began < 3
        (tmp_path / "file").unlink()
    assert len((tmp_path / "file" / "log.txt").read_text().splitlines()) >= 100
    assert capsys.readouterr().err == ""


ABSL = """
import sys
from pathlib import Path
from absl import logging
from rich.console import Console
from maxlm.telemetry.log import RunLog
if sys.argv[2] == "before":
    logging.error("this one comes before the run")  # absl installs a handler on stderr with its first line
elif sys.argv[2] == "under a spinner":  # which puts something in the place of stderr
    with Console(force_terminal=True).status("importing"):
        logging.error("this one comes before the run")
with RunLog() as log:
    log.write_to(Path(sys.argv[1]))
    try:
        raise OSError("no room")
    except OSError:
        logging.exception("a save failed")
"""


@pytest.mark.parametrize("when", ["before", "under a spinner", "not before"])
def test_a_traceback_that_absl_logs_is_in_the_file_alone(tmp_path, when):
    """As orbax does, in a dozen threads, when a disk is full under an asynchronous save."""
    done = subprocess.run([sys.executable, "-c", ABSL, str(tmp_path / "log.txt"), when], capture_output=True, text=True, check=True)
    assert "a save failed" not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "Traceback" in (tmp_path / "log.txt").read_text()
