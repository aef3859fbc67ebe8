"""Errors of the cloud are explained in a line with a fix, above the original message, and stop the command."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RUN = "runs/llama3-8b-v5p-128"
NAME = "maxlm-llama3-8b-v5p-128"
V5P_QUOTA = """\
ERROR: (gcloud.compute.tpus.tpu-vm.create) RESOURCE_EXHAUSTED: Quota limit 'TPUV5PPerProjectPerZoneForTPUAPI' has been exceeded. \
Limit: 8 in zone us-east5-a.
"""
OLD_QUOTA = "ERROR: Quota 'TPUV5sLitepodServingPerProjectPerZoneForTPUAPI' exhausted. Limit 4 in zone us-east5-a\n"
GPU_QUOTA = """\
ERROR: (gcloud.compute.instances.create) Could not fetch resource:
 - Quota 'NVIDIA_H100_GPUS' exceeded.  Limit: 0.0 in region us-central1.
"""
STOCK = """\
ERROR: (gcloud.compute.tpus.tpu-vm.create) {
  "code": 8,
  "message": "There is no more capacity in the zone \\"us-east5-a\\"; you can try in another zone where Cloud TPU Nodes are offered"
}
"""
GPU_STOCK = "ERROR: - The zone 'projects/p/zones/us-east5-a' does not have enough resources available to fulfill the request.\n"
PERMISSION = """\
ERROR: (gcloud.compute.instances.create) Could not fetch resource:
 - Required 'compute.instances.create' permission for 'projects/p/zones/us-east5-a/instances/x'
