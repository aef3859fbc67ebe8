"""The tuned peer: its arguments say what docs/benchmarks.md says, and a program that is there is priced."""

import json
import shutil
from pathlib import Path

import maxtext_schedule
import pytest
import tuned_peer

STAND_IN = """#!/bin/sh
case "$*" in
*find_spec*) echo /nowhere; exit;;
*fails*) echo no such model; exit 1;;
esac
for word in $(echo "$*"); do case "$word" in *--xla_dump_to=*) folder=${word##*--xla_dump_to=};; esac; done
mkdir -p "$folder"
for name in memory-usage-report buffer-assignment; do echo > "$folder/m.jit_train_step.after_optimizations-$name.txt"; done
sleep 0.4; echo HloModule > "$folder/m.jit_train_step.after_optimizations.txt"
sleep 0.4; echo } >> "$folder/m.jit_train_step.after_optimizations.txt"
exec sleep 60
"""
PROGRAMS = Path(__file__).resolve().parents[1] / "hlo" / "programs"


@pytest.fixture
def run(monkeypatch, capsys):
    def main(*arguments):
        monkeypatch.setattr("sys.argv", ["tuned_peer.py", *arguments])
        tuned_peer.main()
        return capsys.readouterr().out

    return main


def test_settings_are_those_of_an_expert(run):
    row, recipe = tuned_peer.ROWS["8x7b-v5p"]
    settings, flags = row.to_compile
    said = dict(setting.split("=", 1) for setting in settings)
    assert (recipe, said["compile_topology"], said["sa_block_q_dkv"], said["remat_policy"]) == (
        "mixtral-8x7b-v5p-256",
        "v5p-256",
        "1024",
        "custom",
    )
    assert int(said["per_device_batch_size"]) * int(said["gradient_accumulation_steps"]) == 4
    assert said["moe_mlpwi_0"] == "device" and "mlpwi_0" not in said
    assert "--xla_tpu_scoped_vmem_limit_kib=65536" in flags
    assert "--xla_tpu_enable_sparse_core_collective_offload_all_gather=true" in flags


def test_a_program_is_priced(run, tmp_path):
    shutil.copy(PROGRAMS / "kernels.hlo", tmp_path / "8b-v5p.hlo")
    found = json.loads(run(str(tmp_path)))
    assert found["row"] == "8b-v5p" and found["ratio"] == pytest.approx(found["maxlm_s"] / found["total_s"])


def test_a_program_is_scheduled_once(tmp_path):
    """By a stand-in for MaxText, which has to be ended: it writes the program piece by piece, and goes on."""
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    wanted = {"a": (("compile_topology=v5e-8",), ("--x=1",)), "b": (("fails",), ())}
    maxtext_schedule.schedule_missing(python, wanted, tmp_path / "out")
    assert (tmp_path / "out" / "a.hlo").read_text() == "HloModule\n}\n"
    assert not (tmp_path / "out" / "b.hlo").exists()
    python.unlink()
    maxtext_schedule.schedule_missing(python, {"a": wanted["a"]}, tmp_path / "out")


@pytest.mark.parametrize(("arguments", "said"), [([], "required: folder"), (["."], "has none of")])
def test_bad_input_is_an_error(run, capsys, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]
