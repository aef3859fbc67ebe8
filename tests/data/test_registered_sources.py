"""Sources and formats of documents that another package registers, in `maxlm data prepare`."""

import pytest
from extensions.kinds import READER, SOURCE
from typer.testing import CliRunner

import maxlm
from maxlm.base.errors import UserError
from maxlm.cli import app
from maxlm.config import choices, load, table
from maxlm.config.fields import Section
from maxlm.config.part import Part
from maxlm.data.token_store import TokenStore


@pytest.fixture
def prepared(monkeypatch, tmp_path):
    """Output of `data prepare` with the source and the reader, and the store."""
    monkeypatch.setattr(choices, "registered", [])
    table.clear()
    maxlm.register(READER)
    maxlm.register(SOURCE)

    def prepare(entry, files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        settings = [f"data.store={tmp_path}/store", f"data.prepare.sources=['{entry}']", "data.prepare.eval_fraction=0"]
        arguments = ["data", "prepare", "runs/quickstart", *settings, "data.prepare.tokenizer.vocab_size=257", "data.prepare.workers=1"]
        return CliRunner().invoke(app, arguments), f"{tmp_path}/store"

    yield prepare
    monkeypatch.undo()
    table.clear()


def test_a_store_is_made_of_a_registered_source_in_a_registered_format(prepared, tmp_path):
    result, store = prepared(f"two-files:{tmp_path}", {"a.blocks": "one\n---\ntwo", "b.blocks": "three", "c.blocks": "four"})
    assert result.exit_code == 0, result.exception
    assert TokenStore(store, "train").size.documents == 3


def test_a_folder_has_the_files_of_a_registered_format(prepared, tmp_path):
    result, store = prepared(str(tmp_path), {"a.blocks": "one", "c.blocks": "four"})
    assert result.exit_code == 0, result.exception
    assert TokenStore(store, "train").size.documents == 2


@pytest.mark.parametrize(
    ("entry", "content", "said"),
    [
        ("two-files:{}", "one\n---\nbroken", "reader.blocks: place extensions.kinds:read_blocks failed: KeyError: 'oops'"),
        ("two-files:{}/none", "one", "has no file of documents; name another source"),
        ("two-file:{}", "one", "must be a path of this machine's file system"),
        ("python-stdlib:{}", "one", "python-stdlib takes nothing after a colon"),
    ],
)
def test_what_is_wrong_is_one_line(prepared, tmp_path, entry, content, said):
    result, _ = prepared(entry.format(tmp_path), {"a.blocks": content})
    assert isinstance(result.exception, UserError) and said in str(result.exception), result.exception
    assert "\n" not in str(result.exception)


def test_a_part_without_settings_has_no_section(prepared):
    assert load("runs/quickstart").config
    with pytest.raises(ValueError, match="a reader of documents has no section in a config; leave it out"):
        maxlm.register(Part(kind="reader", name="mine", place="x:y", section=Section))
