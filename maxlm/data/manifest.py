"""store.json, the manifest of a token store. It is written last, so a folder that has it is complete.

STORE/store.json               the manifest
STORE/tokenizer.json           the tokenizer that made the tokens; next to it the files that came with it (COMPANIONS)
STORE/<split>/tokens           flat token ids, each document closed by the end-of-document id
STORE/<split>/documents        offset of each document's first token, and the end of the last one (uint64)
STORE/<split>/<array>/digests/<shard>  digest of every chunk of a shard of the array, see `storage.chunk_digests`
STORE/<split>/<array>.shards   digest of each of these files
STORE/metadata.json, STORE/<split>/metadata  what is known of the documents, see `metadata`
STORE/sources.json             digests of the sources: unchanged files are not read again
STORE/preparing.npz            progress of a prepare that has not finished

store.json carries checksums of itself and of the small files, and by way of the digests proves every chunk of tokens and documents.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from maxlm.base.errors import UserError
from maxlm.config.fields import Section
from maxlm.data import storage
from maxlm.data.marks import Content
from maxlm.data.storage import DamagedStoreError

FORMAT: Literal["maxlm-tokens-3"] = "maxlm-tokens-3"
MANIFEST = "store.json"
TOKENIZER = "tokenizer.json"
# Companions of a tokenizer.json that the Hugging Face library reads, the chat template among them: they are kept with it.
SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # of conversations with tools
COMPANIONS = (SETTINGS, "special_tokens_map.json", "generation_config.json", TEMPLATE, TOOL_TEMPLATE)
METADATA = "metadata.json"
SMALL_FILES = (TOKENIZER, *COMPANIONS, METADATA)  # small files of a store that belong to no split
PROGRESS = "preparing.npz"
CONVERSATIONS = "data.prepare.conversations.kind"  # in `settings` of a store of conversations, and no other
Split = Literal["train", "eval"]
SPLITS: tuple[Split, Split] = ("train", "eval")
REMAKE = "run `maxlm data prepare` again, after deleting the folder if it still fails"


class SplitInfo(Section):
    """Size of one split."""

    tokens: int = Field(ge=0)  # end-of-document tokens included
    documents: int = Field(ge=0)


class StoreInfo(Section):
    """Content of store.json."""

    format: Literal["maxlm-tokens-3"] = FORMAT
    tokenizer_hash: str
    vocab_size: int = Field(gt=0)  # every id is below it
    end_of_document_id: int = Field(ge=0)
    dtype: Literal["uint8", "uint16", "uint32"]
    fingerprint: str  # of `settings`
    settings: dict[str, Any]  # all that decide the tokens; other values are refused
    splits: dict[Split, SplitInfo]
    files: dict[str, str] = Field(default={})  # name -> sha256, in hex, of every other small file of the store

    @property
    def content(self) -> Content:
        """Kind of its documents. Conversations and preference pairs have marks in their ids, see `marks`."""
        kind = self.settings.get(CONVERSATIONS)
        return "text" if kind is None else "preferences" if kind == "preferences" else "conversations"

    def summary(self) -> str:
        """Sizes in one line."""
        sizes = (f"{split} {size.tokens:,} tokens in {size.documents:,} documents" for split, size in self.splits.items())
        return f"{', '.join(sizes)}; vocabulary {self.vocab_size:,}"


def fingerprint(value: Any) -> str:
    """sha256, in hex, of a JSON value, independent of spacing and key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned dtype that holds ids below `vocab_size`."""
    return np.dtype(np.min_scalar_type(vocab_size - 1))


def load(path: str) -> StoreInfo | None:
    """Read store.json of the folder `path`; None if it does not exist.

    Raises UserError: it is not a token store's, or differs from what was written.
    """
    text = storage.read_bytes(path, MANIFEST)
    if text is None:
        return None
    try:
        body = json.loads(text)
        checksum = body.pop("sha256", None)
        if checksum != fingerprint(body) and body.get("format") == FORMAT:
            raise DamagedStoreError(f"{path}/{MANIFEST} does not match its checksum: it is damaged or was edited; {REMAKE}.")
        return StoreInfo.model_validate({"format": "", **body})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}/{MANIFEST} is not a maxlm token store's: {where} {first['msg']}; choose another data.store.") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}/{MANIFEST} is not a maxlm token store's: {type(error).__name__}; choose another data.store.") from error


def as_bytes(body: dict[str, Any]) -> bytes:
    """store.json with its checksum."""
    return json.dumps({**body, "sha256": fingerprint(body)}, indent=1).encode()


def save(path: str, info: StoreInfo) -> StoreInfo:
    """Write store.json with the checksums of the other small files, which completes the store. Returns its content."""
    arrays = [f"{split}/{name}" for split in SPLITS for name in ("tokens", "documents")]
    files: dict[str, str] = {}
    for name in [*SMALL_FILES, *(f"{array}{part}" for array in arrays for part in ("/zarr.json", ".shards"))]:
        content = storage.read_bytes(path, name)
        if content is not None:
            files[name] = hashlib.sha256(content).hexdigest()
    info = info.model_copy(update={"files": files})
    storage.write_bytes(path, MANIFEST, as_bytes(info.model_dump(mode="json")))
    return info


def check_files(path: str, info: StoreInfo, names: Iterable[str]) -> None:
    """Raise DamagedStoreError if a file among `names` differs from its checksum, if it has one."""
    for name in names:
        if name in info.files and hashlib.sha256(storage.read_bytes(path, name) or b"").hexdigest() != info.files[name]:
            raise DamagedStoreError(
                f"{path}/{name} does not match its checksum: it is missing, damaged or was edited; put it back as it was, or {REMAKE}."
            )


def check_split(path: str, info: StoreInfo, split: Split) -> None:
    """Check the small files of a store and of one of its splits. Raises DamagedStoreError if a file differs from its checksum, lacks one,
    or was added.
    """
    check_files(path, info, [*SMALL_FILES, *(name for name in info.files if name.startswith(f"{split}/"))])
    for name in (f"{split}/{array}{part}" for array in ("tokens", "documents") for part in ("/zarr.json", ".shards")):
        if name not in info.files:
            raise DamagedStoreError(f"{path}/{MANIFEST} has no checksum of {name}: it was edited; {REMAKE}.")
    for name in SMALL_FILES:
        if name not in info.files and storage.read_bytes(path, name) is not None:
            raise DamagedStoreError(f"{path}/{name} has no checksum in {MANIFEST}: it was added later; delete it, or {REMAKE}.")
