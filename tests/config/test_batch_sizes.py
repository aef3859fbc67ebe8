"""Batches of several sizes: every sample is in one of them, and lengths in tokens are whole updates, for any ramp."""

import numpy as np
import pytest
from tiny import SEQ_LEN, tiny_config

from maxlm.base.errors import UserError
from maxlm.config.batch_sizes import BatchSizes, microbatches
from maxlm.config.rules import check_devices

FULL = 16
RAMPS = [(), ((4, 12),), ((4, 13), (8, 40)), ((1, 1), (2, 3), (3, 17), (8, 18)), ((4, 2), (8, 3))]


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_batches_hold_every_sample_once(ramp):
    sizes, before = BatchSizes(FULL, ramp), 0
    for number in range(60):
        assert sizes.before(number) == before
        assert sizes.of(number) == next((size for size, until in ramp if before < until), FULL)
        assert sizes.from_number(number) == tuple(dict.fromkeys(sizes.of(n) for n in range(number, 90)))
        before += sizes.of(number)
    for sequences in range(200):
        count = sizes.holding(sequences)
        assert sizes.before(count) >= sequences > (sizes.before(count - 1) if count else -1)


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_lengths_in_tokens_are_the_fewest_updates_that_hold_them(ramp):
    stages = [{"global_batch": size, "until_tokens": until * SEQ_LEN - 3} for size, until in ramp]
    optimizer = {"schedule": "wsd", "warmup_steps": None, "warmup_tokens": 700, "end_lr_fraction": 0.0}
    for tokens, decay in ((20000, 3000), (20001, 513), (24999, 8888)):
        train = {"steps": None, "tokens": tokens, "global_batch": FULL, "batch_ramp": stages or None}
        config = tiny_config(train=train, optimizer={**optimizer, "decay_tokens": decay})
        sizes, total = config.batch_sizes, config.total_steps
        held = [sum(sizes.of(n) for n in range(step)) * SEQ_LEN for step in range(total + 1)]
        assert held[total] >= tokens > held[total - 1]
        assert config.total_tokens == held[total]
        assert held[total] - held[total - config.decay_steps] >= decay > held[total] - held[total - config.decay_steps + 1]
        warmup = config.steps_of(None, 700, 0)
        assert held[warmup] >= 700 > held[warmup - 1]


@pytest.mark.parametrize("full", [16, 48, 96])
def test_microbatches_are_the_fewest_that_are_small_enough(full):
    for parts, shards, size, least in np.ndindex(9, 9, full, 2):
        parts, shards, size, least = parts + 1, shards + 1, size + 1, least + 1
        if full % (parts * shards):
            continue
        found = microbatches(size, full=full, parts=parts, shards=shards, least=least)
        fit = [n for n in range(least, size + 1) if size % n == 0 and size // n % shards == 0 and size // n <= full // parts]
        assert found == min(fit, default=None)
        assert least == 2 or (found is None) == (size % shards != 0)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"batch_ramp": [{"global_batch": 16, "until_tokens": 64}]}, "global_batch = 16: is not below the 16 sequences"),
        ({"batch_ramp": [{"global_batch": n, "until_tokens": 64} for n in (2, 4)]}, r"1\.until_tokens = 64: is not after token 64"),
        ({"batch_ramp": [{"global_batch": 4, "until_tokens": 10**6}]}, "is not before the end of the run, 1280 tokens"),
    ],
)
def test_a_ramp_that_does_not_rise_is_refused(sections, said):
    with pytest.raises(UserError, match=said):
        tiny_config(train=sections)


SHAPES = [{**dict.fromkeys(("data", "fsdp", "expert", "stage"), 1), **mesh} for n in (1, 2, 4) for mesh in ({"data": n}, {"stage": n})]
BALANCED = {"n_experts": 4, "top_k": 2, "d_ff": 32, "router": {"balance_loss": 0.01}}


@pytest.mark.parametrize("least", [{}, {"noise_scale": {}}])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_no_mesh_chooses_microbatches_that_are_balanced(parts, least):
    """Their number is part of the loss: on every mesh that takes the size it is the number of one device."""
    train = {"microbatches": parts, "batch_ramp": [{"global_batch": 4, "until_tokens": 64}], **least}
    config = tiny_config(model={"moe": BALANCED}, train=train)
    for size in range(1, 17):
        found = {config.microbatches_of(size, mesh) for mesh in SHAPES} - {None}
        assert found == {config.microbatches_of(size, SHAPES[0])} - {None}
    free = tiny_config(model={"moe": {**BALANCED, "router": {"balance_loss": 0.01, "balance_over": "sequence"}}}, train=train)
    assert any(len({free.microbatches_of(size, mesh) for mesh in SHAPES}) > 1 for size in (4, 8)), "a mesh chooses where it may"


def test_a_mesh_that_does_not_split_them_is_refused():
    ramp = [{"global_batch": 12, "until_tokens": 64}]
    config = tiny_config(model={"moe": BALANCED}, train={"batch_ramp": ramp, "microbatches": 2}, mesh={"data": 4})
    with pytest.raises(
        UserError, match=r"= 12: does not split over the 4 shards .* balances; use fewer shards, or .*balance_over=sequence"
    ):
        check_devices(config, 4)


@pytest.mark.parametrize(
    ("mesh", "microbatches", "said"),
    [
        ({"fsdp": 8}, 1, "= 4: is not a multiple of 8: the 8 shards"),
        ({"stage": 2, "fsdp": 4}, 2, "is not a multiple of 8: 2 microbatches of the pipeline"),
    ],
)
def test_a_size_that_the_mesh_does_not_divide_is_refused(mesh, microbatches, said):
    ramp = [{"global_batch": 4, "until_tokens": 64}]
    config = tiny_config(train={"batch_ramp": ramp, "microbatches": microbatches}, mesh=mesh)
    with pytest.raises(UserError, match=f"train.batch_ramp.0.global_batch .*{said}"):
        check_devices(config, 8)
