"""Translate a config and a machine's name to Google Cloud for `maxlm-gcp`: shell variables on stdout, the resolved config in a file.

`settings.py --out FILE [--accelerator NAME] [--bucket gs://B] [--gke] [--queued] [--image] [--extension MODULE] -- CONFIG key=value ...`. A
wrong input is one line and exit code 2, before anything is created.
"""

import argparse
import hashlib
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

try:
    from maxlm.base.errors import ConfigError
    from maxlm.base.paths import is_remote
    from maxlm.config import Config, UserError, extensions, load, rules
    from maxlm.config.loader import dump
    from maxlm.hardware import topologies
    from maxlm.hardware.topologies import Topology, TopologyError, either, is_tpu, near
except (ImportError, SyntaxError) as error:  # a package is missing, or Python is older than 3.11
    fix = "run make .venv/installed in the clone, or set MAXLM_PYTHON to a Python that has maxlm"
    sys.stderr.write(f"maxlm-gcp: {sys.executable} cannot import maxlm ({error}): {fix}.\n")
    sys.exit(2)

TABLE = Path(__file__).with_name("machines.tsv")
GPUS_A_VM = 8  # of every machine type in the table
LONGEST_NAME = 38  # with `maxlm-` before it and `-slice-00-000-abcde` of a JobSet's pod behind it, 63 characters
CREATING = ("up", "create", "restart")  # verbs that send code and config to hosts
RUN_DIR = "runs"  # on the host, where host.sh looks for it


@dataclass(frozen=True)
class Machine:
    """Machine type, a line of machines.tsv."""

    name: str
    chip: str
    api: str  # tpu: Cloud TPU VMs; gce: Compute Engine VMs; gke: neither, only Kubernetes
    image: str
    gke: str


def machines() -> list[Machine]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [Machine(*line.split("\t")) for line in lines if line and not line.startswith("#")]


def find_machine(name: str) -> Machine:
    """Find the machine that Google rents as `name`. Raises UserError with near names if there is none."""
    vms = [machine for machine in machines() if machine.api == "gce"]
    made = [machine for machine in vms if machine.chip == name.lower()]
    if not made:
        try:
            topology = topologies.parse(name)
        except TopologyError as error:
            raise UserError(f"accelerator = {name}: {error}.") from None
        made = [machine for machine in machines() if machine.chip == topology.chip.name.lower()]
        found = next((machine for machine in made if topology.is_tpu or machine.name == name.lower()), None)
        if found is not None:
            return found
    known = either([machine.name for machine in made or vms])
    raise UserError(f"accelerator = {name}: is no machine type of Google Cloud that is known here; use {known}.")


def read(name: str, accelerator: str | None, bucket: str, overrides: list[str]) -> tuple[Config, Machine]:
    """Return the config for the hosts, and its machine. Raises UserError."""
    own = [f"run.dir={RUN_DIR}"]
    if accelerator is not None:
        machine = find_machine(accelerator)
        topology = topologies.parse(accelerator)
        if topology.is_tpu:
            own.append(f"cluster={{topology: '{topology.name}', accelerator: null}}")
        elif load(name, [*overrides, *own]).config.cluster is None:
            own.append(f"cluster={{topology: '{topology.name}', accelerator: {machine.name}}}")
    config = load(name, [*overrides, *own]).config
    if config.cluster is None:
        raise UserError(
            f"cluster is not set in {name}, so the machine is unknown: extend a file of configs/clusters, or add --accelerator."
        )
    machine = find_machine(accelerator or config.cluster.accelerator or _machine_of(config))
    _check_stays(config, bucket)
    if config.checkpoint.dir is None and bucket:
        config = load(name, [*overrides, *own, f"checkpoint.dir={bucket}/{config.run.name}/checkpoints"]).config
    return config, machine


def _machine_of(config: Config) -> str:
    """Name of the first machine type with the chip of `cluster.topology`."""
    topology = rules.topology_of(config)
    if topology.is_tpu:
        return near(topology.chip, topology.chips // topology.slices, most=1)[0]
    names = [machine.name for machine in machines() if machine.chip == topology.chip.name.lower()]
    if not names:
        raise ConfigError(
            "cluster.topology", topology.name, "is not a known machine of Google Cloud", "use h100:1x8, or name a TPU's accelerator"
        )
    return names[0]


def _check_stays(config: Config, bucket: str) -> None:
    """Check that files which must outlive a machine, or are shared, are in a bucket. Raises ConfigError."""
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/[\w.-]+)*", bucket):
        raise UserError(
            f"--bucket {bucket or '(none)'}: must be gs://NAME of 3 or more of a-z, 0-9, - . _: code and files of the run go there."
        )
    saved = config.checkpoint.dir
    if saved is not None and not is_remote(saved):
        fix = f"leave it out (then {bucket}/{config.run.name}/checkpoints), or name a bucket"
        raise ConfigError("checkpoint.dir", saved, "is on the disk of one machine, which ends with it and which no other host sees", fix)
    hosts = rules.topology_of(config).hosts
    for store in config.data.stores:
        if not is_remote(store) and (hosts > 1 or config.data.prepare is None):
            fix = "prepare it into a bucket once, with `maxlm data prepare CONFIG data.store=gs://...`"
            raise ConfigError("data.store", store, f"is a folder of this machine, and {hosts} of the cloud would read it", fix)


