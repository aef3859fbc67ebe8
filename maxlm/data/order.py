"""Order of samples: grain's index-addressed shuffle, repeated with a new order each epoch, mixed by weight."""

from collections.abc import Iterable, Sequence
from typing import Any

import grain
import numpy as np
from grain.transforms import DatasetSelectionMap

from maxlm.config.errors import UserError

SHUFFLE_LIMIT = 2**32  # grain's shuffle counts in 32 bits, and wraps around silently above
SHARES = 2**32  # weights are rounded to this fraction of the whole


def batch_number(step: int, left_out: Sequence[int]) -> int:
    """Number of the batch of step `step`, counted from 0: the step-th natural number that is not in `left_out`, which is sorted."""
    for number in left_out:
        if number > step:
            break
        step += 1
    return step


class WeightedSelection(DatasetSelectionMap):
    """Interleaves endless datasets so that after any n samples each has had its share of n, to within one sample per dataset.

    grain's own `mix` does the same with weights cut to whole hundredths of the smallest: up to 1% off.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = sum(weights)
        self._shares = [max(round(weight / total * SHARES), 1) for weight in weights]

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Dataset of sample `index`, and its number there. Each dataset in turn takes its share of the rest."""
        before, after, left = index, index + 1, sum(self._shares)
        for dataset, share in enumerate(self._shares):
            left -= share
            passed_before, passed_after = before * left // (left + share), after * left // (left + share)
            if passed_before == passed_after:
                return dataset, before - passed_before
            before, after = passed_before, passed_after
        raise AssertionError("the last dataset takes the rest")


class SampleOrder:
    """Sample number -> window id. Ids count the windows of all stores, one store after another."""

    def __init__(self, windows: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool) -> None:
        """`windows`: of each store; `weights`: shares of the samples, in any unit. Each store and epoch derives its own seed."""
        if shuffle and max(windows) > SHUFFLE_LIMIT:
            rule = f"is more than the {SHUFFLE_LIMIT:,} windows a shuffle can count"
            raise UserError(f"a store of {max(windows):,} windows {rule}: use a longer data.seq_len, or split it into a mixture.")
        first = np.concatenate([[0], np.cumsum(windows)]).tolist()
        datasets: list[Any] = []
        for number in range(len(windows)):
            dataset = grain.MapDataset.range(first[number], first[number + 1])
            if shuffle:
                state = np.random.SeedSequence([seed, number]).generate_state(1)  # grain takes 32 bits
                dataset = dataset.shuffle(seed=int(state[0]))
            datasets.append(dataset.repeat())
        self._samples = datasets[0] if len(datasets) == 1 else grain.MapDataset.select_from_datasets(datasets, WeightedSelection(weights))

    def ids(self, samples: Iterable[int]) -> np.ndarray:
        """Window ids of the sample numbers, int64."""
        return np.array([self._samples[int(sample)] for sample in samples], np.int64)
