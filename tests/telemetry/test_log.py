"""log.txt holds what was logged before its folder was there, and nothing that was logged is lost without one."""

import logging

import pytest

from maxlm.telemetry.log import RunLog


@pytest.fixture
def named():
    log = logging.getLogger("maxlm.somewhere")
    yield log
    assert not [handler for handler in logging.getLogger().handlers if type(handler).__module__ == "logging.handlers"], "left behind"


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


def test_another_process_writes_it(named, capsys):
    with RunLog() as log:
        log.write_to(None)
        named.warning("said elsewhere")
    assert capsys.readouterr().err == ""
