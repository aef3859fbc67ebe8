"""The page of the environment variables: those of maxlm, and those of libraries and launchers that it reads."""

from collections.abc import Mapping

# Group -> variable -> sentence. A test finds every variable that the source names.
VARIABLES: Mapping[str, Mapping[str, str]] = {
    "maxlm": {
        "MAXLM_GRACE_SECONDS": "Time from a signal that ends the run to its last moment, in seconds; a save that takes longer is given up.",
        "MAXLM_CLUSTER_SECRET": "Secret that all processes of a cluster share; a process without it is not admitted.",
        "MAXLM_HOSTS": "Names of the hosts of all processes, in order, split by commas.",
        "MAXLM_CACHE_DIR": "Folder of the programs that `maxlm plan` and `maxlm compile` have compiled; ~/.cache/maxlm if it is not set.",
    },
    "maxlm, set by one process for another": {
        "MAXLM_PROGRESS_FILE": "File in which a run records its progress for `maxlm launch`.",
        "MAXLM_PARENT": "Descriptor of a pipe that closes when `maxlm launch` ends.",
    },
    "Scripts for clouds": {
        "MAXLM_PYTHON": "Python with maxlm that `maxlm-gcp` and the hosts run.",
        "MAXLM_HOME": "Folder of the run on a host of Google Cloud.",
        "MAXLM_LOG": "Log file of the script on a host of Google Cloud.",
    },
    "jax and its compilers": {
        "JAX_PLATFORMS": "Platform to use, such as cpu; jax chooses if it is not set.",
        "JAX_COMPILATION_CACHE_DIR": "Folder of compiled programs of runs; ~/.cache/maxlm if it is not set.",
        "XLA_FLAGS": "Flags of the compiler; a flag given here is not overridden by maxlm's own.",
        "LIBTPU_INIT_ARGS": "Flags of the TPU's compiler and runtime.",
        "XLA_CLIENT_MEM_FRACTION": "Share of a GPU's memory that jax takes; maxlm sets the share that its estimates assume.",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "Former name of XLA_CLIENT_MEM_FRACTION.",
        "CUDA_VISIBLE_DEVICES": "GPUs that a process may use.",
        "TPU_SKIP_MDS_QUERY": "Do not ask Google Cloud's metadata server about the TPU.",
    },
    "Weights & Biases": {
        "WANDB_MODE": "online, or offline to write files for `wandb sync`.",
        "WANDB_API_KEY": "Key of the account.",
        "WANDB_ENTITY": "Team or account that the project belongs to.",
        "WANDB_BASE_URL": "Address of a server of one's own.",
    },
    "Launchers": {
        "JAX_COORDINATOR_ADDRESS": "Address of the first process, with JAX_NUM_PROCESSES and JAX_PROCESS_ID.",
        "SLURM_NTASKS": "With SLURM_PROCID and further variables of Slurm: number of processes, and number of this one.",
        "OMPI_COMM_WORLD_SIZE": "With OMPI_COMM_WORLD_RANK: the same of Open MPI; PMI_SIZE of MPICH, MV2_COMM_WORLD_SIZE of MVAPICH.",
        "WORLD_SIZE": "With NODE_RANK or GROUP_RANK and NNODES: the same of torchrun and of managed services.",
        "JOB_COMPLETION_INDEX": "Number of this process in a job of Kubernetes, with JOBSET_NAME of a JobSet.",
        "TPU_WORKER_ID": "Number of this host in its slice, with TPU_WORKER_HOSTNAMES.",
        "MEGASCALE_NUM_SLICES": "Number of slices, with MEGASCALE_SLICE_ID and MEGASCALE_COORDINATOR_ADDRESS.",
    },
}


def environment_page() -> str:
    """The page, as Markdown."""
    text = "# Environment variables\n\nNo variable is needed for a run on one machine. A launcher is recognized by the variables it sets; "
    text += "`maxlm doctor --cluster` says which one was found.\n"
    for group, variables in VARIABLES.items():
        text += f"\n## {group}\n\n| variable | |\n|---|---|\n"
        text += "".join(f"| `{name}` | {about} |\n" for name, about in variables.items())
    return text
