"""Detection of a process's cluster from each launcher's environment."""

import json
import re
from pathlib import Path

import pytest

from maxlm.base.errors import UserError
from maxlm.cluster.environment import HOSTS, VARIABLES, find, first_node, split_arguments

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[007-009],big1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_NTASKS": "99",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}
GKE_TPU = {"TPU_WORKER_HOSTNAMES": "pool-0.svc,pool-1.svc", "TPU_WORKER_ID": "1"}
SLICES = {"MEGASCALE_NUM_SLICES": "4", "MEGASCALE_SLICE_ID": "2", "MEGASCALE_COORDINATOR_ADDRESS": "first.svc:8080"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
JOBSET = {"JOB_COMPLETION_INDEX": "3", "JAX_NUM_PROCESSES": "4", "JOBSET_NAME": "llama", "REPLICATED_JOB_NAME": "worker"}
EXPLICIT = {"coordinator": "node0:8476", "process_count": "4", "process_id": "2"}
ENVIRONMENT = {"JAX_COORDINATOR_ADDRESS": "[fe80::1]:8476", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
VM = {"worker-network-endpoints": "unknown:unknown:10.0.0.4,unknown:unknown:10.0.0.5", "agent-worker-number": "1"}


def look(environ=(), named=(), says=(), n_gpus=0):
    return find(dict(named), dict(environ), dict(says).get, n_gpus)


@pytest.mark.parametrize(
    ("environ", "named", "says", "where", "launcher"),
    [
        ({}, EXPLICIT, {}, (4, 2, "node0:8476"), "the command line"),
        (SLURM, EXPLICIT, {}, (4, 2, "node0:8476"), "the command line"),
        (ENVIRONMENT, {}, {}, (2, 1, "[fe80::1]:8476"), "the environment"),
        (SLURM, {}, {}, (16, 11, "gpu007:61442"), "Slurm job 4097, step 0"),
        (SLURM, {"coordinator": "head:9000"}, {}, (16, 11, "head:9000"), "and the command line"),
        (GKE_TPU, {}, {}, (2, 1, "pool-0.svc:8482"), "TPU_WORKER_HOSTNAMES"),
        ({**GKE_TPU, "TPU_PROCESS_ADDRESSES": "h0:8471,h1:8471"}, {}, {}, (2, 1, "h0:8482"), "TPU_PROCESS_ADDRESSES"),
        ({**GKE_TPU, **SLICES}, {}, {}, (8, 5, "first.svc:8482"), "slice 2 of 4"),
        (OPEN_MPI, {}, {}, (8, 5, "10.96.0.1:63808"), "OMPI_COMM_WORLD_RANK (Open MPI)"),
        ({"PMI_SIZE": "3", "PMI_RANK": "2"}, {"coordinator": "a:1"}, {}, (3, 2, "a:1"), "PMI_RANK"),
        (JOBSET, {}, {}, (4, 3, "llama-worker-0-0.llama:8482"), "JobSet llama"),
        ({"JOB_COMPLETION_INDEX": "0", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "a:1"}, {}, {}, (2, 0, "a:1"), "Kubernetes"),
        ({}, {}, VM, (2, 1, "10.0.0.4:8482"), "metadata server"),
        ({}, {}, {**VM, "worker-network-endpoints": "h0,h1"}, (2, 1, "h0:8482"), "metadata server"),
        (
            {},
            {},
            {**VM, "tpu-env": "ZONE: 'x'\n" + "".join(f"{k}: '{v}'\n" for k, v in SLICES.items())},
            (8, 5, "first.svc:8482"),
            "slice 2",
        ),
    ],
)
def test_every_launcher_is_understood(environ, named, says, where, launcher):
    place = look(environ, named, says)
    assert (place.count, place.process, place.address) == where
    assert launcher in str(place)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, {}),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, {}),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16"}, {}),  # the sbatch script itself
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, {}),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, {}),
        ({"JOB_COMPLETION_INDEX": "0"}, {}),
        ({}, {"worker-network-endpoints": "h0", "agent-worker-number": "0"}),
    ],
)
def test_a_process_alone_is_alone(environ, says):
    assert look(environ, says=says) is None


