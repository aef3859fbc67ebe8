"""A published folder goes through import, training and export: its files come back, but for what training has changed."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from ruamel.yaml import YAML
from safetensors.numpy import save_file
from tiny import drawn_parameters
from tokenizers import Tokenizer as Bpe

from maxlm.checkpoint import Checkpoints
from maxlm.config import load
from maxlm.config.loader import dump
from maxlm.config.schema import DataConfig
from maxlm.data.prepare import prepare
from maxlm.data.stops import Stops, turn_ends
from maxlm.data.tokenizer import copy_tokenizer, open_tokenizer, started_tokenizer, train_tokenizer
from maxlm.interop.averaging import average
from maxlm.interop.exporting import export_model
from maxlm.interop.importing import import_model
from maxlm.training.saved_run import copy_published

GOLDEN = Path(__file__).parent / "golden" / "llama3.npz"
END, TURN, CALL = "<|end_of_text|>", "<|eot|>", "<|eom|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content }}"
    "{{ '<|eom|>' if m.call else '<|eot|>' }}\n{% endfor %}{% if add_generation_prompt %}<|head|>assistant\n{% endif %}"
)
VOCAB = 300


def nothing(done, total):
    pass


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A base model as published, with all the files that a tokenizer may have; written in styles of their own."""
    folder = tmp_path_factory.mktemp("published") / "base"
    folder.mkdir()
    bpe = Bpe.from_str(train_tokenizer(["some words that are written and read " * 9], 290, END).text)
    bpe.add_special_tokens([TURN, CALL, "<|head|>", "<s>"])
    (folder / "tokenizer.json").write_text(bpe.to_str(pretty=True))
    recorded = json.loads(str(np.load(GOLDEN)["config"]))
    config = recorded | {"vocab_size": VOCAB, "bos_token_id": bpe.token_to_id("<s>"), "eos_token_id": bpe.token_to_id(END)}
    config |= {"max_position_embeddings": 131072, "_name_or_path": "somebody/é", "temperature": 0.6, "torch_dtype": "float32"}
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config, indent=4, ensure_ascii=False) + "\n\n")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {config["eos_token_id"]},   "top_p": 0.9, "do_sample": true}}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "bos_token": {"content": "<s>"}, "model_max_length": 9}))
    (folder / "special_tokens_map.json").write_text(f'{{"eos_token":"{END}"}}')
    for name in ("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"):
        (folder / name).write_bytes(name.encode() * 3)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    weights = np.load(GOLDEN)
    shapes = {key.removeprefix("grad "): weights[key].shape for key in weights.files if key.startswith("grad ")}
    shapes["model.embed_tokens.weight"] = (VOCAB, config["hidden_size"])
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    return folder


@pytest.fixture(scope="module")
def model(source, tmp_path_factory):
    """Its import."""
    return import_model(source, tmp_path_factory.mktemp("models") / "imported", [], nothing).folder


