"""The host's startup script, run here with folders for buckets and a stand-in for maxlm itself."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = "runs/llama3-8b-v5p-128"
SECRET = "hf_never_to_be_seen"
CLUSTER_SECRET = "0123456789abcdef" * 4
# Stands in for the Python that has maxlm: `-m maxlm launch ...` writes a run directory and does as BEHAVE says; all else is Python.
MAXLM = """#!/usr/bin/env bash
if [[ $1 != -m ]]; then exec "$PYTHON_OF_TESTS" "$@"; fi
printf '%s\\n' "$@" > launched
printf '%s' "${HF_TOKEN:-none}" > seen-secret
printf '%s' "$MAXLM_CLUSTER_SECRET" > seen-cluster-secret
mkdir -p runs/llama3-8b-v5p-128
echo '{"step":1}' >> runs/llama3-8b-v5p-128/metrics.jsonl
case $BEHAVE in
  wait) trap 'echo saved >> runs/llama3-8b-v5p-128/metrics.jsonl; exit 3' TERM; touch ready; while true; do /bin/sleep 0.05; done ;;
  until*) while [[ ! -e go ]]; do /bin/sleep 0.05; done; exit "${BEHAVE#until }" ;;
  *) exit "$BEHAVE" ;;
esac
"""


@pytest.fixture
def host(cloud):
    """The home of a host, with a config in the bucket."""
    home = cloud.home / "host"
    home.mkdir()
    python = home / "python"
    python.write_text(MAXLM)
    python.chmod(0o755)
    bucket = cloud.bucket / "llama3-8b-v5p-128"
    bucket.mkdir(parents=True)
    (bucket / "config.yml").write_text("model: {}\n")
    (bucket / "cluster-secret").write_text(CLUSTER_SECRET)
    (cloud.home / "bin/sleep").unlink()  # real time passes on a host
    return home


def settings(host, **more):
    return {
        "MAXLM_HOME": str(host), "MAXLM_LOG": str(host / "maxlm.log"), "MAXLM_PYTHON": str(host / "python"), "SYNC_SECONDS": "0.2",
        "BUCKET": "gs://mine", "RUN": "llama3-8b-v5p-128", "EXTRA": "cuda", "RESTARTS": "7", "BEHAVE": "0", **more,
    }  # fmt: skip


def start(cloud, host, **more):
    return subprocess.Popen(
        ["bash", ROOT / "gcp/host.sh", "train"], env={**cloud.environment, **settings(host, **more)}, cwd=host,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for(there, seconds=60):
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_extensions_of_the_command_line_reach_the_run(cloud, host):
    cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], **settings(host, EXTENSIONS="my_package.a b"))
    assert (host / "launched").read_text().split()[-3:] == ["config.yml", "--extension=my_package.a", "--extension=b"]


@pytest.mark.parametrize("code", [0, 2, 4, 1])
def test_the_run_is_started_with_restarts_and_its_end_is_told(cloud, host, code):
    done = cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], code=code, **settings(host, BEHAVE=str(code)))
    assert (host / "launched").read_text().split() == ["-m", "maxlm", "launch", "--restarts", "7", "--", "train", "config.yml"]
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").read_text() == f"{code}\n"
    assert (cloud.bucket / "llama3-8b-v5p-128/run/metrics.jsonl").read_text() == '{"step":1}\n'
    assert (cloud.bucket / "llama3-8b-v5p-128/latest.jsonl").read_text() == '{"step":1}\n'
    assert f"ended with {code}" in done.stdout


@pytest.fixture
def earlier(cloud):
    """Files of an earlier machine of the run in the bucket."""
    folder = cloud.bucket / "llama3-8b-v5p-128/run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step":0}\n')
    (folder / "events.jsonl").write_text("{}\n")
    return folder


def test_a_recreated_machine_goes_on_where_the_metrics_ended(cloud, host, earlier):
    cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], **settings(host))
    assert (earlier / "metrics.jsonl").read_text() == '{"step":0}\n{"step":1}\n'


def test_a_machine_that_was_only_restarted_keeps_its_own_newer_files(cloud, host, earlier):
    own = host / "runs/llama3-8b-v5p-128"
    own.mkdir(parents=True)
    (own / "metrics.jsonl").write_text('{"step":0}\n{"step":0.5}\n')
    cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], **settings(host))
    assert (earlier / "metrics.jsonl").read_text() == '{"step":0}\n{"step":0.5}\n{"step":1}\n'


def test_what_was_written_before_is_not_lost_where_it_cannot_be_read(cloud, host, earlier):
    """A passing fault of the bucket must not begin the metrics anew and copy them over the old."""
    cloud.answer("storage rsync gs://mine", err="503", code=1)
    cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], code=1, **settings(host))
    assert not (host / "launched").exists()
    assert (earlier / "metrics.jsonl").read_text() == '{"step":0}\n'
    cloud.no_answers()
    cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], **settings(host))
    assert (earlier / "metrics.jsonl").read_text() == '{"step":0}\n{"step":1}\n'


def test_a_bucket_that_does_not_answer_is_not_one_without_an_earlier_run(cloud, host, earlier):
    """Else a new history would be copied over the old."""
    cloud.answer("storage ls", err="ERROR: (gcloud.storage.ls) HTTPError 503: Service Unavailable", code=1)
    done = cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], code=1, **settings(host))
    assert "run/events.jsonl exists cannot be seen, so nothing starts: ERROR: (gcloud.storage.ls) HTTPError 503" in done.stdout
    assert not (host / "launched").exists()
    assert (earlier / "metrics.jsonl").read_text() == '{"step":0}\n'
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").read_text() == "1\n"


def test_a_host_that_cannot_begin_says_so(cloud, host):
    """All others wait for it, and nobody logs in to a thousand hosts to see which."""
    cloud.answer("secrets versions access", err="PERMISSION_DENIED", code=1)
    (host / "maxlm.log").write_text("what went wrong\n")
    cluster = "coordinator=h-0:8476 process_count=2 process_id=1"
    done = cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], code=1, **settings(host, CLUSTER=cluster, SECRETS="HF_TOKEN=t"))
    assert "ended with 1 before the run began" in done.stdout
    assert not (host / "launched").exists()
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").read_text() == "1\n"
    (log,) = (cloud.bucket / "llama3-8b-v5p-128/logs").iterdir()
    assert log.read_text() == "what went wrong\n"


def test_sigterm_reaches_the_run_which_saves_and_its_last_lines_reach_the_bucket(cloud, host):
    process = start(cloud, host, BEHAVE="wait")
    wait_for((host / "ready").exists)
    wait_for((cloud.bucket / "llama3-8b-v5p-128/run/metrics.jsonl").exists)  # every so often, while it runs
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").read_text() == "running\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 3, out
    assert (cloud.bucket / "llama3-8b-v5p-128/run/metrics.jsonl").read_text().splitlines()[-1] == "saved"
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").read_text() == "3\n"


@pytest.mark.parametrize(("mark", "code", "told"), [("stopped", "3", "stopped"), ("deleted", "3", "deleted"), ("stopped", "0", "0")])
def test_a_run_that_saves_after_stop_or_delete_leaves_their_mark(cloud, host, mark, code, told):
    """`maxlm-gcp` writes it while the run goes on."""
    process = start(cloud, host, BEHAVE=f"until {code}")
    wait_for((host / "launched").exists)
    (cloud.bucket / "llama3-8b-v5p-128/outcome").write_text(f"{mark}\n")
    (host / "go").touch()
    process.communicate(timeout=60)
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").read_text() == f"{told}\n"


def test_a_host_that_starts_late_leaves_the_mark_of_delete(cloud, host):
    (cloud.bucket / "llama3-8b-v5p-128/outcome").write_text("deleted\n")
    cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], code=3, **settings(host, BEHAVE="3"))
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").read_text() == "deleted\n"


def test_only_the_first_process_writes_the_run_directory_of_the_bucket(cloud, host):
    """The others have no run directory, and an old copy of it must not go over a new one."""
    cluster = "coordinator=h-0:8476 process_count=2 process_id=1"
    cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], **settings(host, CLUSTER=cluster))
    assert (host / "launched").read_text().split()[-3:] == cluster.split()
    assert sorted(path.name for path in (cloud.bucket / "llama3-8b-v5p-128").iterdir()) == ["cluster-secret", "config.yml"]
    cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], **settings(host, CLUSTER=cluster.replace("id=1", "id=0")))
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").exists()


def test_a_vm_knows_its_number_by_its_name(cloud, host):
    (cloud.home / "bin/hostname").write_text("#!/bin/sh\necho maxlm-quickstart-13\n")
    (cloud.home / "bin/hostname").chmod(0o755)
    cloud.execute(
        ["bash", ROOT / "gcp/host.sh", "train"], **settings(host, CLUSTER="coordinator=h:1 process_count=16 process_id=HOST_NUMBER")
    )
    assert (host / "launched").read_text().split()[-1] == "process_id=13"


def test_a_gke_pod_is_first_by_its_index(cloud, host):
    pod = {"JAX_NUM_PROCESSES": "2", "JOBSET_NAME": "maxlm-x", "REPLICATED_JOB_NAME": "slice"}
    cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], **settings(host, JOB_COMPLETION_INDEX="1", **pod))
    assert not (cloud.bucket / "llama3-8b-v5p-128/outcome").exists()
    cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], **settings(host, JOB_COMPLETION_INDEX="0", **pod))
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").exists()


def test_a_secret_is_read_on_the_host_and_nobody_else_sees_it(cloud, host):
    """From the command line to the host: its value is in no word of any command, no output, no file but the run's environment."""
    cloud.answer("gcloud secrets versions access latest --secret=my-token", out=SECRET)
    created = cloud.run("create", RUN, "--secret", "HF_TOKEN=my-token")
    (host / "startup.sh").write_text(cloud.sent().replace('"${1:-boot}"', "train"))
    done = cloud.execute(["bash", host / "startup.sh"], **{**settings(host), "SECRETS": ""})
    assert (host / "seen-secret").read_text() == SECRET
    assert ["gcloud", "secrets", "versions", "access", "latest", "--secret=my-token"] in cloud.calls
    (host / "seen-secret").unlink()
    cloud.no_answers()
    assert SECRET not in created.stdout + created.stderr + done.stdout + done.stderr
    assert not [path for path in cloud.home.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_the_hosts_of_a_run_share_a_secret_of_its_own(cloud, host):
    """maxlm-gcp leaves it in the bucket, another one for each start; no command line and no output holds it."""
    made = []
    for _ in range(2):
        created = cloud.run("create", RUN)
        made.append((cloud.bucket / "llama3-8b-v5p-128/cluster-secret").read_text())
        assert len(made[-1]) == 64 and made[-1] not in created.stdout + created.stderr
    assert made[0] != made[1]
    done = cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], **settings(host))
    assert (host / "seen-cluster-secret").read_text() == made[1]
    assert made[1] not in done.stdout + done.stderr + str(cloud.calls) + cloud.sent()