CASES = json.loads((Path(__file__).parents[1] / "cases/cluster/environments.json").read_text(encoding="utf-8"))
OPEN_MPI_IN_SLURM, JAXJOB, UNKNOWN = CASES.values()
# As Open MPI 4.1, Hydra 4.0 and Slurm 22.05 set them: of two tasks a node on n1 to n3, and of a job with n1 and n[2-3] as components
OPEN_MPI_5 = {**{name: value for name, value in OPEN_MPI.items() if "orte" not in name}, "PMIX_NAMESPACE": "prterun-node0-4711@1"}
STEP_OF_DAEMONS = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "6", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
HETEROGENEOUS = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_ID_HET_GROUP_1": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
    "SLURM_NTASKS_HET_GROUP_1": "2",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}


def test_every_row_of_the_cases_is_right():
    said = {name: str(look(OPEN_MPI_IN_SLURM[name], n_gpus=8)) for name in ("rank 0", "rank 3")}
    right = re.fullmatch(r"(process 0 of 6) and (process 3 of 6), (Open MPI), coordinator (.*)", OPEN_MPI_IN_SLURM["right"])
    assert right is not None
    for rank, gpus, process in (("rank 0", "0 1 2 3", right[1]), ("rank 3", "4 5 6 7", right[2])):
        assert said[rank].startswith(f"{process} at {right[4]}:61440, GPU {gpus}, from ") and right[3] in said[rank]
    found = look(JAXJOB["variables"])
    assert f"process {found.process} of {found.count} at {found.address}" == JAXJOB["right"]
    assert UNKNOWN["right"] == "refused with one line that names the variables; never a run by itself"
    with pytest.raises(UserError, match=r"^WORLD_SIZE = 4 and RANK = 1 .* process_count=4 process_id=1") as error:
        look(UNKNOWN["variables"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("environ", "where", "launcher", "gpu"),
    [
        ({**STEP_OF_DAEMONS, **HYDRA}, (6, 3, "n1:61446"), "PMI_RANK (an MPI launcher (PMI)) in Slurm job 3", (4, 5, 6, 7)),
        ({**STEP_OF_DAEMONS, **OPEN_MPI_5}, (8, 5, "n1:61446"), "Open MPI) in Slurm job 3", (2, 3)),
        ({**OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, (8, 5, "localhost:63792"), "Open MPI", (1,)),
        ({**SLURM, "PMI_RANK": "11", "PMI_SIZE": "16"}, (16, 11, "gpu007:61442"), "srun (Slurm job 4097, step 0)", (3,)),  # --mpi=pmi2
        (HETEROGENEOUS, (4, 3, "n1:61442"), "srun (Slurm job 1, step 0)", None),
        ({**HETEROGENEOUS, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}, (4, 1, "n1:61442"), "srun", (4, 5, 6, 7)),
        ({**JAXJOB["variables"], **OPEN_MPI}, (8, 5, "10.96.0.1:63808"), "Open MPI", (2, 3)),  # the innermost
        ({**UNKNOWN["variables"], **SLURM}, (16, 11, "gpu007:61442"), "srun", (3,)),  # exported by a script for other programs
    ],
)
def test_of_launchers_in_launchers_the_innermost_counts(environ, where, launcher, gpu):
    place = look(environ, n_gpus=8)
    assert (place.count, place.process, place.address, place.devices) == (*where, gpu)
    assert launcher in str(place)


CHOSEN = '{"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222", "c:2222"]}, "task": {"type": "workerpool1", "index": 0}}'
UNDETECTED = {
    "torchrun": {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
    "torchrun in srun": {**SLURM, "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "128", "RANK": "90"},
    "no number": {"WORLD_SIZE": "4"},
    "Kubeflow's torch runtime": {"PET_NNODES": "3", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job"},
    "an elastic one": {"PET_NNODES": "1:3", "PET_NODE_RANK": "1"},
    "no size of Open MPI": {"OMPI_COMM_WORLD_RANK": "1"},
    "no rank of PMI": {"PMI_SIZE": "2"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"},
    "Flux": {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"},
    "JAXJob without its address": {"NUM_PROCESSES": "2", "PROCESS_ID": "0"},
    "an indexed job without its size": {"JOB_COMPLETION_INDEX": "1"},
    "AWS Batch": {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0"},
    "SkyPilot": {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0"},
    "SageMaker": {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-1"},
    "Vertex AI": {"CLUSTER_SPEC": CHOSEN},
    "TFJob": {"TF_CONFIG": CHOSEN.replace("workerpool0", "chief").replace("workerpool1", "worker")},
}


@pytest.mark.parametrize("launcher", UNDETECTED)
def test_of_several_processes_none_runs_alone(launcher):
    """Not unless it says that it means to; and with what the line asks for, it runs with the others."""
    environ = UNDETECTED[launcher]
    with pytest.raises(UserError) as error:
        look(environ)
    said = str(error.value)
    assert any(said.startswith(f"{name} = {environ[name][:50]}") for name in environ)
    assert said.isprintable() and len(said) < 400
    assert look(environ, {"process_count": "1"}) is None
    added = {name: re.search(rf"{name}=(\S+?),? ", said)[1] for name in ("process_count", "process_id")}
    asked = {"coordinator": "a:1", **{name: value if value.isdecimal() else str(9 * ("count" in name)) for name, value in added.items()}}
    assert look(environ, asked).count == int(asked["process_count"]) > 1


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "big", "RANK": ""},
        {"NUM_PROCESSES": "1", "PROCESS_ID": "0", "COORDINATOR_ADDRESS": "job-worker-0", "COORDINATOR_PORT": "6666"},
        {"SM_HOSTS": '["algo-1"]'},
        {"NUM_PROCESSES": "8", "NNODES": "2"},  # of a script, for something else
        {"SM_HOSTS": "[" * 10_000},
        {"TF_CONFIG": '{"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}}'},
        {"TF_CONFIG": "null", "CLUSTER_SPEC": "{}"},
        {**STEP_OF_DAEMONS, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},  # mpirun -n 1 on several nodes
    ],
)
def test_one_process_of_any_launcher_is_alone(environ):
    assert look(environ) is None


def test_a_step_of_one_task_has_no_second():
    """As a component of a heterogeneous job would have it, if Slurm counted tasks by component and numbered them through all."""
    with pytest.raises(UserError, match="process_id = 1: must be a number below process_count, 1"):
        look({**HETEROGENEOUS, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "1"})


@pytest.mark.parametrize(
    ("environ", "n_gpus", "devices"),
    [
        (SLURM, 8, (3,)),  # a process a GPU
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8,4(x2)"}, 8, (6, 7)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_LOCALID": "0"}, 8, None),  # a process a node has them all
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "0"}, 8, None),  # srun bound each to its own
        (SLURM, 0, None),
        (OPEN_MPI, 4, (1,)),
        ({**OPEN_MPI, "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 8, (1,)),
    ],
)
def test_processes_of_a_node_share_its_gpus(environ, n_gpus, devices):
    assert look(environ, n_gpus=n_gpus).devices == devices


@pytest.mark.parametrize(
    ("environ", "named", "says"),
    [
        ({}, {"coordinator": "a:1"}, "process_count nor process_id: add process_count=... process_id=..."),
        ({"JAX_NUM_PROCESSES": "2"}, {}, "JAX_COORDINATOR_ADDRESS nor JAX_PROCESS_ID"),
        ({"PMI_SIZE": "3", "PMI_RANK": "2"}, {}, "an MPI launcher (PMI)) does not set coordinator: add coordinator=..."),
        ({}, {**EXPLICIT, "coordinator": "node0"}, "coordinator = node0: must be HOST:PORT"),
        ({}, {**EXPLICIT, "coordinator": "node0:65535"}, "coordinator = node0:65535: the port must be 1 to 65534"),
        ({}, {**EXPLICIT, "process_id": "4"}, "process_id = 4: must be a number below process_count, 4"),
        ({}, {**EXPLICIT, "process_count": "none"}, "process_count = none"),
        ({**ENVIRONMENT, "JAX_PROCESS_ID": "2"}, {}, "JAX_PROCESS_ID = 2: must be a number below JAX_NUM_PROCESSES, 2"),
    ],
)
def test_what_is_missing_or_wrong_is_said(environ, named, says):
    with pytest.raises(UserError) as error:
        look(environ, named)
    assert says in str(error.value)


ALONE = {"process_count": "1"}


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({}, {**ALONE, "coordinator": "x:1", "process_id": "0"}),
        ({}, {**ALONE, "coordinator": "x:1"}),
        ({}, ALONE),
        ({"JAX_COORDINATOR_ADDRESS": "x:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, {}),
        ({"JAX_NUM_PROCESSES": "1"}, {}),
    ],
)
def test_one_process_needs_no_coordinator(environ, named):
    assert look(environ, named) is None


ODD = {
    "coordinator": (
        "", ":8476", "node0:", "node0:0", "node0:65535", "node0:99999999", "node0:-1", "node0:8476:8477", "two words:1", "node0 :1",
        "n\u00f6de:1", "node0:\u0661", "a..b:1", ".:1", "-a:1", f"{'a' * 64}:1", f"{'a.' * 130}b:1", "fe80::1:8476", "[fe80:::1]:1",
        "[]:1", "[::]:1", "0.0.0.0:1", "224.0.0.1:1", "[ff02::1]:1", "300.1.1.1:1", "1.2.3:1", "x" * 10_000, "http://node0:1", "\udcff:1",
    ),
    "process_count": ("", "0", "-2", "2.0", "1e3", " 2", "0x2", "\u0662", "\u00b2", "15001", "1000000", "9" * 5000, "none", "+2", "1_0"),
    "process_id": ("", "4", "-1", "1.0", "\u0661", "\u00b9", "9" * 5000, "one", " 1", "1 "),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ODD.items() for value in values])
def test_a_value_that_makes_no_sense_is_one_line(name, value):
    with pytest.raises(UserError) as error:
        look({}, {**EXPLICIT, name: value})
    said = str(error.value)
    assert said.startswith(f"{name} = ") and len(said) < 300 and said.isprintable()
    if value:
        with pytest.raises(UserError, match=r"^JAX_"):
            look({**ENVIRONMENT, "JAX_NUM_PROCESSES": "4", VARIABLES[name]: value})


@pytest.mark.parametrize("address", ["node_0.rack-1:1", "node0.:65534", "10.0.0.1:1", "[fd00::1]:8476", "[::1]:1", "localhost:1"])
def test_addresses_that_are_right(address):
    assert look({}, {**EXPLICIT, "coordinator": address}).address == address


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        *((SLURM, name) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_NODEID")),
        *((OPEN_MPI, name) for name in OPEN_MPI if name != "OMPI_MCA_orte_hnp_uri"),
        ({"PMI_SIZE": "3", "PMI_RANK": "2", "OMPI_MCA_orte_hnp_uri": OPEN_MPI["OMPI_MCA_orte_hnp_uri"]}, "PMI_RANK"),
        *(({**GKE_TPU, **SLICES}, name) for name in ("TPU_WORKER_ID", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")),
        *((JOBSET, name) for name in ("JOB_COMPLETION_INDEX", "JAX_NUM_PROCESSES")),
    ],
)
@pytest.mark.parametrize("value", ["x", "-1", "1.5", "\u00b2", "9" * 5000])
def test_a_launchers_number_that_is_none_is_one_line(environ, name, value):
    with pytest.raises(UserError, match=name) as error:
        look({**environ, name: value})
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(("name", "value"), [("SLURM_STEP_NODELIST", "["), ("SLURM_STEP_NODELIST", ","), ("SLURM_PROCID", "16")])
def test_what_slurm_cannot_mean_is_one_line(name, value):
    with pytest.raises(UserError):
        look({**SLURM, name: value})


def test_a_node_without_a_number_of_tasks_is_the_processs_own():
    assert look({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "?"}, n_gpus=8).devices is None


def test_two_places_at_once_are_refused():
    assert split_arguments(["process_id=1", "process_id=1"])[0] == {"process_id": "1"}
    with pytest.raises(UserError, match="process_id is given twice, as 1 and as 2"):
        split_arguments(["process_id=1", "process_id=2"])


def test_gpus_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="8 processes were started on a node of 12 GPUs"):
        look(SLURM, n_gpus=12)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1-4],x", "n1"), ("n[007,010-12]", "n007"), ("r[1-2]n[3-4]", "r1n3"), ("a-b[2-3]-c,d", "a-b2-c")],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_node(nodes) == first


def test_a_cluster_is_no_setting():
    named, rest = split_arguments(["train.steps=3", "coordinator=a:1", "process_id=0", "coordinator", "run.name=coordinator=x"])
    assert named == {"coordinator": "a:1", "process_id": "0"}
    assert rest == ["train.steps=3", "coordinator", "run.name=coordinator=x"]


@pytest.mark.parametrize(
    ("environ", "hosts", "together"),
    [
        (SLURM, (), 1),  # four nodes of 8 are not 16 tasks
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x4)"},
            ("gpu007",) * 4 + ("gpu008",) * 4 + ("gpu009",) * 4 + ("big1",) * 4,
            4,
        ),
        (
            {**SLURM, "SLURM_STEP_NODELIST": "a[1-2]b[08-09]", "SLURM_STEP_TASKS_PER_NODE": "4(x4)"},
            ("a1b08",) * 4 + ("a1b09",) * 4 + ("a2b08",) * 4 + ("a2b09",) * 4,
            4,
        ),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "9,7"}, (), 1),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x4)", "SLURM_DISTRIBUTION": "cyclic"}, (), 1),  # tasks 0, 4, 8 and 12 are on the first
        (
            {**SLURM, "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_DISTRIBUTION": "block:cyclic"},
            ("n1",) * 8 + ("n2",) * 8,
            8,
        ),
        (
            {**SLURM, "SLURM_STEP_NODELIST": "n[01-16]", "SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_DISTRIBUTION": "cyclic"},
            tuple(f"n{number:02}" for number in range(1, 17)),
            1,
        ),
        ({**GKE_TPU, **SLICES}, (), 2),
        ({**ENVIRONMENT, HOSTS: "node0, node1"}, ("node0", "node1"), 1),
        ({**SLURM, HOSTS: ",".join(f"h{n}" for n in range(16))}, tuple(f"h{n}" for n in range(16)), 1),
    ],
)
def test_the_names_of_the_others_and_what_is_lost_together(environ, hosts, together):
    found = look(environ)
    assert (found.hosts, found.together) == (hosts, together)


