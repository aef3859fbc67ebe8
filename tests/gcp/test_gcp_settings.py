"""Translation of a config and a machine's name to Google Cloud; the table of machines against maxlm's hardware facts."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from maxlm.config import UserError
from maxlm.config.loader import SHIPPED
from maxlm.hardware.chips import CHIPS
from maxlm.hardware.topologies import is_tpu, parse

GCP = Path(__file__).resolve().parents[2] / "gcp"
BUCKET = "gs://mine"
V5P = "runs/llama3-8b-v5p-128"


def load_settings():
    spec = importlib.util.spec_from_file_location("gcp_settings", GCP / "settings.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


settings = load_settings()


def told(name, *overrides, accelerator=None, gke=False, queued=False, bucket=BUCKET):
    config, machine = settings.read(name, accelerator, bucket, list(overrides))
    return settings.describe(config, machine, gke=gke, queued=queued)


@pytest.mark.parametrize("machine", settings.machines(), ids=lambda machine: machine.name)
def test_every_machine_is_made_of_a_chip_we_know(machine):
    (chip,) = [chip for chip in CHIPS if chip.name.lower() == machine.chip]
    assert (machine.api == "gce") == (not is_tpu(chip))
    assert (machine.image == "-") == (machine.api == "gke")


@pytest.mark.parametrize("path", sorted((SHIPPED / "clusters").glob("*.yml")), ids=lambda path: path.stem)
def test_every_cluster_file_names_a_machine(path):
    """By its accelerator, or, of GPUs, by the machine types its comment names, all of which are in the table."""
    text = path.read_text(encoding="utf-8")
    cluster = YAML(typ="safe", pure=True).load(text)["cluster"]
    chip = parse(cluster["topology"]).chip.name.lower()
    if "accelerator" in cluster:
        assert settings.find_machine(cluster["accelerator"]).chip == chip
    else:
        stated = re.findall(r"a\d-\w+-\d+g", text)
        assert sorted(stated) == sorted(machine.name for machine in settings.machines() if machine.chip == chip)


@pytest.mark.parametrize("path", sorted((SHIPPED / "clusters").glob("*.yml")), ids=lambda path: path.stem)
def test_hosts_are_those_of_the_cluster_files_comment(path):
    text = path.read_text(encoding="utf-8")
    topology = parse(YAML(typ="safe", pure=True).load(text)["cluster"]["topology"])
    vms = re.search(r"; ([\d,]+) VMs? of (\d)", text)
    expected = (int(vms[1].replace(",", "")), int(vms[2])) if vms else (1, 8)
    assert (topology.chips // settings.chips_of_host(topology), settings.chips_of_host(topology)) == expected


@pytest.mark.parametrize("name", sorted(path.stem for path in (SHIPPED / "runs").glob("*-*-*.yml")))
def test_every_shipped_run_with_a_cluster_can_be_started(name):
    """tpu7x on Kubernetes only; all have their checkpoints in the bucket."""
    config, machine = settings.read(f"runs/{name}", None, BUCKET, [])
    answer = settings.describe(config, machine, gke=machine.api == "gke", queued=False)
    assert answer["API"] == ("gke" if machine.api == "gke" else "queued" if config.mesh.slices > 1 else "tpu")
    assert config.checkpoint.dir == f"{BUCKET}/{name}/checkpoints"
    assert answer["UNITS"] == config.mesh.slices
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,43}", answer["NAME"])


def test_the_machine_may_be_chosen_where_the_config_names_none():
    assert told("runs/quickstart", accelerator="v5p-8")["HOSTS"] == 1
    answer = told("runs/quickstart", accelerator="a4-highgpu-8g")
    assert (answer["ACCELERATOR"], answer["UNITS"], answer["CHIPS_A_HOST"]) == ("a4-highgpu-8g", 1, 8)


@pytest.mark.parametrize(
    ("cluster", "accelerator", "expected"),
    [
        ("cluster={topology: 'v5p:2x2x1'}", None, "v5p-8"),  # a config that names a shape alone
        ("cluster={topology: v5p-8}", None, "v5p-8"),
        ("cluster={topology: 'v5e:2x2', accelerator: null}", None, "v5litepod-4"),
        ("cluster={topology: v5e-4}", None, "v5litepod-4"),
        ("cluster=null", "v5e-4", "v5litepod-4"),
        ("cluster={topology: h100x8}", None, "a3-megagpu-8g"),
        ("cluster={topology: a3-highgpu-8g}", None, "a3-highgpu-8g"),
        ("cluster={topology: 'h100:1x8', accelerator: a3-highgpu-8g}", None, "a3-highgpu-8g"),
        ("cluster={topology: 'h100:1x8', accelerator: a3-highgpu-8g}", "a3-megagpu-8g", "a3-megagpu-8g"),
    ],
)
def test_a_machine_may_be_named_by_its_shape_or_as_it_is_rented(cluster, accelerator, expected):
    assert told("runs/quickstart", cluster, "train.global_batch=16", accelerator=accelerator)["ACCELERATOR"] == expected


def test_every_machine_type_of_the_table_is_one_of_the_names_that_topologies_have():
    vms = {machine.name: machine.chip for machine in settings.machines() if machine.api == "gce"}
    assert {name: parse(name).chip.name.lower() for name in vms} == vms


def test_extensions_need_an_image_that_has_their_packages():
    with pytest.raises(UserError, match=r"extensions = \[ext\]: needs packages that the hosts would lack.*give --image IMAGE"):
        settings.check_extensions(("ext",), "up", image=False)
    settings.check_extensions(("ext",), "up", image=True)
    settings.check_extensions(("ext",), "watch", image=False)
    settings.check_extensions(None, "up", image=False)


def test_a_checkpoint_folder_in_another_bucket_is_kept():
    config, _ = settings.read(V5P, None, BUCKET, ["checkpoint.dir=gs://other/c"])
    assert config.checkpoint.dir == "gs://other/c"


def test_runs_whose_names_a_cloud_does_not_take_do_not_meet():
    """a_b, a.b and A-B are three runs, and the same name is always the same machine."""
    names = ["a-b", "a_b", "a.b", "A-B", "x" * 38, "x" * 60, "x" * 61]
    slugs = [settings.slug(name) for name in names]
    assert len(set(slugs)) == len(names)
    assert slugs == [settings.slug(name) for name in names]
    assert slugs[0] == "a-b"
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,36}[a-z0-9])?", slug) for slug in slugs)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ([V5P], {"accelerator": "v5p-129"}, "accelerator = v5p-129: no v5p-129 is rented; near it there are v5p-64, v5p-128"),
        ([V5P], {"accelerator": "h200"}, "accelerator = h200: is no machine type of Google Cloud that is known here; use a3-ultragpu-8g."),
        ([V5P], {"accelerator": "a3-mega-8g"}, "no machine 'a3-mega-8g' is known; use a3-megagpu-8g"),
        ([V5P], {"accelerator": "p5.48xlarge"}, "p5.48xlarge: is no machine type of Google Cloud that is known here; use a3-megagpu-8g"),
        (
            [V5P, "cluster.topology=v5p:2x4x8", "cluster.accelerator=null"],
            {},
            "cluster.topology = v5p:2x4x8: is a shape that Cloud TPU has no name for",
        ),
        ([V5P], {"accelerator": "abacus"}, "no chip 'abacus' is known; use v4, v5e"),
        (["runs/llama3-8b-tpu7x-128"], {}, "tpu7x is not lent as Cloud TPU VMs, only through Kubernetes: add --gke"),
        (["runs/quickstart"], {}, "cluster is not set in runs/quickstart"),
        ([V5P, "checkpoint.dir=/disk"], {}, "checkpoint.dir = /disk: is on the disk of one machine"),
        ([V5P, "data.store=texts"], {}, "data.store = texts: is a folder of this machine, and 16 of the cloud would read it"),
        (["runs/quickstart", "cluster.topology=h100:2x8", "train.global_batch=16"], {}, "data.store = data/python-stdlib"),
        ([V5P, "run.name=a b"], {}, "run.name = a b"),
        ([V5P], {"bucket": ""}, "--bucket (none): must be gs://NAME"),
        ([V5P], {"accelerator": "a3-megagpu-8g"}, "cluster.topology = v5p:4x4x4: is not what a3-megagpu-8g is made of"),
        (["runs/quickstart", "cluster.topology=h100:1x4"], {}, "has 8 GPUs"),
        (["runs/quickstart", "cluster.topology=a100-80gb:1x8"], {}, "is not a known machine of Google Cloud"),
        (["runs/quickstart"], {"accelerator": "a3-megagpu-8g", "queued": True}, "--queued: a queue is lent for TPUs only"),
    ],
)
def test_bad_input(arguments, options, said):
    with pytest.raises(UserError, match=re.escape(said)):
        told(*arguments, **options)
