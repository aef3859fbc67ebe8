"""The tokenizer beside what it made: in a token store, and kept with a run so that its model can be used without the store."""

from pathlib import Path

from maxlm.config.errors import UserError
from maxlm.data import manifest, storage
from maxlm.data.tokenizer import Tokenizer, read_tokenizer_json


def open_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer of the token store `folder`, or of a folder that `keep_tokenizer` wrote. Raises UserError if it is not there."""
    info = manifest.load(folder)
    if info is None:
        raise UserError(f"{folder} holds no {manifest.MANIFEST}: it is neither a token store nor a run's tokenizer folder.")
    manifest.check_files(folder, info, [manifest.TOKENIZER])
    path = f"{folder}/{manifest.TOKENIZER}"
    return Tokenizer(read_tokenizer_json(path), info.settings["data.prepare.tokenizer.end_of_document"], path)


def keep_tokenizer(store: str, folder: Path) -> None:
    """Copy the tokenizer of `store`, and what the store says of itself, into `folder`."""
    for name in (manifest.TOKENIZER, manifest.MANIFEST):
        content = storage.read_bytes(store, name)
        assert content is not None, "a store that opened has both"
        storage.write_bytes(str(folder), name, content)
