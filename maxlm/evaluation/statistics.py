"""Standard errors by bootstrap."""

from collections.abc import Callable

import numpy as np

RESAMPLES, SEED = 1000, 0
DRAWN = 2**22  # indices at a time


def standard_error(values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], resamples: int = RESAMPLES) -> float | None:
    """Deviation of a statistic over samples of the items, drawn with replacement (Efron 1979), by a fixed seed. None for fewer than two.

    Args:
        values: [items] or [items, figures].
        statistic: from means over items, [samples] or [samples, figures], to one number a sample.
        resamples: number of samples.
    """
    n = len(values)
    if n < 2:
        return None
    rng = np.random.default_rng(SEED)
    means, at_a_time = [], max(DRAWN // n, 1)
    for start in range(0, resamples, at_a_time):
        drawn = rng.integers(0, n, (min(at_a_time, resamples - start), n))
        means.append(values[drawn].mean(axis=1))
    return float(np.std(statistic(np.concatenate(means)), ddof=1))
