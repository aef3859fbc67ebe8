"""Stop texts, and files of prompts."""

import json
import re

import pytest
from tiny import tiny_config

from maxlm.config import UserError
from maxlm.config.loader import dump
from maxlm.data.text_frame import TextFrame
from maxlm.inference import text
from maxlm.inference.generate import Sampler
from maxlm.training.saved_run import SavedRun


class PairTokenizer:
    """A token is two letters: a stop may begin and end inside tokens."""

    end_of_document_id = 0
    frame, special, special_pattern = TextFrame(), frozenset(), re.compile("(?!)")

    def encode_prompt(self, words, special=False):
        return [ord(a) * 1000 + ord(b) for a, b in zip(words[::2], words[1::2], strict=True)]

    def decode(self, ids):
        return "".join(chr(i // 1000) + chr(i % 1000) for i in ids)


def continued(monkeypatch, written, *stop):
    """`continue_texts` with a model that writes `written`, looked at after every 3 tokens; (texts, ids that were generated)."""
    from maxlm.inference.generate import _cut

    def generate(model, params, state, prompts, sampler, end, *, dtype, finished):
        ids = PairTokenizer().encode_prompt(written)
        if finished is None:
            return [ids for _ in prompts]
        at = next((n for n in range(3, len(ids), 3) if finished(ids[:n])), len(ids))
        return [_cut(ids[:at], finished) for _ in prompts]

    monkeypatch.setattr(text, "generate", generate)
    return text.continue_texts(None, {}, {}, PairTokenizer(), ["ab"], Sampler(stop=stop))[0]


@pytest.mark.parametrize(
    ("stop", "wanted"),
    [
        ((), "onetwothreefour!"),
        (("two",), "one"),  # begins inside a token
        (("et", "two"), "on"),  # the first in the text, not in the list
        (("four", "!"), "onetwothree"),
        (("ab",), "onetwothreefour!"),  # in the prompt only
        (("five",), "onetwothreefour!"),
        (("o",), ""),
    ],
)
def test_a_text_ends_before_the_first_stop(monkeypatch, stop, wanted):
    assert continued(monkeypatch, "onetwothreefour!", *stop) == wanted


def test_a_prompt_is_given_to_the_model_as_its_texts_begin(monkeypatch):
    class Opening(PairTokenizer):
        def encode_prompt(self, words, special=False):
            return [7, *super().encode_prompt(words)]

    given = []
    monkeypatch.setattr(
        text, "generate", lambda model, params, state, prompts, *_, **options: given.extend(prompts) or [[] for _ in prompts]
    )
    text.continue_texts(None, {}, {}, Opening(), ["", "ab"], Sampler())
    assert given == [[7], [7, 97098]]


TRAINED = {  # settings of training that say nothing of how a model is generated with
    "a pipeline": {"mesh": {"stage": 2}, "pipeline": {"chunks": 2}, "train": {"microbatches": 2}, "model": {"n_layers": 4}},
    "compressed local updates": {"diloco": {"workers": 2, "every": 2}, "compression": {"kind": "int8"}, "mesh": {"data": 2}},
    "compressed gradients between slices": {"compression": {"kind": "int8"}, "mesh": {"data": 2, "slices": 2}},
    "a ramp of batches": {"train": {"batch_ramp": [{"global_batch": 1, "until_tokens": 64}]}},
    "the noise scale": {"train": {"microbatches": 2, "noise_scale": {"updates": 10}}},
    "activations on the host": {"memory": {"offload": ["layer_input"]}},
    "a small batch": {"train": {"global_batch": 2}},
}


@pytest.mark.parametrize("overrides", [[], ["mesh.fsdp=2", "mesh.tensor=2", "mesh.stage=2"]], ids=str)
@pytest.mark.parametrize("name", TRAINED)
def test_settings_of_training_refuse_no_mesh_of_generation(name, overrides, tmp_path, monkeypatch):
    class LoadedError(Exception): ...

    def weights(run, mesh, step, kind):
        raise LoadedError({axis: size for axis, size in mesh.shape.items() if size > 1})

    (tmp_path / "config.yml").write_text(dump(tiny_config(**TRAINED[name])))
    monkeypatch.setattr(SavedRun, "text_tokenizer", lambda run: PairTokenizer())
    monkeypatch.setattr(SavedRun, "weights", weights)
    with pytest.raises(LoadedError) as loaded:
        text.generate_from_run(tmp_path, ["ab"], Sampler(max_new_tokens=4), overrides=overrides)
    assert loaded.value.args[0] == ({"fsdp": 2, "tensor": 2, "stage": 2} if overrides else {})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=3", "train.steps=3 is no setting of the mesh"),
        ("mesh.fspd=2", "mesh.fspd.*fsdp"),
        ("mesh.data=3", "number of devices, 8"),
        ("mesh.tensor=8", "mesh.tensor = 8.*n_kv_heads = 4"),
    ],
)
def test_a_mesh_of_generation_that_does_not_fit_is_one_line(override, words, tmp_path, monkeypatch):
    (tmp_path / "config.yml").write_text(dump(tiny_config()))
    monkeypatch.setattr(SavedRun, "text_tokenizer", lambda run: PairTokenizer())
    with pytest.raises(UserError, match=words) as told:
        text.generate_from_run(tmp_path, ["ab"], Sampler(max_new_tokens=4), overrides=[override])
    assert "\n" not in str(told.value)


def test_prompts_of_files(tmp_path):
    plain, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("Once\n\n{a}\n", encoding="utf-8")
    lines.write_text('"two\\nlines"\n{"prompt": "Once", "id": 3}\n', encoding="utf-8")
    assert text.read_prompts(plain) == ["Once", "{a}"]
    assert text.read_prompts(lines) == ["two\nlines", "Once"]
    lines.write_text('\ufeff"a line\u2028separator"\r\n"\x7f"\n', encoding="utf-8")
    assert text.read_prompts(lines) == ["a line\u2028separator", "\x7f"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\n \n", "no prompt"),
        ("a.txt", b"\xff\xfe", "UTF-8"),
        ("a.jsonl", b'"one"\n{"text": "x"}\n', "line 2"),
        ("a.jsonl", b"plain\n", "line 1"),
        ("a.jsonl", b"3\n", "line 1"),
        ("a.jsonl", json.dumps({"prompt": 3}).encode(), "line 1"),
        ("a.jsonl", b"[" * 100_000, "line 1"),
        ("a.jsonl", b'"\\ud800"', "surrogate"),
    ],
)
def test_a_bad_file_of_prompts_is_one_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words) as told:
        text.read_prompts(tmp_path / name)
    assert "\n" not in str(told.value)
