"""`maxlm.Data`: the batches of a config's token stores; `maxlm.pack_texts`: windows of tokens from any texts; tokenizers."""

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from maxlm.api.errors import plain_errors
from maxlm.api.process import start_process
from maxlm.base.console import Console
from maxlm.base.errors import UserError
from maxlm.base.paths import user_path
from maxlm.config.schema import Config
from maxlm.data import manifest
from maxlm.data.given import PackedTexts, to_batch
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.tokenizer import Tokenizer, load_tokenizer as read_tokenizer, open_tokenizer
from maxlm.objectives import build_objective
from maxlm.run.open_data import open_data_on_all_hosts
from maxlm.telemetry.phases import Phases

SPLITS = ("train", "eval")


class Data:
    """Batches of token stores. Batch number n holds the same samples on any mesh, any number of hosts and after any restart.

    Iterating over it gives its batches in order, as numpy arrays: of "train" without end, of "eval" each once.
    """

    def __init__(self, config: Config, split: str, pipeline: Pipeline) -> None:
        self.config, self.split, self._pipeline = config, split, pipeline

    @classmethod
    @plain_errors
    def open(cls, config: Config, split: str = "train", *, quiet: bool = True) -> "Data":
        """Open the stores of `config`, and prepare them first if `data.prepare` says how and they are not there. `split`: "train", or
        "eval" for the held-out documents.

        Raises UserError: a store is missing, damaged or does not match the model.
        """
        if split not in SPLITS:
            raise UserError(f"split = {split} is neither of {' and '.join(SPLITS)}.")
        start_process()
        found = open_data_on_all_hosts(config, Phases(Console(quiet=quiet, force_jupyter=False, force_terminal=sys.stdout.isatty())))
        pipeline = found.train if split == "train" else found.held_out
        if pipeline is None:
            raise UserError("there are no held-out batches: set train.eval_batches above 0.")
        return cls(config, split, pipeline)

    @plain_errors
    def batch(self, number: int) -> Any:
        """Batch `number` as a `maxlm.Batch` of numpy arrays; of an objective of its own, as that has it."""
        if number < 0 or (self.split == "eval" and number >= len(self)):
            raise UserError(f"there is no batch {number:,} of {self.split}.")
        return self._pipeline.host_batch(number)

    def batches(self, start: int = 0) -> Iterator[Any]:
        """Batches from number `start` on."""
        numbers: Iterable[int] = itertools.count(start) if self.split == "train" else range(start, len(self))
        return map(self.batch, numbers)

    def __iter__(self) -> Iterator[Any]:
        return self.batches()

    def __len__(self) -> int:
        """Batches that hold every sample once."""
        return self._pipeline.n_batches

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the stores."""
        return open_tokenizer(self.config.data.stores[0])

    def __repr__(self) -> str:
        return f"Data({', '.join(self.config.data.stores)}, {self.split}: {len(self):,} batches)"


@plain_errors
def load_tokenizer(place: str | os.PathLike[str], end_of_document: str | None = None) -> Tokenizer:
    """The tokenizer of a run, an imported model or a token store, or a tokenizer.json with its `end_of_document` token.

    It has `encode(text)`, `decode(ids)`, `vocab_size` and `end_of_document_id`. Raises UserError if there is none.
    """
    path = user_path(os.fspath(place))
    for folder in (path, path / "tokenizer"):
        if (folder / manifest.MANIFEST).is_file():
            return open_tokenizer(str(folder))
    file = path / manifest.TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path} holds no tokenizer: give a run, a token store, or a tokenizer.json.")
    if end_of_document is None:
        raise UserError(f'{file}: say which of its special tokens ends a document, as in end_of_document="<|endoftext|>".')
    return read_tokenizer(str(file), end_of_document)


@plain_errors
def pack_texts(texts: Iterable[str | Mapping[str, Any]], tokenizer: Tokenizer, config: Config, *, field: str = "text") -> PackedTexts:
    """Batches from any iterable of texts, for `fit` or a loop of one's own.

    Each text is closed by the end-of-document token, and windows follow each other without a gap. `field`: of the text, where items are
    mappings. The batches are resumed by state, not by number: a list is read from its beginning again and passed over up to its place; an
    iterable with `state_dict` and `load_state_dict` goes on from its state.
    """
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, above model.vocab_size = {config.model.vocab_size:,}: raise that."
        )
    shape = config.train.global_batch, config.data.seq_len
    make_batch = windows_reader(config, tokenizer.end_of_document_id)
    if make_batch is None:
        raise UserError("the objective is trained on more than texts: give batches, or a store of conversations.")
    return PackedTexts(texts, tokenizer, shape, make_batch, field)


def windows_reader(config: Config, end_of_document: int = -1) -> Callable[[np.ndarray], Any] | None:
    """Function from windows of ids [B, S + 1] to a batch of the objective; None if ids alone are not enough. `end_of_document`: its id; -1:
    each row is one document.
    """
    if config.objective_facts.content != "text":
        return None
    objective = build_objective(config)

    def make_batch(window_BT: np.ndarray) -> Any:
        rows, width = window_BT.shape
        return objective.make_batch(window_BT, np.full(rows, width, np.int64), np.arange(rows), end_of_document)

    return make_batch


def batch_reader(config: Config) -> Callable[[Any], Any]:
    """Function from an item of data that a program gives to a checked batch of host arrays."""
    like, windows = build_objective(config).batch_spec(), windows_reader(config)
    return lambda item: to_batch(item, like, config.data.seq_len, config.model.vocab_size, windows)
