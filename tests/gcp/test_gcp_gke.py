"""The JobSet: a pod a host, a job a slice, and everything a pod needs to find the others, save and be started again."""

import pytest
from ruamel.yaml import YAML

from maxlm.cluster.environment import find

IMAGE = ("--gke", "--image", "i:1")
TPU = "runs/llama3-8b-tpu7x-128"
GPU = ("runs/quickstart", "cluster.topology=h100:2x8", "data.store=gs://corpus/s", "train.global_batch=16")


def manifest(cloud, *words):
    cloud.run("create", *words, *IMAGE, place=())
    assert cloud.calls[-1][:2] == ["kubectl", "apply"]
    document = YAML(typ="safe", pure=True).load(cloud.sent())
    (job,) = document["spec"]["replicatedJobs"]
    return document, job, job["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("run", "accelerator", "topology", "slices", "hosts", "chips"),
    [
        ("runs/llama3-8b-tpu7x-128", "tpu7x", "4x4x4", 1, 16, 4),
        ("runs/llama3-8b-v5p-128", "tpu-v5p-slice", "4x4x4", 1, 16, 4),
        ("runs/llama3-405b-2x-v6e-256", "tpu-v6e-slice", "16x16", 2, 64, 4),
        ("runs/gpt2-124m-v5e-8", "tpu-v5-lite-podslice", "2x4", 1, 1, 8),
    ],
)
def test_tpus(cloud, run, accelerator, topology, slices, hosts, chips):
    document, job, pod = manifest(cloud, run)
    assert pod["nodeSelector"] == {"cloud.google.com/gke-tpu-accelerator": accelerator, "cloud.google.com/gke-tpu-topology": topology}
    assert (job["replicas"], job["template"]["spec"]["parallelism"], job["template"]["spec"]["completions"]) == (slices, hosts, hosts)
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"google.com/tpu": chips}}
    assert "exclusive-topology" in next(iter(document["metadata"]["annotations"]))
    assert not any(entry["name"].startswith("JAX") for entry in container["env"]), "GKE itself tells TPU pods of each other"


@pytest.mark.parametrize(("machine", "accelerator"), [("a3-megagpu-8g", "nvidia-h100-mega-80gb"), ("a3-highgpu-8g", "nvidia-h100-80gb")])
def test_gpus_find_each_other(cloud, machine, accelerator):
    """Return the process specification from the environment of a pod."""
    document, job, pod = manifest(cloud, *GPU, "--accelerator", machine)
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": accelerator}
    assert (job["replicas"], job["template"]["spec"]["completions"]) == (1, 2)
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    environment = {entry["name"]: entry["value"] for entry in container["env"]} | {"JOB_COMPLETION_INDEX": "1"}
    place = find({}, environment, lambda name: None, 8)
    name = document["metadata"]["name"]
    assert (place.count, place.process, place.address) == (2, 1, f"{name}-slice-0-0.{name}:8482")


@pytest.mark.parametrize("spot", [(), ("--spot",)])
def test_spot_nodes_are_asked_for_only_if_wanted(cloud, spot):
    _, _, pod = manifest(cloud, TPU, *spot)
    assert ("cloud.google.com/gke-spot" in pod["nodeSelector"]) == bool(spot)
    assert ("cloud.google.com/gke-spot" in [toleration["key"] for toleration in pod["tolerations"]]) == bool(spot)


def test_it_ends_with_a_save_and_starts_again_where_that_helps(cloud):
    document, job, pod = manifest(cloud, TPU, "--service-account", "trainer", "--restarts", "9", "--secret", "HF_TOKEN=my-token")
    assert pod["serviceAccountName"] == "trainer"
    assert pod["terminationGracePeriodSeconds"] == 300
    assert document["spec"]["failurePolicy"]["maxRestarts"] == 9
    assert document["spec"]["failurePolicy"]["rules"] == [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onExitCodes": {"containerName": "maxlm", "operator": "In", "values": [2, 4]}}
    assert pod["restartPolicy"] == "Never", "which a pod failure policy demands"
    assert {"name": "SECRETS", "value": "HF_TOKEN=my-token"} in pod["containers"][0]["env"]
    labels = {"maxlm-run": "maxlm-llama3-8b-tpu7x-128", "maxlm-owner": "ada"}
    assert document["metadata"]["labels"] == job["template"]["spec"]["template"]["metadata"]["labels"] == labels
