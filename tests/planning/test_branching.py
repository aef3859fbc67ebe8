"""The search sets aside unseen only what it would have found too slow."""

import itertools
from dataclasses import replace

import pytest
from test_plan_model import EXPERTS, analytic
from tiny import tiny_config

from maxlm.planning.branching import SET_ASIDE, search_all
from maxlm.planning.layouts import LayoutSpace

SMALL = tiny_config(train={"global_batch": 8}, model={"n_kv_heads": 4}, precision={"compute": "bfloat16"})
MIXED = tiny_config(train={"global_batch": 8}, model={"n_kv_heads": 4, "moe": EXPERTS}, precision={"compute": "bfloat16"})


@pytest.mark.soak
@pytest.mark.parametrize(("config", "gib"), [(SMALL, 0.00055), (MIXED, 1.0)], ids=["little room", "experts"])
def test_nothing_is_lost_that_the_model_thinks_well_of(config, gib):
    available = round(gib * 2**30)
    model = analytic(config, "v5p:2x2x1")
    everything = {one: model.estimate(one) for one in LayoutSpace(config, 4)}
    found = search_all(model, available)
    fitting = {one: said for one, said in everything.items() if said.needed <= available}
    limit = SET_ASIDE * min(sum(said.parts) for said in fitting.values())
    assert {one for one, said in fitting.items() if sum(said.parts) <= limit} <= found.open.keys()
    assert found.counted == len(everything)
    assert found.set_aside > 0
    impossible = sum(said.least_bytes > available for said in everything.values())
    assert found.cannot_fit + len(found.too_large) <= impossible
    assert (impossible > 0) == (gib < 1)
    ranked = sorted(found.open.values(), key=lambda said: (sum(said.parts), said.needed))
    slower = [said.needed for said in ranked if sum(said.parts) > limit]
    assert slower == sorted(slower, reverse=True)  # each needs less memory than all that are faster


def test_loops_are_searched_where_the_config_has_none():
    own = replace(next(iter(LayoutSpace(SMALL, 4))), remat="none", unroll=True)
    config = own.apply(SMALL)
    assert config.memory.unroll
    model = analytic(config, "v5p:2x2x1")
    alone, beside = (search_all(model, 2**30, first).open for first in (None, own))
    assert not any(layout.unroll for layout in alone)
    assert set(beside) == {*alone, own}, "its time is no measure of theirs"


def test_the_own_layout_is_kept_however_slow_it_is():
    model = analytic(SMALL, "v5p:2x2x1")
    some = itertools.islice(LayoutSpace(SMALL, 4), 0, None, 50)
    slowest = max(some, key=lambda one: sum(model.estimate(one).parts))
    assert slowest not in search_all(model, 2**30).open
    assert slowest in search_all(model, 2**30, slowest).open
