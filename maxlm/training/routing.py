"""Routing of experts in every update: its figures in the records of a run, and alarms, each raised once, on routers that collapse, experts
without a token and logits that are not finite.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from maxlm.config.sections.moe import MoeConfig
from maxlm.telemetry.balance import ROUTING_METRICS, Balance, collapsed, times_even
from maxlm.telemetry.formatting import percent
from maxlm.telemetry.observer import Event
from maxlm.training.reader import Reader
from maxlm.training.step import Metrics

COLLAPSED_STEPS = 20  # in a row
IDLE_STEPS = 100  # in a row without a token
HELP = "raise model.moe.router.balance_loss or bias_rate, or lower the learning rate"


class RoutingReader(Reader):
    """Balance of the experts of the newest update, as far as the update reports its routing."""

    metrics = ROUTING_METRICS

    def __init__(self, first_layer: int) -> None:
        self._first_layer, self._alarms = first_layer, RoutingAlarms()
        self._balance: Balance | None = None

    @classmethod
    def from_config(cls, moe: MoeConfig) -> Self:
        return cls(moe.n_dense)

    def update(self, step: int, metrics: Metrics) -> Sequence[Event]:
        """Alarms of `RoutingAlarms`."""
        self._balance = None if metrics.routing is None else Balance.from_sums(self._first_layer, **metrics.routing._asdict())
        return () if self._balance is None else self._alarms.update(step, self._balance)

    def fault(self, metrics: Metrics) -> str:
        return "" if self._balance is None else not_finite(self._balance)

    def record(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return values if self._balance is None else {**values, **self._balance.figures()}

    def details(self) -> dict[str, Any]:
        return {"balance": self._balance}


class RoutingAlarms:
    """Call `update` after every step. A cause is raised once a layer, and again only after the layer was healthy in between.

    Causes: `collapse` (see balance.collapsed), `idle` (experts without a token) and `unsound` (logits that are not finite; only the first
    such layer is named, since the layers above it read its output).
    """

    def __init__(self) -> None:
        self._collapsed_L: NDArray[np.int64] | int = 0  # steps in a row
        self._idle_LE: NDArray[np.int64] | int = 0
        self._raised: set[tuple[str, int]] = set()

    def update(self, step: int, balance: Balance) -> list[Event]:
        """The alarms of this step."""
        now: dict[tuple[str, int], str] = {}
        for cause, reasons in (("unsound", _unsound(balance)), ("collapse", self._collapse(balance)), ("idle", self._idle(balance))):
            now |= {(cause, layer): reason for layer, reason in reasons.items()}
        news = [Event("alarm", step, data={"cause": key[0], "layer": key[1], "reason": now[key]}) for key in now if key not in self._raised]
        self._raised = set(now)
        return news

    def _collapse(self, balance: Balance) -> dict[int, str]:
        """Layer -> reason, of the routers that collapse."""
        self._collapsed_L = np.where(collapsed(balance.load_LE, balance.tokens_L), self._collapsed_L + 1, 0)
        reasons = {}
        for i in np.flatnonzero(self._collapsed_L >= COLLAPSED_STEPS):
            load_E, tokens = balance.load_LE[i], int(balance.tokens_L[i])
            busiest, layer = int(load_E.argmax()), balance.layers[i]
            reasons[layer] = (
                f"layer {layer}: the router collapses: expert {busiest} is chosen by {percent(load_E[busiest] / tokens)} of the tokens, "
                f"{times_even(load_E)[busiest]:.1f} times its even share, for {COLLAPSED_STEPS} steps; {HELP}"
            )
        return reasons

    def _idle(self, balance: Balance) -> dict[int, str]:
        """Layer -> reason, of the layers with idle experts. A step without tokens counts for nothing."""
        idle_LE = np.where(balance.load_LE == 0, self._idle_LE + (balance.tokens_L > 0)[:, None], 0)
        self._idle_LE = idle_LE
        reasons = {}
        for i in np.flatnonzero(idle_LE.max(axis=1) >= IDLE_STEPS):
            many, layer = int((idle_LE[i] >= IDLE_STEPS).sum()), balance.layers[i]
            have = "has" if many == 1 else "have"
            reasons[layer] = f"layer {layer}: {many} of {idle_LE.shape[1]} experts {have} received no token for {IDLE_STEPS} steps; {HELP}"
        return reasons


def not_finite(balance: Balance) -> str:
    """Reason that names the first layer with router logits that are not finite; "" if all were finite."""
    bad: Sequence[int] = np.flatnonzero(balance.unsound_L > 0).tolist()
    if not bad:
        return ""
    layer, tokens = balance.layers[bad[0]], int(balance.unsound_L[bad[0]])
    return f"the router of layer {layer} gave logits that are not finite for {tokens:,} {'token' if tokens == 1 else 'tokens'}"


def _unsound(balance: Balance) -> dict[int, str]:
    """Layer -> reason, of the first layer in question."""
    reason, layer = not_finite(balance), balance.layers[int((balance.unsound_L > 0).argmax())]
    return {layer: f"{reason}; lower the learning rate, or raise model.moe.router.z_loss"} if reason else {}
