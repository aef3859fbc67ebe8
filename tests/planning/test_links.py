"""A mesh axis is as fast as the links under it: how many dims it spans, whether they close, whether it leaves the slice."""

import pytest

from maxlm.hardware.topologies import parse
from maxlm.planning.collectives import AxisLinks
from maxlm.planning.links import links_of


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
        ("v5e:16x16", [(0, (0, 0, 0)), (1, (0, 0, 0))], AxisLinks(1, True, dcn=True)),
    ],
)
def test_an_axis_knows_its_links(topology, line, links):
    assert links_of(line, parse(topology)) == links
