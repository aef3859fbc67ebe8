"""Health of training, judged on the host by the loss and gradient norm of every update, so alike in every process."""

import math
import statistics
from collections import deque
from collections.abc import Mapping

from maxlm.telemetry.alarms import JumpAlarm
from maxlm.telemetry.observer import Event

SKIPS_IN_A_ROW = 10  # updates that were not finite: the batches differ, so it is the state that is wrong
BAD_STEPS = 20  # in a row; a loss that recovers by itself, or batches of padding only, mostly last for less
BAD_AT_END = 5  # bad updates in a row that are enough where no more follow: each is of another batch, so not chance
DIVERGED = 1.0  # nats above the loss of an untrained model, from which one in its warm-up differs by some tenths
LEARNED = 1.0  # nats below ln(vocabulary) from which learning can be lost; the noise of small batches is some tenths of a nat
LOST = 0.9  # of the way back to ln(vocabulary); a model that still knows the frequency of tokens stays below
SMOOTHED = 10  # losses of which the median is a level
LEAST_LOSS_SPREAD = 0.05  # nats; with JUMP_SPREADS a jump is at least 0.4 nats
LEAST_NORM_SPREAD = 0.3  # of the natural logarithm; with JUMP_SPREADS a jump is at least elevenfold


class Health:
    """Call `update` after every update. A run is unhealthy, and stops, after `SKIPS_IN_A_ROW` updates that were not finite, or `BAD_STEPS`
    without a gradient or at a bad loss: far above where the run began (it diverged), or back at that of an untrained model (it lost what it
    learned). A run that starts from a trained model begins at the median of its first `SMOOTHED` losses.

    `levels` is saved with each checkpoint, so that the lowest loss is known after a restart.
    """

    def __init__(self, untrained: float, levels: Mapping[str, float] | None = None, *, trained: bool = False) -> None:
        """`untrained`: loss of a model that has learned nothing; `levels`: those of the checkpoint that training continues, if it is on the
        same data; `trained`: the run starts from a trained model.
        """
        known = levels or {}
        self._untrained, self._trained = untrained, trained
        self._first: float | None = known.get("first")  # loss with which the run began
        self._best: float = known.get("best", math.inf)  # lowest smoothed loss
        self._recent: deque[float] = deque(maxlen=SMOOTHED)
        self._loss_alarm = JumpAlarm("loss_jump", "loss", LEAST_LOSS_SPREAD)
        self._norm_alarm = JumpAlarm("gradient_jump", "gradient norm", LEAST_NORM_SPREAD, logarithmic=True)
        self._updates = self._skips_in_a_row = self._bad_in_a_row = 0
        self._wrong = ""  # fault of the newest update
        self.unhealthy = ""  # reason to stop the run; it stays once it is set

    @property
    def levels(self) -> dict[str, float]:
        """Levels for a checkpoint, as far as they are known."""
        known = {} if self._first is None else {"first": self._first}
        return {**known, "best": self._best} if math.isfinite(self._best) else known

    @property
    def problem(self) -> str:
        """Reason not to save a state now, or ""."""
        return self.unhealthy or self._wrong

    def at_end(self) -> str:
        """Reason that the last state is not a good end, or "": the last update was not finite, or the loss is bad."""
        if self.unhealthy:
            return self.unhealthy
        if self._skips_in_a_row and self._skips_in_a_row == self._updates:
            return f"not one of {self._updates} updates was finite: {self._wrong}"
        return self._wrong if self._skips_in_a_row or self._bad_in_a_row >= BAD_AT_END else ""

    def fail(self, reason: str) -> None:
        """Declare the run unhealthy."""
        self.unhealthy = self.unhealthy or reason

    def update(self, step: int, loss: float, grad_norm: float, cause: str = "") -> list[Event]:
        """Judge update `step`; returns alarms. Loss in nats a token, norm before clipping; `cause`: why one is not finite, if known."""
        self._updates += 1
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._skips_in_a_row += 1
            self._wrong = (
                f"the update of step {step} was skipped: loss {loss:g}, gradient norm {grad_norm:g}{f'; {cause}' if cause else ''}"
            )
            if self._skips_in_a_row >= SKIPS_IN_A_ROW:
                self.fail(f"{SKIPS_IN_A_ROW} updates in a row were not finite; {self._wrong}")
            return []
        self._skips_in_a_row = 0
        if self._first is None and not self._trained:
            self._first = loss
        self._wrong = self._judge(step, loss, grad_norm)
        self._bad_in_a_row = self._bad_in_a_row + 1 if self._wrong else 0
        if self._bad_in_a_row >= BAD_STEPS:
            self.fail(f"{BAD_STEPS} bad updates in a row; {self._wrong}; lower optimizer.peak_lr, or look at the data of these steps")
        self._recent.append(loss)
        if len(self._recent) == SMOOTHED:
            level = statistics.median(self._recent)
            self._best = min(self._best, level)
            self._first = level if self._first is None else self._first
        return self._loss_alarm.update(step, loss) + self._norm_alarm.update(step, max(grad_norm, 1e-30))

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
            untrained = f"that of an untrained model, {self._untrained:.4g}"
            return f"the loss of step {step}, {loss:.4g}, is back at {untrained}, after it was {self._best:.4g}"
        return ""
