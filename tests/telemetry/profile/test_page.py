"""The page and the file for a trace viewer: figures, size, no network, bad input."""

import dataclasses
import gzip
import json
import random
import re

import numpy as np
import pytest
from synthetic_trace import field

from maxlm.base.errors import UserError
from maxlm.telemetry.profile import PAGE, VIEWER_FILE, Facts, attribution, reduce_trace
from maxlm.telemetry.profile.attribution import Op, profile_of
from maxlm.telemetry.profile.page import _drawn_op, render
from maxlm.telemetry.profile.xplane import MOST_WARNINGS, Trace

FACTS = Facts("<b>run</b>, step 7", steps=2, step=7, predicted={"attn": {"forward": 10e-6}, "embed": {"forward": 1e-6}})


@pytest.fixture
def profile(tpu_file):
    trace = Trace(tpu_file)
    return profile_of(trace)


def rows(page: str) -> dict[str, list[str]]:
    """Cells of each row of the tables, by its first."""
    found = re.findall(r"<tr><th scope=row>(.*?)</th>(.*?)</tr>", page)
    return {head: re.findall(r"<td>(.*?)</td>", cells) for head, cells in found}


def test_measured_times_stand_beside_the_predicted(profile):
    page = render(profile, FACTS)
    assert rows(page)["attention"] == ["0.02 ms", "–", "0.01 ms", "–", "0.03 ms", "35.3%", "0.01 ms", "3.00x"]
    assert rows(page)["embedding"][-2:] == ["0.001 ms", "0.00x"]  # predicted, and not seen
    corrected = rows(render(profile, dataclasses.replace(FACTS, factor=1.5)))
    assert corrected["attention"][-3:] == ["0.015 ms", "2.00x", "0.01 ms"], "expected first, then the estimate"
    assert "scope=col>expected" not in render(profile, dataclasses.replace(FACTS, predicted=None))
    assert rows(page)["TPU:0"] == ["0.095 ms", "0.064 ms", "0.04 ms", "0.019 ms", "0.021 ms", "0.01 ms"]
    assert "holds no allocations" in page


def test_a_gap_is_between_operations_and_names_what_the_host_did(profile):
    longest = next(iter(re.findall(r"<tr><th scope=row>0.01 ms</th>(.*?)</tr>", render(profile, FACTS))))
    assert "fusion.6" in longest
    assert "while.1" in longest or "fusion.2" in longest
    assert "data wait (80.0%)" in render(profile, FACTS)


def test_text_of_a_trace_is_escaped_and_nothing_is_fetched(profile):
    profile.ops[0] = Op("<script>alert(1)</script>", "", "a/<img src=x>", "attn", "forward", "")
    page = render(profile, FACTS)
    assert "<script>" not in page
    assert "<img" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=", page.replace("&lt;img src=", ""))


def test_a_name_that_is_no_text_is_shown_as_far_as_it_is(profile):
    """The name of a folder that is not UTF-8 holds surrogates, and a page cannot."""
    assert "run ?" in render(profile, dataclasses.replace(FACTS, title="run \udcff")).encode().decode()


def test_a_long_place_is_cut_between_letters(profile):
    """Not in the middle of a tag or of an escaped letter: what follows would be part of it."""
    for length in range(390, 402):
        profile.ops[0] = profile.ops[0]._replace(where=f"{'x' * length}/&/y")
        shown = re.findall(r"<code>(.*?)</code>", render(profile, FACTS))
        assert len(shown) == len(profile.own)
        (place,) = (one for one in shown if one.startswith("xxx"))
        assert re.fullmatch(r"(?:[xy/]|<wbr>|&amp;)*", place)


def test_a_gap_has_operations_of_its_own_device(profile):
    """And not of TPU:10 beside TPU:1."""
    (device,) = profile.devices
    ((_, end), *_) = device.longest_gaps
    device.name = "TPU:1"
    for track, found in (("TPU:1 XLA Ops", True), ("TPU:1", True), ("TPU:10 XLA Ops", False)):
        profile.drawn.track = [track] * len(profile.drawn.track)
        assert (_drawn_op(profile, device, start=end) != "–") is found


