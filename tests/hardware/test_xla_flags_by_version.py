"""Compiler options by the version of jaxlib: an unknown one ends the compilation."""

import pytest

from maxlm.hardware.xla_flags import FLAGS, SINCE_0_11, TRACED, compiler_options


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_gpus_get_the_names_of_their_compiler():
    older, newer = compiler_options("H200", "0.10.2"), compiler_options("H200", "0.11.2")
    assert {*SINCE_0_11} < {*older} and not {*SINCE_0_11} & {*newer}
    assert {name: newer[name] for name in newer if name not in older} == dict(SINCE_0_11.values())
    assert all(newer[name] == value for name, value in older.items() if name not in SINCE_0_11)
    assert compiler_options("H200", "1.0.0") == newer


@pytest.mark.parametrize("chip", [name for name in FLAGS if name not in ("A100-40GB", "A100-80GB", "H100", "H200", "B200")])
def test_other_chips_have_one_set(chip):
    assert compiler_options(chip, "0.10.2") == compiler_options(chip, "0.11.2") == {flag.name: flag.value for flag in FLAGS[chip]}


@pytest.mark.parametrize(
    ("jaxlib", "set_there"),
    [
        ("0.10.2", "xla_gpu_enable_pipelined_all_gather"),
        *(("0.11.2", name) for pair in SINCE_0_11.items() for name in (pair[0], pair[1][0])),
    ],
)
def test_the_environment_wins_by_either_name(jaxlib, set_there, monkeypatch):
    without = compiler_options("H200", jaxlib)
    monkeypatch.setenv("XLA_FLAGS", f"--{set_there}=off")
    now = SINCE_0_11.get(set_there, (set_there, None))[0] if jaxlib == "0.11.2" else set_there
    assert compiler_options("H200", jaxlib) == {name: value for name, value in without.items() if name != now}


@pytest.mark.parametrize("chip", [*FLAGS])
def test_a_profile_names_every_operation_of_a_gpu(chip, monkeypatch):
    plain, traced = compiler_options(chip), compiler_options(chip, traced=True)
    more = TRACED if chip in ("A100-40GB", "A100-80GB", "H100", "H200", "B200") else {}
    assert traced == {**plain, **more}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    assert compiler_options(chip, traced=True) == plain
