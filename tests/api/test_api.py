"""The API acts as the commands do, with the same figures and the same errors. One tiny run is shared by all tests."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api_cases import settings
from flax import nnx

import maxlm
from maxlm.api.data import batch_reader
from maxlm.api.table import Table
from maxlm.data.given import GivenBatches
from maxlm.evaluation.opening import open_model
from maxlm.evaluation.requests import Request
from maxlm.training.step import digest


@pytest.fixture(scope="module")
def config(folder, fitted):
    return maxlm.load_config(settings(folder, "fitted"))


@pytest.fixture(scope="module")
def program(config):
    return maxlm.build(config)


@pytest.fixture(scope="module")
def model(fitted):
    return fitted[0].run.model()


def test_config_takes_names_mappings_and_configs_with_overrides(config):
    assert maxlm.load_config(config, "train.steps=7").train.steps == 7
    assert maxlm.load_config({"extends": "runs/quickstart", "train": {"steps": 40}}).train.steps == 40
    assert maxlm.load_config(config) == config


def test_fit_trains_calls_back_and_leaves_a_run(fitted, config):
    result, recorder, losses = fitted
    assert (result.status, result.done, result.step, result.exit_code) == ("done", True, 4, 0)
    assert [record.step for record in recorder.steps] == [1, 2, 3, 4] and losses == [record.loss for record in recorder.steps]
    assert [event.kind for event in recorder.events][:: len(recorder.events) - 1] == ["start", "stop"]
    assert result.metrics["loss"] == losses[-1] and result.eval_loss == result.run.evaluations[-1]["eval_loss"]
    run = maxlm.Run.open(result.run.path)
    assert run.metrics["loss"] == losses and run.checkpoints == [2, 4] and run.config == config
    assert {"start", "save", "eval", "stop"} <= {event.kind for event in run.events}
    assert run.tokenizer.decode(run.tokenizer.encode("document").tolist()) == "document"
    assert run.report().is_file()


def test_fit_goes_on_where_it_stopped(fitted, config):
    again = maxlm.fit(config, quiet=True)
    assert (again.status, again.step, again.metrics) == ("nothing_left", 4, {})


def test_a_loop_of_ones_own_is_the_loop_of_fit(program, fitted):
    """The same losses, bit for bit, from the same batches; and the differentiated loss is what a step reports with its z-loss."""
    state, losses, batches = program.init(), [], []
    for batch in itertools.islice(program.batches(), 4):
        own = float(program.loss(state.params, batch))
        state, metrics = program.step(state, batch)
        losses.append(float(metrics.loss))
        assert math.isclose(own, losses[-1] + 1e-3 * float(metrics.z), rel_tol=1e-5)
        batches.append(batch)
    assert losses == fitted[2]
    held_out = program.evaluate(state, itertools.islice(program.batches("eval"), 2))
    assert math.isclose(held_out["loss"], fitted[0].eval_loss, rel_tol=1e-6)
    gradient = jax.grad(program.loss)(state.params, batches[0])
    step = jax.tree.map(lambda p, g: p - 1e-2 * g, state.params, gradient)
    assert program.loss(step, batches[0]) < program.loss(state.params, batches[0])
    assert np.array_equal(program.model(state).logits([1, 2]), fitted[0].run.model().logits([1, 2]))


def test_data_by_number(program, config):
    data = maxlm.Data.open(config)
    for number, batch in zip((0, 1), data, strict=False):
        assert np.array_equal(batch.tokens_BS, data.batch(number).tokens_BS)
    assert len(maxlm.Data.open(config, "eval")) > 0 and data.tokenizer.vocab_size <= 320


WRONG = {
    "rows": (np.zeros((3, 33), int), "3 rows, and train.global_batch says 8"),
    "ids": (np.full((8, 33), 320), "ids from 320 to 320, and model.vocab_size is 320"),
    "width": (np.zeros((8, 32), int), r"shape \[8, 32\]"),
    "kind": ("text", "an item of the kind str"),
    "floats": (np.zeros((8, 33)), "an item of the kind ndarray"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_batches_are_one_line(program, wrong):
    batch, said = WRONG[wrong]
    with pytest.raises(maxlm.UserError, match=said) as caught:
        program.shard(batch)
    assert len(caught.traceback) <= 3, "frames inside maxlm are not shown"


def test_wrong_calls_are_one_line(config, model, fitted, tmp_path):
    calls = {
        "neither": lambda: maxlm.Data.open(config, "test"),
        "takes a config": lambda: maxlm.fit("runs/quickstart"),
        "iterable of batches": lambda: maxlm.fit(config, data="texts"),
        "goes with data": lambda: maxlm.fit(config, held_out=[]),
        "no setting": lambda: maxlm.load_config("runs/quickstart", 3),
        "mapping of sections": lambda: maxlm.load_config(3),
        "must be at least": lambda: maxlm.load_config("runs/quickstart", "train.steps=-1"),
        "not a run directory": lambda: maxlm.Run.open(tmp_path),
        "does not exist": lambda: maxlm.Model.load(tmp_path / "none"),
        "holds no tokenizer": lambda: maxlm.load_tokenizer(tmp_path),
        "moving average": lambda: fitted[0].run.model(weights="ema"),
        "vocabulary has 320": lambda: model.logits([320]),
        "no tokens": lambda: model.logits(np.zeros((1, 0), int)),
        "rows of ids": lambda: model.logits(3),
        "temperature": lambda: model.generate("a", temperature=-1),
        "prompt is empty": lambda: model.generate(""),
        "this model takes": lambda: model.generate("a", 10_000),
        "context for each text": lambda: model.score(["a", "b"], ["c"]),
        "has the shape None": lambda: model.with_parameters({}),
        "must be built|build one with": lambda: maxlm.build(config, jax.make_mesh((8,), ("x",))),
    }
    for said, call in calls.items():
        with pytest.raises(maxlm.UserError, match=said):
            call()


def test_model_scores_as_its_logits_say(model, fitted):
    text = "document 3: d0x"
    ids = model.encode(text)
    with_prefix = [model.tokenizer.prefix, *ids]
    logprobs = jax.nn.log_softmax(model.logits(with_prefix)[:-1])
    score = model.score(text)
    assert math.isclose(score.logprob, float(sum(logprobs[i, token] for i, token in enumerate(ids))), rel_tol=1e-4)
    assert (score.tokens, score.bytes) == (len(ids), len(text)) and math.isclose(score.loss, -score.logprob / len(ids))
    evaluated = open_model(fitted[0].run.path, []).model
    assert evaluated.score([evaluated.request("document 3:", " d0x")])[0].logprob == model.score(" d0x", "document 3:").logprob
    assert evaluated.score([Request((evaluated.prefix,), tuple(ids))], stride=16)[0].logprob == score.logprob
    greedy = model.generate("document", 4, temperature=0)
    assert model.generate(["document"], 4, temperature=0) == [greedy]
    assert model.decode(ids) == text and model.size == sum(leaf.size for leaf in jax.tree.leaves(model.parameters))


def test_a_changed_weight_changes_the_logits(model):
    name = next(iter(model.parameters["layers"]["0"]["mlp"]))

    def louder(tree):
        tree["layers"]["0"]["mlp"][name] = 2 * tree["layers"]["0"]["mlp"][name]
        return tree

    changed = model.with_parameters(louder)
    assert not np.allclose(changed.logits([1, 2, 3]), model.logits([1, 2, 3]))
    assert changed.parameters["layers"]["0"]["mlp"][name].sharding == model.parameters["layers"]["0"]["mlp"][name].sharding
    silent = model.with_parameters(jax.tree.map(jnp.zeros_like, model.parameters))
    assert float(abs(silent.logits([1, 2, 3])).max()) == 0


def test_module_is_what_a_user_of_flax_expects(model):
    module, tokens = model.module(), np.arange(16, dtype=np.int32)[None].repeat(8, 0)
    wanted = model.logits(tokens)
    graph, state = nnx.split(module)
    assert np.allclose(nnx.jit(lambda module, tokens: module(tokens))(module, tokens), wanted, atol=1e-5)
    assert np.allclose(nnx.merge(graph, state)(tokens), wanted, atol=1e-5)
    assert np.allclose(module(tokens[:1, :5]), wanted[:1, :5], atol=1e-5), "one row, which eight devices do not split"
    gradient = nnx.grad(lambda module: module(tokens).mean())(module)
    assert {"decoder"} == set(state) and float(abs(gradient["decoder"]["embedding_VD"][...]).max()) > 0
    parameters = nnx.state(module, nnx.Param)
    shardings = nnx.get_named_sharding(parameters, model.mesh)
    pairs = list(zip(jax.tree.leaves(shardings), jax.tree.leaves(parameters), strict=True))
    assert pairs and all(sharding.is_equivalent_to(leaf.sharding, leaf.ndim) for sharding, leaf in pairs)
    assert any(not sharding.is_fully_replicated for sharding, _ in pairs), "no variable is split"
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == model.size
    assert "out_sharding" in repr(module)
    nnx.display(module)


def test_table_has_rows_and_columns():
    assert repr(Table([{"step": 1, "\x1b[2J": 2}])) == r"Table(1 rows: step, \x1b[2J)"
    table = Table([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5, "z": None}])
    assert (table["loss"], table[-1]["step"], table.columns, table[:1]["step"]) == (
        [2.0, 1.5],
        2,
        ["step", "loss", "z"],
        [1],
    )
    assert table["z"] == [None, None] and len(table) == 2 and "<td>1.5</td>" in table._repr_html_()
    with pytest.raises(KeyError, match="the columns are step, loss, z"):
        table["nothing"]


class Counted:
    """Batches with a state of their own, and a count of the drawn batches."""

    def __init__(self, batches):
        self.batches, self.place, self.drawn = batches, 0, 0

    def __iter__(self):
        while self.place < len(self.batches):
            self.place, self.drawn = self.place + 1, self.drawn + 1
            yield self.batches[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.fixture(scope="module")
def windows(program):
    """More batches of ids than a run of six steps reads."""
    return [np.random.default_rng(n).integers(0, 300, (8, 33)).astype(np.int32) for n in range(9)]


MAKE = {"state": Counted, "replayed": list, "generator": iter}


def opened(config, items):
    """Batches that `fit` would train on."""
    return GivenBatches(items, config.data, config.batch_sizes, "items", batch_reader(config))


@pytest.mark.parametrize("kind", MAKE)
def test_given_batches_are_resumed_by_state(config, windows, kind):
    """In another process, after a restart, and in this one, after a roll back that leaves a batch out."""
    pipeline = opened(config, MAKE[kind](windows))
    pipeline.go_on({})
    pipeline.restart(0)
    drawn = [pipeline.host_batch(step).tokens_BS for step in range(5)]
    assert all(np.array_equal(batch, window[:, :-1]) for batch, window in zip(drawn, windows, strict=False))
    position = json.loads(json.dumps({"next_step": 3, **pipeline.position(3)}))
    items = MAKE[kind](windows)
    again = opened(config, items)
    again.go_on(position)
    again.restart(3)
    assert np.array_equal(again.host_batch(3).tokens_BS, drawn[3]) and np.array_equal(again.host_batch(3).tokens_BS, drawn[3])
    assert kind != "state" or items.drawn == 1, "items before its place were drawn again"
    pipeline.go_on(position, (3,))
    if kind == "generator":
        with pytest.raises(maxlm.UserError, match="an iterator, which cannot go back from item 5 to 3"):
            pipeline.restart(3)
        return
    pipeline.restart(3)
    assert np.array_equal(pipeline.host_batch(3).tokens_BS, drawn[4]), "batch 3 is left out"
    with pytest.raises(maxlm.UserError, match="have no numbers"):
        pipeline.host_batch(7)


def test_an_iterable_begins_anew_and_an_iterator_ends(config, windows):
    pipeline = opened(config, windows[:2])
    pipeline.restart(0)
    tokens = [pipeline.host_batch(step).tokens_BS for step in range(3)]
    assert np.array_equal(tokens[0], tokens[2]) and not np.array_equal(tokens[0], tokens[1])
    short = opened(config, iter(windows[:2]))
    short.restart(0)
    with pytest.raises(maxlm.UserError, match="the data end after 2 batches"):
        [short.host_batch(step) for step in range(3)]


def test_fit_on_given_batches_goes_on_with_the_next_one(folder, windows):
    own = maxlm.load_config(settings(folder, "given"), "train.steps=2")
    first = maxlm.fit(own, data=(one for one in windows), held_out=windows[-2:], quiet=True)
    assert first.step == 2 and first.eval_loss is not None
    last = maxlm.fit(maxlm.load_config(own, "train.steps=4"), data=(one for one in windows), held_out=windows[-2:], quiet=True)
    wanted = [int(digest(maxlm.Batch(*[jnp.asarray(one[:, :-1])] * 5))) for one in windows[:4]]
    assert last.step == 4 and last.run.metrics["batch_digest"] == wanted
    with pytest.raises(maxlm.UserError, match="came from a Python program"):
        maxlm.fit(last.run.config, quiet=True)


def test_texts_are_packed_without_a_gap_and_resumed(config, fitted):
    tokenizer = fitted[0].run.tokenizer
    texts = [f"text {n} " + "abc " * (n % 7) for n in range(400)]
    packed = maxlm.pack_texts(texts, tokenizer, config)
    batches = list(itertools.islice(packed, 3))
    ids = np.concatenate(tokenizer.encode_documents(texts))
    rows = np.concatenate([batch.tokens_BS for batch in batches]).ravel()
    assert np.array_equal(rows, ids[: rows.size])
    place = json.loads(json.dumps(packed.state_dict()))
    wanted = next(iter(packed)).tokens_BS
    again = maxlm.pack_texts(({"text": text} for text in texts), tokenizer, config)
    again.load_state_dict(place)
    assert np.array_equal(next(iter(again)).tokens_BS, wanted)
