"""Opening a run: what sections do between the program and the first step, at the moments that `run/open_run.py` names."""

from collections.abc import Sequence
from typing import Any, Self

from maxlm.checkpoint import Checkpoints
from maxlm.config.sections.memory_checkpoints import MemoryCheckpointsConfig
from maxlm.training.program import Program
from maxlm.training.session import Init, Start


class Opening:
    """Takes part in opening a run (`Capability.opening`), in all processes alike. A hook that a subclass leaves out changes nothing."""

    title = ""  # what a run does without where the mesh of fewer hosts breaks `check_mesh`
    leave_out: tuple[int, ...] = ()  # numbers of batches that are not trained on

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> "Opening | None":
        """Build the part that a section asks for; None if it asks for nothing. Gets the section, and the settings that the parameters of
        the subclass name (`table.build`).
        """
        raise NotImplementedError

    def check_mesh(self, program: Program) -> None:
        """Raise ConfigError for what the mesh or the platform of `program` cannot do."""

    def keep_copies(self, checkpoints: Checkpoints, hosts: Sequence[str], supervisor: int) -> None:
        """Have `checkpoints` use further copies of the state. `hosts`: of each process; `supervisor`: restarts this process."""

    def first_state(self) -> "FirstState | None":
        """The origin of the first state; None: it is drawn from the seed."""
        return None

    def check_start(self, start: Start) -> None:
        """Raise ConfigError for a run that cannot go on from `start`."""

    def check_compiled(self, program: Program, limit: int | None) -> None:
        """Raise ConfigError if the section's arrays and the compiled step of `program` together exceed `limit` bytes of a device."""


class FirstState(Opening):
    """A first state from another run or model. `setting`: its name in a config; `reads`: its source, in words."""

    setting: str
    reads: str

    def first_state(self) -> Self:
        return self

    def fingerprint(self) -> str:
        """Digest of the source as this host sees it; hosts compare it. Raises UserError."""
        raise NotImplementedError

    def init(self, program: Program, identity: dict[str, str]) -> Init:
        """The function that makes the state. `identity`: of this run's checkpoints."""
        raise NotImplementedError


class CopiesInMemory(Opening):
    """Copies of the state in the memory of the hosts."""

    def __init__(self, settings: MemoryCheckpointsConfig) -> None:
        self._settings = settings

    @classmethod
    def from_config(cls, settings: MemoryCheckpointsConfig) -> Self:
        return cls(settings)

    def keep_copies(self, checkpoints: Checkpoints, hosts: Sequence[str], supervisor: int) -> None:
        checkpoints.add_memory(self._settings, hosts, supervisor)
