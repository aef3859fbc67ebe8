"""Use of links by the schedule of compiled programs: no byte is lost, no link is faster than it is, and slower links take longer."""

from pathlib import Path

import numpy as np
import pytest

from maxlm.cost.link_schedule import FACTORS, LONGER, Runs, link_uses, needs, rates_of, runs_of
from maxlm.cost.network import AxisLinks, Collective, Network
from maxlm.cost.replay import CollectiveSpan
from maxlm.cost.step_cost import estimate_on, replay
from maxlm.hardware.topologies import parse
from maxlm.hlo.parser import read

PROGRAMS = Path(__file__).resolve().parents[1] / "hlo" / "programs"
CASES = {  # program -> machine, mesh, dims of the torus that each axis spans
    "gathers": ("v5p:2x2x2", {"data": 2, "fsdp": 2, "tensor": 2}, {"data": (0,), "fsdp": (1,), "tensor": (2,)}),
    "exchanges": ("v5p:2x2x2", {"data": 2, "fsdp": 2, "tensor": 2}, {"data": (0,), "fsdp": (1,), "tensor": (2,)}),
    "sparsecore": ("v5p:2x2x2", {"fsdp": 4, "tensor": 2}, {"fsdp": (0, 1), "tensor": (2,)}),
    "fused": ("v5e:4x4", {"fsdp": 4}, {"fsdp": (0,)}),
    "offload": ("v6e:1x1", {"fsdp": 1}, {}),
}
each_program = pytest.mark.parametrize("name", CASES)


def program(name):
    """(module, network, machine) of a saved program."""
    machine, sizes, torus = CASES[name]
    topology = parse(machine)
    links = {axis: AxisLinks(dims=len(dims), torus=dims) for axis, dims in torus.items()}
    return read((PROGRAMS / f"{name}.hlo").read_text()), Network(topology.chip, sizes, links), topology


@each_program
def test_every_byte_is_seen_on_every_link_it_passes(name):
    """But for what a loop's last turn leaves to fly, its bytes are those of the collectives, and none is late."""
    module, network, topology = program(name)
    root, _ = replay(module, network)
    moved = {}
    for runs in runs_of(root):
        one = runs.span.collective
        dims = {dim for axis in one.axes if axis in network.links for dim in network.links[axis].torus}
        host = {"to host": "chip to host", "from host": "host to chip"}.get(one.lanes[0]) if one.link == "host" else None
        for link in [host] if host else [f"ICI {'xyz'[dim]}" for dim in dims]:
            moved[link] = moved.get(link, 0.0) + len(runs.begins) * network.link_bytes(one)
    uses = {use.link: use for use in link_uses(root, network, topology)}
    assert {link: use.average * root.seconds for link, use in uses.items() if use.peak} == pytest.approx(moved, rel=1e-6)


@each_program
def test_no_link_is_faster_than_it_is_and_the_step_is_that_of_compile(name):
    module, network, topology = program(name)
    root, _ = replay(module, network)
    assert root.seconds == pytest.approx(estimate_on(module, network).total_s)
    for use in link_uses(root, network, topology):
        assert 0 <= use.average <= use.peak <= use.limit * 1.000001
        assert use.p90 <= use.peak and use.busy == pytest.approx(use.rates.busy)
        assert use.rates.seconds.sum() == pytest.approx(root.seconds)


def test_an_axis_over_two_dims_uses_the_links_of_both_alike():
    module, network, topology = program("sparsecore")
    by_link = {use.link: use for use in link_uses(replay(module, network)[0], network, topology)}
    x, y = by_link["ICI x"], by_link["ICI y"]
    assert x.average == y.average > 0 and x.used_by == y.used_by == "fsdp" and by_link["ICI z"].used_by == "tensor"


def test_loops_are_unrolled():
    """Four layers, each with its gather, one after the other."""
    module, network, _ = program("fused")
    (runs,) = [runs for runs in runs_of(replay(module, network)[0]) if runs.span.collective.opcode == "all-gather"]
    assert len(runs.begins) == 4
    assert np.ptp(np.diff(runs.begins)) < 1e-9 < np.diff(runs.begins).min()


@pytest.mark.parametrize("chip", ["v5e:1x1", "tpu7x:2x2x1"])
def test_a_transfer_between_slices_uses_the_data_centre_network(chip):
    attributes = 'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="a",_xla_megascale_transfer_type="ALL_REDUCE"}'
    module = read(f"""HloModule m, is_scheduled=true

ENTRY %e (p: f32[1048576]) -> f32[1048576] {{
  %p = f32[1048576]{{0}} parameter(0)
  %after = token[] after-all()
  %send = (f32[1048576]{{0}}, u32[], token[]) send(%p, %after), channel_id=1, {attributes}
  %recv = (f32[1048576]{{0}}, u32[], token[]) recv(%after), channel_id=2, {attributes}
  %got = (f32[1048576]{{0}}, token[]) recv-done(%recv), channel_id=2, is_host_transfer=true
  ROOT %r = f32[1048576]{{0}} get-tuple-element(%got), index=0
}}
""")
    topology = parse(chip, slices=2)
    network = Network(topology.chip, {}, {}, slices=2, across="data")
    root, _ = replay(module, network)
    (use,) = [use for use in link_uses(root, network, topology) if use.link == "DCN"]
    assert (use.link, use.used_by, use.limit) == ("DCN", "data", topology.chip.dcn_bytes_per_s)
    sent = topology.chip.devices_per_chip * 4 * 2**20
    assert use.average * root.seconds == pytest.approx(sent), "of each device half of it goes, twice"
    assert root.seconds == pytest.approx(sent / use.limit, rel=0.05)
    assert use.exposed_s == pytest.approx(root.seconds)


def flying(lane, begin, opcode="collective-permute"):
    """One run of a second of 10^9 bytes."""
    one = Collective("c", opcode, "async", 10**9, 2, ("fsdp",), "", 1.0, "ici", (lane,))
    return Runs(CollectiveSpan(one, 0.0, begin, begin + 1.0), np.array([begin]))


@pytest.mark.parametrize(("lanes", "peak"), [(("fsdp {{0,1}}", "fsdp {{1,0}}"), 1e9), (("fsdp {{0,1}}", "fsdp {{0,1}}"), 2e9)])
def test_permutations_of_different_directions_do_not_share_links(lanes, peak):
    network = Network(parse("v5e:2x2").chip, {"fsdp": 2}, {"fsdp": AxisLinks(torus=(0,))})
    rates = rates_of([flying(lane, 0.5 * number) for number, lane in enumerate(lanes)], 4.0, network)
    assert rates.peak == pytest.approx(peak)
    assert rates.seconds.sum() == pytest.approx(4.0) and rates.busy == pytest.approx(1.5 / 4)


@pytest.mark.parametrize(("name", "kind"), [("sparsecore", "ici"), ("fused", "ici"), ("offload", "host")])
def test_more_bandwidth_is_never_slower_and_the_least_is_just_enough(name, kind):
    module, network, _ = program(name)
    (need,) = needs(module, network, {kind})
    times = [need.relative[factor] for factor in sorted(FACTORS, reverse=True)]
    assert times == sorted(times) and times[0] <= 1 <= times[1]
    assert need.least is not None and need.least < need.now
    faster = {factor for factor in FACTORS if factor * need.now >= need.least}
    assert {factor for factor, time in need.relative.items() if time <= 1 + LONGER} == faster