def test_the_page_stays_small_for_many_devices_and_operations(profile):
    long = "x" * 3000
    profile.ops = [Op(f"{long}.{n}", "all-gather", f"jit(train_step)/{long}/{n}", "collectives", "forward", "") for n in range(3000)]
    device = dataclasses.replace(profile.devices[0], own={n: n + 1 for n in range(3000)}, count=dict.fromkeys(range(3000), 1))
    profile.devices = [device] * 70
    profile.memory = [(n, n % 1000) for n in range(100_000)]
    assert len(render(profile, FACTS).encode()) < 2_000_000


def test_files_hold_every_operation_in_order(tpu_file, tmp_path):
    reduce_trace(tpu_file, tmp_path / "out", FACTS)
    assert "7" in (tmp_path / "out" / PAGE).read_text()
    content = json.loads(gzip.decompress((tmp_path / "out" / VIEWER_FILE).read_bytes()))
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert sum(event["pid"] == 1 for event in events) == 2 * 7 + 2
    optimizer = next(event for event in events if event["name"] == "fusion.6")
    assert (optimizer["ts"], optimizer["dur"], optimizer["cat"]) == (75, 15, "optimizer")
    assert {event["name"] for event in events if event["pid"] == 2} == {"maxlm:data_wait", "maxlm:step"}


def test_the_longest_operations_are_kept_for_the_viewer(tpu_file, monkeypatch):
    monkeypatch.setattr(attribution, "_DRAWN", 5)
    trace = Trace(tpu_file)
    drawn = profile_of(trace).drawn
    assert len(drawn.row[0]) == 5
    assert drawn.left_out == 11
    assert np.all(drawn.length[0] >= 20_000_000)


def test_a_trace_without_operations_says_so(tmp_path):
    from synthetic_trace import PlaneWriter

    (tmp_path / "empty.xplane.pb").write_bytes(PlaneWriter("/host:CPU").written())
    reduce_trace(tmp_path / "empty.xplane.pb", tmp_path, FACTS)
    assert "no operation of a device" in (tmp_path / PAGE).read_text()


def test_what_cannot_be_read_or_written_is_one_line(tpu_file, tmp_path):
    with pytest.raises(UserError, match="no trace can be read there"):
        reduce_trace(tmp_path / "none.pb", tmp_path, FACTS)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        reduce_trace(tpu_file, tmp_path / "file", FACTS)


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
def test_a_damaged_trace_gives_a_page_or_one_line(kind, request, tmp_path):
    """Changed bytes and cut ends; no other error, and no endless loop."""
    whole = request.getfixturevalue(f"{kind}_file").read_bytes()
    refused = 0
    for seed in range(40):
        rng = random.Random(seed)
        data = bytearray(whole)
        for _ in range(rng.choice([1, 2, 8])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "damaged.pb").write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        try:
            reduce_trace(tmp_path / "damaged.pb", tmp_path / "out", FACTS)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 0 < refused < 40


def test_warnings_of_the_profiler_are_notes_of_the_page(tpu_file, tmp_path):
    """Such as events that were dropped: without them the page would be taken for the whole."""
    said = [field(2, "no device of this host was traced"), *(field(3, f"{n} events were dropped <{'x' * 2000}") for n in range(99))]
    tpu_file.write_bytes(tpu_file.read_bytes() + b"".join(said))
    reduce_trace(tpu_file, tmp_path / "out", Facts("warned", notes=("a fact",)))
    notes = re.findall(r'<p class="note">(.*?)</p>', (tmp_path / "out" / "profile.html").read_text().partition("</header>")[0])
    assert notes[:3] == ["a fact", "The profiler warns: no device of this host was traced", notes[2]]
    assert notes[2].startswith("The profiler warns: 0 events were dropped &lt;xxx")
    assert len(notes) == 1 + MOST_WARNINGS and max(map(len, notes)) < 600
