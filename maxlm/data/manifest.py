"""store.json: what a token store holds. It is written last, so a folder that has it is whole.

STORE/store.json               this
STORE/tokenizer.json           the tokenizer that made the tokens
STORE/<split>/tokens           flat token ids, each document closed by the end-of-document id
STORE/<split>/documents        offset of each document's first token, and one more for the end (uint64)
STORE/preparing.json           progress of a prepare that has not finished
"""

import hashlib
import json
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from maxlm.config.errors import UserError
from maxlm.data import storage

MANIFEST = "store.json"
TOKENIZER = "tokenizer.json"
PROGRESS = "preparing.json"
Split = Literal["train", "eval"]
SPLITS: tuple[Split, Split] = ("train", "eval")


class SplitInfo(BaseModel):
    """Size of one split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(ge=0)  # end-of-document tokens included
    documents: int = Field(ge=0)


class StoreInfo(BaseModel):
    """What store.json says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["maxlm-tokens-1"] = "maxlm-tokens-1"
    tokenizer_hash: str
    vocab_size: int = Field(gt=0)  # every id is below it
    end_of_document_id: int = Field(ge=0)
    dtype: Literal["uint8", "uint16", "uint32"]
    fingerprint: str  # of `settings`
    settings: dict[str, Any]  # what decided the tokens: asking for others is refused
    splits: dict[Split, SplitInfo]

    def summary(self) -> str:
        """Its size in one line."""
        sizes = (f"{split} {size.tokens:,} tokens in {size.documents:,} documents" for split, size in self.splits.items())
        return f"{', '.join(sizes)}; vocabulary {self.vocab_size:,}"


def fingerprint(settings: dict[str, Any]) -> str:
    """sha256, in hex, of settings as canonical JSON."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned dtype that holds ids below `vocab_size`."""
    return np.dtype(np.min_scalar_type(vocab_size - 1))


def load(path: str) -> StoreInfo | None:
    """What store.json of the folder `path` says, or None where there is none.

    Raises:
        UserError: there is one, but it is not a token store's.
    """
    text = storage.read_bytes(path, MANIFEST)
    if text is None:
        return None
    try:
        return StoreInfo.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}/{MANIFEST} is not a maxlm token store's: {where} {first['msg']}; choose another data.store.") from error


def save(path: str, info: StoreInfo) -> None:
    """Write store.json: from here on the store is whole."""
    storage.write_bytes(path, MANIFEST, info.model_dump_json(indent=1).encode())
