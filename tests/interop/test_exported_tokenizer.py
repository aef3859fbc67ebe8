"""The files of an exported tokenizer say with one voice what ends a text."""

import json

import jax
import pytest
from tiny import VOCAB, drawn_parameters, tiny_config
from tokenizers import Tokenizer as Bpe, models

from maxlm.checkpoint import Checkpoints
from maxlm.config import UserError
from maxlm.config.loader import dump
from maxlm.data import manifest
from maxlm.data.text_frame import TextFrame
from maxlm.data.tokenizer import Tokenizer
from maxlm.interop.exporting import export_model
from maxlm.interop.importing import import_model

END, TURN = "<|endoftext|>", "<|im_end|>"
IDS = {END: 0, TURN: 1}
CONFIG, MAP, GENERATION = "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"
SOURCE = {  # files of a chat model, whose turns end its texts
    CONFIG: {"eos_token": TURN, "model_max_length": 7, "chat_template": "{{ messages }}<|im_end|>"},
    MAP: {"eos_token": {"content": TURN, "lstrip": False}},
    GENERATION: {"eos_token_id": [1, 5], "top_p": 0.8},
}


def nothing(done, total):
    pass


def make_run(folder, ends, files):
    """A run on a store whose documents end with END, which began as a model with these files beside its tokenizer."""
    config = tiny_config()
    bpe = Bpe(models.WordLevel(IDS | {f"w{number}": number for number in range(2, VOCAB)}, unk_token="w2"))
    bpe.add_special_tokens(list(IDS))
    made = Tokenizer(bpe.to_str(), END, "the test")
    settings = {"data.prepare.tokenizer.end_of_document": END, "frame": TextFrame(ends=ends).to_json()}
    info = manifest.StoreInfo(
        tokenizer_hash=made.hash,
        vocab_size=made.vocab_size,
        end_of_document_id=IDS[END],
        dtype="uint8",
        fingerprint=manifest.fingerprint(settings),
        settings=settings,
        splits={split: manifest.SplitInfo(tokens=0, documents=0) for split in manifest.SPLITS},
    )
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / manifest.TOKENIZER).write_text(made.text)
    (folder / "tokenizer" / manifest.MANIFEST).write_bytes(manifest.as_bytes(info.model_dump(mode="json")))
    for name, values in files.items():
        (folder / "tokenizer" / name).write_text(values if isinstance(values, str) else json.dumps(values))
    (folder / "config.yml").write_text(dump(config))
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint, {})
    checkpoints.save(0, {"params": jax.device_put(drawn_parameters(config.model)), "model_state": {}}, {})
    checkpoints.close()
    return folder


@pytest.mark.parametrize("ends", [(), (1,), (1, 0, 1)], ids=str)
def test_the_files_of_the_source_are_made_to_agree_with_the_ends_of_the_model(ends, tmp_path):
    export_model(make_run(tmp_path / "run", ends, SOURCE), tmp_path / "out", "float32", "5GB", None, nothing)
    said = {name: json.loads((tmp_path / "out" / name).read_text()) for name in (*SOURCE, "config.json")}
    wanted = [0, 1] if ends else 0
    assert said["config.json"]["eos_token_id"] == wanted
    assert said[GENERATION] == {"eos_token_id": wanted, "top_p": 0.8}
    assert said[CONFIG] == {**SOURCE[CONFIG], "eos_token": END}
    assert said[MAP] == {"eos_token": END}
    import_model(tmp_path / "out", tmp_path / "back", [], nothing)
    info = manifest.load(str(tmp_path / "back" / "tokenizer"))
    assert (info.end_of_document_id, TextFrame.from_settings(info.settings).ends) == (0, tuple({*ends} - {0}))


def test_files_that_agree_are_copied_as_they_are(tmp_path):
    files = {
        CONFIG: f'{{"eos_token":   "{END}"}}',
        MAP: f'{{"eos_token": {{"content": "{END}", "lstrip": false}}}}',
        GENERATION: '{"eos_token_id":   [0, 1]}',
    }
    export_model(make_run(tmp_path / "run", (1,), files), tmp_path / "out", "float32", "5GB", None, nothing)
    assert {name: (tmp_path / "out" / name).read_text() for name in files} == files


@pytest.mark.parametrize("place", [CONFIG, "chat_template.jinja"])
def test_a_template_that_writes_the_end_token_keeps_that_of_training(place, tmp_path):
    template = "{{ messages[0].content + eos_token }}"
    files = {**SOURCE, **({place: {"eos_token": TURN, "chat_template": template}} if place == CONFIG else {place: template})}
    export_model(make_run(tmp_path / "run", (1,), files), tmp_path / "out", "float32", "5GB", None, nothing)
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["eos_token"] == TURN
    assert json.loads((tmp_path / "out" / GENERATION).read_text())["eos_token_id"] == [0, 1]


def test_a_file_that_is_no_json_is_named_before_anything_is_read(tmp_path):
    run, done = make_run(tmp_path / "run", (), {GENERATION: "{"}), []
    with pytest.raises(UserError, match=r"run/tokenizer/generation_config\.json is no JSON"):
        export_model(run, tmp_path / "out", "float32", "5GB", None, lambda *counts: done.append(counts))
    assert not done and not (tmp_path / "out").exists()
