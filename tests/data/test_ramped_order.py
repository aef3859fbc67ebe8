"""The order of samples where batches grow: that of a run in which they do not."""

import numpy as np
import pytest
from data_cases import config_of, random_documents, write_store

from maxlm.config.batch_sizes import BatchSizes
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.inspect import describe_shares

DOCUMENTS = random_documents(90)
SIZES = [4, 4, 8, 8, 8, 16, 16]  # of the first batches
GROWING = BatchSizes(16, [(4, 8), (8, 32)])


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store", DOCUMENTS)


def pipeline(store, sizes=None):
    return Pipeline(config_of(store), global_batch=16, batch_sizes=sizes, seed=0, vocab_size=100)


@pytest.mark.parametrize("left_out", [(), (1, 4)])
def test_no_sample_is_repeated_or_lost_at_a_change(store, left_out):
    """The stream of samples is that of a run without a ramp; a batch that is left out takes its own samples with it, and no others."""
    plain, grows = pipeline(store), pipeline(store, GROWING)
    grows.go_on({}, left_out)
    stream = np.concatenate([plain.sample_ids(step) for step in range(8)])
    ends = np.cumsum([0, *SIZES])
    wanted = [stream[ends[n] : ends[n + 1]] for n in range(len(SIZES)) if n not in left_out]
    for step, ids in enumerate(wanted):
        np.testing.assert_array_equal(grows.sample_ids(step), ids)
    position = {"next_step": 3, "left_out": list(left_out), **grows.position(3)}
    again = pipeline(store, GROWING)
    again.go_on(position, left_out)
    for step in range(3, len(wanted)):
        np.testing.assert_array_equal(again.sample_ids(step), wanted[step])
    shares = describe_shares(grows, len(wanted), 2)
    assert shares["tokens"] == {"planned": sum(map(len, wanted)) * 16, "consumed": sum(map(len, wanted[:2])) * 16}


def test_held_out_batches_stay_whole(store):
    grows = pipeline(store, GROWING)
    assert [len(grows.in_order().sample_ids(step)) for step in range(3)] == [16, 16, 16]
