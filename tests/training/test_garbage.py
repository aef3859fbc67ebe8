"""Batches of garbage among real text raise an alarm that names update and batch; normal runs raise none."""

import itertools
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import tiny_config, tiny_program

from maxlm.config.schema import DataConfig
from maxlm.config.sections.prepare import PrepareConfig
from maxlm.data import manifest, storage
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.prepare import prepare
from maxlm.data.token_store import TokenStore
from maxlm.data.writer import SplitWriter
from maxlm.models.parameters import abstract_parameters
from maxlm.training import meter
from maxlm.training.layer_figures import ratios

VOCAB, SEQ, ROWS, STEPS = 512, 64, 8, 245
SIZES = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "d_ff": 64}
PLANTED = {"random": (150, 151, 152), "repeated": (200,), "shuffled": (240, 241)}  # kind -> batches


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Folder with a store of real text, code of the standard library."""
    folder = tmp_path_factory.mktemp("stores")
    (folder / "texts").mkdir()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-m]*.py"))[:60]:
        (folder / "texts" / f"{file.stem}.txt").write_bytes(file.read_bytes()[:20_000].decode("ascii", "ignore").encode())
    source = PrepareConfig(sources=(str(folder / "texts"),), workers=1, tokenizer={"vocab_size": VOCAB, "train_bytes": 300_000})
    prepare(DataConfig(store=str(folder / "code"), seq_len=SEQ, prepare=source), progress=False)
    return folder


@pytest.fixture(scope="module")
def both(stores):
    """The same folder with a second store of one tokenizer: the words of the first without order."""
    folder = stores
    opened, dice = TokenStore(str(folder / "code")), np.random.default_rng(0)
    other, dtype = str(folder / "other"), np.dtype(opened.info.dtype)
    writers = {split: SplitWriter(other, split, dtype) for split in manifest.SPLITS}
    for writer in writers.values():
        for n in range(opened.n_tokens // 1000):
            writer.add(np.append(dice.permutation(opened.read(n * 1000, n * 1000 + 1000)), 0))
        writer.finish()
    storage.write_bytes(other, manifest.TOKENIZER, storage.read_bytes(str(folder / "code"), manifest.TOKENIZER))
    manifest.save(other, opened.info.model_copy(update={"splits": {split: writer.info for split, writer in writers.items()}}))
    return folder


def garbage(kind, windows, dice):
    """Tokens [B, T] in the place of those of a batch."""
    if kind == "random":
        return dice.integers(1, VOCAB, windows.shape)
    if kind == "repeated":
        return np.full_like(windows, windows[0, 0])
    return dice.permuted(windows, axis=1)


def train(store, steps, planted, *, seed=0, mixture=None, **optimizer):
    """(alarms of the run, its losses)."""
    data = {"store": store, "seq_len": SEQ} if mixture is None else {"store": None, "mixture": mixture, "seq_len": SEQ}
    program = tiny_program(
        1,
        model=SIZES,
        data=data,
        train={"steps": steps, "global_batch": ROWS, "loss_chunks": 1, "z_loss": 0.0, "seed": seed},
        optimizer={"peak_lr": 1e-2, "warmup_steps": 50, **optimizer},
    )
    dice, number = np.random.default_rng(seed), itertools.count()
    batches = Pipeline(program.config.data, global_batch=ROWS, seed=seed, vocab_size=VOCAB)
    make = batches._make_batch

    def spoilt(windows, *rest):
        batch = next(number)
        kind = next((kind for kind, places in planted.items() if batch in places), None)
        return make(windows if kind is None else garbage(kind, windows, dice).astype(windows.dtype), *rest)

    batches._make_batch = spoilt
    alarms, losses = [], []
    seen = SimpleNamespace(on_event=alarms.append, on_step=lambda record: losses.append(record.loss))
    measured = meter.Meter(program, seen, 0, data=batches)
    state = program.init()
    with jax.set_mesh(program.mesh):
        for n in range(steps):
            state, metrics = program.step(state, batches.device_batch(n, program.batch_sharding))
            measured.stepped(n + 1, metrics, 0.0)
        measured.flush()
    return alarms, losses


def test_batches_of_garbage_are_named_and_no_other(stores):
    """Random tokens, one token repeated, text without order: an alarm names each update, its source and documents, and where to look."""
    alarms, _ = train(str(stores / "code"), STEPS, PLANTED)
    assert [(alarm.step, alarm.data["cause"]) for alarm in alarms] == [(n + 1, "odd_batch") for places in PLANTED.values() for n in places]
    for alarm in alarms:
        said = alarm.data["reason"]
        assert f"batch {alarm.step - 1} holds {ROWS} rows of store ({stores}/code, documents " in said and f"--step {alarm.step}" in said


def test_an_absurd_weight_leaves_the_ratio_of_its_layer_a_number():
    """1e30 in one row of the embedding: its square is infinite in float32, and the ratio of the update was null in the record."""
    config = tiny_config().model
    before = jax.tree.map(lambda one: np.ones(one.shape, np.float32), abstract_parameters(config))
    after = jax.tree.map(lambda one: one * np.float32(1.01), before)
    whole = ratios(config, before, after)
    for tree in (before, after):
        tree["embedding_VD"][3] = 1e30
        found = ratios(config, before, after)
        assert np.isfinite(found).all() and np.count_nonzero(found != whole) == 1


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["long warm-up", "short warm-up", "mixture", "small rate"])
def test_no_alarm_in_normal_runs(both, kind, seed):
    """8 runs of 600 updates: warm-ups, a mixture that goes from code to words without order and back, another seed each."""
    sources = {name: {"store": str(both / name), "weight": 1.0 if name == "code" else 1e-6} for name in ("code", "other")}
    stages = [{"from_tokens": 200 * ROWS * SEQ, "weights": {"other": 1.0}}, {"from_tokens": 400 * ROWS * SEQ, "weights": {"code": 1.0}}]
    mixture = {"sources": sources, "stages": stages} if kind == "mixture" else None
    settings = {"long warm-up": {"warmup_steps": 400}, "short warm-up": {"warmup_steps": 5}, "small rate": {"peak_lr": 1e-3}}.get(kind, {})
    alarms, losses = train(str(both / "code"), 600, {}, seed=seed, mixture=mixture, **settings)
    assert [alarm.data["reason"] for alarm in alarms] == []
    assert losses[-1] < losses[0] - 0.5
