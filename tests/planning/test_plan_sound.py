"""Nothing that `maxlm plan` drops uncompiled would have been chosen, and its choice is that of compiling everything.

Two compiled steps are held to be equal when they differ by less than NOISE: XLA's estimates of one step move by as much when only the
number of loss chunks changes.
"""

import importlib.util
from pathlib import Path

import pytest

from maxlm.compiler.aot import available_hbm
from maxlm.config.loader import load
from maxlm.config.schema import Config
from maxlm.cost.verify import verify
from maxlm.hardware.topologies import parse
from maxlm.planning.explore import MOST_COMPILES, begin, explore
from maxlm.planning.layouts import Layout, LayoutSpace
from maxlm.planning.plan import analytic_model

NOISE = 0.005
TINY = """
model: {vocab_size: 1024, d_model: 256, n_layers: 4, n_heads: 2, d_ff: 512}
data: {store: unused, seq_len: 512}
train: {steps: 10, global_batch: 8}
cluster: {topology: "v5e:2x2"}
"""
# 327,680 tokens a chip of 16 GiB: all that may be kept takes 18.8 GB.
LARGE = TINY.replace("d_model: 256", "d_model: 512").replace("d_ff: 512", "d_ff: 2048").replace("global_batch: 8", "global_batch: 2560")
EXPERTS = TINY.replace("d_ff: 512", "d_ff: 512, moe: {n_experts: 8, top_k: 2, d_ff: 128, n_shared: 1, n_dense: 1}")
TOPOLOGY = parse("v5e:2x2")
ATTENTION = ("layer_input", "attention")
ALL = ("layer_input", "query", "key", "value", "attention", "attention_out", "gate", "up")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which holds the TPU compiler: pip install -e '.[tpu]'"
)
few_and_all = pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["few", "all"])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MAXLM_CACHE_DIR", str(tmp_path / "cache"))


def read(text: str, folder: Path) -> Config:
    (folder / "experiment.yml").write_text(text, encoding="utf-8")
    return load(str(folder / "experiment.yml")).config


def space(config: Config) -> list[Layout]:
    remats = ("full", "dots", "none", ATTENTION, ALL[:6], ALL)
    offered = (one for one in LayoutSpace(config, TOPOLOGY.devices) if one.loss_chunks == 8 and not one.offload)
    return [one for one in offered if one.microbatches in (1, 4) and one.remat in remats and one.zero == 3 and plain(one)]


def plain(layout: Layout) -> bool:
    """True without a pipeline and without a sequence on several devices."""
    return layout.sizes["stage"] == layout.sizes["context"] == 1


@pytest.mark.soak
@few_and_all
def test_what_is_dropped_would_be_refused(few, tmp_path):
    config = read(LARGE, tmp_path)
    dropped = begin(space(config), analytic_model(config, TOPOLOGY), available_hbm(TOPOLOGY)).too_large
    assert len(dropped) > 4
    for one in dropped[:: len(dropped) // 3] if few else dropped:
        assert not verify(one.apply(config), TOPOLOGY).fits, one


@pytest.mark.soak
@few_and_all
def test_the_choice_is_that_of_compiling_everything(few, tmp_path):
    config = read(TINY, tmp_path)
    model, offered = analytic_model(config, TOPOLOGY), [one for one in space(config) if one.remat in ("full", "dots", ALL)]
    if few:
        offered = [one for one in offered if one.sizes["fsdp"] == 4 and one.microbatches == 1]
    everything = {one: verify(one.apply(config), TOPOLOGY) for one in offered}
    for one, verdict in everything.items():  # the bounds, by which layouts are dropped, are true
        said = model.estimate(one)
        assert verdict.step_s >= said.least_s, one
        assert verdict.needed >= said.least_bytes, one
    search = begin(offered, model, available_hbm(TOPOLOGY))
    explore(search, [], lambda layout: verify(layout.apply(config), TOPOLOGY), lambda *_: None, MOST_COMPILES)
    fastest = min(verdict.step_s for verdict in everything.values())
    assert all(everything[one].step_s >= search.best.verdict.step_s for one in search.too_slow)
    assert search.best.verdict.step_s <= fastest * (1 + NOISE)
    assert len(everything) == search.counted == len(search.open) + len(search.trials) + len(search.too_slow) + len(search.too_large)


@pytest.mark.soak
@few_and_all
def test_the_bounds_of_experts_are_true(few, tmp_path):
    config = read(EXPERTS, tmp_path)
    model, offered = analytic_model(config, TOPOLOGY), [one for one in space(config) if one.microbatches == 1]
    for one in [one for one in offered if (one.sizes["expert"], one.remat) == (4, ALL)] if few else offered[::3]:
        said, verdict = model.estimate(one), verify(one.apply(config), TOPOLOGY)
        assert verdict.step_s >= said.least_s, one
        assert verdict.needed >= said.least_bytes, one
