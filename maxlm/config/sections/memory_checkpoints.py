"""Copies of the state in the memory of the hosts."""

from typing import Annotated

from pydantic import Field

from maxlm.config.capability import Capability
from maxlm.config.fields import Bool, Count, LocalPath, Positive, PositiveFloat, Section


class MemoryCheckpointsConfig(Section):
    """Copies of the state in the memory of the hosts, which outlive a crash of the trainer."""

    every_steps: Positive | None = None
    """Updates between two copies; null: by Daly's formula from measured times and `mtbf_hours`. Unit: updates."""
    folder: LocalPath = "/dev/shm"  # noqa: S108
    """Folder of the copies on each host; a folder on its local disk also outlives a reboot."""
    peer: Bool = True
    """Where there are several hosts, keep each host's copy also in the memory of a host in another failure domain."""
    domains: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """Failure domain of each process, such as its rack, as numbers in the order of the processes; null: its slice where there are several,
    else its host. Unit: domain numbers.
    """
    mtbf_hours: PositiveFloat = 5700.0
    """Mean time between failures of one host; the default follows from Llama 3 (arXiv 2407.21783, section 3.3.4): 466 interruptions in 54
    days of 16,384 GPUs, 8 in a host. Unit: hours.
    """


CAPABILITY = Capability(key="memory_checkpoints", opening=("maxlm.training.opening:CopiesInMemory",))
