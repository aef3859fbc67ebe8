"""From `maxlm plan` to a machine: the file that it writes is read by `maxlm-gcp` and by the Slurm script, for every kind of machine."""

import importlib.util
import json
import sys

import pytest

from maxlm import cli
from maxlm.config.loader import load
from maxlm.planning import explore, plan as planning

TINY = """
model: {vocab_size: 256, d_model: 256, n_layers: 2, n_heads: 2, d_ff: 256}
data: {store: "gs://mine/store", seq_len: 256}
train: {steps: 10, global_batch: 64}
"""
IMAGE = ("--gke", "--image", "i")

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which holds the TPU compiler")


@pytest.fixture
def plan(cloud, monkeypatch, capfd):
    """`maxlm plan` in the user's folder: name of the config that it wrote. `compiled`: with the real compiler, one layout."""

    def run(name: str, *words: str, compiled: bool = False) -> str:
        monkeypatch.chdir(cloud.home)
        monkeypatch.setenv("MAXLM_CACHE_DIR", str(cloud.home / "cache"))
        monkeypatch.setattr(explore, "MOST_COMPILES", 1)
        monkeypatch.setattr(explore, "MOST_UNROLLED", 0)
        if not compiled:
            monkeypatch.setattr(planning, "why_not", lambda topology: "not in this test")
        (cloud.home / f"{name}.yml").write_text(TINY, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["maxlm", "plan", name, *words, "--json"])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capfd.readouterr()
        assert not end.value.code, err
        return json.loads(out)["config"]

    return run


def created(cloud) -> str:
    """The command that made the machine."""
    return " ".join(next(words for words in cloud.changes if "create" in words[:6] or words[:2] == ["kubectl", "apply"]))


@pytest.mark.soak
@needs_libtpu
def test_a_plan_by_the_compiler_starts_the_machine_that_it_was_made_for(cloud, plan):
    file = plan("compiled", "--topology", "v5e:2x2", compiled=True)
    text = (cloud.home / file).read_text(encoding="utf-8")
    assert "as compiled" in text and "accelerator: v5litepod-4" in text
    cloud.run("create", file)
    assert "tpu-vm create maxlm-compiled-planned" in created(cloud) and "--accelerator-type=v5litepod-4" in created(cloud)


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "options", "machine", "more"),
    [
        ("v5p:2x2x2", (), "--accelerator-type=v5p-16", ()),
        pytest.param("v5p-16", (), "--accelerator-type=v5p-16", (), marks=pytest.mark.soak),
        pytest.param("v5e-4", (), "--accelerator-type=v5litepod-4", (), marks=pytest.mark.soak),
        pytest.param("v6e-8", ("--slices", "2"), "--accelerator-type=v6e-8", ("--queued",), marks=pytest.mark.soak),
        pytest.param("tpu7x-8", (), "kubectl apply", IMAGE, marks=pytest.mark.soak),
    ],
)
def test_the_plan_for_a_tpu_names_its_machine(cloud, plan, topology, options, machine, more):
    file = plan(f"tpu-{topology.replace(':', '-')}", "--topology", topology, *options)
    cloud.run("create", file, *more)
    assert machine in created(cloud)


@pytest.mark.parametrize(
    ("topology", "machine"),
    [
        ("a3-highgpu-8g", "--machine-type=a3-highgpu-8g"),
        pytest.param("h100:2x8", "--machine-type=a3-megagpu-8g", marks=pytest.mark.soak),
        pytest.param("a4-highgpu-8g", "--machine-type=a4-highgpu-8g", marks=pytest.mark.soak),
    ],
)
def test_the_plan_for_gpus_names_its_machine(cloud, plan, topology, machine):
    file = plan(f"gpu-{topology.replace(':', '-')}", "--topology", topology)
    cloud.run("create", file)
    assert machine in created(cloud)


def test_the_plan_for_gpus_starts_under_slurm(cloud, plan):
    """What srun is given is a command of maxlm, with a config that its nodes can read."""
    file = plan("slurm", "--topology", "h100x16")
    assert load(str(cloud.home / file)).config.cluster.topology == "h100:2x8"
    script = cloud.repository / "slurm/train.sbatch"
    cloud.execute(["bash", script, file, "train.seed=1"], SLURM_JOB_ID="1", MAXLM=sys.executable)
    (srun,) = cloud.calls
    command = srun[srun.index("--") + 1 :]
    assert command == ["train", file, "train.seed=1"]
    assert load(command[1], command[2:]).config.train.seed == 1
