"""`maxlm-gcp up` and `create`: what is asked of the cloud, word by word, for every kind of machine; and what is refused before."""

import re
import shlex
import subprocess
import tempfile

import pytest

SCRATCH = re.escape(tempfile.gettempdir())
RUN = "runs/llama3-8b-v5p-128"
NAME = "maxlm-llama3-8b-v5p-128"
LABELS = "--labels=maxlm-run={name},maxlm-owner=ada"
STARTUP = "--metadata-from-file=startup-script=SCRATCH/startup.sh"
GPU = ("--image-family=ubuntu-accelerator-2404-amd64-with-nvidia-580", "--image-project=ubuntu-os-accelerator-images",
       "--boot-disk-size=200GB", "--boot-disk-type=hyperdisk-balanced", "--maintenance-policy=TERMINATE")  # fmt: skip


def plain(words):
    """Words without the scratch folder's name."""
    return [re.sub(SCRATCH + r"/[^/]+/(?=startup|code|config|cluster-secret|outcome|jobset)", "SCRATCH/", word) for word in words]


def created(cloud):
    """The one command that made machines, without what comes after `create`'s verb in all of them."""
    (words,) = [plain(words) for words in cloud.changes if "create" in words[:6]]
    return words


def common(name):
    return ["--zone=us-east5-a", LABELS.format(name=name), STARTUP, "--scopes=cloud-platform"]


@pytest.mark.parametrize(
    ("run", "accelerator", "version"),
    [
        ("runs/llama3-8b-v5p-128", "v5p-128", "v2-alpha-tpuv5"),
        ("runs/llama3-8b-v5e-256", "v5litepod-256", "v2-alpha-tpuv5-lite"),
        ("runs/llama3-8b-v6e-256", "v6e-256", "v2-alpha-tpuv6e"),
    ],
)
def test_a_slice_of_tpus(cloud, run, accelerator, version):
    cloud.run("create", run)
    name = f"maxlm-{run.removeprefix('runs/')}"
    expected = ["gcloud", "compute", "tpus", "tpu-vm", "create", name, *common(name)]
    assert created(cloud) == [*expected, f"--accelerator-type={accelerator}", f"--version={version}"]


def test_another_accelerator_than_the_configs(cloud):
    cloud.run("create", RUN, "--accelerator", "v4-128", "--spot")
    assert created(cloud)[-3:] == ["--accelerator-type=v4-128", "--version=tpu-ubuntu2204-base", "--spot"]
    assert "topology: v4:4x4x4" in (cloud.bucket / "llama3-8b-v5p-128/config.yml").read_text()


def test_a_queue_and_what_it_may_wait_for(cloud):
    cloud.run("create", RUN, "--queued", "--spot", "--network", "n", "--subnetwork", "s", "--service-account", "a@p")
    expected = ["gcloud", "compute", "tpus", "queued-resources", "create", NAME, *common(NAME), "--service-account=a@p"]
    expected += ["--network=n", "--subnetwork=s", f"--node-id={NAME}", "--accelerator-type=v5p-128", "--runtime-version=v2-alpha-tpuv5"]
    assert created(cloud) == [*expected, "--async", "--spot"]


