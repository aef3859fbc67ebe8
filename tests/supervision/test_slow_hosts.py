"""The host or the link that the others wait for is named, with since when and by how much; and none in clean steps."""

import random
import socket

import pytest

from maxlm.supervision import own_time
from maxlm.supervision.own_time import OwnTime, Sent
from maxlm.supervision.slow_hosts import SlowHosts, Times
from maxlm.training.progress import LoopProgress

STEP = 0.5  # seconds
BEAT = 10  # steps between two heartbeats


class Hosts:
    """Figures of hosts as their heartbeats carry them; each step adds to them with some noise."""

    def __init__(self, count, seed=0):
        self.random = random.Random(seed)
        self.count, self.step = count, 0
        self.sums = [dict.fromkeys(("steps", "wall_ms", "stepped_ms", "waited_ms", "stopped_ms", "sending_ms"), 0.0) for _ in range(count)]
        self.slow = SlowHosts(0.2, lambda number: f"host{number}")

    def beat(self, worked=None, stopped=None, sending=None, trips=None, beside=0.0):
        """Five seconds; seconds a step of the hosts that are special. Returns the events."""
        self.step += BEAT
        for number, sums in enumerate(self.sums):
            noise = self.random.uniform(0.9, 1.1)
            own = (worked or {}).get(number, 0.04 * noise)
            figures = {
                "steps": BEAT,
                "wall_ms": 1e3 * (BEAT * STEP + beside),
                "stepped_ms": 1e3 * BEAT * STEP,
                "waited_ms": 1e3 * BEAT * (STEP - own),
                "stopped_ms": 1e3 * BEAT * (stopped or {}).get(number, 0.01 * noise * noise),
                "sending_ms": 1e3 * BEAT * (sending or {}).get(number, 0.1 * noise),
            }
            for name, value in figures.items():
                sums[name] += value
        times = {number: Times(**{name: round(value) for name, value in sums.items()}) for number, sums in enumerate(self.sums)}
        round_trips = {number: (trips or {}).get(number, self.random.uniform(1e-4, 4e-2)) for number in range(1, self.count)}
        return self.slow.update(self.step * STEP, self.step, times, round_trips)

    def beats(self, many, **special):
        return [event for _ in range(many) for event in self.beat(**special)]


@pytest.mark.parametrize("count", [2, 3, 4, 64])
@pytest.mark.parametrize(
    ("special", "cause", "words"),
    [
        ({"worked": {1: 0.49}}, "slow_host", "its loop works for 0.49 s of each step of 0.5 s"),
        ({"stopped": {1: 0.2}}, "slow_host", "its process does not run for 0.2 s of each step of 0.5 s"),
        ({"sending": {1: 0.48}}, "slow_link", "not acknowledged for 0.48 s of each step of 0.5 s"),
        ({"trips": {1: 0.2}}, "slow_link", "a round trip takes 200 ms"),
    ],
)
def test_the_culprit_is_named_and_its_recovery(count, special, cause, words):
    hosts = Hosts(count)
    assert hosts.beats(20) == []
    began = hosts.step
    (event,) = hosts.beats(26, **special)
    assert event.kind == "alarm"
    assert event.data["cause"] == cause
    named = ["host0", "host1"] if count == 2 and "trips" in special else ["host1"]  # ends of the only link
    assert event.data["hosts"] == named
    assert words.replace("trip", "trip on the link between it and host1" if len(named) == 2 else "trip") in event.data["reason"]
    assert abs(event.data["since"] - began) <= 60 + BEAT, "a window"
    assert hosts.beats(10, **special) == [], "once is enough"
    (event,) = hosts.beats(30)
    assert event.data["cause"] == f"{cause}_recovered"
    assert event.data["hosts"] == named


@pytest.mark.parametrize("count", [2, 4, 64])
def test_ten_thousand_clean_steps_raise_nothing(count):
    """With saves, evaluations, single slow windows of a host each, and loads that all hosts share."""
    hosts = Hosts(count, seed=count)
    for number in range(1000):
        hiccup = {number % count: 0.49} if number % 40 < 6 else {}
        everybody = dict.fromkeys(range(count), 0.45) if 500 < number < 600 else {}
        assert hosts.beat(worked=everybody or hiccup, stopped=hiccup and {number % count: 0.1}, beside=60 * (number % 30 == 0)) == []


def test_a_host_that_works_more_but_waits_as_well_is_not_behind():
    """Its devices have work to do meanwhile."""
    assert Hosts(4).beats(60, worked={1: 0.3}) == []


def test_a_neighbour_of_a_slow_link_is_not_blamed():
    """Figures of three hosts of which one sent at 20 Mbit/s: its neighbour's data was acknowledged late, too."""
    (event,) = Hosts(3).beats(30, sending={0: 0.004, 1: 0.48, 2: 0.32})
    assert event.data["hosts"] == ["host1"]


def test_a_distance_is_no_slow_link_and_a_network_that_all_share_blames_nobody():
    assert Hosts(4).beats(60, trips={1: 0.15}) == []
    hosts = Hosts(4)
    hosts.beats(10)
    assert hosts.beats(60, trips={1: 0.2, 2: 0.2, 3: 0.2}) == []
    assert hosts.beats(60, sending=dict.fromkeys(range(4), 0.45)) == []


def test_a_thousand_slow_hosts_are_one_event():
    hosts = Hosts(4000)
    events = hosts.beats(30, stopped=dict.fromkeys(range(1000), 0.3))
    assert len(events) == 1
    assert events[0].data["reason"].endswith("995 more")
    assert len(events[0].data["hosts"]) == 5


def test_time_of_a_host_in_its_figures():
    now, connections = [0.0], [Sent((("a", 1), ("b", 2)), 5.0)]
    progress = LoopProgress(lambda: now[0])
    own = OwnTime(progress, lambda: list(connections))
    for step in range(1, 5):
        now[0] += 0.3
        with progress.waiting(step):
            now[0] += 0.7
    progress.pause()
    now[0] += 50
    with progress.waiting(5):
        now[0] += 0.7
    own.slept(own_time.SLEEP_SECONDS + 0.15)
    own.slept(own_time.SLEEP_SECONDS + 0.001)
    assert own.figures() == {"steps": 3, "wall_ms": 54700, "stepped_ms": 3000, "waited_ms": 2100, "stopped_ms": 150, "sending_ms": 0}
    connections[:] = [Sent((("a", 1), ("b", 2)), 5.25), Sent((("c", 1), ("d", 2)), 100.0)]
    assert own.figures()["sending_ms"] == 250


def test_what_a_peer_does_not_read_is_not_its_link():
    """A connection is found, with no time of a slow link while the receiver has no space."""
    with socket.create_server(("localhost", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            one.setblocking(False)
            try:
                while True:
                    one.send(bytes(2**20))
            except BlockingIOError:
                pass
            ends = (one.getsockname(), one.getpeername())
            assert [sent.seconds < 0.05 for sent in own_time.tcp_connections() if sent.ends == ends] == [True]


@pytest.mark.parametrize(("often", "named"), [(3, True), (1, False)])
def test_a_round_trip_counts_by_its_median(often, named):
    """Three of four beats with a long one name the link; one of four does not."""
    run = Hosts(3)
    events = [event for beat in range(400) for event in run.beat(trips={1: 0.2 if beat % 4 < often else 0.005})]
    assert [event.data["cause"] for event in events] == ["slow_link"] * named
