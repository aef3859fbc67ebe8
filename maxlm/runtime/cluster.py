"""Joining the processes of one run."""

import os

import jax

from maxlm.config import UserError

EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join() -> str:
    """Join the cluster this process was started in, before any device is touched; says in words what was found.

    A coordinator named by the environment wins; then a Slurm step of several tasks and a TPU slice of several hosts, both of which
    jax finds its way in by itself; else the process is alone. Raises UserError for an incomplete or unreachable cluster.
    """
    named = [name for name in EXPLICIT if os.environ.get(name)]
    if named and len(named) < len(EXPLICIT):
        missing = ", ".join(name for name in EXPLICIT if name not in named)
        raise UserError(f"{named[0]} is set and {missing} is not: a cluster named by the environment needs all three; set them or none.")
    if named:
        address, count, process = (os.environ[name] for name in EXPLICIT)
        if not (count.isdigit() and process.isdigit() and int(process) < int(count)):
            raise UserError(f"JAX_PROCESS_ID = {process} must be a number below JAX_NUM_PROCESSES = {count}: correct them.")
        return _initialize(f"process {process} of {count} at {address}, from the environment", address, int(count), int(process))
    if int(os.environ.get("SLURM_NTASKS", "1") or 1) > 1 and "SLURM_STEP_NODELIST" in os.environ:
        return _initialize(f"task {os.environ.get('SLURM_PROCID')} of {os.environ['SLURM_NTASKS']} of a Slurm step")
    if "," in os.environ.get("TPU_WORKER_HOSTNAMES", "") or int(os.environ.get("MEGASCALE_NUM_SLICES", "1") or 1) > 1:
        return _initialize("host of a Cloud TPU slice")
    return "one process"


def _initialize(found: str, address: str | None = None, count: int | None = None, process: int | None = None) -> str:
    try:
        jax.distributed.initialize(coordinator_address=address, num_processes=count, process_id=process, initialization_timeout=120)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"this is {found}, and joining failed: {str(error).splitlines()[0]}") from error
    return found
