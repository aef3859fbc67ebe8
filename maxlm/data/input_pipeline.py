"""Batches: number n holds the same samples on any mesh, any number of hosts, and after any restart.

The token stream of a store is cut in windows of `seq_len` inputs; a window's targets reach one token further, into the
next window's first input. So every token is an input once an epoch, but for the very last, which is a target only. Long documents
are split over windows, short ones share one; the last window is padded. Nothing is dropped. Conversations are packed whole instead
(`samples.PackedRows`), and a window below is a row of them.
"""

import copy
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from maxlm.config.errors import ConfigError, UserError
from maxlm.config.schema import DataConfig
from maxlm.data import manifest, marks
from maxlm.data.batch import Batch, batch_of_windows
from maxlm.data.manifest import Split
from maxlm.data.marks import Content
from maxlm.data.order import SampleOrder, batch_number
from maxlm.data.prefetch import Prefetcher
from maxlm.data.samples import PackedRows, Samples, Windows
from maxlm.data.storage import DamagedStoreError
from maxlm.data.token_store import TokenStore, read_context

if TYPE_CHECKING:
    import jax

# (windows [B, T], tokens in each [B], number of each in the stream of samples [B], end of document) -> a NamedTuple of arrays, rows first
MakeBatch = Callable[[np.ndarray, np.ndarray, np.ndarray, int], Any]

# (batch, numbers of the documents in each row) -> the batch with what is known of them
Annotate = Callable[[Any, list[np.ndarray]], Any]

PADDING = -1  # the sample id of a row that only fills up the last batch of an evaluation


