"""Batch n is a pure function of (seed, n), holds every token once an epoch, and never lets one document predict another."""

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from data_cases import END, all_of, config_of, mixture_of, random_documents, write_store
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxlm.base.errors import ConfigError, UserError
from maxlm.config.sections.data import SkipConfig
from maxlm.data import manifest, storage
from maxlm.data.batch import Batch, batch_of_windows
from maxlm.data.input_pipeline import PADDING, Pipeline
from maxlm.data.storage import DamagedStoreError

DOCUMENTS = random_documents(60)
STREAM = np.concatenate(DOCUMENTS)
OFFSETS = np.cumsum([0, *map(len, DOCUMENTS)])
DOCUMENT_OF = np.repeat(np.arange(len(DOCUMENTS)), [len(document) for document in DOCUMENTS])
S = 16


@pytest.fixture
def store(tmp_path: Path) -> str:
    return write_store(tmp_path / "store", DOCUMENTS, DOCUMENTS[:9])


def pipeline(store: str, *, global_batch: int = 6, seed: int = 0, vocab_size: int = 100, split="train", **settings) -> Pipeline:
    return Pipeline(config_of(store, **settings), global_batch=global_batch, seed=seed, vocab_size=vocab_size, split=split)


def same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def epoch(pipe: Pipeline, number: int = 0) -> tuple[np.ndarray, Batch]:
    """Window ids and rows of one epoch of samples, whatever batches they fall in."""
    first, last = number * pipe.n_windows, (number + 1) * pipe.n_windows
    steps = range(first // pipe.global_batch, -(-last // pipe.global_batch))
    cut = slice(first - steps[0] * pipe.global_batch, last - steps[0] * pipe.global_batch)
    ids = np.concatenate([pipe.sample_ids(step) for step in steps])[cut]
    batches = [pipe.host_batch(step) for step in steps]
    return ids, jax.tree.map(lambda *rows: np.concatenate(rows)[cut], *batches)


@pytest.mark.parametrize("seq_len", [1, 7, 16, 100, len(STREAM) - 1, len(STREAM), 5000])
def test_an_epoch_holds_every_token_once(store, seq_len):
    """Every token but the last is an input once; every token but the first is a target once; the rest is padding."""
    pipe = pipeline(store, seq_len=seq_len)
    ids, batch = epoch(pipe)
    assert sorted(ids) == list(range(-(-(len(STREAM) - 1) // seq_len)))
    order = np.argsort(ids)
    real = (batch.segment_ids_BS[order] > 0).ravel()
    assert real.sum() == len(STREAM) - 1 and real[: len(STREAM) - 1].all()
    np.testing.assert_array_equal(batch.tokens_BS[order].ravel()[real], STREAM[:-1])
    np.testing.assert_array_equal(batch.targets_BS[order].ravel()[real], STREAM[1:])
    for field in jax.tree.leaves(batch):
        assert not field[order].ravel()[~real].any(), "padding is all zeros"


@pytest.mark.parametrize("seq_len", [1, 7, 16, 100, 5000])
def test_segments_positions_and_weights_follow_the_documents(store, seq_len):
    """Checked token by token against the documents' offsets, not against the end-of-document tokens."""
    ids, batch = epoch(pipeline(store, seq_len=seq_len))
    assert [field.dtype.name for field in jax.tree.leaves(batch)] == ["int32", "int32", "float32", "int32", "int32"]
    for row, window in enumerate(ids):
        start = window * seq_len
        for column in range(min(seq_len, len(STREAM) - 1 - start)):
            token, document = start + column, DOCUMENT_OF[start + column]
            assert batch.segment_ids_BS[row, column] == document - DOCUMENT_OF[start] + 1
            assert batch.positions_BS[row, column] == token - max(OFFSETS[document], start)
            assert batch.weights_BS[row, column] == (DOCUMENT_OF[token + 1] == document)


def test_unmasked_documents_share_a_segment_and_still_do_not_predict_each_other(store):
    masked, unmasked = pipeline(store).host_batch(0), pipeline(store, mask_documents=False).host_batch(0)
    np.testing.assert_array_equal(unmasked.segment_ids_BS, (masked.segment_ids_BS > 0).astype(np.int32))
    np.testing.assert_array_equal(unmasked.positions_BS, np.broadcast_to(np.arange(S), (6, S)) * unmasked.segment_ids_BS)
    assert all(np.array_equal(masked[field], unmasked[field]) for field in (0, 1, 2))


def test_rows_of_padding_are_zero():
    windows = np.full((3, 5), 7)
    batch = batch_of_windows(windows, np.array([0, 1, 2]), END, mask_documents=True)
    assert batch.segment_ids_BS.tolist() == [[0] * 4, [0] * 4, [1, 0, 0, 0]] and batch.weights_BS.sum() == 1


def test_epochs_are_different_permutations(store):
    pipe = pipeline(store)
    orders = [epoch(pipe, number)[0].tolist() for number in range(4)]
    assert all(sorted(order) == list(range(pipe.n_windows)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4 and orders[0] != sorted(orders[0])


def test_seeds_give_different_orders_that_do_not_repeat_each_other(store):
    """Grain's epoch e of seed s is epoch e - 1 of seed s + 1; ours must not be."""
    orders = {tuple(epoch(pipeline(store, seed=seed), number)[0]) for seed in (*range(3), 2**40) for number in range(3)}
    assert len(orders) == 12


def test_without_shuffle_windows_come_in_order_again_and_again(store):
    pipe = pipeline(store, shuffle=False)
    ids = np.concatenate([pipe.sample_ids(step) for step in range(40)])
    np.testing.assert_array_equal(ids, np.arange(240) % pipe.n_windows)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_batch_is_the_same_however_its_rows_are_split(store, split):
    pipe = pipeline(store, split=split)
    rng = np.random.default_rng(0)
    for step in (0, pipe.n_batches - 1):
        whole = pipe.host_batch(step)
        for rows in (slice(0, 3), slice(3, 6), slice(None, None, 2), np.array([5, 0]), rng.permutation(6), np.array([], int), [2]):
            part = pipe.host_batch(step, rows if isinstance(rows, slice) else np.asarray(rows))
            assert same(part, jax.tree.map(lambda field, rows=rows: field[rows], whole))


def test_eval_is_every_held_out_window_once_in_order(store):
    pipe = pipeline(store, split="eval", global_batch=4)
    ids = np.concatenate([pipe.sample_ids(step) for step in range(pipe.n_batches)])
    assert ids[: pipe.n_windows].tolist() == list(range(pipe.n_windows))
    assert set(ids[pipe.n_windows :]) <= {PADDING} and len(ids) - pipe.n_windows < 4
    rows = np.concatenate([pipe.host_batch(step).tokens_BS for step in range(pipe.n_batches)]).ravel()
    held_out = np.concatenate(DOCUMENTS[:9])
    np.testing.assert_array_equal(rows[: len(held_out) - 1], held_out[:-1])
    assert not rows[len(held_out) - 1 :].any()


def fingerprint(pipe: Pipeline) -> str:
    digest = hashlib.sha256()
    for step in (0, 1, 17, 10**6):
        digest.update(pipe.sample_ids(step).tobytes())
        for field in jax.tree.leaves(pipe.host_batch(step)):
            digest.update(field.tobytes())
    return digest.hexdigest()


def test_another_process_makes_the_same_batches(store, tmp_path):
    other = write_store(tmp_path / "other", random_documents(20, seed=1))
    config = config_of(mixture=mixture_of({"a": {"store": store, "weight": 0.7}, "b": {"store": other, "weight": 0.3}}))
    here = fingerprint(Pipeline(config, global_batch=6, seed=5, vocab_size=100))
    program = (
        "import sys\nfrom maxlm.data import storage\nstorage.TOKENS = storage.ArrayLayout(16, 64)\n"
        "storage.DOCUMENTS = storage.ArrayLayout(4, 16)\nfrom test_pipeline import *\n"
        "config = config_of(**json.loads(sys.argv[1]))\n"
        "print(fingerprint(Pipeline(config, global_batch=6, seed=5, vocab_size=100)))"
    )
    command = [sys.executable, "-c", program, config.model_dump_json(exclude_defaults=True)]
    there = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    assert there == here


def mesh_of(shape: tuple[int, int]) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("data", "context"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: shape[0] * shape[1]])


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 1), PartitionSpec("data")),
        ((4, 2), PartitionSpec("data")),
        ((2, 4), PartitionSpec("data", "context")),
        ((2, 4), PartitionSpec(("data", "context"))),
        ((8, 1), PartitionSpec()),
        ((2, 2), PartitionSpec(None, "context")),
    ],
)
def test_devices_hold_the_host_batch_in_any_layout(store, shape, spec):
    pipe = pipeline(store, global_batch=16)
    sharding = NamedSharding(mesh_of(shape), spec)
    device = pipe.device_batch(3, sharding)
    assert all(field.sharding == sharding for field in jax.tree.leaves(device))
    assert same(jax.tree.map(np.asarray, device), pipe.host_batch(3))
    for field, host in zip(*map(jax.tree.leaves, (device, pipe.host_batch(3))), strict=True):
        for shard in field.addressable_shards:
            np.testing.assert_array_equal(shard.data, host[shard.index])


def test_an_objective_makes_its_own_batches(store):
    """From windows and the numbers of their samples; arrays of any rank are laid out as they are said to be."""

    class Numbered(NamedTuple):
        tokens_BS: Any
        sample_B: Any

    pipe = Pipeline(
        config_of(store),
        global_batch=16,
        seed=0,
        vocab_size=100,
        make_batch=lambda window, length, sample, end: Numbered(window[:, :-1], sample),
    )
    rows, tokens = (NamedSharding(mesh_of((4, 2)), PartitionSpec(*spec)) for spec in (("data",), ("data", "context")))
    batch = pipe.device_batch(3, Numbered(tokens, rows))
    np.testing.assert_array_equal(batch.sample_B, np.arange(48, 64))
    np.testing.assert_array_equal(batch.tokens_BS, pipe.host_batch(3).tokens_BS)
    assert (batch.tokens_BS.sharding, batch.sample_B.sharding) == (tokens, rows)


class OtherHost:
    """A sharding of which this process holds only some devices, as on one host of several."""

    def __init__(self, sharding: NamedSharding, devices: list) -> None:
        self._sharding, self._devices = sharding, devices

    def addressable_devices_indices_map(self, shape):
        return {device: index for device, index in self._sharding.devices_indices_map(shape).items() if device in self._devices}


def test_a_process_reads_only_the_rows_of_its_own_devices(store, monkeypatch):
    pipe = pipeline(store, global_batch=16)
    sharding = NamedSharding(mesh_of((4, 2)), PartitionSpec("data", "context"))
    whole = pipe.host_batch(2)
    read, placed = [], []
    original = pipe.host_batch
    monkeypatch.setattr(pipe, "host_batch", lambda step, rows, spans: read.append(rows.tolist()) or original(step, rows, spans))

    def place(shape, host, callback):
        parts = {device: callback(index) for device, index in host.addressable_devices_indices_map(shape).items()}
        placed.append((host, parts))

    monkeypatch.setattr(jax, "make_array_from_callback", place)
    devices = list(sharding.mesh.devices.ravel())
    for mine in (devices[:4], devices[4:], devices[1:3]):
        pipe.device_batch(2, OtherHost(sharding, mine))
    assert read == [list(range(8)), list(range(8, 16)), list(range(8))]
    for number, (host, parts) in enumerate(placed):
        for device, part in parts.items():
            np.testing.assert_array_equal(part, whole[number % 5][host.addressable_devices_indices_map((16, S))[device]])


def test_batches_are_those_of_device_batch_from_any_step(store):
    pipe = pipeline(store, global_batch=8, prefetch=3)
    sharding = NamedSharding(mesh_of((8, 1)), PartitionSpec("data"))
    batches = dict(zip(range(5, 12), all_of(pipe.batches(5, sharding, 12)), strict=True))
    assert all(same(jax.tree.map(np.asarray, batch), pipe.host_batch(step)) for step, batch in batches.items())


def test_batches_left_out_are_skipped_and_all_others_stay_as_they_are(store):
    pipe, whole = pipeline(store, global_batch=2), pipeline(store, global_batch=2)
    pipe.go_on({}, (0, 3, 4))
    for step, number in enumerate([1, 2, 5, 6, 7]):
        np.testing.assert_array_equal(pipe.sample_ids(step), whole.sample_ids(number))
        assert same(pipe.host_batch(step), whole.host_batch(number))
    (ranges,) = whole.token_ranges(whole.sample_ids(1)).values()
    rows = [STREAM[start : stop - 1] for start, stop in ranges]
    assert all(np.array_equal(row, tokens[: len(row)]) for row, tokens in zip(rows, whole.host_batch(1).tokens_BS, strict=True))


def test_damage_found_in_the_background_is_raised_to_the_consumer(store):
    shard = Path(store) / "train/tokens/c/2"
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    sharding = NamedSharding(mesh_of((1, 1)), PartitionSpec())
    threads = threading.active_count()
    with pytest.raises(UserError, match="cannot read its train tokens"):
        all_of(pipeline(store, global_batch=8).batches(0, sharding, 50))
    assert threading.active_count() == threads


# ------------------------------------------------------------------------------------------------------------- mixtures


def mixture(tmp_path: Path, weights: list[float], **settings) -> Pipeline:
    stores = [write_store(tmp_path / f"m{n}", random_documents(10 + 20 * n, seed=n), DOCUMENTS[:n]) for n in range(len(weights))]
    sources = {f"s{n}": {"store": path, "weight": weight} for n, (path, weight) in enumerate(zip(stores, weights, strict=True))}
    split = settings.pop("split", "train")
    return Pipeline(config_of(mixture=mixture_of(sources), **settings), global_batch=10, seed=0, vocab_size=100, split=split)


@pytest.mark.parametrize("weights", [[1, 1], [0.7, 0.3], [1.0, 1.0049], [5, 1, 0.01], [2, 3, 4, 1]])
def test_each_store_has_its_share_of_every_prefix(tmp_path, weights):
    pipe = mixture(tmp_path, weights)
    ids = np.concatenate([pipe.sample_ids(step) for step in range(50)])
    owner = np.searchsorted(pipe._first, ids, side="right") - 1
    for number, weight in enumerate(weights):
        drawn, share = np.cumsum(owner == number), weight / sum(weights)
        assert np.abs(drawn - share * np.arange(1, len(ids) + 1)).max() <= len(weights)


def test_a_mixture_visits_every_window_of_a_store_each_epoch_of_that_store(tmp_path):
    pipe = mixture(tmp_path, [1, 1, 1])
    ids = np.concatenate([pipe.sample_ids(step) for step in range(150)])
    for first, last in zip(pipe._first, pipe._first[1:], strict=False):
        own = ids[(ids >= first) & (ids < last)]
        size = last - first
        assert len(own) >= 2 * size
        for number in range(len(own) // size):
            assert sorted(own[number * size : (number + 1) * size]) == list(range(first, last))


def test_the_rows_of_a_mixture_are_the_windows_their_ids_name(tmp_path):
    pipe = mixture(tmp_path, [2, 1, 1])
    streams = [np.concatenate(random_documents(10 + 20 * n, seed=n)) for n in range(3)]
    ids, batch = pipe.sample_ids(7), pipe.host_batch(7)
    assert len(set(np.searchsorted(pipe._first, ids, side="right"))) == 3
    for row, window in enumerate(ids):
        number = int(np.searchsorted(pipe._first, window, side="right")) - 1
        start = (window - pipe._first[number]) * S
        real = streams[number][start : start + S + 1][:-1]
        np.testing.assert_array_equal(batch.tokens_BS[row, : len(real)], real)


def test_eval_of_a_mixture_leaves_out_stores_that_hold_nothing_out(tmp_path):
    pipe = mixture(tmp_path, [1, 1, 1], split="eval")
    tokens = sum(-(-(sum(map(len, DOCUMENTS[:n])) - 1) // S) for n in (1, 2))
    assert pipe.n_windows == tokens


# ------------------------------------------------------------------------------------------------------------ bad input


def test_another_tokenizer_in_a_mixture_is_refused(tmp_path):
    stores = [write_store(tmp_path / name, DOCUMENTS, tokenizer_hash=name) for name in ("aaa", "bbb")]
    config = config_of(mixture=mixture_of({name: {"store": path} for name, path in zip("ab", stores, strict=True)}))
    with pytest.raises(ConfigError, match=r"data\.mixture = .*another tokenizer than .*aaa \(bbb, not aaa\)"):
        Pipeline(config, global_batch=2, seed=0, vocab_size=100)


def test_a_vocabulary_too_small_is_refused_before_any_batch(store):
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 99: is below 100, .*use at least 100"):
        pipeline(store, vocab_size=99)
    assert pipeline(store, vocab_size=100).host_batch(0).tokens_BS.max() < 100


def test_an_id_above_the_stores_own_vocabulary_names_store_and_id(store):
    body = json.loads((Path(store) / "store.json").read_text())
    del body["sha256"]
    (Path(store) / "store.json").write_bytes(manifest.as_bytes({**body, "vocab_size": 50}))
    with pytest.raises(UserError, match=r"store holds the id \d+.*below 50"):
        for step in range(20):
            pipeline(store).host_batch(step)


def test_no_held_out_documents_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"no eval documents.*data\.prepare\.eval_fraction.*train\.eval_batches"):
        pipeline(write_store(tmp_path / "s", DOCUMENTS), split="eval")


def test_a_store_too_small_for_one_target_is_refused(tmp_path):
    with pytest.raises(UserError, match="no train documents"):
        pipeline(write_store(tmp_path / "s", [np.array([END])]))


def test_a_missing_store_is_named_and_where_a_relative_path_counts_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^nowhere is not a token store \(no store.json in it, seen from .*\); make it") as error:
        pipeline("nowhere")
    assert str(tmp_path) in str(error.value)
    with pytest.raises(UserError, match=r"nowhere is not a token store \(no store.json in it\); make it"):
        pipeline(str(tmp_path / "nowhere"))


def test_more_windows_than_the_shuffle_can_count_are_refused(store, monkeypatch):
    from maxlm.data import order

    monkeypatch.setattr(order, "SHUFFLE_LIMIT", 10)
    with pytest.raises(UserError, match=r"more than the 10 windows.*data\.seq_len"):
        pipeline(store)
    assert pipeline(store, shuffle=False).n_windows > 10


def test_shards_as_large_as_in_production_read_alike(tmp_path, monkeypatch):
    small = write_store(tmp_path / "small", DOCUMENTS)
    expected = pipeline(small).host_batch(0)
    monkeypatch.undo()
    assert storage.TOKENS.shard == 2**24
    assert same(pipeline(write_store(tmp_path / "large", DOCUMENTS)).host_batch(0), expected)


def flip_in(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


@pytest.fixture
def holed(store):
    """A store whose chunk 5 (tokens 80 to 95) is damaged."""
    flip_in(Path(store) / "train/tokens/c/1", 20 + 3)  # a chunk is 16 bytes and its CRC
    return store


def test_a_damaged_chunk_stops_training_and_says_how_to_go_on(holed):
    with pytest.raises(DamagedStoreError, match=r"data\.skip_bad_chunks\.at_most"):
        pipeline(holed, shuffle=False, global_batch=8).host_batch(0)


def test_samples_that_touch_a_damaged_chunk_become_padding_and_are_told(holed, tmp_path):
    """Windows of 16 tokens and one target: 4 and 5 touch chunk 5. Whatever rows are read together, the rest of the batch is untouched."""
    whole = tmp_path / "whole"
    shutil.copytree(holed, whole)
    flip_in(whole / "train/tokens/c/1", 20 + 3)
    good = pipeline(str(whole), shuffle=False, global_batch=8).host_batch(0)
    skipping = pipeline(holed, shuffle=False, global_batch=8, skip_bad_chunks=SkipConfig())
    batch = skipping.host_batch(0)
    for row in range(8):
        for array, whole_array in zip(*map(jax.tree.leaves, (batch, good)), strict=True):
            expected = np.zeros_like(array[row]) if row in (4, 5) else whole_array[row]
            np.testing.assert_array_equal(array[row], expected)
    [problem] = skipping.take_problems()
    assert (problem["cause"], problem["chunks"], problem["samples"], problem["tokens"]) == ("bad_chunk", [5], [4, 5], 32)
    assert "2 samples of 32 tokens were omitted" in problem["reason"] and skipping.take_problems() == []
    for rows in ([4], [0, 5, 7], slice(2, 6)):
        part = skipping.host_batch(0, np.arange(8)[rows])
        np.testing.assert_array_equal(part.tokens_BS, batch.tokens_BS[rows])
        np.testing.assert_array_equal(part.weights_BS, batch.weights_BS[rows])


def test_too_many_damaged_chunks_stop_training_after_all(holed):
    flip_in(Path(holed) / "train/tokens/c/1", 40 + 3)
    skipping = pipeline(holed, shuffle=False, global_batch=8, skip_bad_chunks=SkipConfig(at_most=1))
    with pytest.raises(UserError, match=r"more than data\.skip_bad_chunks\.at_most = 1 chunks are damaged"):
        skipping.host_batch(0)
