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
        "TPU_LIBRARY_PATH": "File of libtpu, in place of the installed package.",
        "TPU_SKIP_MDS_QUERY": "Do not ask Google Cloud's metadata server about the TPU.",
    },
    "Weights & Biases": {
        "WANDB_MODE": "online, or offline to write files for `wandb sync`.",
        "WANDB_API_KEY": "Key of the account.",
        "WANDB_ENTITY": "Team or account that the project belongs to.",
        "WANDB_BASE_URL": "Address of a server of one's own.",
    },
    "Launchers that start the processes": {
        "JAX_COORDINATOR_ADDRESS": "Address of the first process; `coordinator=` on the command line takes its place.",
        "JAX_NUM_PROCESSES": "Number of processes; `process_count=` takes its place.",
        "JAX_PROCESS_ID": "Number of this process, from 0; `process_id=` takes its place.",
        "SLURM_NTASKS": "Number of processes, with SLURM_PROCID and further variables of Slurm.",
        "OMPI_COMM_WORLD_SIZE": "Number of processes of Open MPI, with OMPI_COMM_WORLD_RANK and their numbers on a node.",
        "PMI_SIZE": "Number of processes of an MPI launcher (PMI), with PMI_RANK.",
        "TPU_WORKER_ID": "Number of this host in its slice, with TPU_WORKER_HOSTNAMES.",
        "MEGASCALE_NUM_SLICES": "Number of slices, with MEGASCALE_SLICE_ID and MEGASCALE_COORDINATOR_ADDRESS.",
        "NUM_PROCESSES": "Number of processes of a JAXJob of Kubeflow, with PROCESS_ID.",
        "JOB_COMPLETION_INDEX": "Number of this process in an indexed job of Kubernetes; JOBSET_NAME names a JobSet.",
    },
    "Launchers that are recognized, and named in an error where a run would start once on each host": {
        "WORLD_SIZE": "torchrun, PyTorchJob and accelerate, with RANK; TORCHELASTIC_RUN_ID of torchrun.",
        "PET_NNODES": "Kubeflow's torch runtime, with PET_NODE_RANK; NNODES and NODE_RANK of launchers of one process a node.",
        "MV2_COMM_WORLD_SIZE": "MVAPICH, with MV2_COMM_WORLD_RANK.",
        "PALS_SIZE": "PALS, with PALS_RANKID; JSM_NAMESPACE_SIZE of jsrun, and FLUX_JOB_SIZE of Flux.",
        "AWS_BATCH_JOB_NUM_NODES": "AWS Batch, with AWS_BATCH_JOB_NODE_INDEX; SM_HOSTS of SageMaker.",
        "SKYPILOT_NUM_NODES": "SkyPilot, with SKYPILOT_NODE_RANK; CLUSTER_SPEC of Vertex AI, and TF_CONFIG.",
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
