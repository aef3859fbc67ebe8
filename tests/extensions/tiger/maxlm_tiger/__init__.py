"""Tiger, a tight-fisted optimizer (Su 2023, https://kexue.fm/archives/9512): the sign of one average of gradients, and decay.

optimizer: {name: tiger, peak_lr: 1e-3, tiger: {momentum: 0.965}}
"""

from collections.abc import Iterator

import maxlm
from maxlm.config.capability import Inert, Problems
from maxlm.config.fields import BELOW_ONE, Fraction, Section
from maxlm.config.part import FIRST, OptimizerFacts, Part


class TigerConfig(Section):
    """Settings of `optimizer.name: tiger`. Absent: the defaults."""

    momentum: Fraction = 0.965
    """Share of its old value that the average of gradients keeps in an update. Unit: share."""


def _problems(tiger: TigerConfig) -> Problems:
    if tiger.momentum >= BELOW_ONE:
        yield "optimizer.tiger.momentum", tiger.momentum, "must be below 1, or the average never moves", "use 0.9 to 0.99"


def _inert(tiger: TigerConfig) -> Iterator[Inert]:
    why = "optimizer.name = tiger has one average, and divides by nothing"
    yield from (Inert(f"optimizer.{name}", why, "set optimizer.tiger.momentum") for name in ("beta1", "beta2", "eps"))


maxlm.register(
    Part(
        kind="optimizer",
        name="tiger",
        place="maxlm_tiger.rule:Tiger",
        about="The sign of one average of gradients (https://kexue.fm/archives/9512).",
        section=TigerConfig,
        rules=(_problems,),
        inert=_inert,
        facts=OptimizerFacts((FIRST,)),
    )
)
