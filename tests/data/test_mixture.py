"""Sources of a mixture hold exactly their documents, have their shares in each stage, and go on where they were after any edit."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from data_cases import config_of, mixture_of, random_documents, write_store

from maxlm.base.errors import ConfigError, UserError
from maxlm.config.sections.mixture import MixtureConfig
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.metadata import About
from maxlm.data.samples import PackedRows, Windows
from maxlm.data.token_store import TokenStore

S, G = 16, 6
DOCUMENTS, HELD_OUT = random_documents(90, longest=60), random_documents(12, seed=9)
LANGUAGES = ["en", "de", "fr"]


def language(number: int) -> str:
    return LANGUAGES[min(number % 7, 2)]  # two of seven, en and de; the others fr


ABOUT = [About(f"d{n}", {"language": language(n), "score": n / 100}) for n in range(102)]


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store", DOCUMENTS, HELD_OUT, about=ABOUT)


@pytest.fixture
def other(tmp_path):
    return write_store(tmp_path / "other", random_documents(40, seed=1))


def pipeline(mixture: MixtureConfig | None, *, split="train", **settings: Any) -> Pipeline:
    return Pipeline(config_of(mixture=mixture, **settings), global_batch=G, seed=0, vocab_size=100, split=split)


def saved(pipe: Pipeline, step: int) -> dict:
    """The data position of a checkpoint, as it is written and read."""
    return json.loads(
        json.dumps({"next_step": step, **({"left_out": list(pipe.left_out)} if pipe.left_out else {}), **pipe.position(step)})
    )


def sequence(pipe: Pipeline, steps: range) -> dict[str, list[int]]:
    """Windows of each source, by its name, in the order in which batches hold them."""
    found: dict[str, list[int]] = {}
    for step in steps:
        for number in pipe.sample_ids(step).tolist():
            owner = int(np.searchsorted(pipe._first, number, side="right")) - 1
            found.setdefault(pipe.sources[owner].name, []).append(number - int(pipe._first[owner]))
    return found


def tokens_of(documents: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(documents)


# --------------------------------------------------------------------------------------------------- documents of a source


@pytest.mark.parametrize("seq_len", [1, 7, 16, 100, 5000])
@pytest.mark.parametrize("chosen", [[3], [0, 1, 2, 3], [0, 5, 6, 40, 41, 89], list(range(0, 90, 2)), list(range(90)), [88, 89]])
def test_windows_of_some_documents_are_those_of_a_store_of_these_documents(store, chosen, seq_len):
    stream = tokens_of([DOCUMENTS[n] for n in chosen])
    whole = TokenStore(store)
    windows = Windows(whole, seq_len, np.array(chosen))
    assert windows.count == -(-(len(stream) - 1) // seq_len) and windows.tokens == len(stream)
    order = np.random.default_rng(0).permutation(windows.count)[:60]
    rows, lengths = windows.read(order)
    for row, number in enumerate(order.tolist()):
        expected = stream[number * seq_len : number * seq_len + seq_len + 1]
        np.testing.assert_array_equal(rows[row], np.pad(expected, (0, seq_len + 1 - len(expected))))
        assert lengths[row] == len(expected) and windows.inputs(number) == len(expected) - 1
        parts = [whole.read(*part) for part in windows.ranges(number)]
        np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_no_document_has_no_window(store):
    assert Windows(TokenStore(store), S, np.zeros(0, np.int64)).count == 0


def test_rows_of_some_conversations_hold_exactly_those(store):
    chosen = np.arange(1, 90, 3)
    rows = PackedRows(TokenStore(store), 80, chosen)
    held = np.concatenate([rows.documents(number) for number in range(rows.count)])
    assert sorted(held) == list(range(30))
    for number in range(rows.count):
        np.testing.assert_array_equal(
            [stop - start for start, stop in rows.ranges(number)], [len(DOCUMENTS[chosen[n]]) for n in rows.documents(number)]
        )


@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_epoch_of_a_source_holds_the_documents_that_meet_its_conditions_and_no_others(store, split):
    pipe = pipeline(mixture_of({"good": {"store": store, "where": ["score >= 0.3", "language in en | fr"]}}), split=split)
    first = 0 if split == "train" else 90
    documents = DOCUMENTS if split == "train" else HELD_OUT
    stream = tokens_of([documents[n] for n in range(len(documents)) if first + n >= 30 and language(first + n) != "de"])
    assert pipe.n_windows == -(-(len(stream) - 1) // S)
    rows = pipe.in_order()
    read = np.concatenate([rows.host_batch(step).tokens_BS for step in range(rows.n_batches)]).ravel()
    np.testing.assert_array_equal(read[: len(stream) - 1], stream[:-1])


def test_sources_split_by_a_field_are_its_values(store):
    pipe = pipeline(mixture_of({"web": {"store": store, "by": "language"}}))
    assert [source.name for source in pipe.sources] == ["web/de", "web/en", "web/fr"]
    for source in pipe.sources:
        assert {language(n) for n in source.documents} == {source.name.partition("/")[2]}
    assert sum(len(source.documents) for source in pipe.sources) == 90


# ------------------------------------------------------------------------------------------------------------------ shares


def shares(pipe: Pipeline, steps: range) -> dict[str, float]:
    counts = Counter({name: len(own) for name, own in sequence(pipe, steps).items()})
    return {name: count / counts.total() for name, count in counts.items()}


@pytest.mark.parametrize("temperature", [1.0, pytest.param(2.0, marks=pytest.mark.soak), 5.0])
def test_shares_by_temperature(store, temperature):
    pipe = pipeline(mixture_of({"web": {"store": store, "by": "language"}}, temperature=temperature))
    sizes = {name: tokens ** (1 / temperature) for name, (_, tokens) in pipe.sizes.items()}
    expected = {name: size / sum(sizes.values()) for name, size in sizes.items()}
    assert shares(pipe, range(400)) == pytest.approx(expected, abs=0.002)


def test_a_weight_of_a_source_that_is_split_is_divided_among_its_parts(store, other):
    sources = {"web": {"store": store, "by": "language", "weight": 3}, "code": {"store": other, "weight": 1}}
    stage = {"from_tokens": 100 * G * S, "weights": {"web": 1, "web/en": 3}}
    pipe = pipeline(mixture_of(sources, stages=[stage]))
    tokens = {name: count for name, (_, count) in pipe.sizes.items()}
    web = sum(count for name, count in tokens.items() if name.startswith("web/"))
    first = {"code": 0.25, **{name: 0.75 * count / web for name, count in tokens.items() if name != "code"}}
    assert shares(pipe, range(100)) == pytest.approx(first, abs=0.01)
    rest = tokens["web/de"] + tokens["web/fr"]
    second = {"web/en": 0.75, "web/de": 0.25 * tokens["web/de"] / rest, "web/fr": 0.25 * tokens["web/fr"] / rest}
    assert shares(pipe, range(100, 200)) == pytest.approx(second, abs=0.01)


def test_a_stage_begins_at_its_token_and_a_source_ends_with_its_epochs(store, other):
    sources = {"web": {"store": store, "weight": 1}, "code": {"store": other, "weight": 1, "epochs": 1.5}}
    pipe = pipeline(mixture_of(sources, stages=[{"from_tokens": 12 * S - 3, "weights": {"code": 1}}]))
    assert set(sequence(pipe, range(2))) == {"web", "code"} and set(sequence(pipe, range(2, 3))) == {"code"}
    windows = pipe.sizes["code"][0]
    end = 12 + int(1.5 * windows) - 6  # 6 of its samples came before
    assert pipe._order.end == end
    pipe.check_length(end // G)
    with pytest.raises(ConfigError, match=r"ends at token .*epochs.*raise `epochs`"):
        pipe.check_length(end // G + 1)


# ------------------------------------------------------------------------------------------------------- edits in mid-run


def random_mixture(rng: np.random.Generator, stores: list[str], step: int) -> MixtureConfig:
    """Any weights, and perhaps a stage, that begins after `step`."""
    sources = {"web": {"store": stores[0], "by": "language"}, "code": {"store": stores[1], "epochs": 40 + float(rng.random())}}
    named = ["web/en", "web/de", "web/fr", "code"]

    def weights() -> dict[str, float]:
        return {name: float(rng.random() + 0.1) for name in rng.permutation(named)[: rng.integers(1, 5)]}

    if rng.random() < 0.5:
        sources = {name: {**source, "weight": float(rng.random() + 0.1)} for name, source in sources.items()}
    starts = sorted({int((step + rng.integers(1, 30)) * G * S) for _ in range(rng.integers(0, 3))})
    return mixture_of(sources, temperature=1 + 3 * float(rng.random()), stages=[{"from_tokens": at, "weights": weights()} for at in starts])


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_edited_in_mid_run_no_source_repeats_or_loses_a_sample(store, other, seed):
    """Each source's windows, over all edits, are those that it gives alone, in that order: no gap, no repeat until its epoch ends."""
    rng, stores = np.random.default_rng(seed), [store, other]
    pipe = pipeline(random_mixture(rng, stores, 0))
    step, seen = 0, dict[str, list[int]]()
    for _ in range(5):
        end = step + int(rng.integers(1, 25))
        for name, own in sequence(pipe, range(step, end)).items():
            seen.setdefault(name, []).extend(own)
        position, step = saved(pipe, end), end
        pipe = pipeline(random_mixture(rng, stores, step))
        pipe.go_on(position)
    for name, own in seen.items():
        windows = pipe.sizes[name][0]
        for first in range(0, len(own) - windows + 1, windows):
            assert sorted(own[first : first + windows]) == list(range(windows))
        last = own[len(own) // windows * windows :]
        assert len(set(last)) == len(last)


def test_a_run_that_goes_on_with_its_config_has_the_batches_of_one_without_a_break(store, other):
    mixture = mixture_of(
        {"web": {"store": store, "by": "language"}, "code": {"store": other, "epochs": 2}},
        stages=[{"from_tokens": 20 * G * S, "weights": {"web": 1, "code": 2}}],
    )
    whole = pipeline(mixture)
    for step in (0, 1, 19, 20, 21, 30, 60):
        again = pipeline(mixture)
        again.go_on(saved(whole, step))
        assert again.plan == whole.plan
        for later in (step, step + 1, 70):
            np.testing.assert_array_equal(again.sample_ids(later), whole.sample_ids(later))


def test_a_checkpoint_of_before_plans_were_recorded_goes_on_as_ever(store):
    old, new = pipeline(None, store=store), pipeline(None, store=store)
    new.go_on({"next_step": 40, "store": "x"})
    np.testing.assert_array_equal(new.sample_ids(40), old.sample_ids(40))


def test_a_run_on_one_store_goes_on_with_a_mixture_without_repeating(store, other):
    pipe = pipeline(None, store=store)
    before = sequence(pipe, range(3))["store"]
    mixed = pipeline(mixture_of({"web": {"store": store, "weight": 1}, "code": {"store": other, "weight": 1}}))
    mixed.go_on(saved(pipe, 3))
    after = sequence(mixed, range(3, 12))
    alone = sequence(pipe, range(20))["store"]
    assert before + after["web"] == alone[: 18 + 27] and len(after["code"]) == 27


def test_sources_may_be_renamed_and_moved_but_not_changed_under_their_name(store, other, tmp_path):
    pipe = pipeline(mixture_of({"web": {"store": store}, "code": {"store": other}}))
    (tmp_path / "store").rename(tmp_path / "moved")
    moved = str(tmp_path / "moved")
    renamed = pipeline(mixture_of({"crawl": {"store": moved}, "code": {"store": other}}))
    renamed.go_on(saved(pipe, 4))
    assert [source.name for source in renamed.plan.sources] == ["crawl", "code"]
    changed = pipeline(mixture_of({"web": {"store": moved, "where": ["language == en"]}, "code": {"store": other}}))
    with pytest.raises(ConfigError, match=r"data\.mixture\.sources = web: is not what it was.*another name"):
        changed.go_on(saved(pipe, 4))


# ---------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("sources", "stages", "says"),
    [
        ({"a": {"where": ["lang == en"]}}, [], r"sources\.a\.where = .*no field lang; the nearest is language"),
        ({"a": {"by": "topic"}}, [], r"sources\.a\.by = topic: .*no field topic"),
        ({"a": {"where": ["language == xx"]}}, [], r"a\.where = .*: no document of .* meets `language == xx`; language is .*; loosen it"),
        ({"a": {"where": ["score > 0.5"]}, "b": {"where": ["language == en"]}}, [], r"= b: holds \d+ documents .* source a holds, too"),
        ({"a": {"by": "language"}}, [{"from_tokens": 9, "weights": {"a/xx": 1}}], r"stages\.0\.weights = .*a/xx has no documents"),
    ],
)
def test_what_the_stores_do_not_have_is_one_line(store, sources, stages, says):
    with pytest.raises(UserError, match=says):
        pipeline(mixture_of({name: {"store": store, **source} for name, source in sources.items()}, stages=stages))


def test_too_many_sources_are_refused(store, monkeypatch):
    monkeypatch.setattr("maxlm.data.mixture.MOST_SOURCES", 2)
    with pytest.raises(ConfigError, match="3 sources: are more than 2"):
        pipeline(mixture_of({"a": {"store": store, "by": "language"}}))
