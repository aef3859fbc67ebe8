"""Tokens around texts: as a published tokenizer states them, as a model records them, and where a continuation ends."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Bpe, decoders, models, pre_tokenizers, processors

from maxlm.config import UserError
from maxlm.data import manifest
from maxlm.data.stops import Stops
from maxlm.data.text_frame import TextFrame, started_frame
from maxlm.data.tokenizer import Tokenizer, copy_tokenizer, open_tokenizer, started_tokenizer
from maxlm.interop.importing import published_frame

SPECIAL = {"<bos>": 0, "<eos>": 1, "<|im_end|>": 2, "<unk>": 3}
EOS, IM_END = SPECIAL["<eos>"], SPECIAL["<|im_end|>"]
WORDS = {f"\u2581{word}": number for number, word in enumerate(("Once", "upon", "a", "time", "end"), len(SPECIAL))}


def tokenizer(frame=None, opens=False):
    """A word is a token; as of Llama 2, the decoder leaves out the space before the first."""
    bpe = Bpe(models.WordLevel(SPECIAL | WORDS, unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    bpe.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    bpe.add_special_tokens(list(SPECIAL))
    if opens:
        bpe.post_processor = processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 0)])
    return Tokenizer(bpe.to_str(), "<eos>", "the test", frame)


BOS = {"bos_token": {"content": "<bos>"}}


@pytest.mark.parametrize(
    ("opens", "settings", "generation", "wanted"),
    [
        (True, BOS, {}, TextFrame((0,), 0)),
        (False, BOS, {}, TextFrame((), 0)),
        (False, {}, {}, TextFrame()),
        (False, {**BOS, "add_bos_token": True}, {}, TextFrame((0,), 0)),  # DeepSeek-V3
        (True, {**BOS, "add_bos_token": True}, {}, TextFrame((0,), 0)),
        (True, {**BOS, "add_bos_token": False}, {}, TextFrame((), 0)),
        (False, {"add_bos_token": True}, {}, TextFrame()),
        (False, {}, {"eos_token_id": [1, 2]}, TextFrame((), None, (2,))),
        (False, {}, {"eos_token_id": 2}, TextFrame((), None, (2,))),
        (False, {}, {"eos_token_id": [999, -1]}, TextFrame()),
    ],
)
def test_the_files_of_a_published_tokenizer_say_what_surrounds_texts(opens, settings, generation, wanted, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert published_frame(tmp_path, tokenizer(opens=opens), [1]) == wanted
    assert published_frame(tmp_path, tokenizer(opens=opens), [2]).ends == (2,), "of config.json"


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json is no JSON"):
        published_frame(tmp_path, tokenizer(), [])


def test_a_prompt_is_opened_once_and_never_empty():
    plain, framed = tokenizer(), tokenizer(TextFrame((0,), 0))
    assert plain.encode_prompt("Once a") == [4, 6]
    assert plain.encode_prompt("") == [plain.end_of_document_id]
    assert framed.encode_prompt("Once a") == [0, 4, 6]
    assert framed.opened([0, 4]) == [0, 4]
    assert framed.encode_prompt("") == [0]


def save(folder: Path, frame=None, end="<eos>") -> Path:
    """A folder with the tokenizer, as of a token store, or of a model with a frame."""
    folder.mkdir()
    made = tokenizer()
    settings = {"data.prepare.tokenizer.end_of_document": end} | ({} if frame is None else {"frame": frame.to_json()})
    info = {"tokenizer_hash": made.hash, "vocab_size": made.vocab_size, "end_of_document_id": SPECIAL[end], "dtype": "uint8"}
    splits = {split: manifest.SplitInfo(tokens=0, documents=0) for split in manifest.SPLITS}
    whole = manifest.StoreInfo(**info, fingerprint=manifest.fingerprint(settings), settings=settings, splits=splits)
    (folder / manifest.TOKENIZER).write_text(made.text)
    (folder / manifest.MANIFEST).write_bytes(manifest.as_bytes(whole.model_dump(mode="json")))
    return folder


def test_a_run_has_the_frame_of_the_model_that_it_starts_from(tmp_path):
    frame = TextFrame((0,), 0, (2,))
    store, model = save(tmp_path / "store"), save(tmp_path / "model", frame)
    assert open_tokenizer(str(model)).frame == frame
    for name, source, wanted in (("fresh", None, TextFrame()), ("tuned", model, frame)):
        copy_tokenizer(str(store), tmp_path / name, source)
        assert open_tokenizer(str(tmp_path / name)).frame == started_frame(source, tmp_path / name, EOS, goes_on=False) == wanted
    model.rename(tmp_path / "elsewhere")
    copy_tokenizer(str(store), tmp_path / "tuned", model)  # the run goes on
    assert open_tokenizer(str(tmp_path / "tuned")).frame == started_frame(model, tmp_path / "tuned", EOS, goes_on=False) == frame
    for goes_on, wanted in ((True, frame), (False, TextFrame())):  # without a source in its config
        copy_tokenizer(str(store), tmp_path / "tuned", goes_on=goes_on)
        known = started_tokenizer(str(store), tmp_path / "tuned", None, goes_on=goes_on)
        assert open_tokenizer(str(tmp_path / "tuned")).frame == known.frame == wanted


@pytest.mark.parametrize(("ends", "wanted"), [((EOS,), (IM_END,)), ((), (IM_END,)), ((EOS, 3), (IM_END, 3))])
def test_what_ended_texts_of_the_model_still_does_where_the_data_has_another_end(ends, wanted, tmp_path):
    """A chat model ends a turn with <|im_end|>, and a store that it is tuned on ends documents with <eos>: both end its texts."""
    store, model = save(tmp_path / "store"), save(tmp_path / "model", TextFrame((0,), 0, ends), "<|im_end|>")
    copy_tokenizer(str(store), tmp_path / "tuned", model)
    for known in (open_tokenizer(str(tmp_path / "tuned")), started_tokenizer(str(store), tmp_path / "tuned", model)):
        assert (known.end_of_document_id, known.frame) == (EOS, TextFrame((0,), 0, wanted))
        assert Stops(known, []).finished([5, IM_END])
    copy_tokenizer(str(store), tmp_path / "tuned again", tmp_path / "tuned")
    assert open_tokenizer(str(tmp_path / "tuned again")).frame.ends == wanted


def test_a_continuation_ends_at_ids_and_before_texts():
    known, ids = tokenizer(TextFrame(ends=(1,))), [5, 6, 2, 8, 1, 4]  # upon a <|im_end|> end <eos> Once
    assert Stops(known, []).text(ids) == "upon a end", "special tokens are not decoded"
    assert Stops(known, ["<|im_end|>"]).text(ids) == "upon a", "a stop that is a special token"
    assert Stops(known, ["end"]).text(ids) == "upon a "
    assert [Stops(known, ["<|im_end|>"]).finished(ids[:n]) for n in (2, 3)] == [False, True]
    assert [Stops(known, []).finished(ids[:n]) for n in (4, 5)] == [False, True]
    assert not Stops(tokenizer(), []) and Stops(known, [])
    assert not Stops(tokenizer(), [""]) and Stops(known, ["", "end"]).text(ids) == "upon a ", "every text holds the empty one"


def test_the_space_after_a_prompt_is_kept():
    known = tokenizer()
    prompt = known.encode_prompt("Once")
    assert Stops(known, []).text([5, 6], prompt) == " upon a"
    assert Stops(known, ["upon"]).text([5, 6], prompt) == " "