def files_of(folder):
    """Name -> bytes of all files but weights and the card."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".safetensors", ".py", ".md"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_model_that_was_not_trained_has_the_files_of_its_source_to_the_byte(source, model, tmp_path):
    export_model(model, tmp_path / "out", "float32", "5GB", None, nothing)
    assert files_of(tmp_path / "out") == files_of(source)


def test_only_the_number_format_changes_with_that_of_the_weights(source, model, tmp_path):
    export_model(model, tmp_path / "out", "bfloat16", "5GB", None, nothing)
    wanted = files_of(source)
    wanted["config.json"] = wanted["config.json"].replace(b'"torch_dtype": "float32"', b'"torch_dtype": "bfloat16"').rstrip() + b"\n"
    assert files_of(tmp_path / "out") == wanted


def test_so_has_one_without_a_tokenizer_json(source, tmp_path):
    """Whose tokenizer maxlm cannot read."""
    folder = tmp_path / "old"
    shutil.copytree(source, folder)
    (folder / "tokenizer.json").unlink()
    import_model(folder, tmp_path / "in", [], nothing)
    export_model(tmp_path / "in", tmp_path / "out", "float32", "5GB", None, nothing)
    assert files_of(tmp_path / "out") == files_of(folder)


LINES = [
    {"messages": [{"role": "user", "content": "a word?"}, {"role": "assistant", "content": f"word {number}", "call": number == 2}]}
    for number in range(5)
]


@pytest.fixture(scope="module")
def tuned(model, tmp_path_factory):
    """A run on conversations, with a template given by file, that begins as the imported model."""
    folder = tmp_path_factory.mktemp("run") / "tuned"
    (folder.parent / "chat.jinja").write_text(TEMPLATE)
    (folder.parent / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    spoken = {"kind": "chat", "template": str(folder.parent / "chat.jinja")}
    tokenizer = {"path": str(model / "tokenizer" / "tokenizer.json"), "end_of_document": END}
    part = {"sources": [str(folder.parent / "lines.jsonl")], "eval_fraction": 0.0, "workers": 1, "tokenizer": tokenizer}
    store = str(folder.parent / "store")
    prepare(DataConfig(store=store, seq_len=200, prepare={**part, "conversations": spoken}), progress=False)
    return made_run(model, folder, store)


def made_run(source, folder, store):
    """A run with two checkpoints, as `maxlm train` leaves it, that began as `source`."""
    settings = [f"train.start_from.path={json.dumps(str(source))}", f"data.store={store}", "data.seq_len=200", "optimizer.peak_lr=1e-3"]
    config = load(str(source / ("model.yml" if (source / "model.yml").is_file() else "config.yml")), settings, assume=True).config
    folder.mkdir()
    (folder / "config.yml").write_text(dump(config))
    copy_tokenizer(store, folder / "tokenizer", source / "tokenizer", turns=turn_ends([store]))
    copy_published(source, folder, goes_on=False)
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint, {})
    for step in (1, 2):
        checkpoints.save(step, {"params": jax.device_put(drawn_parameters(config.model)), "model_state": {}}, {})
    checkpoints.close()
    return folder


@pytest.mark.parametrize("averaged", [False, True])
def test_a_chat_model_stops_where_its_training_ended_turns(averaged, source, tuned, tmp_path):
    """Also where a turn ends with a call; all else is what the base model says, and the template goes along."""
    run = tuned
    if averaged:
        average(tuned, tmp_path / "mean", 2, (), "raw", nothing)
        run = tmp_path / "mean"
    export_model(run, tmp_path / "out", "float32", "5GB", None, nothing)
    was, now = files_of(source), files_of(tmp_path / "out")
    ids = open_tokenizer(str(run / "tokenizer")).ids
    ends = {"eos_token_id": [ids[END], *sorted((ids[TURN], ids[CALL]))]}
    assert json.loads(now["config.json"]) == json.loads(was["config.json"]) | ends
    assert json.loads(now["generation_config.json"]) == json.loads(was["generation_config.json"]) | ends
    assert now.pop("chat_template.jinja") == TEMPLATE.encode()
    assert was.pop("additional_chat_templates/tool_use.jinja") and "additional_chat_templates/tool_use.jinja" not in now, "as in training"
    changed = {name for name in {**was, **now} if was.get(name) != now.get(name)}
    assert changed == {"config.json", "generation_config.json"}
    assert import_model(tmp_path / "out", tmp_path / "back", [], nothing).parameters
    assert open_tokenizer(str(tmp_path / "back" / "tokenizer")).frame.ends == tuple(sorted((ids[TURN], ids[CALL])))


def test_the_run_itself_stops_there_too(tuned, model):
    tokenizer = open_tokenizer(str(tuned / "tokenizer"))
    store = str(tuned.parent / "store")
    while_training = started_tokenizer(store, tuned / "tokenizer", model / "tokenizer", turns=turn_ends([store]))
    for known in (tokenizer, while_training):
        stops = Stops(known, ())
        assert all(stops.finished([known.ids[token]]) for token in (TURN, CALL)) and not stops.finished([known.ids["<|head|>"]])


def test_a_run_that_starts_from_a_run_and_one_whose_source_is_gone_keep_the_files(tuned, source, tmp_path):
    again = made_run(tuned, tmp_path / "again", str(tuned.parent / "store"))
    copy_published(tmp_path / "gone", again, goes_on=True)
    export_model(again, tmp_path / "out", "float32", "5GB", None, nothing)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["max_position_embeddings"] == 131072 and said["_name_or_path"] == "somebody/é"
    copy_published(tmp_path / "gone", again, goes_on=False)  # another run in this folder
    assert not (again / "published").exists()


FORGED = "x\nalerts:\n  command: touch owned\u2028# <b>`'\"\x85more: |"


def test_no_name_from_outside_becomes_a_setting_or_a_page(source, tmp_path, monkeypatch):
    """The folder of the source names the model in model.yml and on the card; the same name is that of a run and of an average."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / FORGED).mkdir()
    for file in source.iterdir():
        if file.is_file():
            (tmp_path / FORGED / file.name).write_bytes(file.read_bytes())
    imported = import_model(tmp_path / FORGED, tmp_path / "in" / FORGED, [], nothing).folder
    export_model(imported, tmp_path / "out", "float32", "5GB", None, nothing)
    text = (imported / "model.yml").read_text(encoding="utf-8")
    assert set(YAML(typ="safe", pure=True).load(text)) == {"model"} and len(text.split("\nmodel:")[0].splitlines()) == 2
    load(str(imported / "model.yml"), assume=True)
    run = made_run(imported, tmp_path / "runs", _text_store(tmp_path, imported)).rename(tmp_path / ("r" + FORGED))
    export_model(run, tmp_path / "out of run", "float32", "5GB", None, nothing)
    average(run, tmp_path / "mean", 2, (), "raw", nothing)
    text = (tmp_path / "mean" / "model.yml").read_text(encoding="utf-8")
    assert set(YAML(typ="safe", pure=True).load(text)) == {"model"}
    for card in ("out", "out of run"):
        said = (tmp_path / card / "README.md").read_text(encoding="utf-8")
        assert "<b>" not in re.sub(r"`[^`\n]*`", "", said) and "\u2028" not in said and "\nalerts" not in said


