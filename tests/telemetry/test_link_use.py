"""Bandwidth of links over time: figures are those of the time, not of the samples; counters are read as the system writes them."""

import itertools

import numpy as np
import pytest

from maxlm.base.errors import UserError
from maxlm.telemetry.link_counters import Link, Sampler, read_host
from maxlm.telemetry.link_use import LinkUse, Rates, plot, table

SECONDS, LEVELS = np.array([3.0, 1.0, 0.5, 5.5]), np.array([2.0, 8.0, 9.0, 0.0])


def test_figures_are_weighted_by_time():
    """As for samples of a tenth of a second each, all alike."""
    rates = Rates(SECONDS, LEVELS)
    even = np.repeat(LEVELS, (10 * SECONDS).astype(int))
    assert rates.average == pytest.approx(even.mean())
    for share in (0.1, 0.5, 0.6, 0.9, 0.95, 0.99):
        assert rates.percentile(share) == np.percentile(even, 100 * share, method="inverted_cdf")
    assert (rates.peak, rates.busy) == (9.0, pytest.approx(0.45))


def test_without_time_nothing_is_used():
    nothing = Rates(np.zeros(0), np.zeros(0))
    assert (nothing.average, nothing.percentile(), nothing.peak, nothing.busy) == (0.0, 0.0, 0.0, 0.0)


def test_a_use_survives_json():
    use = LinkUse.from_rates("eth0 sent", "ethernet", Rates(SECONDS, LEVELS), 1.25e9, used_by="host0")
    again = LinkUse.from_json(use.to_json())
    assert again.to_json() == use.to_json() and again.limit == 1.25e9
    assert table([use, again], "host").row_count == 2


@pytest.mark.parametrize("intervals", [0, 4, 10_000])
def test_a_plot_is_drawn_for_any_number_of_intervals(tmp_path, intervals):
    rates = Rates(np.full(intervals, 0.1), np.arange(intervals, dtype=float))
    plot([LinkUse.from_rates("ICI x", "ici", rates, None)], "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_dollar_sign_in_a_name_is_no_formula(tmp_path):
    plot([LinkUse.from_rates("$_$", "ici", Rates(SECONDS, LEVELS), None)], "a$_$b on x", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_a_plot_that_cannot_be_written_is_an_error_of_one_line(tmp_path):
    with pytest.raises(UserError, match=r"--out .* cannot be written"):
        plot([], "title", tmp_path / "missing" / "plot.png")


DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    1000      10    0    0    0     0          0         0     1000      10    0    0    0     0       0          0
  eth0:    5000      50    0    0    0     0          0         0     7000      70    0    0    0     0       0          0
"""


def test_counters_are_read_as_the_system_writes_them(tmp_path):
    """Interfaces in bytes and Mbit/s, InfiniBand in words of four bytes and Gb/sec; a file that is missing is no limit."""
    files = {
        "proc/self/net/dev": DEV,
        "sys/class/net/eth0/speed": "10000\n",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": "100\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": "25\n",
        "sys/class/infiniband/mlx5_1/ports/1/rate": "400 Gb/sec (4X NDR)\n",  # its counters are missing
        "sys/class/infiniband/mlx5_2/ports/1/counters/port_xmit_data": "1\n",  # its rate is
        "sys/class/infiniband/mlx5_2/ports/1/counters/port_rcv_data": "2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_host(tmp_path) == {
        Link("lo received", "loopback"): 1000,
        Link("lo sent", "loopback"): 1000,
        Link("eth0 received", "ethernet", 1.25e9): 5000,
        Link("eth0 sent", "ethernet", 1.25e9): 7000,
        Link("mlx5_0/1 received", "infiniband", 5e10): 100,
        Link("mlx5_0/1 sent", "infiniband", 5e10): 400,
        Link("mlx5_2/1 received", "infiniband"): 8,
        Link("mlx5_2/1 sent", "infiniband"): 4,
    }
    assert read_host(tmp_path / "nowhere") == {}
    assert {link.name for link in read_host()} >= {"lo sent", "lo received"}


def sampled(values, **how):
    """Use of one link whose reader gives `values`, one a sample, then the last."""
    link, given = Link("eth0 sent", "ethernet"), itertools.chain(values, itertools.repeat(values[-1]))
    lengthy = len(values)
    seen = []

    def read():
        seen.append(None)
        return {link: float(next(given))}

    sampler = Sampler(read, 0.001, **how)
    with sampler:
        while len(seen) < lengthy:
            pass
    return sampler


def test_bytes_that_a_counter_counts_are_kept():
    (use,) = sampled([1e6, 1e6, 4e6, 4e6, 9e6]).uses("host0")
    assert use.rates is not None and use.used_by == "host0"
    assert use.rates.seconds @ use.rates.bytes_per_s == pytest.approx(8e6)


def test_a_counter_that_is_reset_leaves_an_interval_out():
    (use,) = sampled([5e6, 6e6, 0.0, 1e6]).uses()
    assert use.rates is not None and use.rates.seconds @ use.rates.bytes_per_s == pytest.approx(2e6)


def test_a_reader_of_rates_is_not_differentiated():
    (use,) = sampled([7.0, 7.0, 7.0], rates=True).uses()
    assert (use.average, use.p90, use.peak) == (pytest.approx(7.0), pytest.approx(7.0), pytest.approx(7.0))


def test_links_that_carry_nothing_are_left_out():
    assert sampled([5.0, 5.0]).uses() == []
