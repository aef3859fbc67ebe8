"""After the start: watching, resuming, stopping, fetching and deleting; and whose machines are touched."""

import json
import re

import pytest

RUN = "runs/llama3-8b-v5p-128"
NAME = "maxlm-llama3-8b-v5p-128"
SLICES, SLICES_NAME = "runs/llama3-405b-2x-v6e-256", "maxlm-llama3-405b-2x-v6e-256"
GPUS = ("runs/quickstart", "cluster.topology=h100:2x8", "data.store=gs://corpus/s", "train.global_batch=16")
GKE = ("runs/llama3-8b-tpu7x-128", "--gke", "--image", "i")
TPU_VM = ["gcloud", "compute", "tpus", "tpu-vm"]


def write_run(cloud, outcome="running", run="llama3-8b-v5p-128"):
    """Write a host's files to the bucket: 300 steps of 2 s each, in 1,000 s."""
    folder = cloud.bucket / run
    (folder / "run").mkdir(parents=True)
    records = [{"step": step, "loss": 2.5, "tokens_per_s": 1e6, "step_time_s": 2.0} for step in (299, 300)]
    (folder / "latest.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"torn')
    start = {"kind": "start", "step": 0, "time": 1000.0, "total_steps": 1200}
    goodput = {"wall_s": 400.0, "seconds": {"compile": 100.0, "step": 300.0}, "steps": 200}
    killed = {"kind": "killed", "step": 200, "time": 1400.0, "goodput": goodput}
    stop = {"kind": "stop", "step": 300, "time": 2000.0, "reason": "done"}
    events = [start, killed, {**start, "step": 200, "time": 1500.0, "attempt": "a"}]
    events.append({**stop, "goodput": {**goodput, "wall_s": 500.0, "seconds": {"compile": 200.0, "step": 300.0}}})
    (folder / "run/events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "run/metrics.jsonl").write_text("{}\n")
    (folder / "outcome").write_text(f"{outcome}\n")


def test_watch_says_state_step_and_goodput(cloud):
    cloud.state(NAME, "READY")
    write_run(cloud)
    line = cloud.run("watch", RUN, "--once").stdout
    goodput = "goodput 60.0% (compiling 30.0%, nothing ran 10.0%)"
    expected = f"READY (up)  step 300 of 1,200  loss 2.5  1,000,000 tokens/s  {goodput}  started 2 times\n"
    assert re.sub(r"^[\d:]+  ", "", line) == expected
    assert cloud.changes == []


def test_watch_before_the_first_step_and_without_a_machine(cloud):
    assert "NONE (none)  not started yet" in cloud.run("watch", RUN, "--once").stdout


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [("0", 0, "is done"), ("2", 2, "input is wrong"), ("4", 4, "unhealthy"), ("1", 1, "restarts are used up")],
)
def test_watch_ends_with_the_run(cloud, outcome, code, said):
    cloud.state(NAME, "READY")
    write_run(cloud, outcome)
    assert said in cloud.run("watch", RUN, "--resume", code=code).stderr
    assert cloud.changes == []


@pytest.mark.parametrize("outcome", ["running", "3"])
def test_watch_resumes_what_was_preempted_until_it_is_done(cloud, outcome):
    """PREEMPTED: the machine is deleted and made again, and watching goes on."""
    write_run(cloud, outcome)
    cloud.state(NAME, "PREEMPTED", times=3)  # once a line, once to resume it
    cloud.state(NAME, "READY")
    cloud.answer("storage cat gs://mine/llama3-8b-v5p-128/outcome", out=f"{outcome}\n", times=2)
    cloud.answer("storage cat gs://mine/llama3-8b-v5p-128/outcome", out="0\n")
    done = cloud.run("watch", RUN, "--resume", "--every", "7")
    verbs = [words[4] for words in cloud.changes if words[:4] == TPU_VM]
    assert verbs[:2] == ["delete", "create"]
    assert ["sleep", "7"] in cloud.calls
    assert "PREEMPTED (dead)" in done.stdout
    assert "READY (up)" in done.stdout


@pytest.mark.parametrize("verb", ["delete", "stop"])
def test_watch_brings_nothing_back_that_was_stopped_or_deleted(cloud, verb):
    """`watch --resume` runs for weeks in another window."""
    write_run(cloud)
    name = "maxlm-llama3-8b-tpu7x-128"
    cloud.state(name, "")
    cloud.run(verb, *GKE)
    cloud.no_answers()
    cloud.state(name, "Failed")
    before = len(cloud.changes)
    done = cloud.run("watch", *GKE, "--resume", code=3)
    assert f"{verb} has been called for llama3-8b-tpu7x-128" in done.stderr
    assert len(cloud.changes) == before
    told = [words[-1] for words in cloud.changes].index("gs://mine/llama3-8b-tpu7x-128/outcome")
    assert told < [words[0] for words in cloud.changes].index("kubectl"), "or a watch would see the machine gone and not why"
    cloud.run("resume", *GKE)
    assert (cloud.bucket / "llama3-8b-tpu7x-128/outcome").read_text() == "starting\n"


def test_the_end_of_a_run_outlives_its_machines_and_a_bucket_that_fails_keeps_none_of_them(cloud):
    write_run(cloud, "0")
    cloud.run("delete", RUN)
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").read_text() == "0\n"
    cloud.state(NAME, "READY")
    cloud.answer("storage cat", err="ERROR: 503\n", code=1)
    assert "end every watch --resume of it yourself" in cloud.run("delete", RUN).stderr
    assert cloud.changes[-1][:5] == [*TPU_VM, "delete"]


def test_watch_goes_on_after_a_look_that_failed(cloud):
    """A token expires, a laptop sleeps: a run takes weeks."""
    write_run(cloud, "running")
    cloud.state(NAME, "READY", times=1)
    cloud.answer("tpu-vm describe", err="ERROR: 503 The service is currently unavailable.\n", code=1, times=2)
    cloud.state(NAME, "READY")
    cloud.answer("storage cat gs://mine/llama3-8b-v5p-128/outcome", out="running\n", times=1)
    cloud.answer("storage cat gs://mine/llama3-8b-v5p-128/outcome", out="0\n")
    done = cloud.run("watch", RUN)
    assert done.stdout.count("READY (up)") == 2
    assert done.stderr.count("503") == 2


def test_watch_waits_for_room_where_there_is_none(cloud):
    """A preempted machine is deleted, and usually cannot be recreated at once, for lack of capacity."""
    write_run(cloud, "running")
    cloud.state(NAME, "PREEMPTED", times=2)
    cloud.answer("tpu-vm create", err="ERROR: There is no more capacity in the zone\n", code=1, times=2)
    cloud.answer("tpu-vm describe", err="NOT_FOUND\n", code=1, times=4)
    cloud.state(NAME, "READY")
    cloud.answer("storage cat gs://mine/llama3-8b-v5p-128/outcome", out="running\n", times=3)
    cloud.answer("storage cat gs://mine/llama3-8b-v5p-128/outcome", out="0\n")
    done = cloud.run("watch", RUN, "--resume", "--spot")
    assert [words[4] for words in cloud.changes if words[:4] == TPU_VM] == ["delete", "create", "create", "create"]
    assert done.stderr.count("the zone us-east5-a has none left") == 2


def test_a_suspended_jobset_is_resumed(cloud):
    cloud.answer("get jobset", out="true,maxlm-llama3-8b-tpu7x-128,ada\n")
    assert "SUSPENDED (dead)" in cloud.run("watch", *GKE, "--once").stdout
    cloud.run("resume", *GKE)
    assert [words[:2] for words in cloud.changes if words[0] == "kubectl"] == [["kubectl", "delete"], ["kubectl", "apply"]]


@pytest.mark.parametrize(("asked", "verb"), [((), "queued-resources"), (("--queued",), "tpu-vm")])
def test_delete_finds_what_was_asked_for_in_the_other_way(cloud, asked, verb):
    """A request that waits becomes a slice some day, and that is paid for."""
    cloud.answer(f"{verb} describe {NAME} ", f"ACTIVE,{NAME},ada\n")
    cloud.run("delete", RUN, *asked)
    assert [words[3:6] for words in cloud.changes if words[1:3] != ["storage", "cp"]] == [[verb, "delete", NAME]]


@pytest.mark.parametrize("asked", [(), ("--queued",)])
def test_delete_finds_a_machine_and_a_request_of_the_same_name(cloud, asked):
    """A request takes its node along; the machine beside it is looked for once more."""
    cloud.state(NAME, "READY")
    cloud.run("delete", RUN, *asked)
    assert [words[3:6] for words in cloud.changes[1:]] == [["queued-resources", "delete", NAME], ["tpu-vm", "delete", NAME]]
    (cloud.home / "calls").unlink()
    cloud.no_answers()
    cloud.answer(f"queued-resources describe {NAME} ", f"ACTIVE,{NAME},ada\n")
    cloud.answer(f"tpu-vm describe {NAME} ", f"READY,{NAME},ada\n", times=2)
    cloud.run("delete", RUN, *asked)
    assert [words[3:6] for words in cloud.changes[1:]] == [["queued-resources", "delete", NAME]]


def test_delete_finds_the_vms_of_a_larger_topology_by_their_labels(cloud):
    for unit in (0, 1, 2):
        cloud.state(f"maxlm-quickstart-{unit}", "RUNNING", run="maxlm-quickstart")
    cloud.answer("instances list", out="maxlm-quickstart-0\nmaxlm-quickstart-1\nmaxlm-quickstart-2\n")
    cloud.run("delete", *GPUS)
    assert [words[3:5] for words in cloud.changes[1:]] == [["delete", f"maxlm-quickstart-{unit}"] for unit in (0, 1, 2)]
    (listed,) = [words for words in cloud.calls if "list" in words]
    assert {"--zones=us-east5-a", "--filter=labels.maxlm-run=maxlm-quickstart AND labels.maxlm-owner=ada"} < set(listed)


def test_restart_refuses_what_only_create_can_set(cloud):
    cloud.state(NAME, "READY")
    assert "as create has set them" in cloud.run("restart", RUN, "--secret", "HF_TOKEN=t", code=2).stderr
    assert cloud.changes == []


@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED"])
def test_resume_recreates_a_dead_slice_as_it_was(cloud, state):
    cloud.run("create", RUN, "--spot")
    first = cloud.changes[-1]
    cloud.state(NAME, state)
    cloud.run("resume", RUN, "--spot")
    delete, _, again = cloud.changes[-3:]
    assert delete == [*TPU_VM, "delete", NAME, "--zone=us-east5-a", "--quiet"]
    scratch = r"startup-script=\S+/"
    assert [re.sub(scratch, "", word) for word in again] == [re.sub(scratch, "", word) for word in first]
    sent = [words[-1].rpartition("/")[2] for words in cloud.changes if words[1] == "storage"]
    assert sent == ["code.tar.gz", "config.yml", "cluster-secret", "outcome", "outcome"], (
        "code, config and secret of the run stay those it began with"
    )


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED"])
def test_resume_deletes_a_dead_request_with_its_nodes(cloud, state):
    cloud.state(SLICES_NAME, state)
    cloud.run("resume", SLICES)
    delete, _, create = cloud.changes
    assert delete == ["gcloud", "compute", "tpus", "queued-resources", "delete", SLICES_NAME, "--zone=us-east5-a", "--force", "--quiet"]
    assert create[4:6] == ["create", SLICES_NAME]


def test_resume_leaves_living_vms_and_makes_the_others(cloud):
    cloud.state("maxlm-quickstart-0", "RUNNING", run="maxlm-quickstart")
    cloud.state("maxlm-quickstart-1", "TERMINATED", run="maxlm-quickstart")
    cloud.run("resume", *GPUS)
    delete, _, create = cloud.changes
    assert delete == ["gcloud", "compute", "instances", "delete", "maxlm-quickstart-1", "--zone=us-east5-a", "--quiet"]
    assert create[3:6] == ["create", "maxlm-quickstart-1", "--zone=us-east5-a"]


@pytest.mark.parametrize("state", ["READY", "REPAIRING"])
def test_resume_touches_nothing_that_lives(cloud, state):
    cloud.state(NAME, state)
    assert "nothing to resume" in cloud.run("resume", RUN).stderr
    assert cloud.changes == []


def test_a_failed_jobset_is_made_again(cloud):
    cloud.state("maxlm-llama3-8b-tpu7x-128", "Failed")
    cloud.run("resume", *GKE)
    assert [words[:2] for words in cloud.changes if words[0] == "kubectl"] == [["kubectl", "delete"], ["kubectl", "apply"]]


FOREIGN = {"run": "maxlm-another"}, "labelled maxlm-run=maxlm-another maxlm-owner=ada"


@pytest.mark.parametrize(
    ("verb", "state", "labels", "words"),
    [
        ("delete", "READY", *FOREIGN),
        ("stop", "READY", *FOREIGN),
        ("restart", "READY", *FOREIGN),
        ("resume", "PREEMPTED", *FOREIGN),
        ("delete", "READY", {"run": NAME, "owner": "bob"}, f"labelled maxlm-run={NAME} maxlm-owner=bob"),
        ("delete", "READY", {"run": " ", "owner": ""}, "labelled maxlm-run="),
    ],
)
def test_what_another_run_has_made_is_not_touched(cloud, verb, state, labels, words):
    cloud.state(NAME, state, **labels)
    done = cloud.run(verb, RUN, code=2)
    assert f"{NAME} was not made by this run: it is {words}" in done.stderr
    assert cloud.changes == []


def test_not_even_ours_are_deleted_where_one_is_foreign(cloud):
    cloud.state("maxlm-quickstart-0", "RUNNING", run="maxlm-quickstart")
    cloud.state("maxlm-quickstart-1", "RUNNING", run="maxlm-quickstart", owner="bob")
    cloud.run("delete", *GPUS, code=2)
    assert cloud.changes == []


@pytest.mark.parametrize(
    ("words", "units", "commands"),
    [
        ((RUN,), [NAME], [[*TPU_VM, "delete", NAME, "--zone=us-east5-a", "--quiet"]]),
        ((*GPUS,), ["maxlm-quickstart-0", "maxlm-quickstart-1"],
         [["gcloud", "compute", "instances", "delete", f"maxlm-quickstart-{n}", "--zone=us-east5-a", "--quiet"] for n in (0, 1)]),
        (GKE, ["maxlm-llama3-8b-tpu7x-128"], [["kubectl", "delete", "jobset", "maxlm-llama3-8b-tpu7x-128", "--wait=true"]]),
    ],
    ids=["tpu", "gpu", "gke"],
)  # fmt: skip
def test_delete_names_what_it_deletes_and_leaves_the_bucket(cloud, words, units, commands):
    write_run(cloud)
    cloud.answer("queued-resources describe", err="NOT_FOUND\n", code=1)
    for unit in units:
        cloud.state(unit, "RUNNING", run=re.sub(r"-[01]$", "", unit))
    done = cloud.run("delete", *words)
    assert [words for words in cloud.changes if words[1:3] != ["storage", "cp"]] == commands
    assert len(cloud.changes) == len(commands) + 1, "and tells a watch"
    assert "stay at gs://mine/" in done.stderr
    assert (cloud.bucket / "llama3-8b-v5p-128/outcome").exists()


def test_delete_of_nothing(cloud):
    assert f"{NAME} has no machine" in cloud.run("delete", RUN).stderr


@pytest.mark.parametrize(
    ("verb", "remote"), [("restart", "--command=sudo bash /var/lib/maxlm/host.sh boot"), ("stop", "--command=sudo systemctl stop maxlm")]
)
def test_restart_and_stop_reach_every_worker_of_every_slice(cloud, verb, remote):
    cloud.state(SLICES_NAME, "ACTIVE")
    cloud.run(verb, SLICES)
    ssh = sorted(words for words in cloud.calls if "ssh" in words)
    assert ssh == [[*TPU_VM, "ssh", f"{SLICES_NAME}-{n}", "--zone=us-east5-a", "--worker=all", remote] for n in (0, 1)]
    sent = [words[-1] for words in cloud.calls if words[1:3] == ["storage", "cp"]]
    assert len(sent) == (4 if verb == "restart" else 1)


def test_restart_and_stop_of_vms_and_jobsets(cloud):
    for unit in (0, 1):
        cloud.state(f"maxlm-quickstart-{unit}", "RUNNING", run="maxlm-quickstart")
    cloud.run("stop", *GPUS)
    stop = ["--zone=us-east5-a", "--command=sudo systemctl stop maxlm"]
    told, *stops = cloud.changes
    assert told[-1] == "gs://mine/quickstart/outcome"
    assert sorted(stops) == [["gcloud", "compute", "ssh", f"maxlm-quickstart-{unit}", *stop] for unit in (0, 1)]
    cloud.state("maxlm-llama3-8b-tpu7x-128", "")
    cloud.run("stop", *GKE)
    patch = ["--type=merge", '--patch={"spec":{"suspend":true}}']
    assert cloud.changes[-1] == ["kubectl", "patch", "jobset", "maxlm-llama3-8b-tpu7x-128", *patch]


def test_fetch_and_log(cloud):
    write_run(cloud)
    cloud.run("fetch", RUN)
    assert (cloud.home / "runs/llama3-8b-v5p-128/metrics.jsonl").exists()
    cloud.run("fetch", RUN, "--to", "here")
    assert (cloud.home / "here/events.jsonl").exists()
    cloud.run("log", SLICES)
    assert cloud.calls[-1][4:6] == ["ssh", f"{SLICES_NAME}-0"]
    cloud.run("log", *GKE)
    assert cloud.calls[-1][:3] == ["kubectl", "logs", "--follow"]


def test_a_stop_that_does_not_reach_all_is_told(cloud):
    cloud.state(SLICES_NAME, "ACTIVE")
    cloud.answer(f"ssh {SLICES_NAME}-1", err="ssh: no route\n", code=255)
    done = cloud.run("stop", SLICES, code=1)
    assert "ssh: no route" in done.stderr
    assert f"ended with 255: gcloud compute tpus tpu-vm ssh {SLICES_NAME}-1" in done.stderr


def test_watch_does_not_take_an_earlier_end_for_that_of_a_new_start(cloud):
    write_run(cloud, outcome="0")
    cloud.run("create", RUN)
    cloud.state(NAME, "READY")
    assert "is done" not in cloud.run("watch", RUN, "--once").stderr


def test_fetch_of_nothing(cloud):
    assert "there is nothing of that name (yet)" in cloud.run("fetch", RUN, code=1).stderr


def test_up_ends_where_the_machine_dies_before_it_is_up(cloud):
    cloud.answer(f"describe {NAME} ", err="NOT_FOUND", code=1, times=2)
    cloud.state(NAME, "PREEMPTED")
    assert "is PREEMPTED (dead): maxlm-gcp resume creates it again" in cloud.run("up", RUN, code=2).stderr
