"""Health of training, judged on the host by the loss and gradient norm of every update, so alike in every process."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from maxlm.config.sections.health import HealthConfig
from maxlm.telemetry.alarms import JUMP_SPREADS, JUMP_STEPS, LEAST_LOSS_SPREAD, LEAST_NORM_SPREAD, JumpAlarm
from maxlm.telemetry.layer_alarms import LayerAlarms, LayerFigures
from maxlm.telemetry.observer import Event
from maxlm.training.opening import Opening
from maxlm.training.session import RollBack

SKIPS_IN_A_ROW = 10  # updates that were not finite: the batches differ, so it is the state that is wrong
BAD_STEPS = 20  # in a row; a loss that recovers by itself, or batches of padding only, mostly last for less
BAD_AT_END = 5  # bad updates in a row that are enough where no more follow: each is of another batch, so not chance
DIVERGED = 1.0  # nats above the loss of an untrained model, from which one in its warm-up differs by some tenths
LEARNED = 1.0  # nats below ln(vocabulary) from which learning can be lost; the noise of small batches is some tenths of a nat
LOST = 0.9  # of the way back to ln(vocabulary); a model that still knows the frequency of tokens stays below
SMOOTHED = 10  # losses of which the median is a level
REPLAYS = 3  # of updates that were not finite, until the end or the next roll back: each compiles a program or two
ODD_BATCH = "odd_batch"  # cause of an alarm on a single batch
HISTORY = 60  # newest updates that a page of evidence shows


class Judged(NamedTuple):
    """Figures of an update. `refused`: it was finite and not applied, since it was a spike."""

    step: int
    loss: float
    grad_norm: float
    refused: bool = False

    @property
    def finite(self) -> bool:
        """True if loss and gradient norm are."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Health:
    """Call `update` after every update. A run is unhealthy, and stops, after `SKIPS_IN_A_ROW` updates that were not finite, or `BAD_STEPS`
    without a gradient or at a bad loss: far above where the run began (it diverged), or back at the loss of an untrained model (it lost
    what it learned). A run that starts from a trained model begins at the median of its first `SMOOTHED` losses.

    `settings` may say to go back instead: then `roll_back` is set. `levels` is saved with each checkpoint, so that the lowest loss is known
    after a restart, and with `settings` all by which the next update is judged.
    """

    def __init__(
        self,
        untrained: float,
        levels: Mapping[str, Any] | None = None,
        *,
        trained: bool = False,
        settings: HealthConfig | None = None,
    ) -> None:
        """`untrained`: loss of a model that has learned nothing; `levels`: of the checkpoint that training continues, if it is on the
        same data; `trained`: the run starts from a trained model.
        """
        known = levels or {}
        self._untrained, self._trained, self._settings = untrained, trained, settings
        self._first: float | None = known.get("first")  # loss with which the run began
        self._best: float = known.get("best", math.inf)  # lowest smoothed loss
        self._recent: deque[float] = deque(maxlen=SMOOTHED)
        spreads, steps = (JUMP_SPREADS, JUMP_STEPS) if settings is None else (settings.spreads, settings.spike_steps)
        self._jumps = (
            JumpAlarm("loss_jump", "loss", LEAST_LOSS_SPREAD, spreads=spreads, steps=steps, odd=ODD_BATCH),
            JumpAlarm("gradient_jump", "gradient norm", LEAST_NORM_SPREAD, logarithmic=True, spreads=spreads, steps=steps),
        )
        for alarm, window in zip(self._jumps, known.get("windows", ()), strict=False):
            alarm.restore(window)
        self._layers = LayerAlarms(spreads, LEAST_NORM_SPREAD)
        if known.get("layers") is not None:
            self._layers.restore(known["layers"])
        self._updates = self._finite = self._skips_in_a_row = self._bad_in_a_row = 0
        self._wrong = ""  # fault of the newest update
        self.unhealthy = ""  # reason to stop the run; it stays once it is set
        self.roll_back: RollBack | None = None  # it stays once it is set
        self._replays, self._to_replay = 0, 0
        self.history: deque[Judged] = deque(maxlen=HISTORY)
        self.layers: LayerFigures | None = None  # of the newest update, where they are computed

    @property
    def levels(self) -> dict[str, Any]:
        """Levels for a checkpoint, as far as they are known."""
        known: dict[str, Any] = {} if self._first is None else {"first": self._first}
        known |= {"best": self._best} if math.isfinite(self._best) else {}
        if self._settings is None:
            return known
        return {**known, "windows": [alarm.window for alarm in self._jumps], "layers": self._layers.window}

    @property
    def problem(self) -> str:
        """Reason not to save a state now, or ""."""
        return self.unhealthy or (self._wrong if self.roll_back is None else self.roll_back.reason)

    @property
    def healthy(self) -> bool:
        """Mark of a state that is saved now: False while a spike lasts."""
        return self._settings is None or not (self.problem or any(alarm.suspects for alarm in self._jumps))

    def at_end(self) -> str:
        """Reason that the last state is not a good end, or "": the last update was not finite, or the loss is bad."""
        if self.unhealthy or self.roll_back is not None:
            return self.problem
        if not self._finite and (self._wrong or self._updates >= SKIPS_IN_A_ROW):  # a few updates that overflow are no fault
            return f"not one of {self._updates} updates was finite: {self._wrong or 'their gradients overflowed'}"
        return self._wrong if self._skips_in_a_row or self._bad_in_a_row >= BAD_AT_END else ""

    def fail(self, reason: str) -> None:
        """Declare the run unhealthy."""
        self.unhealthy = self.unhealthy or reason

    def state_not_finite(self, reason: str) -> None:
        """Report that the state itself holds values that are not finite, or absurd. No checkpoint does, so it may go back to the newest."""
        newest = self.history[-1].step if self.history else 0
        self._give_up(reason, "not_finite", newest + 2, newest)

    def _give_up(self, reason: str, cause: str, since: int, step: int) -> None:
        """Go back before update `since` and leave out the batches up to that step's, if the policy says so; else the run is unhealthy.

        Left out is also the batch before: the loss of an update is the loss of the weights from the update before.
        """
        settings = self._settings
        if settings is None or (settings.not_finite if cause == "not_finite" else settings.spike) != "roll_back":
            self.fail(reason)
        else:
            self._go_back(reason, cause, since, step)

    def _go_back(self, reason: str, cause: str, since: int, step: int) -> None:
        first = max(since - 2, 0)  # update n is of the batch of step n - 1
        self.request(RollBack(reason, cause, first, tuple(range(first, step))))

    def request(self, roll_back: RollBack) -> None:
        """Go back before the next update. Of several requests the first counts."""
        self.roll_back = self.roll_back or roll_back

    def update(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        cause: str = "",
        *,
        refused: bool = False,
        overflowed: bool = False,
        layers: LayerFigures | None = None,
        other_data: bool = False,
    ) -> list[Event]:
        """Judge update `step`; returns alarms. Loss in nats a token, norm before clipping; `cause`: why one is not finite, if known;
        `refused`: it was not applied, since it was a spike; `overflowed`: nor was it, and the loss's scale is halved: no fault;
        `other_data`: a stage of the mixture begins with it, so that another loss is no jump.
        """
        for alarm in self._jumps if other_data else ():
            alarm.forget()
        self._updates += 1
        self.history.append(Judged(step, loss, grad_norm, refused))
        self.layers = layers
        if overflowed:
            return []
        if not self.history[-1].finite:
            self._skips_in_a_row += 1
            if self._skips_in_a_row == 1 and self._settings is not None and self._replays < REPLAYS:
                self._replays, self._to_replay = self._replays + 1, step
            self._wrong = (
                f"the update of step {step} was skipped: loss {loss:g}, gradient norm {grad_norm:g}{f'; {cause}' if cause else ''}"
            )
            if self._skips_in_a_row >= SKIPS_IN_A_ROW:
                reason = f"{SKIPS_IN_A_ROW} updates in a row were not finite; {self._wrong}"
                self._give_up(reason, "not_finite", step - SKIPS_IN_A_ROW + 1, step)
            return []
        self._skips_in_a_row, self._finite = 0, self._finite + 1
        if self._first is None and not self._trained:
            self._first = loss
        self._wrong = self._judge(step, loss, grad_norm)
        self._bad_in_a_row = self._bad_in_a_row + 1 if self._wrong else 0
        if self._bad_in_a_row >= BAD_STEPS:
            reason = f"{BAD_STEPS} bad updates in a row; {self._wrong}; lower optimizer.peak_lr, or look at the data of these steps"
            self._give_up(reason, "bad_loss", step - BAD_STEPS + 1, step)
        self._recent.append(loss)
        if len(self._recent) == SMOOTHED:
            level = statistics.median(self._recent)
            self._best = min(self._best, level)
            self._first = level if self._first is None else self._first
        return self._jumped(step, loss, grad_norm) + (self._changed(step, layers) if layers is not None else [])

    def take_replay(self) -> int | None:
        """Number of an update that was not finite and that is to be replayed, once."""
        step, self._to_replay = self._to_replay, 0
        return step or None

    def _jumped(self, step: int, loss: float, grad_norm: float) -> list[Event]:
        alarms = []
        for alarm, value in zip(self._jumps, (loss, max(grad_norm, 1e-30)), strict=True):
            for event in alarm.update(step, value):
                alarms.append(event)
                if event.data["cause"] != ODD_BATCH and self._settings is not None and self._settings.spike == "roll_back":
                    self._go_back(event.data["reason"], "spike", alarm.since, step)
        return alarms

    def _changed(self, step: int, layers: LayerFigures) -> list[Event]:
        alarms = self._layers.update(step, layers)
        for event in alarms:
            if "since" in event.data and self._settings is not None and self._settings.layers == "roll_back":
                self._go_back(event.data["reason"], "layer_jump", event.data["since"], step)
        return alarms

    def _judge(self, step: int, loss: float, grad_norm: float) -> str:
        """Fault of this update, or ""."""
        if grad_norm == 0:
            return f"the gradient of step {step} is zero, at a loss of {loss:.4g}: nothing is learned"
        first = self._untrained if self._first is None else self._first
        began = first if self._trained else max(self._untrained, first)
        if loss > began + DIVERGED:
            what = "with which the run began" if self._trained else "of an untrained model"
            return f"the loss of step {step}, {loss:.4g}, is more than {DIVERGED:g} nat above that {what}, {began:.4g}"
        learned = self._untrained - self._best
        if learned >= LEARNED and loss > self._best + LOST * learned:
            untrained = f"the loss of an untrained model, {self._untrained:.4g}"
            return f"the loss of step {step}, {loss:.4g}, is back at {untrained}, after it was {self._best:.4g}"
        return ""


class LeftOut(Opening):
    """Batches that the settings leave out."""

    def __init__(self, leave_out: tuple[int, ...]) -> None:
        self.leave_out = leave_out

    @classmethod
    def from_config(cls, health: HealthConfig) -> Self:
        return cls(health.leave_out)
