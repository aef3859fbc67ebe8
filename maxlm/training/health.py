"""Health of training, judged on the host by the loss and the gradient norm of every update: the same in every process."""

import math
import statistics
from collections import deque
from collections.abc import Mapping

from maxlm.telemetry.alarms import JumpAlarm
from maxlm.telemetry.observer import Event

SKIPS_IN_A_ROW = 10  # updates that were not finite: the batches differ, so it is the state that is wrong
BAD_STEPS = 20  # in a row as no healthy model has them; a loss that recovers by itself, or batches of padding only, mostly last less
BAD_AT_END = 5  # of them are enough where no more updates follow: more than chance, as every one of them is another batch
DIVERGED = 1.0  # nats above the untrained level: an untrained model stays within some tenths of it, and so does one in its warm-up
LEARNED = 1.0  # nats below ln(vocabulary) a loss must have come before it can be lost: noise of small batches is some tenths of a nat
LOST = 0.9  # of the way back to ln(vocabulary); a model that still knows how frequent each token is has not come that far
SMOOTHED = 10  # losses whose median counts as a level reached
LEAST_LOSS_SPREAD = 0.05  # nats; with JUMP_SPREADS a jump is at least 0.4 nats
LEAST_NORM_SPREAD = 0.3  # of the natural logarithm; with JUMP_SPREADS a jump is at least elevenfold


class Health:
    """Call `saw` after every update. A run is unhealthy, and stops, after `SKIPS_IN_A_ROW` updates that were not finite, or `BAD_STEPS`
    without a gradient or at a bad loss: far above where the run began (it diverged), or back at ln(vocabulary) (it lost what it learned).

    The levels that this needs are in `levels`, kept in each checkpoint: after a restart it would not be known that the loss was lower.
    """

    def __init__(self, vocab_size: int, levels: Mapping[str, float] | None = None) -> None:
        """`levels`: those of the checkpoint that training continues, if it is on the same data."""
        known = levels or {}
        self._untrained = math.log(vocab_size)
        self._first: float | None = known.get("first")  # loss of the first update of the run, in nats a token
        self._best: float = known.get("best", math.inf)  # lowest smoothed loss
        self._recent: deque[float] = deque(maxlen=SMOOTHED)
        self._loss_alarm = JumpAlarm("loss_jump", "loss", LEAST_LOSS_SPREAD)
        self._norm_alarm = JumpAlarm("gradient_jump", "gradient norm", LEAST_NORM_SPREAD, logarithmic=True)
        self._updates = self._skips_in_a_row = self._bad_in_a_row = 0
        self._wrong = ""  # with the newest update
        self.unhealthy = ""  # why the run must stop; stays once it is said

    @property
    def levels(self) -> dict[str, float]:
        """Levels that a checkpoint keeps, as far as they are known."""
        known = {} if self._first is None else {"first": self._first}
        return {**known, "best": self._best} if math.isfinite(self._best) else known

    @property
    def doubt(self) -> str:
        """Reason not to save a state now, or ""."""
        return self.unhealthy or self._wrong

    def at_end(self) -> str:
        """Reason that the last state is not a good end, or "": the last update was not finite, or the loss is bad."""
        if self.unhealthy:
            return self.unhealthy
        if self._skips_in_a_row and self._skips_in_a_row == self._updates:
            return f"not one of {self._updates} updates was finite: {self._wrong}"
        return self._wrong if self._skips_in_a_row or self._bad_in_a_row >= BAD_AT_END else ""

    def condemn(self, reason: str) -> None:
        """The state itself is known to be bad."""
        self.unhealthy = self.unhealthy or reason

    def saw(self, step: int, loss: float, grad_norm: float, cause: str = "") -> list[Event]:
        """The alarms to tell after update `step`; loss in nats a token, norm before clipping; `cause`: of what is not finite, if known."""
        self._updates += 1
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._skips_in_a_row += 1
            self._wrong = (
                f"the update of step {step} was skipped: loss {loss:g}, gradient norm {grad_norm:g}{f'; {cause}' if cause else ''}"
            )
            if self._skips_in_a_row >= SKIPS_IN_A_ROW:
                self.condemn(f"{SKIPS_IN_A_ROW} updates in a row were not finite; {self._wrong}")
            return []
        self._skips_in_a_row = 0
        self._first = loss if self._first is None else self._first
        self._wrong = self._judge(step, loss, grad_norm)
        self._bad_in_a_row = self._bad_in_a_row + 1 if self._wrong else 0
        if self._bad_in_a_row >= BAD_STEPS:
            self.condemn(f"{BAD_STEPS} bad updates in a row; {self._wrong}; lower optimizer.peak_lr, or look at the data of these steps")
        self._recent.append(loss)
        if len(self._recent) == SMOOTHED:
            self._best = min(self._best, statistics.median(self._recent))
        return self._loss_alarm.saw(step, loss) + self._norm_alarm.saw(step, max(grad_norm, 1e-30))

    def _judge(self, step: int, loss: float, grad_norm: float) -> str:
        """What is bad about this update."""
        assert self._first is not None, "set by the caller"
        if grad_norm == 0:
            return f"the gradient of step {step} is zero, at a loss of {loss:.4g}: nothing is learned"
        began = max(self._untrained, self._first)
        if loss > began + DIVERGED:
            return f"the loss of step {step}, {loss:.4g}, is more than {DIVERGED:g} nat above that of an untrained model, {began:.4g}"
        learned = self._untrained - self._best
        if learned >= LEARNED and loss > self._best + LOST * learned:
            return f"the loss of step {step}, {loss:.4g}, is back at ln(vocabulary) = {self._untrained:.4g} after it was {self._best:.4g}"
        return ""
