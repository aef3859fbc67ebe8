"""Nothing that `maxlm plan` drops uncompiled would have been chosen, and its choice is that of compiling everything.

Two compiled steps are held to be equal when they differ by less than NOISE: XLA's estimates of one step move by as much when only the
number of loss chunks changes.
"""

import importlib.util
import itertools

import pytest

from maxlm.config.loader import load
from maxlm.hardware.topologies import parse
from maxlm.planning.aot import available_hbm
from maxlm.planning.search.explore import MOST_COMPILES, begin, explore
from maxlm.planning.search.layouts import Layout, layouts
from maxlm.planning.search.plan import analytic
from maxlm.planning.search.verify import verify

NOISE = 0.005
# 327,680 tokens a chip of 16 GiB: all that may be kept takes 18.8 GB.
LARGE = """
model: {vocab_size: 1024, d_model: 512, n_layers: 4, n_heads: 4, d_ff: 2048}
data: {store: unused, seq_len: 2048}
train: {steps: 10, global_batch: 640}
cluster: {topology: "v5e:2x2"}
"""
ATTENTION = ("layer_input", "attention")
ALL = ("layer_input", "query", "key", "value", "attention", "attention_out", "gate", "up")

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which holds the TPU compiler: pip install -e '.[tpu]'"
)


def mesh(layout: Layout) -> tuple[int, ...]:
    return tuple(layout.sizes[axis] for axis in ("data", "fsdp", "tensor"))


def few(layout: Layout) -> bool:
    return (mesh(layout), layout.microbatches, layout.remat) in [
        ((1, 4, 1), 1, "full"),
        ((1, 4, 1), 1, ATTENTION),
        ((1, 4, 1), 1, ALL),
        ((4, 1, 1), 1, ATTENTION),
        ((1, 4, 1), 4, ALL),
    ]


def many(layout: Layout) -> bool:
    return layout.microbatches in (1, 4) and layout.remat in ("full", "dots", "none", ATTENTION, ALL[:6], ALL)


@needs_libtpu
@pytest.mark.parametrize("some", [few, pytest.param(many, marks=pytest.mark.soak)])
def test_the_choice_is_that_of_compiling_everything(some, tmp_path, monkeypatch):
    monkeypatch.setenv("MAXLM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "large.yml").write_text(LARGE, encoding="utf-8")
    config, topology = load(str(tmp_path / "large.yml")).config, parse("v5e:2x2")
    space = [one for one in layouts(config, 4) if one.loss_chunks == 8 and not one.offload and some(one)]
    model = analytic(config, topology)
    everything = {one: verify(one.apply(config), topology) for one in space}
    for one, verdict in everything.items():  # the bounds, by which layouts are dropped, are true
        said = model.estimate(one)
        assert verdict.step_s >= said.least_s, one
        assert verdict.needed >= said.least_bytes or not verdict.fits, one
    search = begin(space, model, available_hbm(topology))
    explore(search, config, None, lambda candidate: verify(candidate, topology), lambda *_: None, MOST_COMPILES)
    fastest = min(verdict.step_s for verdict in everything.values())
    assert search.too_large
    assert not any(everything[one].fits for one in search.too_large)
    assert all(everything[one].step_s >= search.best.verdict.step_s for one in search.too_slow)
    assert search.best.verdict.step_s <= fastest * (1 + NOISE)
    assert search.counted == len(space) == len(list(itertools.chain(search.open, search.found, search.too_large, search.too_slow)))