"""
TPU_PERMISSION = """\
ERROR: (gcloud.compute.tpus.tpu-vm.create) PERMISSION_DENIED: Permission 'tpu.nodes.create' denied on 'projects/p/locations/us-east5-a' \
(or it may not exist).
"""
BUCKET_PERMISSION = "ERROR: (gcloud.storage.cp) [ada@p] does not have permission to access b instance [mine] (or it may not exist): \
ada@p does not have storage.objects.create access to the Google Cloud Storage object.\n"
DISABLED = "ERROR: (gcloud.x) PERMISSION_DENIED: Cloud TPU API has not been used in project 1 before or it is disabled. \
service: tpu.googleapis.com reason: SERVICE_DISABLED\n"
NOBODY = "ERROR: (gcloud.compute.tpus.tpu-vm.describe) You do not currently have an active account selected.\n"
EXISTS = "ERROR: (gcloud.x.create) ALREADY_EXISTS: Resource already exists.\n"
NO_JOBSET = 'error: resource mapping not found: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"\n'

PERMISSION_OF = "you lack the permission {}: gcp/iam lists what is needed, and which command needs it"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (V5P_QUOTA, "your quota TPUV5PPerProjectPerZoneForTPUAPI (limit 8 in us-east5-a) does not allow it: ask for more"),
        (OLD_QUOTA, "your quota TPUV5sLitepodServingPerProjectPerZoneForTPUAPI (limit 4 in us-east5-a) does not allow it: ask for more"),
        (GPU_QUOTA, "your quota NVIDIA_H100_GPUS (limit 0.0 in us-central1) does not allow it: ask for more"),
        (STOCK, "the zone us-east5-a has none left: try another --zone, or wait in line with --queued"),
        (GPU_STOCK, "the zone us-east5-a has none left"),
        (PERMISSION, PERMISSION_OF.format("compute.instances.create")),
        (TPU_PERMISSION, PERMISSION_OF.format("tpu.nodes.create")),
        (BUCKET_PERMISSION, PERMISSION_OF.format("storage.objects.create")),
        ('Error from server (Forbidden): jobsets "x" is forbidden', "you lack a permission: gcp/iam"),
        (DISABLED, "the API is switched off: gcloud services enable tpu.googleapis.com"),
        (NOBODY, "nobody is logged in: gcloud auth login"),
        (EXISTS, "it exists already: watch it, resume it or delete it"),
        (NO_JOBSET, "the cluster does not know JobSets: install the JobSet controller"),
        ("ERROR: something new", "it was refused"),
    ],
)
def test_what_a_refusal_means(text, said):
    script = f"source {ROOT}/gcp/lib.sh; ZONE=us-east5-a; explain {shlex.quote(text)}"
    answer = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, check=True).stdout
    assert answer.startswith(said)
    assert len(answer.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "text", "said"),
    [
        ("tpu-vm create", V5P_QUOTA, "your quota TPUV5PPerProjectPerZoneForTPUAPI (limit 8 in us-east5-a)"),
        ("storage cp", BUCKET_PERMISSION, "you lack the permission storage.objects.create"),
        ("tpu-vm describe", NOBODY, "nobody is logged in"),
    ],
)
def test_a_refusal_ends_all_and_keeps_its_words(cloud, command, text, said):
    cloud.answer(command, err=text, code=1)
    done = cloud.run("up", RUN, code=1)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("maxlm-gcp: ") and "it was: " in line]
    assert line.startswith(f"maxlm-gcp: {said}")
    below = done.stderr[done.stderr.index(line) + len(line) + 1 :]
    assert "".join(part.removeprefix("  | ") for part in below.splitlines(keepends=True)) == text
    assert command in " ".join(cloud.calls[-1]), "nothing is done after it"


@pytest.mark.parametrize("made", [(), (0,), (0, 1)])
def test_the_vms_that_a_failed_create_has_made_are_named(cloud, made):
    """They cost, and who goes to another zone does not see them."""
    units = [f"maxlm-quickstart-{unit}" for unit in (0, 1)]
    for unit in units:
        cloud.answer(f"describe {unit} ", err="NOT_FOUND", code=1, times=1)
    for unit in made:
        cloud.state(units[unit], "RUNNING", run="maxlm-quickstart")
    cloud.answer("instances create", err=GPU_STOCK, code=1)
    gpus = ("cluster.topology=h100:2x8", "data.store=gs://corpus/s", "train.global_batch=16")
    done = cloud.run("create", "runs/quickstart", *gpus, code=1)
    assert "the zone us-east5-a has none left" in done.stderr
    named = " ".join(units[unit] for unit in made)
    assert (f"{named} exist and cost: maxlm-gcp resume creates the others, maxlm-gcp delete" in done.stderr) == bool(made)
    assert ("exist and cost" in done.stderr) == bool(made)


@pytest.mark.parametrize("verb", ["resume", "delete", "watch"])
def test_who_may_not_look_is_not_told_that_nothing_is_there(cloud, verb):
    """An error of a look must not pass for a machine that does not exist."""
    cloud.answer("tpu-vm describe", err=TPU_PERMISSION, code=1)
    done = cloud.run(verb, RUN, code=1)
    assert "you lack the permission" in done.stderr
    assert cloud.changes == []


@pytest.mark.parametrize("verb", ["create", "resume", "delete", "watch"])
def test_a_cluster_that_does_not_answer_is_not_one_without_the_jobset(cloud, verb):
    """`delete` would end well while the pods cost on."""
    cloud.answer("get jobset", err="error: You must be logged in to the server (Unauthorized)\n", code=1)
    done = cloud.run(verb, "runs/llama3-8b-tpu7x-128", "--gke", "--image", "i", code=1)
    assert "nobody is logged in" in done.stderr
    assert "no machine" not in done.stderr
    assert cloud.changes == []


def test_a_bucket_that_cannot_be_read_is_not_an_empty_one(cloud):
    cloud.state(NAME, "READY")
    cloud.answer("storage cat", err=BUCKET_PERMISSION, code=1)
    assert "you lack the permission storage.objects.create" in cloud.run("watch", RUN, "--once", code=1).stderr


@pytest.mark.parametrize(
    ("missing", "options", "said"),
    [
        ("bin/gcloud", (), "gcloud is not installed, or not on PATH: see docs.cloud.google.com/sdk/docs/install"),
        ("bin/kubectl", ("--gke", "--image", "i"), "kubectl is not installed, or not on PATH: gcloud components install kubectl"),
        ("../programs/git", (), "git is not installed, or not on PATH"),
    ],
)
@pytest.mark.parametrize("verb", ["up", "create"])
def test_a_program_that_is_missing_is_one_line_before_anything_is_made(cloud, only_programs, missing, options, said, verb):
    (cloud.home / missing).unlink()
    cloud.environment["PATH"] = only_programs
    done = cloud.run(verb, RUN, *options, code=2)
    assert done.stderr.startswith(f"maxlm-gcp: {said}") and done.stderr.count("\n") == 1
    assert cloud.calls == []


def test_a_python_without_maxlm_is_one_line(cloud, only_programs, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    for program, said in ((python, "cannot import maxlm (No module named "), (tmp_path / "none", "does not exist: install Python 3.11")):
        cloud.environment["MAXLM_PYTHON"] = str(program)
        done = cloud.run("create", RUN, code=2)
        assert said in done.stderr and done.stderr.count("\n") == 1
    assert cloud.calls == []