def test_without_the_secret_of_the_run_a_host_starts_nothing(cloud, host):
    (cloud.bucket / "llama3-8b-v5p-128/cluster-secret").unlink()
    cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], code=1, **settings(host))
    assert not (host / "launched").exists()


def test_a_secret_that_cannot_be_read_starts_nothing(cloud, host):
    cloud.answer("gcloud secrets versions access", err="PERMISSION_DENIED", code=1)
    cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], code=1, **settings(host, SECRETS="HF_TOKEN=my-token"))
    assert not (host / "launched").exists()


def test_boot_starts_a_service_and_ends_an_earlier_one(cloud, host):
    """The startup script itself: it must end, or the machine never counts as started; SIGTERM must go to our script alone."""
    cloud.run("create", RUN)
    script = host / "metadata-script"
    script.write_text(cloud.sent())
    cloud.execute(["bash", script], **settings(host))
    stop, unit = [words for words in cloud.calls if words[0].startswith("system")]
    assert stop == ["systemctl", "stop", "maxlm"]
    assert {"--unit=maxlm", "--property=KillMode=mixed", "--property=TimeoutStopSec=300"} < set(unit)
    assert unit[-3:] == ["bash", str(host / "host.sh"), "run"]
    assert (host / "host.sh").read_text() == script.read_text()
    cloud.execute(["bash", host / "host.sh", "boot"], **settings(host))  # as `restart` does
    assert cloud.calls[-2:] == [stop, unit]


