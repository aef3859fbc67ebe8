"""A trained checkpoint scores texts for a corpus: bits per byte as `maxlm eval` counts them."""

import json
import math
import pickle

import pytest

from maxlm.base.errors import UserError
from maxlm.corpus import engine
from maxlm.corpus.executors.local import LocalExecutor
from maxlm.corpus.files import read_shard
from maxlm.corpus.settings import CorpusSettings
from maxlm.evaluation.opening import find_checkpoint
from maxlm.evaluation.requests import Request

TEXTS = ["", "a short text", "ümlaut and more words " * 20, "a lone \ud800 surrogate"]


@pytest.fixture(scope="module")
def source(workspace):
    return find_checkpoint(str(workspace / "run"))


def test_scores_are_bits_per_byte_of_the_whole_text(source):
    scorer = pickle.loads(pickle.dumps(source)).open()
    scores = scorer.score(TEXTS)
    assert scores[0] == 0.0 and all(math.isfinite(score) and score > 0 for score in scores[1:])
    model = scorer.model
    [alone] = model.score([Request((model.prefix,), model.encode(TEXTS[1]))])
    assert scores[1] == pytest.approx(-alone.logprob / math.log(2) / len(TEXTS[1]), rel=1e-4)
    assert source.open() is scorer  # one model in a process
    assert find_checkpoint(source.place) == source


def test_a_corpus_is_filtered_by_it(source, tmp_path):
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS[:3], "x"] * 30))
    bits = source.open().score(TEXTS[:3])
    limit = (bits[1] + bits[2]) / 2
    config = CorpusSettings.model_validate(
        {
            "output": str(tmp_path / "out"),
            "sources": {"made": {"paths": [str(tmp_path / "raw.jsonl")]}},
            "filters": {"perplexity": {"checkpoint": source.place, "max_bits_per_byte": limit}},
        }
    )
    engine.run(engine.make_plan(config, source), LocalExecutor(1, print))
    kept = list(read_shard(tmp_path / "out" / "documents" / "000000.jsonl.zst"))
    low = min(TEXTS[1:3], key=lambda text: bits[TEXTS.index(text)])
    assert low in {record["text"] for record in kept} and max(bits[1:]) > limit >= max(
        record["metadata"]["bits_per_byte"] for record in kept
    )
    before = (tmp_path / "out" / "documents" / "000000.jsonl.zst").read_bytes()
    other = type(source)(source.place, source.step, ("other weights", source.key[1]))
    assert engine.make_plan(config, other).fingerprints != engine.make_plan(config, source).fingerprints
    engine.run(engine.make_plan(config, other), LocalExecutor(1, print))
    assert (tmp_path / "out" / "documents" / "000000.jsonl.zst").read_bytes() == before


def test_what_is_no_model_is_one_line(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        find_checkpoint(str(tmp_path / "missing"))
