"""Slurm and Ray give the bytes that processes of this machine give; what fails there is one line."""

import json
import os
import random
import stat
import sys
import time
from pathlib import Path

import pytest

from maxlm.base.errors import ExitCode, UnavailableError, UserError
from maxlm.corpus import engine
from maxlm.corpus.executors import make_executor, slurm
from maxlm.corpus.settings import CorpusSettings

# sbatch that runs the tasks of an array one after the other, and the commands that a job calls
FAKES = {
    "sbatch": """#!/usr/bin/env bash
script="${@: -1}"
last=$(grep -- --array= "$script" | sed 's/.*--array=0-\\([0-9]*\\).*/\\1/')
out=$(grep -- --output= "$script" | sed 's/.*--output=//')
for number in $(seq 0 "$last"); do
  file=${out/\\%A/7}; file=${file/\\%a/$number}
  SLURM_ARRAY_TASK_ID=$number SLURM_NODELIST=here bash "$script" > "$file" 2>&1
done
echo "Submitted batch job 7"
""",
    "srun": """#!/usr/bin/env bash
while [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done
exec "$@"
""",
    "scontrol": "#!/usr/bin/env bash\necho here\n",
    "squeue": "#!/usr/bin/env bash\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n",
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder of fake commands of Slurm at the front of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in FAKES.items():
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "POLL_S", 0.05)
    monkeypatch.setattr(slurm, "LATE_S", 0.2)
    return folder


def settings(tmp_path, output, **sections):
    raw, rng = tmp_path / "raw.jsonl", random.Random(0)
    texts = [" ".join(rng.choices(["river", "stone", "north", "paper", "green", "seven"], k=40)) for _ in range(8)]
    if not raw.exists():
        raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, texts[0]]))
    source = {"made": {"paths": [str(raw)]}}
    return CorpusSettings.model_validate({"output": str(tmp_path / output), "sources": source, "deduplicate": {}, **sections})


def run(config):
    said = []
    engine.run(engine.make_plan(config), make_executor(config, said.append))
    return said


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file() and "slurm" not in path.parts}


def test_slurm_gives_the_same_bytes(tmp_path, cluster):
    run(settings(tmp_path, "a"))
    said = run(settings(tmp_path, "b", slurm={"partition": "cpu", "options": {"account": "me"}}))
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert said[0].startswith("job 7 (filter): 1 tasks, logs in ") and "1 of 1 tasks" in said[1]
    script = next((tmp_path / "b" / "slurm").glob("filter*/launch_script.slurm")).read_text()
    assert "#SBATCH --partition=cpu\n" in script and "#SBATCH --account=me\n" in script and "--qos" not in script


@pytest.mark.soak
def test_killed_jobs_of_slurm_begin_again(tmp_path, cluster):
    good = (cluster / "srun").read_text()
    (cluster / "srun").write_text(good.replace("exec", 'mkdir "$0.once" 2>/dev/null && kill -9 $$\nexec'))
    said = run(settings(tmp_path, "b", slurm={"partition": "cpu"}))
    assert sum("1 tasks of job 7 ended without a result" in line for line in said) == 1
    (cluster / "srun").write_text("#!/usr/bin/env bash\nexit 1\n")
    with pytest.raises(UserError, match=r"1 tasks ended without a result 3 times; see .*slurm_logs; the same command goes on"):
        run(settings(tmp_path, "c", slurm={"partition": "cpu"}))


def test_what_slurm_or_a_task_refuses_is_one_line(tmp_path, cluster, monkeypatch):
    config = settings(tmp_path, "b", slurm={"partition": "cpu"}, filters={"language": {}})
    plan = engine.make_plan(config)
    (tmp_path / "b" / "removed").mkdir(parents=True)
    (tmp_path / "b" / "removed" / "filter").write_text("a file where a folder should be")
    with pytest.raises(UserError, match=r"removed/filter"):
        engine.run(plan, make_executor(config, print))
    (cluster / "sbatch").write_text("#!/usr/bin/env bash\nexit 1\n")
    with pytest.raises(UserError, match=r"sbatch refused the job"):
        run(settings(tmp_path, "c", slurm={"partition": "cpu"}))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"sbatch is not here"):
        run(settings(tmp_path, "c", slurm={"partition": "cpu"}))


