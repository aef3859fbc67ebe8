"""A mesh axis is as fast as the links under it: how many dims it spans, whether they close, whether it leaves the slice."""

from types import SimpleNamespace

import numpy as np
import pytest

from maxlm.cost.efficiency import HBM_SHARE
from maxlm.cost.mesh_links import axis_links, links_of, node_links
from maxlm.cost.network import AxisLinks, Network
from maxlm.cost.step_cost import StepCost, estimate_on
from maxlm.hardware.chips import chip_named
from maxlm.hardware.topologies import parse
from maxlm.hlo.parser import read


@pytest.mark.parametrize(
    ("topology", "line", "links"),
    [
        ("v5p:4x4x4", [(0, (x, 0, 0)) for x in range(4)], AxisLinks(1, True)),
        ("v5p:4x4x4", [(0, (x, y, z)) for x in range(4) for y in range(4) for z in range(4)], AxisLinks(3, True)),
        ("v5p:4x4x8", [(0, (0, 0, z)) for z in range(4)], AxisLinks(1, False)),  # half a ring is a line
        ("v5p:2x2x4", [(0, (0, 0, z)) for z in range(4)], AxisLinks(1, False)),
        ("v5e:8x16", [(0, (0, y, 0)) for y in range(16)], AxisLinks(1, True)),
        ("v5e:8x16", [(0, (x, y, 0)) for x in range(8) for y in range(16)], AxisLinks(2, False)),
        ("tpu7x:4x4x4", [(0, (0, 0, 0)), (0, (0, 0, 0))], AxisLinks(1, True)),  # the two halves of a chip
        ("tpu7x:4x4x4", [(0, (x, 0, 0)) for x in range(4) for _ in range(2)], AxisLinks(1, True)),  # both halves of each
        ("tpu7x:4x4x4", [(0, (x, 0, 0)) for x in range(4)], AxisLinks(1, True, rows=2)),  # one: the others are another row
        ("v5e:16x16", [(0, (0, 0, 0)), (1, (0, 0, 0))], AxisLinks(1, True, slices=2)),
        ("v5e:2x2", [(s, (x, 0, 0)) for s in range(4) for x in range(2)], AxisLinks(1, False, slices=4)),
    ],
)
def test_an_axis_knows_its_links(topology, line, links):
    assert links_of(line, parse(topology)) == links


def test_halves_of_chips_that_gather_apart_share_their_links():
    """Twice as long as both together over the same links, whatever the collective; with the axis inside the chips they are one group."""
    chip, sizes = chip_named("tpu7x"), {"fsdp": 64, "tensor": 2}
    apart = Network(chip, sizes, {"fsdp": AxisLinks(3, rows=2), "tensor": AxisLinks()})
    alone = Network(chip, sizes, {"fsdp": AxisLinks(3), "tensor": AxisLinks()})
    for opcode in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        times = [network.seconds(opcode, 10**10, ("fsdp",), 64) for network in (apart, alone)]
        assert times[0] == pytest.approx(2 * times[1], rel=0.02)
        both = [network.seconds(opcode, 10**10, ("fsdp", "tensor"), 128) for network in (apart, alone)]
        assert both[0] == both[1]


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 8}, {"data": 8, "tensor": 2}, {"fsdp": 16}, {"data": 1, "fsdp": 2, "tensor": 8}])
@pytest.mark.parametrize("topology", ["h100:2x8", "h100:4x4", "h100:8x2", "a100-40gb:1x16", "h100:16x1"])
def test_nodes_that_an_axis_crosses_are_those_of_its_devices(sizes, topology):
    """Reckoned from the sizes alone, as read off a mesh of devices numbered node by node."""
    gpus = parse(topology).sides[1]
    grid = np.arange(16).reshape(tuple(sizes.values()))
    there = np.vectorize(lambda number: SimpleNamespace(platform="cuda", process_index=number // gpus))(grid)
    mesh = SimpleNamespace(shape=sizes, devices=there)
    assert node_links(sizes, parse(topology)) == axis_links(mesh, parse(topology))


def test_of_rows_that_cross_unlike_numbers_of_nodes_the_slowest_counts():
    """In nodes of 6 GPUs every second row of 4 lies in two of them, though the first does not."""
    topology, sizes = parse("h100:4x6"), {"data": 6, "tensor": 4}
    there = [SimpleNamespace(platform="cuda", process_index=number // 6) for number in range(24)]
    mesh = SimpleNamespace(shape=sizes, devices=np.array(there).reshape(6, 4))
    assert node_links(sizes, topology)["tensor"] == axis_links(mesh, topology)["tensor"] == AxisLinks(slices=2)


def step_between_slices(moved: int, kind: str = "ALL_REDUCE") -> StepCost:
    """One transfer of 4 MB between two slices, with an operation that writes `moved` bytes between its send and its recv-done."""
    attributes = f'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="a_0",_xla_megascale_transfer_type="{kind}"}}'
    module = read(f"""HloModule m, is_scheduled=true

ENTRY %e (p: f32[1048576]) -> f32[1048576] {{
  %p = f32[1048576]{{0}} parameter(0)
  %after = token[] after-all()
  %send = (f32[1048576]{{0}}, u32[], token[]) send(%p, %after), channel_id=1, {attributes}
  %recv = (f32[1048576]{{0}}, u32[], token[]) recv(%after), channel_id=2, {attributes}
  %work = u8[{moved}]{{0}} iota(), iota_dimension=0
  %done = token[] send-done(%send), channel_id=1, is_host_transfer=true
  %got = (f32[1048576]{{0}}, token[]) recv-done(%recv), channel_id=2, is_host_transfer=true
  ROOT %r = f32[1048576]{{0}} get-tuple-element(%got), index=0
}}
""")
    return estimate_on(module, Network(parse("v5e:2x2").chip, {}, {}, slices=2, across="data"))


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_what_computes_meanwhile_hides_a_transfer_between_slices(share):
    chip = parse("v5e:2x2").chip
    (row,) = step_between_slices(0).traffic
    assert (row.axes, row.opcode, row.link, row.count, row.bytes) == (("data",), "all-reduce", "dcn", 1, 4 * 2**20)
    assert row.seconds == pytest.approx(2 * 4 * 2**20 / 2 / chip.dcn_bytes_per_s, rel=0.05)  # half goes and half comes, twice
    cost = step_between_slices(round(share * row.seconds * HBM_SHARE * chip.hbm_bytes_per_s))
    assert cost.exposed_s == pytest.approx(row.seconds * max(0.0, 1 - share), rel=1e-3)
    assert cost.exposed_s + cost.hidden_s == pytest.approx(row.seconds)


def test_of_a_permutation_between_slices_all_is_sent_once():
    """As between the stages of a pipeline."""
    (row,) = step_between_slices(0, "ONE_TO_ONE").traffic
    assert (row.opcode, row.bytes) == ("one-to-one", 4 * 2**20)
    assert row.seconds == pytest.approx(4 * 2**20 / parse("v5e:2x2").chip.dcn_bytes_per_s, rel=0.05)


def test_of_a_gather_between_slices_every_part_goes_to_every_other_slice():
    (row,) = step_between_slices(0, "ALL_GATHER").traffic
    assert (row.opcode, row.bytes) == ("all-gather", 2 * 4 * 2**20)
    assert row.seconds == pytest.approx(4 * 2**20 / parse("v5e:2x2").chip.dcn_bytes_per_s, rel=0.05)
