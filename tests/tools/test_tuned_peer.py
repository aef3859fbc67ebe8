"""The tuned peer: its arguments say what docs/benchmarks.md says, and a program that is there is priced."""

import json
import shutil
from pathlib import Path

import pytest
import tuned_peer

PROGRAMS = Path(__file__).resolve().parents[1] / "hlo" / "programs"


@pytest.fixture
def run(monkeypatch, capsys):
    def main(*arguments):
        monkeypatch.setattr("sys.argv", ["tuned_peer.py", *arguments])
        tuned_peer.main()
        return capsys.readouterr().out

    return main


def test_arguments_are_those_of_an_expert(run):
    said = dict(line.split("=", 1) for line in run("--arguments", "mixtral-8x7b-v5p-256").splitlines())
    assert (said["compile_topology"], said["sa_block_q_dkv"], said["remat_policy"]) == ("v5p-256", "1024", "custom")
    assert int(said["per_device_batch_size"]) * int(said["gradient_accumulation_steps"]) == 4
    assert said["moe_mlpwi_0"] == "device" and "mlpwi_0" not in said
    assert "--xla_tpu_scoped_vmem_limit_kib=65536" in said["compile_xla_flags"]
    assert "--xla_tpu_enable_sparse_core_collective_offload_all_gather=true" in said["compile_xla_flags"]


def test_a_program_is_priced(run, tmp_path):
    shutil.copy(PROGRAMS / "kernels.hlo", tmp_path / "llama3-8b-v5p-128.hlo")
    found = json.loads(run(str(tmp_path)))
    assert found["row"] == "llama3-8b-v5p-128" and found["ratio"] == pytest.approx(found["maxlm_s"] / found["peer_s"])


@pytest.mark.parametrize(("arguments", "said"), [([], "give a FOLDER"), (["--arguments", "x"], "invalid choice"), (["."], "has none of")])
def test_bad_input_is_an_error(run, capsys, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]
