"""slurm/train.sbatch, run here with stand-ins for srun and scontrol."""

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "slurm/train.sbatch"
JOB = {"SLURM_JOB_ID": "4097"}


@pytest.fixture(autouse=True)
def environment(cloud):
    """The folder that sbatch is called in, with an environment that has maxlm."""
    program = cloud.home / ".venv/bin/maxlm"
    program.parent.mkdir(parents=True)
    program.touch(0o755)


def test_one_task_a_node_runs_maxlm_with_restarts(cloud):
    cloud.execute(["bash", SCRIPT, "mine.yml", "train.seed=1"], **JOB)
    (srun,) = cloud.calls
    assert srun[0] == "srun"
    assert srun[srun.index(".venv/bin/maxlm") :] == [
        ".venv/bin/maxlm",
        "launch",
        "--restarts",
        "10",
        "--",
        "train",
        "mine.yml",
        "train.seed=1",
    ]


def test_all_components_of_a_heterogeneous_job_take_part(cloud):
    cloud.execute(["bash", SCRIPT, "mine.yml"], SLURM_HET_SIZE="3", **JOB)
    (srun,) = cloud.calls
    assert "--het-group=0-2" in srun[: srun.index(".venv/bin/maxlm")]


@pytest.mark.parametrize(("code", "again"), [(0, False), (1, False), (2, False), (3, True), (4, False)])
def test_only_what_was_saved_and_stopped_goes_back_to_the_queue(cloud, code, again):
    cloud.answer("srun", code=code)
    cloud.execute(["bash", SCRIPT, "mine.yml"], code=code, **JOB)
    assert (["scontrol", "requeue", "4097"] in cloud.calls) == again


def terminated(cloud, code, **environment):
    """What the job prints that receives SIGTERM; its tasks end with `code` then."""
    cloud.answer("srun", wait=60, code=code)
    environment = {**cloud.environment, **JOB, **environment}
    process = subprocess.Popen(["bash", SCRIPT, "mine.yml"], env=environment, cwd=cloud.home, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (cloud.home / "waiting").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    return out


@pytest.mark.parametrize(("elastic", "code", "again"), [("1", 6, True), ("1", 137, True), ("1", 4, False), ("", 6, False)])
def test_a_run_that_was_saved_goes_back_to_the_queue_whatever_became_of_a_host_that_it_lost(cloud, elastic, code, again):
    """srun returns the highest code: that of the lost host hides the 3 of the others."""
    terminated(cloud, code, ELASTIC=elastic)
    assert (["scontrol", "requeue", "4097"] in cloud.calls) == again


def test_an_elastic_run_that_failed_by_itself_stays_out_of_the_queue(cloud):
    cloud.answer("srun", code=6)
    cloud.execute(["bash", SCRIPT, "mine.yml"], code=6, ELASTIC="1", **JOB)
    assert ["scontrol", "requeue", "4097"] not in cloud.calls


def test_sigterm_reaches_the_tasks_and_the_job_waits_for_their_save(cloud):
    out = terminated(cloud, 3)
    assert (cloud.home / "terminated").exists()
    assert cloud.calls[-1] == ["scontrol", "requeue", "4097"]
    assert "job 4097 goes back to the queue" in out


@pytest.mark.parametrize(
    ("state", "again"),
    [
        ("CANCELLED", False),
        ("COMPLETING Reason=None", False),  # of scancel, while the processes end
        ("PENDING", False),
        ("RUNNING", True),
        ("COMPLETING Reason=TimeLimit", True),
    ],
)
def test_a_job_that_was_cancelled_or_requeued_is_not_requeued(cloud, state, again):
    """`scancel` sends the same SIGTERM as the time limit."""
    cloud.answer("scontrol show job 4097", out=f"JobId=4097 JobName=maxlm\n   JobState={state} Dependency=(null)\n")
    out = terminated(cloud, 3)
    assert (["scontrol", "requeue", "4097"] in cloud.calls) == again
    assert ("job 4097 goes back to the queue" in out) == again
    assert ("job 4097 is not requeued from here" in out) != again


@pytest.mark.parametrize(("elastic", "kept"), [("", False), ("1", True)])
def test_a_step_outlives_a_node_only_if_the_run_does(cloud, elastic, kept):
    cloud.execute(["bash", SCRIPT, "mine.yml"], ELASTIC=elastic, **JOB)
    (srun,) = cloud.calls
    assert ("--no-kill" in srun) == kept


def test_without_a_config_it_says_so(cloud):
    done = cloud.execute(["bash", SCRIPT], code=2, **JOB)
    assert done.stderr == "train.sbatch: which config? sbatch slurm/train.sbatch CONFIG [key=value ...]\n"
    assert cloud.calls == []


def test_what_it_asks_of_slurm():
    """Requeue and an appended log belong together, as do the signal and the script that passes it on."""
    asked = set(re.findall(r"^#SBATCH (\S+)$", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE))
    assert {"--requeue", "--open-mode=append", "--signal=B:TERM@300", "--ntasks-per-node=1", "--exclusive"} < asked


def test_each_job_has_a_secret_that_its_tasks_share(cloud):
    script = SCRIPT.read_text(encoding="utf-8")
    (cloud.home / "probe").write_text(re.sub(r"^srun .*$", "printenv MAXLM_CLUSTER_SECRET &", script, flags=re.MULTILINE))
    made = [cloud.execute(["bash", cloud.home / "probe", "c"], **JOB).stdout for _ in range(2)]
    assert made[0] != made[1] and all(re.fullmatch("[0-9a-f]{64}\n", one) for one in made)
    assert cloud.execute(["bash", cloud.home / "probe", "c"], MAXLM_CLUSTER_SECRET="mine", **JOB).stdout == "mine\n"


def test_what_is_set_before_sbatch_wins(cloud):
    script = SCRIPT.read_text(encoding="utf-8")
    (cloud.home / "probe").write_text(re.sub(r"^srun .*$", "echo $NCCL_DEBUG &", script, flags=re.MULTILINE))
    assert cloud.execute(["bash", cloud.home / "probe", "c"], **JOB).stdout == "WARN\n"
    assert cloud.execute(["bash", cloud.home / "probe", "c"], NCCL_DEBUG="INFO", **JOB).stdout == "INFO\n"


def test_the_maxlm_of_path_is_used_where_the_folder_has_no_environment(cloud):
    """As after `pip install maxlm`."""
    (cloud.home / ".venv/bin/maxlm").rename(cloud.home / "bin/maxlm")
    cloud.execute(["bash", SCRIPT, "mine.yml"], **JOB)
    (srun,) = cloud.calls
    assert str(cloud.home / "bin/maxlm") in srun


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (".venv/bin/maxlm", "no maxlm in .venv/bin of "),
        ("bin/srun", "srun is not on PATH: give this script to sbatch"),
        ("bin/scontrol", "scontrol is not on PATH"),
    ],
)
def test_a_program_that_is_missing_is_one_line(cloud, only_programs, missing, said):
    (cloud.home / missing).unlink()
    done = cloud.execute(["bash", SCRIPT, "mine.yml"], 2, PATH=only_programs, **JOB)
    assert done.stderr.startswith("train.sbatch: ") and done.stderr.count("\n") == 1 and said in done.stderr
    assert cloud.calls == []
