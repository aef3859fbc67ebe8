"""Detection of a process's cluster: from the command line, the launcher's environment, or a Cloud TPU VM's metadata server.

Uses no device, and no network but that server. It reads the variables of GKE's TPU webhook, Open MPI, MPICH and Intel MPI (PMI), Slurm's
srun, Kubeflow's JAXJob, and JobSet with Kubernetes' indexed jobs, as their manuals name them. Of launchers inside each other the innermost
started the process: mpirun's daemons, started by srun, pass the variables of that srun on. An environment of several processes from any
other launcher is refused, since each would otherwise train the whole model by itself.
"""

import ipaddress
import itertools
import json
import re
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from maxlm.base.errors import SHOWN, UserError
from maxlm.cluster.message_socket import MAX_PROCESSES

TPU_PORT = 8482  # of process 0 where the launcher names only a host: jax's own default
COORDINATOR, COUNT, PROCESS = "coordinator", "process_count", "process_id"
VARIABLES = {COORDINATOR: "JAX_COORDINATOR_ADDRESS", COUNT: "JAX_NUM_PROCESSES", PROCESS: "JAX_PROCESS_ID"}
HOSTS = "MAXLM_HOSTS"  # names of the hosts of all processes, in order
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # of a host's name; sites have underscores
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
# Variables of MPI's launchers: (processes, number of this one, among how many on its node, number there, name)
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "Open MPI"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "an MPI launcher (PMI)"),
)
# (processes, number of this one) in variables of launchers that are not detected, or of detected ones that set no more than these
_UNDETECTED = (
    ("WORLD_SIZE", "RANK", "torchrun, PyTorchJob or accelerate"),
    ("PET_NNODES", "PET_NODE_RANK", "Kubeflow's torch runtime"),
    ("NNODES", "NODE_RANK", "a launcher of one process a node"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI"),
    ("PMI_SIZE", "PMI_RANK", "an MPI launcher"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MVAPICH"),
    ("PALS_SIZE", "PALS_RANKID", "PALS"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "Flux"),
    ("NUM_PROCESSES", "PROCESS_ID", "JAXJob"),
    ("JAX_NUM_PROCESSES", "JOB_COMPLETION_INDEX", "an indexed job of Kubernetes"),
    ("AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX", "AWS Batch"),
    ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SkyPilot"),
    ("SM_HOSTS", "SM_CURRENT_HOST", "SageMaker"),
    ("CLUSTER_SPEC", "", "Vertex AI"),
    ("TF_CONFIG", "", "TFJob or Vertex AI"),
)
_COMMON_NAMES = {"NNODES", "NUM_PROCESSES"}  # set by people's own scripts, too: they count only together with the other variable
Metadata = Callable[[str], str | None]  # attribute of the metadata server -> its value


@dataclass(frozen=True)
class ProcessSpec:
    """Process number `process` of `count`; number 0 waits for the others at `address`, host:port."""

    count: int
    process: int
    address: str
    launcher: str  # the launcher, and how it was detected
    devices: tuple[int, ...] | None = None  # indices of this process's GPUs among the visible ones; None: all
    hosts: tuple[str, ...] = ()  # names by process number, at which they can be reached; () where the launcher does not tell
    together: int = 1  # processes in a row that are of use only all together, of a slice or a node

    def __str__(self) -> str:
        share = "" if self.devices is None else f", GPU {' '.join(map(str, self.devices))}"
        return f"process {self.process} of {self.count} at {self.address}{share}, from {self.launcher}"


def process_label(host: str, process: int) -> str:
    """Return the label of a process in messages."""
    return f"{host} (process {process})"


def split_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split `key=value` arguments into (settings of the cluster, the rest): the cluster is not part of the config.

    Raises UserError: a setting is given twice.
    """
    named: dict[str, str] = {}
    rest = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or name not in VARIABLES:
            rest.append(argument)
        elif named.setdefault(name, value) != value:
            raise UserError(f"{name} is given twice, as {_short(named[name])} and as {_short(value)}: give it once.")
    return named, rest


def find(named: Mapping[str, str], environ: Mapping[str, str], ask: Metadata, n_gpus: int) -> ProcessSpec | None:
    """Return the specification of this process, or None if it is alone.

    `named`: any of VARIABLES from the command line; the launcher's environment has the rest. `ask`: the metadata server; `n_gpus`: of this
    machine. Raises UserError: a setting is missing or invalid.
    """
    given = dict(named) or {name: environ[variable] for name, variable in VARIABLES.items() if environ.get(variable)}
    spelling = {name: variable if given and not named else name for name, variable in VARIABLES.items()}
    source = "the command line" if named else "the environment"
    launched = None
    if len(given) < len(VARIABLES):
        launched = _launched(environ, ask)
        if launched is None and not given:
            _refuse_undetected(environ)
            return None
    rest = {} if launched is None else {COORDINATOR: launched.address, COUNT: str(launched.count), PROCESS: str(launched.process)}
    merged = {name: value for name, value in {**rest, **given}.items() if value or name in given}
    if merged.get(COUNT) == "1":  # alone
        merged = {COORDINATOR: "localhost:1", PROCESS: "0", **merged}
    missing = [spelling[name] for name in VARIABLES if name not in merged]
    if missing:
        problem = f"{launched.launcher} does not set" if launched is not None else f"{spelling[next(iter(given))]} is set, without"
        raise UserError(f"{problem} {' nor '.join(missing)}: add {' '.join(f'{name}=...' for name in missing)}.")
    if launched is not None:
        source = f"{launched.launcher}{' and the command line' if named else ''}"
    spec = _parse_spec(merged, spelling, source)
    if spec.count == 1:
        return None
    if launched is not None and launched.count == spec.count:
        spec = replace(spec, hosts=launched.hosts, together=launched.together)
    if environ.get(HOSTS):
        spec = replace(spec, hosts=_named_hosts(environ[HOSTS], spec.count))
    return _share_gpus(spec, environ, n_gpus)


def host_and_port(address: str) -> tuple[str, int]:
    """Split an `address` into host and port; an IPv6 address without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def service_address(address: str, bind: str = "") -> str:
    """Address of jax's own service for the process group at `address`: one port above, on the same host or at its address `bind`."""
    host, port = host_and_port(address)
    host = bind or host
    return f"[{host}]:{port + 1}" if ":" in host else f"{host}:{port + 1}"


def metadata(name: str, seconds: float = 2.0) -> str | None:
    """Return an attribute of Google Cloud's metadata server; None without a server or such an attribute."""
    request = urllib.request.Request(METADATA + name, headers={"Metadata-Flavor": "Google"})  # noqa: S310 -- a fixed address
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310
            return str(answer.read().decode())
    except (OSError, ValueError):
        return None


def _parse_spec(settings: Mapping[str, str], spelling: Mapping[str, str], launcher: str) -> ProcessSpec:
    address, count, process = settings[COORDINATOR], settings[COUNT], settings[PROCESS]
    host, _, port = address.rpartition(":")
    if not (_is_host(host) and re.fullmatch("[0-9]{1,5}", port)):
        raise UserError(
            f"{spelling[COORDINATOR]} = {_short(address)}: must be HOST:PORT, where process 0 waits for the others; as in node0:8476."
        )
    if not 0 < int(port) < 65535:
        raise UserError(f"{spelling[COORDINATOR]} = {address}: the port must be 1 to 65534; the next one is jax's.")
    if not (re.fullmatch("[0-9]{1,9}", count) and 0 < int(count) <= MAX_PROCESSES):
        raise UserError(f"{spelling[COUNT]} = {_short(count)}: must be the number of all processes, 1 to {MAX_PROCESSES}.")
    if not (re.fullmatch("[0-9]{1,9}", process) and int(process) < int(count)):
        raise UserError(
            f"{spelling[PROCESS]} = {_short(process)}: must be a number below {spelling[COUNT]}, {int(count)}; processes count from 0."
        )
    return ProcessSpec(int(count), int(process), address, launcher)


def _named_hosts(text: str, count: int) -> tuple[str, ...]:
    hosts = tuple(name.strip() for name in text.split(","))
    if len(hosts) != count or not all(map(_is_host, hosts)):
        raise UserError(f"{HOSTS} = {_short(text)}: must name the hosts of all {count} processes in their order, with commas between them.")
    return hosts


def _short(value: str) -> str:
    return value if len(value) <= SHOWN else value[: SHOWN - 3] + "..."


def _is_host(host: str) -> bool:
    """True if `host` is a valid name or address; an IPv6 address is in brackets."""
    inner = host[1:-1] if host.startswith("[") and host.endswith("]") else ""
    try:
        address = ipaddress.IPv6Address(inner) if inner else ipaddress.IPv4Address(host)
    except ValueError:
        return not inner and len(host) <= 253 and _HOST.fullmatch(host) is not None and not re.fullmatch("[0-9.]+", host)
    return not (address.is_unspecified or address.is_multicast)


def _host_of(entry: str) -> str:
    """The host of an entry with or without a port; an IPv6 address is in brackets, or is the whole entry and is put in brackets."""
    if entry.startswith("["):
        return entry.partition("]")[0] + "]"
    return f"[{entry}]" if entry.count(":") > 1 else entry.partition(":")[0]


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    """Parse a launcher's variable; `default` where it is not set. Raises UserError."""
    value = environ.get(name) or str(default)
    if not re.fullmatch("[0-9]{1,18}", value):
        raise UserError(f"{name} = {_short(value)}: must be a number, 0 or more; the launcher sets it.")
    return int(value)


def _launched(environ: Mapping[str, str], ask: Metadata) -> ProcessSpec | None:
    """Specification by the innermost launcher; None if no launcher is detected."""
    if environ.get("TORCHELASTIC_RUN_ID") and _count(environ.get("WORLD_SIZE", "")) > 1:  # torchrun, whatever started that
        return None
    return next(filter(None, (look(environ) for look in (_tpu_pod, _mpi, _slurm, _jaxjob, _indexed_job))), None) or _tpu_vm(environ, ask)


def _refuse_undetected(environ: Mapping[str, str]) -> None:
    """Raise UserError if `environ` belongs to one of several processes of a launcher that is not detected."""
    for size, rank, launcher in _UNDETECTED:
        count, process = _count(environ.get(size, "")), _count(environ.get(rank, ""))
        if process > 0 or (count > 1 and (size not in _COMMON_NAMES or environ.get(rank))):
            found = " and ".join(f"{name} = {_short(environ[name])}" for name in (size, rank) if environ.get(name))
            known = f"process_count={count if count > 1 else '...'} process_id={process if environ.get(rank, '').isdecimal() else '...'}"
            raise UserError(
                f"{found} ({launcher}): several processes were started, and no launcher that maxlm detects says where they meet: add "
                f"coordinator=HOST:PORT {known}, or process_count=1 to run alone."
            )


def _count(text: str) -> int:
    """A number of processes, or the number of hosts in a list or cluster specification in JSON; 0 for other text."""
    if re.fullmatch("[0-9]{1,9}", text):
        return int(text)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return 0
    groups = found.get("cluster", found) if isinstance(found, dict) else found
    lists = groups.values() if isinstance(groups, dict) else [groups]
    return sum(len(hosts) for hosts in lists if isinstance(hosts, list))


def _tpu_pod(environ: Mapping[str, str]) -> ProcessSpec | None:
    """Detect TPU slices on GKE: its webhook names all hosts in every container."""
    name = next((name for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES") if environ.get(name)), "")  # in jax's order
    hosts = [_host_of(host) for host in environ.get(name, "").split(",") if host]
    return _of_slices(hosts, _number(environ, "TPU_WORKER_ID"), environ, f"{name} (Cloud TPU)") if hosts else None


def _tpu_vm(environ: Mapping[str, str], ask: Metadata) -> ProcessSpec | None:
    """Detect a host of a slice of Cloud TPU VMs, from the metadata server."""
    endpoints = ask("worker-network-endpoints")
    if not endpoints:
        return None
    hosts = [_host_of(worker.split(":", 2)[-1]) for worker in endpoints.split(",")]  # a host, or name:id:address
    megascale = dict(re.findall(r"^(MEGASCALE_\w+): *'?([^'\n]*)'?$", ask("tpu-env") or "", re.MULTILINE))
    worker = _number({"agent-worker-number": ask("agent-worker-number") or ""}, "agent-worker-number")
    return _of_slices(hosts, worker, {**megascale, **environ}, "the metadata server (Cloud TPU VM)")


def _of_slices(hosts: Sequence[str], worker: int, megascale: Mapping[str, str], launcher: str) -> ProcessSpec | None:
    """Specification in one or several slices; processes are numbered through one slice after another. None: a host alone."""
    slices, number = _number(megascale, "MEGASCALE_NUM_SLICES", 1), _number(megascale, "MEGASCALE_SLICE_ID")
    if len(hosts) * slices == 1:
        return None
    first = _host_of(megascale.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0])
    many = f", slice {number} of {slices}" if slices > 1 else ""
    together = len(hosts)
    return ProcessSpec(together * slices, number * together + worker, f"{first}:{TPU_PORT}", launcher + many, together=together)


def _slurm(environ: Mapping[str, str]) -> ProcessSpec | None:
    """Detect a task of an srun step, also over components of a heterogeneous job. An sbatch script itself has no step, and is alone."""
    if any(_number(environ, size) == 1 for size, *_ in _MPI_VARIABLES):  # mpirun -n 1, which has started the step for its daemons
        return None
    count = _number(environ, "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS", 1)
    nodes = environ.get("SLURM_STEP_NODELIST")
    if not nodes or "SLURM_PROCID" not in environ or (count == 1 and _number(environ, "SLURM_PROCID") == 0):
        return None
    port = _port(_number(environ, "SLURM_JOB_ID"))
    step = f"srun (Slurm job {environ.get('SLURM_JOB_ID', '?')}, step {environ.get('SLURM_STEP_ID', '?')})"
    hosts, together = _hosts_of_tasks(_all_nodes(nodes), _tasks_by_node(environ), count, environ.get("SLURM_DISTRIBUTION", ""))
    return ProcessSpec(count, _number(environ, "SLURM_PROCID"), f"{first_node(nodes)}:{port}", step, hosts=hosts, together=together)


def _port(job: int) -> int:
    """Port of a job's process 0, followed by jax's; different for two jobs on a node."""
    return 61440 + job % 2048 * 2


def first_node(nodes: str, variable: str = "SLURM_STEP_NODELIST") -> str:
    """Return the first host of Slurm's list, the value of `variable`: `node007` of `node[007-015,020],other`. Raises UserError."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if match is None:
        raise UserError(f"{variable} = {_short(nodes)}: must be a list of hosts as Slurm writes it, such as node[007-015,020].")
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", match[0])


def _all_nodes(nodes: str) -> list[str]:
    """All hosts of Slurm's list, in order; the first MAX_PROCESSES of them."""
    found: list[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        names = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", entry):
            parts = [text] if text else [number for part in ranges.split(",") for number in _numbers(part)]
            names = list(itertools.islice((name + part for name in names for part in parts), MAX_PROCESSES))
        found += names
    return found[:MAX_PROCESSES]


def _numbers(text: str) -> list[str]:
    """`007` to `015` of `007-015`, as they are written; a single number is itself."""
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and len(last) < 10):
        return [text]
    return [f"{number:0{len(first)}}" for number in range(int(first), min(int(last), int(first) + MAX_PROCESSES) + 1)]


def _hosts_of_tasks(nodes: Sequence[str], tasks: Sequence[int], count: int, distribution: str) -> tuple[tuple[str, ...], int]:
    """(host of every task, tasks of a node), if the nodes have equally many, one node after another (Slurm's block distribution, which is
    its default).
    """
    each = count // len(nodes) if nodes and count % len(nodes) == 0 else 0
    in_order = not distribution or distribution.startswith("block") or (each == 1 and distribution.startswith("cyclic"))
    if not (each and in_order) or (tasks and set(tasks) != {each}):
        return (), 1
    return tuple(node for node in nodes for _ in range(each)), each


def _mpi(environ: Mapping[str, str]) -> ProcessSpec | None:
    """Detect a process of mpirun or mpiexec.

    Process 0 is on the host of mpirun, which Open MPI 4 names; in a Slurm job, on its first node; or on this host, with all others.
    """
    for size, rank, local_size, _, name in _MPI_VARIABLES:
        count, launcher = _number(environ, size), f"{rank} ({name})"
        task = name != "Open MPI" and (environ.get("SLURM_STEP_NUM_TASKS"), environ.get("SLURM_PROCID")) == (str(count), environ.get(rank))
        if count <= 1 or not environ.get(rank) or task:  # srun --mpi=pmi2 sets both
            continue
        uri = re.match(r"(\d+)\.\d+;tcp6?://(?:\[([^,\]]+)|([^,:]+))", environ.get("OMPI_MCA_orte_hnp_uri", ""))  # IPv6 in brackets
        nodes, host, port = environ.get("SLURM_JOB_NODELIST", ""), "", _port(_number(environ, "SLURM_JOB_ID"))
        if uri:
            host, port = _host_of(uri[2] or uri[3]), _port(int(uri[1]) // 4096)
        elif _number(environ, local_size) == count:
            host, port = "localhost", _port(zlib.crc32(environ.get("PMIX_NAMESPACE", "").encode()))
        elif nodes:
            host, launcher = first_node(nodes, "SLURM_JOB_NODELIST"), f"{launcher} in Slurm job {environ.get('SLURM_JOB_ID', '?')}"
        return ProcessSpec(count, _number(environ, rank), f"{host}:{port}" if host else "", launcher)
    return None


def _jaxjob(environ: Mapping[str, str]) -> ProcessSpec | None:
    """Detect a pod of Kubeflow's JAXJob (training operator). TrainJob, its successor, sets VARIABLES themselves."""
    host, port = environ.get("COORDINATOR_ADDRESS", ""), environ.get("COORDINATOR_PORT", "")
    if not (host and environ.get("NUM_PROCESSES") and environ.get("PROCESS_ID")):
        return None
    address = f"{_host_of(host)}:{port}" if port else host
    return ProcessSpec(_number(environ, "NUM_PROCESSES"), _number(environ, "PROCESS_ID"), address, "PROCESS_ID (JAXJob)")


def _indexed_job(environ: Mapping[str, str]) -> ProcessSpec | None:
    """Detect a pod of a JobSet or indexed job: the manifest sets the count; JobSet's naming rule gives the first host."""
    process, count = environ.get("JOB_COMPLETION_INDEX", ""), environ.get("JAX_NUM_PROCESSES", "")
    if not (process and count):  # alone, for all that is known
        return None
    jobset, job = environ.get("JOBSET_NAME"), environ.get("REPLICATED_JOB_NAME")
    address = f"{jobset}-{job}-0-0.{jobset}:{TPU_PORT}" if jobset and job else ""
    return ProcessSpec(
        _number(environ, "JAX_NUM_PROCESSES"),
        _number(environ, "JOB_COMPLETION_INDEX"),
        address,
        f"JOB_COMPLETION_INDEX ({'JobSet ' + jobset if jobset else 'Kubernetes'})",
    )


def _share_gpus(spec: ProcessSpec, environ: Mapping[str, str], n_gpus: int) -> ProcessSpec:
    """Assign `spec` its part of the node's GPUs if the launcher started several processes there and bound none to its own."""
    local, on_node = _local_rank_and_size(environ)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    n_visible = n_gpus if visible is None else len([one for one in visible.split(",") if one.strip()])
    if on_node <= 1 or n_visible < on_node:  # alone on the node, or bound by the launcher
        return spec
    if n_visible % on_node:
        raise UserError(f"{on_node} processes were started on a node of {n_visible} GPUs: start one for each GPU, or one for the node.")
    share = n_visible // on_node
    return replace(spec, devices=tuple(range(local * share, (local + 1) * share)))


def _local_rank_and_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return (index of this process among the processes of its launcher on this node, their number)."""
    for *_, size, rank, _ in _MPI_VARIABLES:
        if environ.get(rank) and environ.get(size):
            return _number(environ, rank), _number(environ, size)
    if "SLURM_LOCALID" in environ and environ.get("SLURM_STEP_TASKS_PER_NODE"):
        tasks = _tasks_by_node(environ)
        return _number(environ, "SLURM_LOCALID"), tasks[min(_number(environ, "SLURM_NODEID"), len(tasks) - 1)] if tasks else 1
    return 0, 1


def _tasks_by_node(environ: Mapping[str, str]) -> list[int]:
    """Numbers of tasks of a step's nodes; [] if Slurm does not say."""
    tasks: list[int] = []
    for each, times in re.findall(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):  # 8(x4),7
        tasks += [int(each)] * int(times or 1)
    return tasks
