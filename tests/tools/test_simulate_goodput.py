"""The simulation of goodput agrees with closed forms where there are some, and its tiers help as they should."""

import math
from dataclasses import replace

import pytest

from maxlm.planning.goodput import LLAMA_CHIPS, MEMORY, PARTS, TO_VERDICT_S, Job, Tier, expected_goodput, simulate
from tools.lab.simulate_goodput import variants

BLOCK, MTBF = 10.0, 20_000.0


def alone(interval, *, block=BLOCK, mtbf=MTBF, restart=0.0):
    """One tier, and failures of processes only."""
    tier = Tier("store", block, 0.0, restart, True, interval)
    times = {"step_s": 1.0, "detect_process_s": 0.0, "startup_s": 0.0, "host_share": 0.0, "hang_share": 0.0, "spares": 0}
    return Job(chips=1, tiers=(tier,), rate=1 / mtbf, **times)


@pytest.mark.parametrize(("interval", "restart"), [(200, 0.0), (630, 0.0), (2000, 500.0), (15_000, 500.0)])
def test_one_tier_is_as_daly_says(interval, restart):
    """Daly 2006 (Future Generation Computer Systems 22), eq. 20: wall time M exp(R/M) (exp((t + d)/M) - 1) for each t seconds of work."""
    wall = MTBF * math.exp(restart / MTBF) * (math.exp((interval + BLOCK) / MTBF) - 1)
    assert simulate(alone(interval, restart=restart))["useful"] == pytest.approx(interval / wall, rel=5e-3)


def test_the_interval_is_young_s_and_the_best():
    """Young 1974: saves every sqrt(2 d M) seconds cost a share of about sqrt(2 d / M) together with the work that is lost."""
    best = alone(None)
    assert best.intervals() == {"store": pytest.approx(math.sqrt(2 * BLOCK * MTBF), abs=1)}
    overhead = {factor: 1 - simulate(alone(factor * best.intervals()["store"]))["useful"] for factor in (0.4, 1.0, 2.5)}
    assert overhead[1.0] == pytest.approx(math.sqrt(2 * BLOCK / MTBF), rel=0.03)
    assert overhead[1.0] < min(overhead[0.4], overhead[2.5]) / 1.2


def test_every_second_is_in_one_part_and_each_tier_helps():
    job = Job(spares=0, wait_s=0.0, meet_s=0.0, compile_s=0.0)
    found = {name: simulate(one, interruptions=5000) for name, one in variants(job, 128).items()}
    assert all(sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= 0 for shares in found.values())
    assert all(set(shares) == set(PARTS) for shares in found.values())
    assert found["store alone"]["useful"] < found["+ memory"]["useful"] < found["+ peer"]["useful"] < found["+ elastic"]["useful"]
    assert found["+ peer"]["no hosts"] > 0.5, "hosts are away for six hours, every three and a half"
    assert found["+ elastic"]["no hosts"] == 0
    assert found["+ elastic"]["fewer hosts"] == pytest.approx(6 / (54 * 24 / 466 / 0.78) * 128 / LLAMA_CHIPS, rel=0.1)


def test_a_copy_that_dies_with_its_host_helps_only_where_it_lives():
    job = replace(Job(), tiers=(MEMORY, Tier("store", 1.0, 60.0, 0.0, True, 3600.0)))
    lost = {share: simulate(replace(job, host_share=share), interruptions=5000)["redone"] for share in (0.0, 1.0)}
    assert lost[0.0] < 0.02 < 0.15 < lost[1.0]


def test_idle_spares_are_paid_for():
    """Also by a job that never fails: its goodput is its share of the hosts. `maxlm plan` counts wall time, and no spares."""
    job = replace(alone(100.0), rate=1e-12, chips=800, chips_per_host=8, tiers=(Tier("store", 0.0, 0.0, 0.0, True, 1e6),), spares=25)
    shares = simulate(job, interruptions=1)
    assert (shares["useful"], shares["spares"]) == (pytest.approx(0.8, abs=1e-3), pytest.approx(0.2))
    plain = simulate(replace(Job(1000), spares=None), interruptions=1000)
    assert expected_goodput(1000, 8, 6.0, memory=True, peer=True) == pytest.approx(plain["useful"] / (1 - plain["spares"]))


def test_spares_by_default_are_enough_for_repairs_at_any_size_and_few():
    for chips in (1000, LLAMA_CHIPS, 100_000):
        job = Job(chips)
        assert simulate(job, interruptions=3000)["no hosts"] < 0.003
        assert job.spare_hosts * 8 / chips < 0.02


def test_a_hang_costs_the_limit_that_the_watchdog_has_learned():
    """20 times the 99th percentile of steps, within 5%, and the time to the end of all processes."""
    job = replace(alone(2000), step_s=6.0, hang_share=1.0)
    assert 20 * 7.2 <= job.hang_s - TO_VERDICT_S <= 20 * 7.2 * 1.05
    assert replace(job, step_s=0.5).hang_s == 60 + TO_VERDICT_S
    shares = simulate(job, interruptions=3000)
    assert shares["detection"] == pytest.approx(job.hang_s / MTBF, rel=0.1)
    slow = simulate(replace(job, detect_hang_s=3600.0), interruptions=3000)
    assert slow["detection"] > 10 * shares["detection"]


def test_hosts_are_waited_for_once_and_each_smaller_mesh_compiles_once():
    job = variants(Job(spares=0, hang_share=0.0, wait_s=0.0, meet_s=0.0, compile_s=0.0), 128)["+ elastic"]
    per_loss = 1 / job.mtbf_s * job.host_share
    plain, waits = simulate(job, interruptions=5000), simulate(replace(job, wait_s=300.0), interruptions=5000)
    assert plain["no hosts"] == 0
    assert waits["no hosts"] == pytest.approx(300 * per_loss, rel=0.1)
    first, each = (simulate(replace(job, compile_s=300.0, compiled=found), interruptions=5000)["mesh changes"] for found in (True, False))
    assert first < plain["mesh changes"] + 0.001
    assert each > plain["mesh changes"] + 0.9 * 300 * per_loss