def _text_store(folder, model):
    (folder / "a.txt").write_text("words that are read")
    tokenizer = {"path": str(model / "tokenizer" / "tokenizer.json"), "end_of_document": END}
    part = {"sources": [str(folder / "a.txt")], "eval_fraction": 0.0, "workers": 1, "tokenizer": tokenizer}
    prepare(DataConfig(store=str(folder / "store"), seq_len=200, prepare=part), progress=False)
    return str(folder / "store")


def test_only_special_tokens_that_close_a_turn_which_counts_end_texts(model, tuned, tmp_path):
    """Not those of the prompt, nor one in the middle of a turn, nor the end of the document; stores of texts have none."""
    tokenizer = {"path": str(model / "tokenizer" / "tokenizer.json"), "end_of_document": END}
    stores = [_text_store(tmp_path, model), str(tuned.parent / "store")]
    for name, answer in (("open", "{{ m.content }}"), ("middle", "<|eot|>{{ m.content }}\n"), ("spaced", "{{ m.content }}<|eom|> \n\n")):
        (tmp_path / f"{name}.jinja").write_text(
            "{% for m in messages %}<|head|>{% generation %}" + answer + "{% endgeneration %}{% endfor %}"
        )
        lines = [{"messages": [{"role": "assistant", "content": f"word {number}"}]} for number in range(3)]
        (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        part = {"sources": [str(tmp_path / "lines.jsonl")], "eval_fraction": 0.0, "workers": 1, "tokenizer": tokenizer}
        spoken = {"kind": "chat", "template": str(tmp_path / f"{name}.jinja")}
        stores.append(str(tmp_path / name))
        prepare(DataConfig(store=stores[-1], seq_len=200, prepare={**part, "conversations": spoken}), progress=False)
    ids = open_tokenizer(stores[1]).ids
    found = [turn_ends([store]) for store in stores]
    assert found == [(), tuple(sorted((ids[TURN], ids[CALL]))), (), (), (ids[CALL],)]
    assert turn_ends(stores) == found[1]
