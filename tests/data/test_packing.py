"""Packed rows: whole conversations, each once an epoch, the same on any mesh; segments that end where conversations do."""

import time

import numpy as np
import pytest
from data_cases import config_of, random_documents, write_store
from marked_store import conversations, write_marked
from tiny import tiny_config

from maxlm.base.errors import ConfigError, UserError
from maxlm.data import marks
from maxlm.data.batch import batch_of_segments
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.samples import pack
from maxlm.data.storage import DamagedStoreError
from maxlm.run.open_data import open_data


def test_rows_hold_whole_documents_and_are_full():
    rng = np.random.default_rng(0)
    for longest in (100, 30, 1000):
        lengths = np.minimum(rng.geometric(1 / longest, 2000), 1000)
        rows = pack(lengths, 1000)
        sizes = np.bincount(rows, lengths)
        assert sizes.max() <= 1000 and sizes.min() > 0
        assert len(sizes) <= 1.02 * lengths.sum() / 1000 + 1
        first = [int(np.flatnonzero(rows == row)[0]) for row in range(len(sizes))]
        assert first == sorted(first), "rows follow each other as documents do"
    assert pack(np.array([], np.int64), 10).tolist() == []
    assert pack(np.array([10, 10, 1]), 10).tolist() == [0, 1, 2]


def test_it_is_cheap():
    lengths = np.minimum(np.random.default_rng(0).geometric(1 / 500, 100_000), 4096)
    began = time.process_time()
    pack(lengths, 4096)
    assert time.process_time() - began < 2.0, "100,000 documents"


@pytest.fixture
def store(tmp_path):
    documents = conversations(150)
    return write_marked(tmp_path / "s", documents, conversations(20, seed=1)), documents


def pipeline(path, batch=4, split="train", **settings):
    config = config_of(path, **settings)
    return Pipeline(
        config, global_batch=batch, seed=3, vocab_size=100, split=split, content="conversations", make_batch=lambda w, n, _, __: (w, n)
    )


def test_every_conversation_comes_once_an_epoch_and_whole(store):
    path, documents = store
    pipe = pipeline(path, batch=1)
    seen = []
    for step in range(pipe.n_windows):
        (window,), (length,) = pipe.host_batch(step)
        (numbers,) = pipe.documents(step)
        np.testing.assert_array_equal(window[:length], np.concatenate([documents[number] for number in numbers]))
        seen += numbers.tolist()
    assert sorted(seen) == list(range(len(documents)))
    assert len(seen) / pipe.n_windows > 1.3, "rows are shared"


def test_rows_do_not_depend_on_who_reads_them(store):
    pipe = pipeline(store[0], batch=8)
    for step in (0, 3, 90):
        whole = pipe.host_batch(step)
        for rows in (slice(2, 5), np.array([7, 0])):
            for mine, all_of_them in zip(pipeline(store[0], batch=8).host_batch(step, rows), whole, strict=True):
                np.testing.assert_array_equal(mine, all_of_them[rows])


def test_in_order_every_row_comes_once_with_padding_at_the_end(store):
    pipe = pipeline(store[0], batch=4).in_order()
    seen = [number for step in range(pipe.n_batches) for numbers in pipe.documents(step) for number in numbers]
    assert sorted(seen) == list(range(150))
    assert pipeline(store[0], batch=4).documents(0)[0].tolist() != pipe.documents(0)[0].tolist(), "the original is shuffled"


def test_segments_positions_and_weights_are_those_of_the_documents():
    one, two = (marks.segment(np.arange(5, 5 + n), np.arange(n) >= start) for n, start in ((4, 2), (3, 1)))
    window = np.zeros((2, 9), np.uint32)
    window[0, :7] = np.concatenate([one, two])
    batch = batch_of_segments(window.astype(np.int32), np.array([7, 0]))
    assert batch.tokens_BS[0].tolist() == [5, 6, 7, 8, 5, 6, 0, 0]
    assert batch.targets_BS[0].tolist() == [6, 7, 8, 5, 6, 7, 0, 0]
    assert batch.weights_BS[0].tolist() == [0, 1, 1, 0, 1, 1, 0, 0], "no target of another document, none of a prompt"
    assert batch.segment_ids_BS[0].tolist() == [1, 1, 1, 1, 2, 2, 0, 0]
    assert batch.positions_BS[0].tolist() == [0, 1, 2, 3, 0, 1, 0, 0]
    assert not any(array[1].any() for array in batch[:5])


@pytest.mark.parametrize(
    ("content", "said"),
    [("text", "holds conversations, and the objective reads text; use objective.kind sft"), ("preferences", "reads preferences")],
)
def test_another_objective_is_refused(store, content, said):
    with pytest.raises(UserError, match=said):
        Pipeline(config_of(store[0]), global_batch=4, seed=0, vocab_size=100, content=content)


def test_errors_name_the_setting_of_the_store(store, tmp_path):
    """A further held-out set that holds text, or holds nothing out."""
    text, sections = write_store(tmp_path / "t", random_documents(9)), {"objective": {"kind": "sft"}, "train": {"eval_batches": 1}}
    for own, said in (
        (text, r"data.eval.wiki = .*holds text"),
        (write_marked(tmp_path / "e", conversations(9)), "or remove data.eval.wiki"),
    ):
        with pytest.raises(UserError, match=said):
            open_data(tiny_config(**sections, model={"vocab_size": 100}, data={"store": store[0], "eval": {"wiki": own}}))
    with pytest.raises(ConfigError, match=r"data.mixture = .*t\b.*holds text"):
        pipeline(None, mixture={"sources": {"a": {"store": store[0]}, "b": {"store": text}}})


def test_damaged_offsets_are_not_said_to_be_left_out(store, tmp_path):
    """data.skip_bad_chunks is for tokens; without offsets no conversation is found."""
    shard = tmp_path / "s/train/documents/c/0"
    content = bytearray(shard.read_bytes())
    content[10:14] = b"\xff" * 4
    shard.write_bytes(content)
    with pytest.raises(DamagedStoreError, match="train documents") as error:
        pipeline(store[0], skip_bad_chunks={"at_most": 2})
    assert "skip_bad_chunks" not in str(error.value)


def test_a_row_that_is_too_short_is_refused(store):
    with pytest.raises(UserError, match=r"conversations are longer than data.seq_len = 8, the longest of 17.*data.seq_len to 16"):
        pipeline(store[0], seq_len=8)


def test_a_damaged_chunk_takes_only_the_rows_that_touch_it(tmp_path):
    documents = conversations(150)
    path = write_marked(tmp_path / "s", documents)
    before = pipeline(path, batch=1)
    shard = tmp_path / "s" / "train" / "tokens" / "c" / "1"
    content = bytearray(shard.read_bytes())
    content[4:8] = b"\xff" * 4
    shard.write_bytes(content)
    pipe = pipeline(path, batch=1, skip_bad_chunks={"at_most": 2})
    omitted = 0
    for step in range(pipe.n_windows):
        length = pipe.host_batch(step)[1][0]
        omitted += length == 0
        assert length == 0 or sum(len(documents[n]) for n in before.documents(step)[0]) == length
    assert 0 < omitted < 12
    assert sum(len(problem["samples"]) for problem in pipe.take_problems()) == omitted