@pytest.mark.parametrize("text", ["node0", "node0,", "node0,no de", "node0,node1,node2"])
def test_names_that_are_not_those_of_all_are_refused(text):
    with pytest.raises(UserError, match=r"MAXLM_HOSTS = .*all 2 processes"):
        look({**ENVIRONMENT, HOSTS: text})


def test_a_list_that_names_millions_of_hosts_is_cut():
    assert len(look({**SLURM, "SLURM_STEP_NODELIST": "n[1-99999999]x[1-99999999]", "SLURM_STEP_TASKS_PER_NODE": ""}).hosts) in (0, 16)


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"OMPI_MCA_orte_hnp_uri": "1234176.0;tcp6://[fd80::1,fd80::2]:3333"}, "[fd80::1]:62042"),
        ({"OMPI_MCA_orte_hnp_uri": "1234176.0;tcp://10.0.0.1,10.0.0.2:3333"}, "10.0.0.1:62042"),
        ({"TPU_WORKER_HOSTNAMES": "[fd00::1],[fd00::2]"}, "[fd00::1]:8482"),
        ({"TPU_PROCESS_ADDRESSES": "[fd00::1]:8476,[fd00::2]:8476"}, "[fd00::1]:8482"),
        ({"TPU_WORKER_HOSTNAMES": "fd00::1,fd00::2"}, "[fd00::1]:8482"),
        ({"TPU_WORKER_HOSTNAMES": "a:8476,b:8476", "MEGASCALE_COORDINATOR_ADDRESS": "[fd00::9]:8080"}, "[fd00::9]:8482"),
    ],
)
def test_addresses_of_ipv6_are_whole(environ, address):
    rank = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"} if "OMPI_MCA_orte_hnp_uri" in environ else {"TPU_WORKER_ID": "1"}
    assert look({**environ, **rank}).address == address