class Pipeline:
    """Batch number -> batch. Train batches never end; eval batches are the held-out windows once, in order."""

    def __init__(
        self,
        config: DataConfig,
        *,
        global_batch: int,
        seed: int,
        vocab_size: int,
        split: Split = "train",
        make_batch: MakeBatch | None = None,
        content: Content = "text",
        field: str | None = None,
    ) -> None:
        """Open the stores of `config` and check that they match each other and the model.

        `seed`: of the order of train batches; `make_batch` and `content`: of the objective, None for next-token prediction; `field`: the
        setting that names the store, for errors, None for data.store or data.mixture. Stores of a mixture without held-out documents are
        left out of "eval". Raises UserError: a store is missing, damaged, empty, of other content,
        or of another tokenizer than the others; or the model's vocabulary is too small.
        """
        opened = _opened(config, split, vocab_size, content, field)
        self.global_batch = global_batch
        self._make_batch = make_batch or (
            lambda windows, lengths, _, end: batch_of_windows(windows, lengths, end, mask_documents=config.mask_documents)
        )
        self._config, self._stores = config, list(opened)
        kind = Windows if content == "text" else PackedRows
        self._samples_of: list[Samples] = [kind(store, config.seq_len) for store in opened]
        self._first_document = np.concatenate([[0], np.cumsum([store.size.documents for store in opened])])
        self.annotate: Annotate | None = None  # adds to every batch what is known of its documents beside the stores
        windows = [samples.count for samples in self._samples_of]
        self._first = np.concatenate([[0], np.cumsum(windows)])  # window id of each store's first window
        self._order = SampleOrder(windows, list(opened.values()), seed=seed, shuffle=config.shuffle) if split == "train" else None
        self.left_out: tuple[int, ...] = ()  # numbers of batches that no step trains on, sorted
        self._bad_chunks: list[set[int]] = [set() for _ in opened]  # seen so far
        self._problems: list[dict[str, Any]] = []
        self._lock = threading.Lock()  # batches are made in a background thread

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer of the stores, in hex."""
        return self._stores[0].info.tokenizer_hash

    @property
    def fingerprint(self) -> str:
        """Digest of the manifests of its stores, in hex: equal on hosts with the same tokens."""
        return manifest.fingerprint({"stores": [store.info.model_dump(mode="json") for store in self._stores]})

    @property
    def n_windows(self) -> int:
        """Windows of all stores: samples of an epoch, where there is one store."""
        return int(self._first[-1])

    @property
    def n_documents(self) -> int:
        """Documents of all stores, which `annotate` numbers one store after another."""
        return int(self._first_document[-1])

    def in_order(self) -> "Pipeline":
        """The same windows once, in order, in `n_batches` batches, without annotation."""
        ordered = copy.copy(self)
        ordered._order, ordered.annotate, ordered.left_out = None, None, ()
        return ordered

    def documents(self, step: int) -> list[np.ndarray]:
        """Numbers of the documents in every row of batch `step`; for packed rows."""
        return self._documents(self._ids(self._samples(step)))

    def token_ranges(self, ids: np.ndarray) -> dict[str, list[tuple[int, int]]]:
        """Store -> the parts [start, stop) of its tokens that windows hold."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number in ids:
            owner = int(np.searchsorted(self._first, number, side="right")) - 1
            parts = self._samples_of[owner].ranges(int(number - self._first[owner]))
            found.setdefault(self._stores[owner].path, []).extend(parts)
        return found

    @property
    def n_batches(self) -> int:
        """Batches that hold every window once; the last may have padding."""
        return -(-self.n_windows // self.global_batch)

    def take_problems(self) -> list[dict[str, Any]]:
        """Samples omitted from batches since the last call, among those this process reads, as data of alarms: `cause reason store split
        chunks samples tokens`.
        """
        with self._lock:
            problems, self._problems = self._problems, []
        return problems

    def sample_ids(self, step: int) -> np.ndarray:
        """Ids of the windows in the batch of `step`, [global_batch] int64: a pure function of (seed, `step`, `left_out`).

        An id is unique over the stores of a mixture. -1 is a row of padding, which only the last eval batch has.
        """
        return self._ids(self._samples(step))

    def host_batch(self, step: int, rows: slice | np.ndarray | None = None) -> Batch:
        """Batch `step`, or the given rows of it, as numpy arrays [rows, seq_len]."""
        return self._batch(self._samples(step)[slice(None) if rows is None else rows])

    def device_batch(self, step: int, shardings: Any) -> Any:
        """Batch `step` as global jax arrays with `shardings`: one NamedSharding for every array, or a batch of them.

        Every process reads the rows of its own devices, each row once.
        """
        import jax

        held = np.zeros(self.global_batch, np.bool_)
        tokens = jax.tree.leaves(shardings)[0]  # the rows of all arrays are split like those of the first
        for index in tokens.addressable_devices_indices_map((self.global_batch, self._config.seq_len)).values():
            assert index is not None, "every device of a NamedSharding has a part or a copy"
            held[index[0]] = True
        host = self.host_batch(step, np.flatnonzero(held))
        row = np.cumsum(held) - 1  # of the global batch -> of `host`

        def to_devices(sharding: "jax.sharding.NamedSharding", array: np.ndarray) -> "jax.Array":
            def own(index: Any) -> np.ndarray:
                return array[row[index[0]]][:, *index[1:]]

            return jax.make_array_from_callback((self.global_batch, *array.shape[1:]), sharding, own)

        return jax.tree.map(to_devices, jax.tree.broadcast(shardings, host), host)

    def batches(self, start_step: int, shardings: Any, stop_step: int) -> Prefetcher:
        """Batches of steps [start_step, stop_step), with `data.prefetch` batches prefetched in the background.

        Errors in the background are raised here. Call `close` on it to stop early.
        """
        return Prefetcher(lambda step: self.device_batch(step, shardings), range(start_step, stop_step), self._config.prefetch)

    def _samples(self, step: int) -> np.ndarray:
        return batch_number(step, self.left_out) * self.global_batch + np.arange(self.global_batch)

    def _ids(self, samples: np.ndarray) -> np.ndarray:
        if self._order is not None:
            return self._order.ids(samples)
        return np.where(samples < self.n_windows, samples, PADDING)

    def _batch(self, samples: np.ndarray) -> Any:
        """Read the windows of `samples`, each from its store."""
        ids, S = self._ids(samples), self._config.seq_len
        window_BT, length_B = np.zeros((len(ids), S + 1), np.int32), np.zeros(len(ids), np.int64)
        owner_B = np.searchsorted(self._first, ids, side="right") - 1
        for number, store in enumerate(self._stores):
            rows = np.flatnonzero(owner_B == number)
            if len(rows):
                tokens, length_B[rows] = self._windows(number, ids[rows])
                window_BT[rows] = tokens
                largest, limit = int((tokens & marks.IDS if store.info.content != "text" else tokens).max()), store.info.vocab_size
                if largest >= limit:
                    raise UserError(f"{store.path} holds the id {largest}, and its manifest says all are below {limit}; prepare it again.")
        batch = self._make_batch(window_BT, length_B, samples, self._stores[0].info.end_of_document_id)
        return batch if self.annotate is None else self.annotate(batch, self._documents(ids))

    def _documents(self, ids: np.ndarray) -> list[np.ndarray]:
        owners, found = np.searchsorted(self._first, ids, side="right") - 1, []
        for number, owner in zip(ids, owners, strict=True):
            rows = self._samples_of[owner]
            assert isinstance(rows, PackedRows), "only whole documents can be told apart"
            none = np.zeros(0, np.int64)
            found.append(none if number == PADDING else self._first_document[owner] + rows.documents(int(number - self._first[owner])))
        return found

    def _windows(self, number: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Windows `ids` of store `number`: tokens [B, T] and lengths [B]. With data.skip_bad_chunks one that touches a damaged chunk has
        length 0, so that all its weights are zero. Whether it does depends on the store alone, not on the mesh or the other rows.
        """
        store, samples, own = self._stores[number], self._samples_of[number], ids - self._first[number]
        try:
            return samples.read(own)
        except DamagedStoreError:
            if self._config.skip_bad_chunks is None:
                raise
        windows, lengths = np.zeros((len(ids), self._config.seq_len + 1), store.info.dtype), np.zeros(len(ids), np.int64)
        omitted: list[int] = []
        chunks: set[int] = set()
        for row in range(len(ids)):
            try:
                windows[row : row + 1], lengths[row : row + 1] = samples.read(own[row : row + 1])
            except DamagedStoreError as error:
                chunks |= self._damaged_chunks(number, int(own[row]), error)
                omitted.append(row)
        self._report(number, ids[omitted], sorted(chunks))
        return windows, lengths

    def _damaged_chunks(self, number: int, sample: int, error: DamagedStoreError) -> set[int]:
        """The damaged chunks of a window. Raises UserError once a store has too many."""
        store, known = self._stores[number], self._bad_chunks[number]
        found = {chunk for part in self._samples_of[number].ranges(sample) for chunk in store.bad_chunks(*part)}
        known |= found
        assert self._config.skip_bad_chunks is not None, "without it the first damaged chunk stops training"
        most = self._config.skip_bad_chunks.at_most
        if len(known) > most:
            raise UserError(f"{store.path}: more than data.skip_bad_chunks.at_most = {most} chunks are damaged: {error}")
        return found

    def _report(self, number: int, ids: np.ndarray, chunks: list[int]) -> None:
        store = self._stores[number]
        tokens = sum(self._samples_of[number].inputs(int(window)) for window in ids - self._first[number])
        named = ", ".join(map(str, chunks[:8])) + (f" and {len(chunks) - 8} more" if len(chunks) > 8 else "")
        reason = f"{store.path}: damaged {store.split} chunks {named}: {len(ids)} samples of {tokens:,} tokens were omitted"
        data = {"cause": "bad_chunk", "reason": f"{reason} (data.skip_bad_chunks)", "store": store.path, "split": store.split}
        with self._lock:
            self._problems.append({**data, "chunks": chunks, "samples": ids.tolist(), "tokens": tokens})


def _opened(config: DataConfig, split: Split, vocab_size: int, content: Content, field: str | None) -> dict[TokenStore, float]:
    """The stores that have documents of this split, with their weights. Raises UserError if there is none, or not enough to train."""
    weights = {config.store: 1.0} if config.store else {entry.store: entry.weight for entry in config.mixture}
    assert weights, "config/rules.py requires a store or a mixture"
    context = read_context(config.read_threads)
    stores = {TokenStore(path, split, context=context): weight for path, weight in weights.items()}
    for store in stores:
        _check(store, next(iter(stores)), vocab_size, content, field or ("data.store" if config.store else "data.mixture"))
    used = {store: weight for store, weight in stores.items() if store.n_tokens > 1}
    if not used or (split == "train" and len(used) < len(stores)):
        empty = next(store for store in stores if store.n_tokens <= 1)
        off = f"remove {field}" if field else "set train.eval_batches to 0"
        fix = f"raise data.prepare.eval_fraction, or {off}" if split == "eval" else "give it more text"
        raise UserError(f"{empty.path} has no {split} documents to make a batch of; {fix}.")
    return used


def _check(store: TokenStore, first: TokenStore, vocab_size: int, content: Content, field: str) -> None:
    """Refuse a store, named by the setting `field`, that does not match the objective, the model or the first store."""
    if store.info.content != content:
        kind = {"text": "next_token (or no objective)", "conversations": "sft", "preferences": "dpo"}[store.info.content]
        rule = f"holds {store.info.content}, and the objective reads {content}"
        raise ConfigError(field, store.path, rule, f"use objective.kind {kind}, or another store (data.prepare.conversations)")
    if store.info.tokenizer_hash != first.info.tokenizer_hash:
        rule = f"has another tokenizer than {first.path} ({store.info.tokenizer_hash[:12]}, not {first.info.tokenizer_hash[:12]})"
        fix = "prepare both with the same data.prepare.tokenizer.path"
        raise ConfigError("data.mixture", store.path, rule, fix)
    if store.info.end_of_document_id != first.info.end_of_document_id:
        rule = f"ends documents with id {store.info.end_of_document_id}, but {first.path} with {first.info.end_of_document_id}"
        raise ConfigError("data.mixture", store.path, rule, "prepare both with the same data.prepare.tokenizer.end_of_document")
    if store.info.vocab_size > vocab_size:
        rule = f"is below {store.info.vocab_size}, the vocabulary of {store.path}"
        raise ConfigError("model.vocab_size", vocab_size, rule, f"use at least {store.info.vocab_size}")