def test_what_may_pass_in_a_task_of_slurm_keeps_its_exit_code(tmp_path, cluster):
    """A supervisor starts the command again after a bucket failed, as it does without Slurm."""
    config = settings(tmp_path, "b", slurm={"partition": "cpu"})
    plan = engine.make_plan(config)
    with (tmp_path / "raw.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(UnavailableError, match=r"raw\.jsonl: it changed since") as caught:
        engine.run(plan, make_executor(config, print))
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


def test_two_clusters_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"ray = .*slurm and ray are both set"):
        settings(tmp_path, "a", slurm={"partition": "cpu"}, ray={})


def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "maxlm.corpus.executors.ray", raising=False)
    with pytest.raises(UserError, match=r"ray: needs the package ray: pip install .*\[corpus-ray\]'"):
        make_executor(settings(tmp_path, "a", ray={}), print)


def test_ray_gives_the_same_bytes(tmp_path):
    ray = pytest.importorskip("ray")
    run(settings(tmp_path, "a"))
    try:
        run(settings(tmp_path, "b", ray={"address": "local", "memory_gb": 0.2, "combine_cpus": 1}, run={"memory_mb": 64}))
    finally:
        ray.shutdown()
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.soak
def test_a_node_of_ray_that_is_killed_changes_no_byte(tmp_path, capsys):
    """Four nodes; one is killed when the first tasks are done, with a task on it. Its tasks begin again on others."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    rng, words = random.Random(1), ["river", "stone", "north", "paper", "green", "seven", "winter", "bridge", "quiet", "mason"]
    (tmp_path / "raw").mkdir()
    for number in range(24):
        texts = [" ".join(rng.choices(words, k=rng.randrange(50, 400))) + f" {rng.random()}" for _ in range(150)]
        lines = [json.dumps({"text": text}) + "\n" for text in [*texts, texts[0]]]
        (tmp_path / "raw" / f"{number:02}.jsonl").write_text("".join(lines))
    sources = {"made": {"paths": [str(tmp_path / "raw")]}}
    stages = {"filters": {"language": {}, "gopher_repetition": {}}, "deduplicate": {"lines": {}}, "format": "parquet"}
    base = {"sources": sources, "run": {"task_bytes": 1, "memory_mb": 64}, **stages}
    run(CorpusSettings.model_validate({"output": str(tmp_path / "a"), **base}))

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1, memory=2**30, resources={f"node{number}": 1}) for number in range(4)]
        cluster.wait_for_nodes()
        address = {"address": cluster.address, "memory_gb": 0.2, "combine_cpus": 1}
        config = CorpusSettings.model_validate({"output": str(tmp_path / "b"), **base, "ray": address})
        plan, said, killed = engine.make_plan(config), [], []

        def say(line):
            said.append(line)
            if not killed and not line.startswith("filter: 24"):
                killed.append(len(list((tmp_path / "b" / "marks").rglob("*.json"))))
                cluster.remove_node(nodes[0], allow_graceful=False)

        began = time.monotonic()
        engine.run(plan, make_executor(config, say))
        alive = [node for node in ray.nodes() if node["Alive"]]
        with capsys.disabled():
            print(
                f"\n{time.monotonic() - began:.0f} s; killed after {killed} of 24 tasks of the first pass; {len(alive)} nodes live",
                *said,
                sep="\n",
            )
        assert killed and 0 < killed[0] < 24 and len(alive) == 4, "the head and three nodes"
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert files(tmp_path / "a") == files(tmp_path / "b")