def test_several_slices_are_one_request(cloud):
    cloud.run("create", "runs/llama3-405b-2x-v6e-256", "--reserved")
    name = "maxlm-llama3-405b-2x-v6e-256"
    words = created(cloud)
    assert words[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", name]
    assert words[-6:] == ["--node-count=2", f"--node-prefix={name}", "--accelerator-type=v6e-256", "--runtime-version=v2-alpha-tpuv6e",
                          "--async", "--reserved"]  # fmt: skip


@pytest.mark.parametrize(
    ("topology", "machine"),
    [("h100:2x8", "a3-megagpu-8g"), ("h100:2x8", "a3-highgpu-8g"), ("h200:2x8", "a3-ultragpu-8g"), ("b200:2x8", "a4-highgpu-8g")],
)
def test_gpu_machines(cloud, topology, machine):
    chosen = ["--accelerator", machine] if machine == "a3-highgpu-8g" else []
    cloud.run(
        "create", "runs/quickstart", *chosen, f"cluster.topology={topology}", "data.store=gs://corpus/s", "train.global_batch=16", "--spot"
    )
    assert created(cloud) == [
        *["gcloud", "compute", "instances", "create", "maxlm-quickstart-0", "maxlm-quickstart-1"], *common("maxlm-quickstart"),
        f"--machine-type={machine}", *GPU, "--provisioning-model=SPOT", "--instance-termination-action=STOP",
    ]  # fmt: skip
    assert "export CLUSTER=coordinator=maxlm-quickstart-0:8476\\ process_count=2\\ process_id=HOST_NUMBER" in cloud.sent()
    assert "export EXTRA=cuda\n" in cloud.sent()


def test_gpu_machines_with_their_networks_and_a_reservation(cloud):
    nics = ["--nic", "nic-type=GVNIC,network=a", "--nic", "nic-type=MRDMA,network=b"]
    cloud.run("create", "runs/quickstart", "--accelerator", "a4-highgpu-8g", "--reservation", "mine", *nics)
    words = created(cloud)
    assert words[-4:] == ["--reservation-affinity=specific", "--reservation=mine", "--network-interface=nic-type=GVNIC,network=a",
                          "--network-interface=nic-type=MRDMA,network=b"]  # fmt: skip
    assert "export CLUSTER=''\n" in cloud.sent(), "one machine is alone"


def test_code_and_config_are_there_before_the_machines(cloud):
    """The hosts fetch both as soon as they are up: git's HEAD, and the resolved config, whose checkpoints go to the bucket."""
    cloud.run("create", RUN, "train.tokens=20000000000")
    *sent, last = cloud.changes
    assert [words[-1] for words in sent] == [
        f"gs://mine/llama3-8b-v5p-128/{name}" for name in ("code.tar.gz", "config.yml", "cluster-secret", "outcome")
    ]
    assert last[1:5] == ["compute", "tpus", "tpu-vm", "create"]
    config = (cloud.bucket / "llama3-8b-v5p-128/config.yml").read_text()
    assert "dir: gs://mine/llama3-8b-v5p-128/checkpoints" in config
    assert "tokens: 20000000000" in config
    listed = subprocess.run(["tar", "-tzf", cloud.bucket / "llama3-8b-v5p-128/code.tar.gz"], capture_output=True, text=True, check=True)
    assert "gcp/host.sh" in listed.stdout.splitlines()


def test_up_waits_for_the_machines_and_follows_the_log_of_the_first_host(cloud):
    cloud.answer(f"describe {NAME} ", err="NOT_FOUND", code=1, times=2)
    cloud.state(NAME, "CREATING", times=1)
    cloud.state(NAME, "READY")
    cloud.run("up", RUN)
    assert [words[0] for words in cloud.calls].count("sleep") == 1
    command = "--command=tail -n 1000 -F /var/log/maxlm.log"
    assert cloud.calls[-1] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", NAME, "--zone=us-east5-a", "--worker=0", command]


def test_a_container_needs_no_code_and_no_commit(cloud):
    cloud.run("create", RUN, "--image", "us-docker.pkg.dev/p/r/maxlm:1")
    assert not (cloud.bucket / "llama3-8b-v5p-128/code.tar.gz").exists()
    assert "export IMAGE=us-docker.pkg.dev/p/r/maxlm:1\n" in cloud.sent()


@pytest.mark.parametrize("verb", ["up", "create", "restart", "stop", "log", "watch", "resume", "fetch", "delete"])
def test_a_dry_run_prints_and_calls_nothing(cloud, verb):
    done = cloud.run(verb, "runs/llama3-405b-2x-v6e-256", "--dry-run")
    assert cloud.calls == []
    assert not (cloud.home / "runs").exists()
    assert "+ gcloud" in done.stdout


def test_a_dry_run_prints_every_command_of_the_real_one(cloud):
    cloud.answer(f"describe {NAME} ", err="NOT_FOUND", code=1, times=2)
    cloud.state(NAME, "READY")
    words = ["up", RUN, "--spot", "--secret", "HF_TOKEN=mine"]
    printed = cloud.run(*words, "--dry-run").stdout.splitlines()
    cloud.run(*words)
    shown = [plain(shlex.split(line.removeprefix("+ "))) for line in printed]
    assert shown == [plain(call) for call in cloud.calls if call[0] != "sleep"]


def test_a_machine_that_exists_is_left_alone(cloud):
    cloud.state(NAME, "READY")
    done = cloud.run("up", RUN, code=2)
    assert cloud.changes == []
    assert f"{NAME} exists already (READY): watch it, resume it or delete it" in done.stderr


@pytest.mark.parametrize(("asked", "kind"), [((), "queued-resources"), (("--queued",), "tpu-vm")])
def test_a_machine_of_the_other_kind_is_one_that_exists(cloud, asked, kind):
    cloud.answer(f"{kind} describe {NAME} ", f"ACTIVE,{NAME},ada\n")
    assert f"{NAME} exists already (ACTIVE)" in cloud.run("create", RUN, *asked, code=2).stderr
    assert cloud.changes == []


def test_changes_that_are_not_committed_are_not_left_behind(cloud):
    host = cloud.repository / "gcp/host.sh"
    before = host.read_text()
    try:
        host.write_text(before + "# new\n")
        done = cloud.run("create", RUN, code=2)
    finally:
        host.write_text(before)
    assert "uncommitted changes would stay here" in done.stderr
    assert cloud.changes == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([RUN, "--accelerator", "v5p-130"], "accelerator = v5p-130: no v5p-130 is rented; near it there are v5p-64"),
        (["runs/nothing"], "runs/nothing"),
        ([RUN, "--bucket", "mine"], "--bucket mine: must be gs://NAME"),
        (["runs/llama3-8b-tpu7x-128", "--gke"], "--gke needs --image"),
        ([RUN, "--spot", "--reserved"], "exclude each other"),
        (["runs/quickstart", "--accelerator", "a3-megagpu-8g", "--reserved"], "--reserved is for Cloud TPU VMs"),
        ([RUN, "--gke", "--image", "i", "--reserved"], "--reserved is for Cloud TPU VMs"),
        ([RUN, "--nic", "x"], "--nic is for GPU VMs"),
        ([RUN, "--reservation", "x"], "--reservation NAME is for GPU VMs"),
        ([RUN, "--secret", "HF_TOKEN=hf_abc/123+"], "never its value"),
        ([RUN, "--restarts", "many"], "--restarts many: must be a whole number"),
        ([RUN, "--every", "1h"], "--every 1h: must be a whole number"),
        ([RUN, "--owner", "A B"], "--owner A B"),
        ([RUN, "--sport"], "no option --sport"),
        ([RUN, "runs/other"], "a config was given already"),
        ([RUN, "--image"], "--image needs a value"),
        (["--spot"], "create what?"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_made(cloud, words, said):
    done = cloud.run("create", *words, code=2)
    assert said in done.stderr
    assert done.stderr.startswith("maxlm-gcp: ")
    assert len(done.stderr.splitlines()) == 1
    assert cloud.calls == []


def test_a_watch_that_resumes_a_jobset_needs_its_image(cloud):
    """Or it would delete the dead JobSet, and apply one that names no image."""
    jobset = "maxlm-llama3-8b-tpu7x-128"
    cloud.state(jobset, "Failed")
    assert "--gke needs --image" in cloud.run("watch", "runs/llama3-8b-tpu7x-128", "--gke", "--resume", "--once", code=2).stderr
    assert cloud.calls == []
    assert "Failed (dead)" in cloud.run("watch", "runs/llama3-8b-tpu7x-128", "--gke", "--once").stdout


def test_a_zone_is_needed_and_a_verb(cloud):
    assert "--zone is needed" in cloud.run("create", RUN, code=2, place=()).stderr
    assert "no verb destroy: use one of up create" in cloud.run("destroy", RUN, code=2).stderr
    assert "create   the machines" in cloud.execute([cloud.repository / "gcp/maxlm-gcp", "--help"]).stdout