# Stands in for a machine's python3, of the version VERSION; `-m venv` makes one out of the stand-in for maxlm, which knows pip and uv, too.
PYTHON3 = """#!/usr/bin/env bash
case $* in
  "-c import sys, ensurepip"*) [[ -e {home}/apt || $VERSION == 3.12-full ]] && [[ $VERSION == 3.1[2-9]* ]] ;;
  "-m venv"*)
    mkdir -p "$3/bin"
    cp {home}/python "$3/bin/python"
    printf '#!/bin/sh\necho "$@" >uv-said; mkdir -p venv/bin; cp {home}/python venv/bin/' >"$3/bin/uv"
    chmod +x "$3/bin/uv"
    ;;
  *) exec {python} "$@" ;;
esac
"""
PIP = """#!/usr/bin/env bash
if [[ $2 == pip ]]; then printf '%s\\n' "$@" >installed; exit 0; fi
"""


@pytest.mark.parametrize(("version", "apt", "uv"), [("3.12-full", False, False), ("3.12", True, False), ("3.10", True, True)])
def test_run_installs_the_code_of_the_bucket_with_a_python_that_fits(cloud, host, version, apt, uv):
    """`run` as the service does it, on Ubuntu 24.04 with and without its venv, and on 22.04."""
    cloud.run("create", RUN)
    for path, text in {
        cloud.home / "bin/python3": PYTHON3.format(home=host, python=sys.executable),
        cloud.home / "bin/apt-get": f"#!/bin/sh\ntouch {host}/apt\n",
        host / "python": PIP + MAXLM.split("\n", 1)[1],
    }.items():
        path.write_text(text)
        path.chmod(0o755)
    (host / "host.sh").write_text(cloud.sent())
    environment = settings(host, VERSION=version)
    del environment["MAXLM_PYTHON"]
    cloud.environment.pop("MAXLM_PYTHON")
    cloud.execute(["bash", host / "host.sh", "run"], **environment)
    assert (host / "apt").exists() == apt
    assert (host / "uv-said").exists() == uv
    assert (host / "installed").read_text().split()[-2:] == ["--editable", "code[tpu]"]
    assert (host / "code/gcp/host.sh").exists()
    assert (host / "launched").read_text().split()[2:5] == ["launch", "--restarts", "50"]


