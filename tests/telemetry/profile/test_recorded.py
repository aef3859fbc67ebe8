"""Three steps of Llama 3.2 1B recorded on an H200 (26 November 2026, jax 0.11.2): what the page says of them is what jax's reader finds."""

import lzma
from pathlib import Path

import numpy as np
import pytest
from jax.profiler import ProfileData

from maxlm.telemetry.profile import TRACE, Facts
from maxlm.telemetry.profile.attribution import profile_of
from maxlm.telemetry.profile.page import render
from maxlm.telemetry.profile.scopes import TITLES
from maxlm.telemetry.profile.xplane import Trace

RECORDED = Path(__file__).parent / "recorded" / "h200_llama3_1b.xplane.pb.xz"
PS = 1e3  # in a nanosecond
STEPS, LAYERS = 3, 16


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(our reading of the trace, the events of its GPU as (name, start, duration) in ns by jax's reader)."""
    path = tmp_path_factory.mktemp("recorded") / TRACE
    path.write_bytes(lzma.decompress(RECORDED.read_bytes()))
    (plane,) = (plane for plane in ProfileData.from_file(str(path)).planes if plane.name == "/device:GPU:0")
    events = [(event.name, event.start_ns, event.duration_ns) for line in plane.lines for event in line.events]
    trace = Trace(path)
    return profile_of(trace), events


def test_all_time_of_the_device_has_its_place(recorded):
    profile, events = recorded
    table = profile.table()
    assert sum(time for phases in table.values() for time in phases.values()) == pytest.approx(PS * sum(took for *_, took in events))
    assert profile.attributed > 0.999
    assert set(table) == {"embed", "norm", "attn", "mlp", "unembed", "layers", "model", "optimizer", "copies"}, "one device: no collectives"


def test_time_in_which_streams_run_beside_each_other_is_counted_once(recorded):
    profile, events = recorded
    (device,) = profile.devices
    starts, ends = np.array(sorted((start, start + took) for _, start, took in events)).T
    before = np.maximum.accumulate(np.concatenate([starts[:1], ends[:-1]]))  # the end of all that began earlier
    busy = np.sum(np.maximum(ends - np.maximum(starts, before), 0))
    assert device.busy == pytest.approx(PS * busy, rel=1e-6) and device.busy < PS * sum(took for *_, took in events)
    assert device.window == pytest.approx(PS * (ends.max() - starts.min()), rel=1e-6)
    assert device.communication == 0


def test_our_kernels_are_attention(recorded):
    """Forward once in each layer of each step, so nothing is computed again; the part has the projections, too."""
    profile, events = recorded
    ours = [(name, took) for name, _, took in events if "attention_hopper" in name]
    counts = {name: sum(other == name for other, _ in ours) for name, _ in ours}
    assert set(counts.values()) == {STEPS * LAYERS}
    assert PS * sum(took for _, took in ours) < sum(profile.table()["attn"].values())
    assert set(profile.table()["attn"]) == {"forward", "backward"}


def test_the_page_names_the_parts(recorded):
    page, parts = render(recorded[0], Facts("recorded")), recorded[0].table()
    assert [title for title in map(TITLES.get, parts) if f"<th scope=row>{title}</th>" not in page] == [] and len(page) < 2_000_000
