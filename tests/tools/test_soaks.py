"""The round of slow tests: each is run once in fourteen days, and one that fails has a second chance by itself."""

import datetime
import time

import pytest

from tools import soaks

SUITE = """
import pathlib, time, pytest
@pytest.mark.soak
@pytest.mark.parametrize("case", ["plain", "{'a': 1, 'b': (2, 3)}", "with space & <sign>"])
def test_passes(case):
    pass
@pytest.mark.soak
def test_passes_the_second_time():
    mark = pathlib.Path("mark")
    mark.touch() if (first := not mark.exists()) else None
    assert not first
@pytest.mark.soak
def test_fails():
    assert False
@pytest.mark.soak
def test_takes_long():
    time.sleep(600)
def test_is_quick():
    assert False
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = soak\n", encoding="utf-8")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_slow.py").write_text(SUITE, encoding="utf-8")
    return folder, soaks.collect(folder)


def choose(tests, *names):
    return [test for test in tests if any(f"::{name}" in test for name in names)]


def test_soaks_are_collected_and_no_other(suite):
    assert len(suite[1]) == 6
    assert not choose(suite[1], "test_is_quick")


def test_fourteen_days_run_each_soak_once():
    tests = [f"tests/test_{n % 5}.py::test[{n}]" for n in range(100)]
    seconds = {"tests/test_0.py::test": 600.0, "tests/test_1.py::test": 10.0}
    parts = soaks.split(tests, seconds)
    assert sorted(test for part in parts for test in part) == sorted(tests)
    lengths = [sum(seconds.get(test.partition("[")[0], soaks.UNMEASURED_S) for test in part) for part in parts]
    assert max(lengths) - min(lengths) <= 600
    assert parts == soaks.split(tests[::-1], seconds), "the order of collection changes nothing"
    assert soaks.split([*tests, f"{soaks.DRAWN}test_fuzz.py::test_cases[0]"], seconds) == parts, "random cases are run by themselves"
    first = datetime.date(2026, 12, 28)
    assert {soaks.part_of(first + datetime.timedelta(n)) for n in range(14)} == set(range(1, 15))


def test_one_that_fails_once_fails_nothing_and_one_that_fails_twice_all(suite, capfd):
    folder, tests = suite
    assert soaks.run_with_second_try(folder, choose(tests, "test_passes"), 300, workers=0) == 0
    out = capfd.readouterr().out
    assert "Run again, each by itself: 1 of 4 soaks" in out
    assert "failed twice" not in out
    assert soaks.run_with_second_try(folder, choose(tests, "test_passes", "test_fails"), 300, workers=0) == 1
    assert capfd.readouterr().out.rstrip().endswith("Soaks that failed twice:\n  tests/test_slow.py::test_fails")


def test_the_limit_ends_it(suite, capfd):
    folder, tests = suite
    started = time.monotonic()
    assert soaks.run_with_second_try(folder, choose(tests, "test_takes_long"), 5, workers=0) == 1
    assert time.monotonic() - started < 300
    assert "stopped at the limit" in capfd.readouterr().out


def test_what_does_not_collect_is_said(tmp_path):
    (tmp_path / "test_broken.py").write_text("import no_such_module\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="no_such_module"):
        soaks.collect(tmp_path)
