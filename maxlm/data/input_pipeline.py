"""Batches: number n holds the same samples on any mesh, any number of hosts, and after any restart.

The token stream of a source, a store or some of its documents, is cut in windows of `seq_len` inputs; a window's targets reach one token
further, into the next window's first input. So every token is an input once an epoch, but for the very last, which is a target only. Long
documents are split over windows, short ones share one; the last window is padded. Nothing is dropped. Conversations are packed whole
instead (`samples.PackedRows`), and a window below is a row of them.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maxlm.base.errors import ConfigError, UserError
from maxlm.config.batch_sizes import BatchSizes
from maxlm.config.choices import parts
from maxlm.config.schema import DataConfig
from maxlm.data import manifest, marks
from maxlm.data.batch import Batch, batch_of_windows
from maxlm.data.manifest import Split
from maxlm.data.marks import Content
from maxlm.data.mixture import POSITION, Plan, Source, from_json, make_plan, open_sources, repeating
from maxlm.data.order import PADDING, SampleOrder, batch_number
from maxlm.data.prefetch import Batches, Spans
from maxlm.data.samples import PackedRows, Samples, Windows
from maxlm.data.storage import DamagedStoreError
from maxlm.data.token_store import ReadContext, TokenStore

if TYPE_CHECKING:
    import jax

NAMED = 3  # sources, and documents of each, in the description of a batch
STORES = "stores"  # entry of a checkpoint's data position: each store, as the config names it -> digest of its tokens

# (windows [B, T], tokens in each [B], number of each in the stream of samples [B], end of document) -> a NamedTuple of arrays, rows first
MakeBatch = Callable[[np.ndarray, np.ndarray, np.ndarray, int], Any]

# (batch, numbers of the documents in each row) -> the batch with what is known of them
Annotate = Callable[[Any, list[np.ndarray]], Any]


class Pipeline:
    """Batch number -> batch. Train batches never end; eval batches are the held-out windows once, in order."""

    def __init__(
        self,
        config: DataConfig,
        *,
        global_batch: int,
        batch_sizes: BatchSizes | None = None,
        seed: int,
        vocab_size: int,
        split: Split = "train",
        make_batch: MakeBatch | None = None,
        content: Content = "text",
        field: str | None = None,
    ) -> None:
        """Open the stores of `config` and check that they match each other and the model.

        `batch_sizes`: of all batches, None: each has `global_batch` sequences, the largest size; `seed`: of the order of train batches;
        `make_batch` and `content`: of the objective, None for next-token prediction; `field`: the setting that names the store, for errors,
        None for data.store or data.mixture. Sources of a mixture without held-out documents are left out of "eval". Raises UserError: a
        store is missing, damaged, empty, of other content, or of another tokenizer than the others; or the model's vocabulary is too small.
        """
        context = ReadContext(config.read_threads)
        found = open_sources(config, split, context)
        _check_all(config, found, split, vocab_size, content, field)
        self.global_batch, self.batch_sizes = global_batch, batch_sizes or BatchSizes(global_batch)
        self._make_batch = make_batch or (
            lambda windows, lengths, _, end: batch_of_windows(windows, lengths, end, mask_documents=config.mask_documents)
        )
        kind = Windows if content == "text" else PackedRows
        samples: list[Samples] = [kind(source.store, config.seq_len, source.documents) for source in found]
        self._config, self._seed = config, seed
        self.sources = [source for source, own in zip(found, samples, strict=True) if own.count]
        self._samples_of = [own for own in samples if own.count]
        self._stores = [source.store for source in self.sources]
        self._contents = {source.store.path: source.content for source in self.sources}
        documents = [
            store.size.documents if source.documents is None else len(source.documents)
            for source, store in zip(self.sources, self._stores, strict=True)
        ]
        self._first_document = np.concatenate([[0], np.cumsum(documents)])
        self.annotate: Annotate | None = None  # adds figures of its documents to every batch
        windows = [own.count for own in self._samples_of]
        self._first = np.concatenate([[0], np.cumsum(windows)])  # window id of each source's first window
        self.plan: Plan | None = None  # of batches that never end
        self._order: SampleOrder | None = None
        self.left_out: tuple[int, ...] = ()  # numbers of batches that no step trains on, sorted
        if split == "train":
            self.go_on({})
        self._bad_chunks: dict[str, set[int]] = {store.path: set() for store in self._stores}  # seen so far
        self._problems: list[dict[str, Any]] = []
        self._lock = threading.Lock()  # batches are made in a background thread

    def go_on(self, position: Mapping[str, Any], left_out: Sequence[int] = ()) -> list[str]:
        """Go on from the data position of a checkpoint, {}: from the beginning, with what the config asks for from there on.

        `left_out`: numbers of batches that no step trains on, sorted. Returns a line about each source with documents that may be repeated.
        Raises ConfigError: a source of the mixture is not what it was, or a store was rewritten where it lies.
        """
        config, self.left_out = self._config, tuple(left_out)
        for place, content in position.get(STORES, {}).items():
            if self._contents.get(place, content) != content:
                rule = f"holds other tokens than it did when this run was at step {position['next_step']:,}: it was rewritten since"
                raise ConfigError("data.store", place, rule, "put the store back, or write the new one to a folder of its own")
        past = from_json(position[POSITION]) if POSITION in position else None
        sample = self.batch_sizes.before(batch_number(position.get("next_step", 0), position.get("left_out", ())))
        self.plan = make_plan(config.mixture, self.sources, self.sizes, seq_len=config.seq_len, past=past, sample=sample)
        numbers = {source.identity: number for number, source in enumerate(self.plan.sources)}
        windows = {numbers[source.identity]: own.count for source, own in zip(self.sources, self._samples_of, strict=True)}
        self._order = SampleOrder(windows, self.plan.stages, seed=self._seed, shuffle=config.shuffle)
        return [] if past is None else repeating(past, self.plan, self.sources, sample)

    def position(self, step: int) -> dict[str, Any]:
        """Entries of the data position of a checkpoint that `step` batches came before."""
        assert self.plan is not None, "held-out data have no position"
        return {POSITION: self.plan.to_json(self.first_sample(step)), STORES: self._contents}

    def check_length(self, steps: int) -> None:
        """Raise UserError if the sources have had their epochs before the end of so many steps."""
        assert self.plan is not None and self._order is not None, "held-out data have an end"
        needed, end = self.end_sample(steps - 1), self._order.end
        if end is not None and end < needed:
            S = self._config.seq_len
            rule = f"ends at token {end * S:,} of {needed * S:,}, when all sources of its stage have had their epochs"
            raise ConfigError(
                "data.mixture", self.plan.names(self.plan.stages[-2].shares), rule, "raise `epochs`, or train for fewer steps"
            )

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Windows and tokens of every source, by its name."""
        return {source.name: (own.count, own.tokens) for source, own in zip(self.sources, self._samples_of, strict=True)}

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer of the stores, in hex."""
        return self._stores[0].info.tokenizer_hash

    @property
    def fingerprint(self) -> str:
        """Digest of the manifests of its stores, in hex: equal on hosts with the same tokens."""
        stated: dict[str, Any] = {"stores": [store.info.model_dump(mode="json") for store in self._stores]}
        if any(source.documents is not None for source in self.sources):
            stated["sources"] = [source.identity for source in self.sources]
        return manifest.fingerprint(stated)

    def first_sample(self, step: int) -> int:
        """Number of the first sample of batch `step`."""
        return self.batch_sizes.before(batch_number(step, self.left_out))

    def end_sample(self, step: int) -> int:
        """Number of the sample after the last of batch `step`."""
        return self.batch_sizes.before(batch_number(step, self.left_out) + 1)

    def stage_begins(self, step: int) -> bool:
        """True if a later stage of the mixture begins within batch `step`: it is of other data than those before."""
        first, end = self.first_sample(step), self.end_sample(step)
        return self.plan is not None and any(max(first, 1) <= stage.first < end for stage in self.plan.stages)

    def described(self, step: int) -> str:
        """Sources and first documents of batch `step`, for an alarm."""
        ids = self.sample_ids(step)
        found: dict[str, list[int]] = {}
        for window in ids[ids != PADDING].tolist():
            found.setdefault(self.source_of(window)[0].name, []).append(window)
        parts = []
        for name, windows in list(found.items())[:NAMED]:
            store = self.source_of(windows[0])[0].store
            try:
                documents = ", ".join(f"{store.document_at(self.token_parts(window)[0][0]):,}" for window in windows[:NAMED])
                shown = f"{store.path}, documents {documents} ..."
            except UserError as error:
                shown = str(error)
            parts.append(f"{len(windows)} rows of {name} ({shown})")
        more = f" and {len(found) - NAMED} more sources" if len(found) > NAMED else ""
        return f"batch {batch_number(step, self.left_out)} holds {', '.join(parts)}{more}"

    @property
    def seq_len(self) -> int:
        """Inputs of a row."""
        return self._config.seq_len

    def documents_of(self, name: str) -> int | None:
        """Number of documents of a source; None if there is none of this name."""
        counts = dict(zip((source.name for source in self.sources), np.diff(self._first_document).tolist(), strict=True))
        return counts.get(name)

    def source_of(self, window: int) -> tuple[Source, int]:
        """Source of a window id, and its number there."""
        owner = int(np.searchsorted(self._first, window, side="right")) - 1
        return self.sources[owner], int(window - self._first[owner])

    def token_parts(self, window: int) -> Sequence[tuple[int, int]]:
        """The parts [start, stop) of its source's store that a window holds, its last target included."""
        source, number = self.source_of(window)
        return self._samples_of[self.sources.index(source)].ranges(number)

    @property
    def n_windows(self) -> int:
        """Windows of all sources: samples of an epoch, where there is one source."""
        return int(self._first[-1])

    @property
    def n_documents(self) -> int:
        """Documents of all sources, which `annotate` numbers one source after another."""
        return int(self._first_document[-1])

    def in_order(self) -> "Pipeline":
        """The same windows once, in order, in `n_batches` batches, without annotation."""
        ordered = copy.copy(self)
        ordered.plan, ordered._order, ordered.annotate, ordered.left_out = None, None, None, ()
        ordered.batch_sizes = BatchSizes(self.global_batch)
        return ordered

    def documents(self, step: int) -> list[np.ndarray]:
        """Numbers of the documents in every row of batch `step`; for packed rows."""
        return self._documents(self._ids(self._samples(step)))

    def token_ranges(self, ids: np.ndarray) -> dict[str, list[tuple[int, int]]]:
        """Store -> the parts [start, stop) of its tokens that windows hold."""
        found: dict[str, list[tuple[int, int]]] = {}
        for window in ids[ids != PADDING].tolist():
            found.setdefault(self.source_of(window)[0].store.path, []).extend(self.token_parts(window))
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
        """Ids of the windows in the batch of `step`, int64 for each of its rows: a pure function of (seed, `step`, `left_out`, `plan`).

        An id is unique over the sources of a mixture. -1 is a row of padding, which only the last eval batch has, or one of a source that
        the config names no more.
        """
        return self._ids(self._samples(step))

    def host_batch(self, step: int, rows: slice | np.ndarray | None = None, spans: Spans | None = None) -> Batch:
        """Batch `step`, or the given rows of it, as numpy arrays [rows, seq_len]. `spans` is told where the time goes."""
        spans = spans or Spans()
        with spans.measure("pack"):
            samples = self._samples(step)[slice(None) if rows is None else rows]
            ids = self._ids(samples)
        with spans.measure("read"):
            read = self._read(ids)
        with spans.measure("pack"):
            batch = self._make_batch(*read, samples, self._stores[0].info.end_of_document_id)
            return batch if self.annotate is None else self.annotate(batch, self._documents(ids))

    def device_batch(self, step: int, shardings: Any, spans: Spans | None = None) -> Any:
        """Batch `step` as global jax arrays with `shardings`: one NamedSharding for every array, or a batch of them.

        Every process reads the rows of its own devices, each row once. `spans` is told where the time goes.
        """
        import jax

        spans = spans or Spans()
        rows = self.end_sample(step) - self.first_sample(step)
        held = np.zeros(rows, np.bool_)
        tokens = jax.tree.leaves(shardings)[0]  # all arrays are split into the same rows
        for index in tokens.addressable_devices_indices_map((rows, self._config.seq_len)).values():
            assert index is not None, "every device of a NamedSharding has a part or a copy"
            held[index[0]] = True
        host = self.host_batch(step, np.flatnonzero(held), spans)
        row = np.cumsum(held) - 1  # of the global batch -> of `host`

        def to_devices(sharding: "jax.sharding.NamedSharding", array: np.ndarray) -> "jax.Array":
            def own(index: Any) -> np.ndarray:
                return array[row[index[0]]][:, *index[1:]]

            return jax.make_array_from_callback((rows, *array.shape[1:]), sharding, own)

        with spans.measure("transfer"):
            return jax.tree.map(to_devices, jax.tree.broadcast(shardings, host), host)

    def batches(self, start_step: int, shardings: Any, stop_step: int) -> Batches:
        """Batches of steps [start_step, stop_step), with `data.prefetch` batches prefetched in the background.

        Errors in the background are raised here. Call `close` on it to stop early.
        """
        return Batches(lambda step, spans: self.device_batch(step, shardings, spans), range(start_step, stop_step), self._config.prefetch)

    def _samples(self, step: int) -> np.ndarray:
        return np.arange(self.first_sample(step), self.end_sample(step))

    def _ids(self, samples: np.ndarray) -> np.ndarray:
        if self._order is not None:
            return self._order.ids(samples)
        return np.where(samples < self.n_windows, samples, PADDING)

    def _read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read windows, each from its store: tokens [B, T] and lengths [B]."""
        S = self._config.seq_len
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
        return window_BT, length_B

    def _documents(self, ids: np.ndarray) -> list[np.ndarray]:
        found = []
        for number, owner in zip(ids, np.searchsorted(self._first, ids, side="right") - 1, strict=True):
            rows = self._samples_of[owner]
            assert isinstance(rows, PackedRows), "only whole documents can be told apart"
            own = np.zeros(0, np.int64) if number == PADDING else rows.documents(int(number - self._first[owner]))
            found.append(self._first_document[owner] + own)
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
        store = self._stores[number]
        known = self._bad_chunks[store.path]
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


def _check_all(config: DataConfig, sources: Sequence[Source], split: Split, vocab_size: int, content: Content, field: str | None) -> None:
    """Refuse stores that do not match, or that have no documents of this split, or not enough to train."""
    stores = list(dict.fromkeys(source.store for source in sources))
    for store in stores:
        _check(store, stores[0], vocab_size, content, field or ("data.store" if config.store else "data.mixture"))
    empty = [store for store in stores if store.n_tokens <= 1]
    if empty and (split == "train" or len(empty) == len(stores)):
        off = f"remove {field}" if field else "set train.eval_batches to 0"
        fix = f"raise data.prepare.eval_fraction, or {off}" if split == "eval" else "give it more text"
        raise UserError(f"{empty[0].path} has no {split} documents to make a batch of; {fix}.")
    if split == "eval" and not any(source.documents is None or len(source.documents) for source in sources):
        raise UserError(
            "data.mixture: no held-out document meets the conditions of a source; loosen `where`, or set train.eval_batches to 0."
        )


def _check(store: TokenStore, first: TokenStore, vocab_size: int, content: Content, field: str) -> None:
    """Refuse a store, named by the setting `field`, that does not match the objective, the model or the first store."""
    if store.info.content != content:
        readers = [part.name for part in parts("objective") if part.facts.content == store.info.content]
        kind = f"{readers[0]} (or no objective)" if store.info.content == "text" else readers[0]
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