def check_extensions(names: Sequence[str] | None, verb: str, *, image: bool) -> None:
    """Check that the hosts will have the packages of extensions. Raises ConfigError."""
    if names and not image and verb in CREATING:
        rule = "needs packages that the hosts would lack: they install maxlm alone"
        raise ConfigError(extensions.FIELD, list(names), rule, "install them in an image (gcp/Dockerfile) and give --image IMAGE")


def slug(run: str) -> str:
    """Return a valid resource name of Google Cloud, unique for each run."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:LONGEST_NAME]
    same = plain == run
    return plain if same else f"{plain[: LONGEST_NAME - 7].strip('-') or 'run'}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"


def chips_of_host(topology: Topology) -> int:
    """Chips per VM: 8 for a v5e or v6e slice of 8 chips, else at most 4; of GPU nodes by their name."""
    chips = topology.chips // topology.slices
    if not is_tpu(topology.chip):
        return topology.sides[-1]
    return chips if chips <= 4 or (chips == 8 and len(topology.sides) == 2) else 4


def describe(config: Config, machine: Machine, *, gke: bool, queued: bool) -> dict[str, str | int]:
    """Return the variables of maxlm-gcp. Raises UserError for a machine that the API does not provide."""
    topology = rules.topology_of(config)
    assert config.cluster is not None
    if not re.fullmatch(r"[\w.-]+", config.run.name, re.ASCII):
        rule = "becomes a name in a bucket and in manifests: letters, digits, `.`, `_` and `-` only"
        raise ConfigError("run.name", config.run.name, rule, "choose another")
    chip = topology.chip.name.lower()
    if chip != machine.chip:
        fix = f"it has {machine.chip}: take another, or another cluster.topology"
        raise ConfigError("cluster.topology", topology.name, f"is not what {machine.name} is made of", fix)
    tpu = is_tpu(topology.chip)
    if tpu and not gke and topologies.accelerator(topology) is None:
        shapes = ", ".join(near(topology.chip, topology.chips // topology.slices))
        raise ConfigError("cluster.topology", topology.name, "is a shape that Cloud TPU has no name for", f"use one of {shapes}, or --gke")
    if machine.api == "gke" and not gke:
        raise UserError(
            f"{machine.name} is not lent as Cloud TPU VMs, only through Kubernetes: add --gke and --image IMAGE (docs/how-to/cloud.md)."
        )
    if not tpu and topology.sides[-1] != GPUS_A_VM:
        raise ConfigError("cluster.topology", topology.name, f"{machine.name} has {GPUS_A_VM} GPUs", f"end it with x{GPUS_A_VM}")
    if queued and not tpu:
        raise UserError(f"--queued: a queue is lent for TPUs only, not for {machine.name}: use --spot or --reservation NAME.")
    hosts = topology.hosts if not tpu else topology.chips // chips_of_host(topology)
    units = topology.slices if tpu else hosts  # what is created: slices, or VMs
    api = "gke" if gke else "queued" if tpu and (queued or topology.slices > 1) else machine.api
    return {
        "RUN": config.run.name,
        "NAME": f"maxlm-{slug(config.run.name)}",
        "API": api,
        "KIND": "tpu" if tpu else "gpu",
        "ACCELERATOR": topologies.accelerator(topology) or machine.name,
        "IMAGE_FAMILY": machine.image,
        "GKE_ACCELERATOR": machine.gke,
        "TOPOLOGY": "x".join(map(str, topology.sides)),
        "UNITS": units,
        "HOSTS": hosts,
        "CHIPS_A_HOST": chips_of_host(topology),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--accelerator")
    parser.add_argument("--bucket", default="")
    parser.add_argument("--gke", action="store_true")
    parser.add_argument("--queued", action="store_true")
    parser.add_argument("--image", action="store_true")
    parser.add_argument("--verb", default="")
    parser.add_argument("--extension", action="append", default=[])
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    try:
        extensions.accept(options.extension)
        config, machine = read(options.config, options.accelerator, options.bucket.rstrip("/"), options.overrides)
        check_extensions(config.extensions, options.verb, image=options.image)
        variables = describe(config, machine, gke=options.gke, queued=options.queued)
    except UserError as error:
        sys.stderr.write(f"maxlm-gcp: {error}\n")
        return 2
    options.out.write_text(dump(config), encoding="utf-8")
    sys.stdout.writelines(f"{name}={shlex.quote(str(value))}\n" for name, value in variables.items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
