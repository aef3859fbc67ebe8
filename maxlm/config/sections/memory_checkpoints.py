"""Copies of the state in the memory of the hosts."""

from typing import Annotated

from pydantic import Field

from maxlm.config.capability import Capability
from maxlm.config.fields import Bool, Count, LocalPath, Positive, PositiveFloat, Section


class MemoryCheckpointsConfig(Section):
    """Copies of the state in the memory of the hosts, which outlive a crash of the trainer."""

    every_steps: Positive | None = None  # None: by Daly's formula, from measured times and `mtbf_hours`
    folder: LocalPath = "/dev/shm"  # noqa: S108 -- of each host; a folder of its local disk outlives a reboot, too
    peer: Bool = True  # where there are several hosts: each one's copy is also in the memory of one in another failure domain
    # Failure domain of each process, such as its rack. None: slices, where there are several, else hosts.
    domains: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    # Mean time between failures of one host. Llama 3 (arXiv 2407.21783, 3.3.4): 466 interruptions in 54 days of 16,384 GPUs, 8 a host.
    mtbf_hours: PositiveFloat = 5700.0


CAPABILITY = Capability(key="memory_checkpoints", opening=("maxlm.training.opening:CopiesInMemory",))