@pytest.mark.parametrize(("failures", "code"), [(2, 0), (3, 1)])
def test_a_passing_fault_of_a_fetch_or_an_install_ends_no_host(cloud, host, failures, code):
    """All others would wait for it. One that lasts ends it, and is told."""
    cloud.run("create", RUN)
    venv = host / "venv/bin"
    venv.mkdir(parents=True)
    fail = f"if [[ $2 == pip ]]; then echo x >>tries; (($(wc -l <tries) > {failures})); exit; fi"
    (venv / "python").write_text(f"#!/usr/bin/env bash\n{fail}\n" + MAXLM.split("\n", 1)[1])
    (venv / "python").chmod(0o755)
    cloud.answer("code.tar.gz code.tar.gz", err="ERROR: 503\n", code=1, times=2)
    environment = settings(host, RETRY_SECONDS="0")
    del environment["MAXLM_PYTHON"]
    cloud.environment.pop("MAXLM_PYTHON")
    done = cloud.execute(["bash", ROOT / "gcp/host.sh", "run"], code=code, **environment)
    assert "try 2 of 3 ended with 1: gcloud storage cp gs://mine/llama3-8b-v5p-128/code.tar.gz" in done.stdout
    assert (host / "launched").exists() == (code == 0)
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").read_text() == f"{code}\n"


