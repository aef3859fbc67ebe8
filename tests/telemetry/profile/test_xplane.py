"""Reading trace files: the same events as `jax.profiler.ProfileData` reads, in blocks, and one line for what is no trace."""

import jax
import numpy as np
import pytest
from synthetic_trace import Event, Instruction, PlaneWriter, field, hlo_proto, metadata_plane

from maxlm.base.errors import UserError
from maxlm.telemetry.profile import xplane
from maxlm.telemetry.profile.programs import parse_program, programs_of
from maxlm.telemetry.profile.xplane import Trace


def random_plane(number: int) -> bytes:
    """A synthetic plane of two lines with numbers of one to eight bytes, and stats of both kinds."""
    rng = np.random.default_rng(0)
    plane = PlaneWriter("/device:TPU:0")
    for line, timestamp in (("XLA Ops", 5_000_000_000), ("Async XLA Ops", 5_000_000_100)):
        starts = np.cumsum(rng.integers(0, 1 << 34, number))
        lengths = 1 << rng.integers(0, 50, number)
        names = rng.integers(0, 300, number)
        stats = ({"run_id": int(n) << 20, "hlo_op": f"op.{n % 7}"} if n % 3 else {} for n in names)
        events = [Event(f"op.{n}", int(s), int(d), x) for n, s, d, x in zip(names, starts, lengths, stats, strict=True)]
        plane.line(line, events, timestamp)
    return plane.written()


def test_events_are_those_that_jax_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(xplane, "BLOCK", 50)
    path = tmp_path / "random.xplane.pb"
    path.write_bytes(random_plane(500))
    expected = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    trace = Trace(path)
    assert [plane.name for plane in trace.planes] == [plane.name for plane in expected]
    plane, wanted = trace.planes[0], list(expected[0].lines)
    assert [line.name for line in plane.lines] == [line.name for line in wanted]
    hlo_op = plane.stat_id("hlo_op")
    for line, by_jax in zip(plane.lines, wanted, strict=True):
        blocks = list(trace.blocks(line, (hlo_op,)))
        assert len(blocks) > 3
        found = [
            (plane.kinds[int(kind)].name, int(start) + trace.base_ns * 1000, int(length), plane.stat_names.get(int(stat)))
            for block in blocks
            for kind, start, length, stat in zip(*block[:3], block.stats[hlo_op], strict=True)
        ]
        for mine, event in zip(found, by_jax.events, strict=True):
            assert mine[0] == event.name
            assert mine[1] / 1000 == pytest.approx(event.start_ns, abs=1)  # which has whole nanoseconds
            assert mine[2] / 1000 == pytest.approx(event.duration_ns, abs=1)
            assert mine[3] == dict(event.stats).get("hlo_op")


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_trace_that_is_cut_short_is_refused(tmp_path, cut):
    path = tmp_path / "cut.xplane.pb"
    path.write_bytes(random_plane(50)[:-cut])
    with pytest.raises(UserError, match="damaged or cut short"):
        Trace(path)


def test_a_line_of_another_time_is_refused(tmp_path):
    """Picoseconds between it and the first do not fit in 64 bits."""
    plane = PlaneWriter("/device:TPU:0")
    plane.line("XLA Ops", [Event("a", 0, 1)], timestamp_ns=0)
    plane.line("Async XLA Ops", [Event("b", 0, 1)], timestamp_ns=1_764_115_200_000_000_000)
    path = tmp_path / "times.xplane.pb"
    path.write_bytes(plane.written())
    trace = Trace(path)
    with pytest.raises(UserError, match="s after the first"):
        list(trace.blocks(trace.planes[0].lines[1]))


@pytest.mark.parametrize("content", [b"", b"not a trace", b"\xff" * 100])
def test_what_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "text.xplane.pb"
    path.write_bytes(content)
    with pytest.raises(UserError):
        Trace(path)


def test_a_program_whose_number_is_missing_is_read(tmp_path):
    """A damaged stat `program_id` without a value."""
    whole = metadata_plane({77: hlo_proto("jit_f", [[Instruction("dot.2", "dot", "jit(f)/mlp/dot")]])})
    assert whole.count(field(4, 77)) == 1
    path = tmp_path / "metadata.xplane.pb"
    path.write_bytes(whole.replace(field(4, 77), field(9, 77)))
    trace = Trace(path)
    assert [program.name for program in programs_of(trace).values()] == ["jit_f"]


def test_operations_without_a_place_take_that_of_their_neighbours(tmp_path):
    """The place of what a fusion holds, else of what is read, else of the reader."""
    outer = [
        Instruction("parameter.1", "parameter", "state"),
        Instruction("dot.2", "dot", "jit(f)/jvp()/mlp/dot_general", (1,)),
        Instruction("copy.3", "copy", "", (2,)),
        Instruction("fusion.4", "fusion", "", (3,), (2,)),
        Instruction("copy.5", "copy", "", (1,)),
        Instruction("add.6", "add", "jit(f)/jvp()/embed/add", (5,)),
    ]
    inner = [Instruction("multiply.7", "multiply", "jit(f)/transpose(jvp())/attn/mul")]
    data = hlo_proto("jit_f", [outer, inner])
    found = parse_program(data).instructions
    assert found["copy.3"].where == "jit(f)/jvp()/mlp/dot_general"
    assert found["fusion.4"].where == "jit(f)/transpose(jvp())/attn/mul"
    assert found["copy.5"].where == "jit(f)/jvp()/embed/add"
    path = tmp_path / "metadata.xplane.pb"
    path.write_bytes(metadata_plane({7: data}))
    trace = Trace(path)
    assert {key: program.name for key, program in programs_of(trace).items()} == {7: "jit_f"}
