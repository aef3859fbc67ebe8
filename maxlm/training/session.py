"""A training session: what the loop works with, where it starts and how it ends."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from maxlm.checkpoint import Checkpoints
from maxlm.data.input_pipeline import Pipeline
from maxlm.telemetry.compilations import Compilations
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.observer import Observers
from maxlm.training.program import Program
from maxlm.training.progress import LoopProgress
from maxlm.training.rollback import Journal
from maxlm.training.step import TrainState

BRANCH = "branch"  # source of a state that is another run's; entry of a data position: the step of it
Status = Literal["done", "nothing_left", "preempted", "interrupted", "unhealthy", "corrupted"]
STOPPED: tuple[Status, ...] = ("preempted", "interrupted")  # by a signal, after a save
_BY_HAND = ("SIGINT", "SIGHUP")  # Ctrl-C, and a terminal that was closed; SIGTERM comes from a machine or a scheduler


def stopped_by(reason: str | None) -> Status:
    """Status of a run that stops for `reason`: the name of a signal, or why all processes are asked to stop."""
    return "interrupted" if reason in _BY_HAND else "preempted"


class Tasks(Protocol):
    """Tasks that are run while training pauses."""

    every: int | None  # steps; None: only at the end
    asked: Mapping[str, str]  # name of a task -> digest of all that it asks of a model

    def run(self, state: TrainState, step: int, gives_up: Callable[[], bool]) -> dict[str, Any] | None:
        """Data of the event `tasks`. None once `gives_up()`, which all processes ask equally often."""


class StepProfiler(Protocol):
    """Records traces of some steps (`profiling.RunProfiler`)."""

    def before(self, step: int, state: TrainState, meter: Any) -> None:
        """Call before update `step`. It begins and ends traces; it never fails."""


class StateChecks(Protocol):
    """Checks for silent corruption (`integrity.Integrity`). Every process makes the same calls and gets the same answers."""

    def check(self, step: int, state: TrainState, *, now: bool) -> "Outcome | None":
        """Call before update `step` and after the last; `now`: the state is about to be saved."""

    def replay(self, step: int, state: TrainState, batch: Any) -> "Outcome | None":
        """Call before the update from `batch`."""

    def update(self, advance: Callable[[TrainState, Any], Any], state: TrainState, batch: Any) -> Any:
        """`advance(state, batch)`."""


@dataclass(frozen=True)
class Session:
    """`stop` returns a reason to stop before a step, or None. `gives_up` is polled during what may take long, and `all_give_up`, which is
    True in all processes or in none, between the batches of tasks. `named`: held-out sets that have curves of their own. `concluded`: the
    figures of the last step are on record; else a start with no steps left makes them.
    """

    program: Program
    data: Pipeline
    held_out: Pipeline | None
    checkpoints: Checkpoints
    observers: Observers
    goodput: Goodput
    stop: Callable[[int], str | None] = lambda step: None
    gives_up: Callable[[], bool] = lambda: False
    named: Mapping[str, Pipeline] = field(default_factory=dict)
    tasks: Tasks | None = None
    all_give_up: Callable[[], bool] = lambda: False
    progress: LoopProgress = field(default_factory=LoopProgress)
    init: "Init | None" = None  # the first state, where that is not drawn from the seed
    journal: Journal = field(default_factory=Journal)
    folder: Path | None = None  # for pages of evidence; None: none are written
    integrity: StateChecks | None = None
    profiler: "StepProfiler | None" = None
    concluded: bool = True
    compilations: Compilations | None = None  # of this process
    signal: Callable[[], str | None] = lambda: None  # name of the signal that this process has received
    check_owner: Callable[[], None] = lambda: None  # raises if another start of this run has taken over its checkpoints


@dataclass(frozen=True)
class Start:
    """A state that holds `step` updates. If it was restored, `restored` is the data of its event, and `position` what its checkpoint
    recorded of the data and of the run's health. `left_out`: numbers of batches.
    """

    state: TrainState
    step: int
    restored: dict[str, Any] | None = None
    position: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[int, ...] = ()

    @property
    def branched(self) -> bool:
        """True if the state is from another run."""
        return self.restored is not None and self.restored.get("source") == BRANCH


# The first state of a run: of step 0, or, of a run that branches off, where that was
Init = Callable[[], TrainState | Start]


@dataclass(frozen=True)
class RollBack:
    """Request to go back to the newest healthy checkpoint of step `before` or earlier, and to leave out the batches of the steps `batches`,
    counted from 0. `cause`: one word, as of alarms. `final`: this start ends, and the next one goes back.
    """

    reason: str
    cause: str
    before: int
    batches: tuple[int, ...] = ()
    final: bool = False


@dataclass(frozen=True)
class Outcome:
    """End of training: after `step` updates, and why. `roll_back`: not the end, if training can go back."""

    status: Status
    step: int
    message: str
    eval_loss: float | None = None
    state: TrainState | None = None
    roll_back: RollBack | None = None
