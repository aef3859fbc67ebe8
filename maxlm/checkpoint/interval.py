"""Interval of saves: the one that loses least time to saves and failures together."""

import math


def daly(save_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves that block it for `save_s`, at one failure every `mtbf_s` on average.

    Daly 2006 (A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22:303, equation 37), whose first term,
    sqrt(2 save_s mtbf_s), is Young's (CACM 17:530, 1974).
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def steps_between(save_s: float, written_s: float, step_s: float, mtbf_s: float) -> int:
    """`daly` in steps of `step_s`, and no fewer than the background takes for `written_s`, so that no save waits for the one before."""
    return max(1, math.ceil(max(daly(max(save_s, 1e-6), mtbf_s), written_s) / max(step_s, 1e-6)))