@pytest.mark.parametrize(
    ("told", "gke", "now"), [("1", False, "1"), ("1", True, "running"), ("3", False, "running"), ("starting", False, "running")]
)
def test_the_failure_of_another_host_is_not_lost_where_process_0_begins_later(cloud, host, told, gke, now):
    """That host never comes: `running` would hide it. On GKE all pods start again."""
    (cloud.bucket / "llama3-8b-v5p-128/outcome").write_text(f"{told}\n")
    pod = {"JAX_NUM_PROCESSES": "2", "JOBSET_NAME": "maxlm-x", "REPLICATED_JOB_NAME": "slice", "JOB_COMPLETION_INDEX": "0"}
    process = start(cloud, host, BEHAVE="until 0", **(pod if gke else {}))
    wait_for((host / "launched").exists)
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").read_text() == f"{now}\n"
    (host / "go").touch()
    process.communicate(timeout=60)


@pytest.mark.parametrize(("extra", "devices"), [("tpu", ["--privileged"]), ("cuda", ["--gpus", "all", "--ipc=host"])])
def test_a_container_gets_the_devices_and_sigterm(cloud, host, extra, devices):
    image = "us-docker.pkg.dev/p/r/maxlm:1"
    cloud.answer("docker run", wait=60, code=3)
    process = subprocess.Popen(
        ["bash", ROOT / "gcp/host.sh", "run"], env={**cloud.environment, **settings(host, IMAGE=image, EXTRA=extra)}, cwd=host
    )
    wait_for((cloud.home / "waiting").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 3
    assert (cloud.home / "terminated").exists()
    (run,) = [words for words in cloud.calls if words[:2] == ["docker", "run"]]
    assert " ".join(devices) in " ".join(run)
    assert run[-4:] == [image, "bash", "/opt/maxlm/gcp/host.sh", "train"]
    assert ["gcloud", "auth", "configure-docker", "us-docker.pkg.dev", "--quiet"] in cloud.calls


@pytest.mark.parametrize("code", [125, 126, 127, 137])
def test_a_container_that_cannot_run_is_told(cloud, host, code):
    """Nobody else would: what reports the end of a run is inside it."""
    (host / "told").touch()  # of an earlier start
    cloud.answer("docker run", err="docker: Error response from daemon\n", code=code)
    done = cloud.execute(["bash", ROOT / "gcp/host.sh", "run"], code=code, **settings(host, IMAGE="i:1"))
    assert f"docker run ended with {code}, and the container has not reported anything" in done.stdout
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").read_text() == f"{code}\n"


def test_an_image_that_cannot_be_fetched_is_told(cloud, host):
    cloud.answer("docker image inspect", code=1)
    cloud.answer("docker pull", err="manifest unknown\n", code=1)
    cloud.execute(["bash", ROOT / "gcp/host.sh", "run"], code=1, **settings(host, IMAGE="i:1", RETRY_SECONDS="0"))
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").read_text() == "1\n"
    assert [words[1] for words in cloud.calls if words[0] == "docker"].count("pull") == 3
    assert not [words for words in cloud.calls if words[:2] == ["docker", "run"]]


@pytest.mark.parametrize("signal_first", [False, True])
def test_the_end_that_a_container_has_told_stays(cloud, host, signal_first):
    """The run inside has ended with 3; or the machine is taken, and its container killed before it has said so."""
    outcome = cloud.bucket / "llama3-8b-v5p-128/outcome"
    outcome.write_text("running\n")
    docker = cloud.home / "bin/docker"
    docker.unlink()
    train = f"bash {ROOT}/gcp/host.sh train; exit 127"
    if signal_first:
        train = "trap 'exit 137' TERM; touch ready; while :; do /bin/sleep 0.05; done"
    docker.write_text(f"#!/usr/bin/env bash\n[[ $1 == run ]] || exit 0\n{train}\n")
    docker.chmod(0o755)
    process = subprocess.Popen(
        ["bash", ROOT / "gcp/host.sh", "run"], env={**cloud.environment, **settings(host, IMAGE="i:1", BEHAVE="3")}, cwd=host
    )
    if signal_first:
        wait_for((host / "ready").exists)
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == (137 if signal_first else 127)
    assert outcome.read_text() == ("running\n" if signal_first else "3\n")


def test_nothing_is_left_running(cloud, host):
    """The process that copies to the bucket ends with the run."""
    cloud.execute(["bash", ROOT / "gcp/host.sh", "train"], **settings(host))
    alive = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if f"MAXLM_HOME={host}".encode() in environment and int(folder.name) != os.getpid():
                alive.append(folder.name)
    assert alive == []
