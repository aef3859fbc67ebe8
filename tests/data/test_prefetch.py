"""Results come in order, a bounded number ahead; what goes wrong comes in its turn; no thread is left behind."""

import contextlib
import gc
import threading
import time

import pytest
from data_cases import all_of

from maxlm.data.prefetch import Batches


def wait_for(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "waited 5 s"
        time.sleep(0.001)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_results_come_in_order_and_at_most_depth_ahead(depth):
    made = []
    with contextlib.closing(Batches(lambda key, _: made.append(key) or key * 10, range(12), depth)) as results:
        wait_for(lambda: len(made) == depth)
        time.sleep(0.05)
        assert len(made) == depth, "made before anybody asked, and no further"
        assert all_of(results) == [key * 10 for key in range(12)]
        assert all_of(results) == []


def test_it_works_while_the_consumer_does():
    with contextlib.closing(Batches(lambda key, _: time.sleep(0.03), range(8), 2)) as results:
        start = time.perf_counter()
        for _ in range(8):
            results.get()
            time.sleep(0.03)
    assert time.perf_counter() - start < 0.42, "0.27 s side by side, 0.48 s in turn"


def test_an_exception_comes_after_the_results_before_it_and_ends_the_thread():
    def make(key: int, _: object) -> int:
        if key == 2:
            raise ValueError("broken")
        return key

    threads = threading.active_count()
    results = Batches(make, range(5), 4)
    assert [results.get(), results.get()] == [0, 1]
    with pytest.raises(ValueError, match="broken"):
        results.get()
    with pytest.raises(StopIteration):
        results.get()
    assert threading.active_count() == threads


@pytest.mark.parametrize("stop", ["close", "drop"])
def test_no_thread_outlives_its_consumer(stop):
    threads = threading.active_count()
    results = Batches(lambda key, _: key, iter(int, 1), 2)
    results.get()
    if stop == "close":
        results.close()
        results.close()
    del results
    gc.collect()
    wait_for(lambda: threading.active_count() == threads)
