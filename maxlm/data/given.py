"""Batches that a program gives, from any iterable. Their promise is weaker than a token store's: they are resumed by state, not by number.

A token store gives batch n whatever came before. An iterable only gives its next item, so a checkpoint keeps the state of the iterable if
it has one (`state_dict` and `load_state_dict`, or the `get_state` and `set_state` of its iterator), else the number of items drawn: then
the items are drawn again from the beginning and passed over. The batches after a restart are the same if the iterable gives the same items.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from maxlm.base.errors import UserError, shorten
from maxlm.base.paths import PYTHON
from maxlm.config.batch_sizes import BatchSizes
from maxlm.config.schema import DataConfig
from maxlm.data import manifest
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.order import batch_number
from maxlm.data.prefetch import Batches, Spans
from maxlm.data.tokenizer import Tokenizer

KEPT = 8  # host batches that a replay of an update may ask for again
_POSITION = "given"  # entry of a checkpoint's data position
_log = logging.getLogger(__name__)


class Resumable:
    """Draws the items of an iterable, again and again if it can begin anew; its `state` restores the place in it."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items, self.drawn = items, 0
        self._iterator: Iterator[Any] | None = None
        self._once = iter(items) is items  # an iterator, such as a generator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._items)
        try:
            item = next(self._iterator)
        except StopIteration:
            if self._once or self.drawn == 0:
                raise
            _log.warning("the data have ended after %d items, and begin anew", self.drawn)
            self._iterator = iter(self._items)
            item = next(self._iterator)
        self.drawn += 1
        return item

    def state(self) -> dict[str, Any]:
        """JSON values: items drawn, and the state of the iterable if it has one."""
        own = {}
        if hasattr(self._items, "state_dict") and hasattr(self._items, "load_state_dict"):
            own = {"state_dict": self._items.state_dict()}
        elif (get_state := getattr(self._iterator, "get_state", None)) is not None and hasattr(self._iterator, "set_state"):
            own = {"iterator": _as_json(get_state())}
        return {"items": self.drawn, **own}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to the place of `state`. Raises UserError for an iterator that is beyond it and keeps no state."""
        wanted = int(state.get("items", 0))
        if "state_dict" in state and hasattr(self._items, "load_state_dict"):
            self._items.load_state_dict(state["state_dict"])
            self._iterator, self.drawn = None, wanted
        elif "iterator" in state and hasattr(iterator := iter(self._items), "set_state"):
            iterator.set_state(_from_json(state["iterator"]))
            self._iterator, self.drawn = iterator, wanted
        elif self._once and self.drawn > wanted:
            raise UserError(
                f"the data are an iterator, which cannot go back from item {self.drawn:,} to {wanted:,}: give an iterable that can begin "
                "anew, such as a list or an object with __iter__."
            )
        else:
            if not self._once:
                self._iterator, self.drawn = None, 0
            for _ in itertools.islice(self, wanted - self.drawn):
                pass


def _as_json(state: Any) -> Any:
    return {"hex": state.hex()} if isinstance(state, bytes) else state


def _from_json(state: Any) -> Any:
    return bytes.fromhex(state["hex"]) if isinstance(state, dict) and set(state) == {"hex"} else state


class PackedTexts:
    """Batches from texts: each text is closed by the end-of-document token, and windows follow each other without a gap.

    A window's last target is the first input of the next one, as in a token store.
    """

    def __init__(
        self,
        texts: Iterable[str | Mapping[str, Any]],
        tokenizer: Tokenizer,
        shape: tuple[int, int],
        make_batch: Callable[[np.ndarray], Any],
        field: str = "text",
    ) -> None:
        """`shape`: rows and inputs of a row; `make_batch`: of windows of ids [B, S + 1]; `field`: of the text, where items are mappings."""
        self.tokenizer, self._shape, self._make, self._field = tokenizer, shape, make_batch, field
        self._source, self._left = Resumable(texts), np.zeros(0, np.int32)

    def __iter__(self) -> Iterator[Any]:
        rows, length = self._shape
        while True:
            while len(self._left) <= rows * length:
                try:
                    text = next(self._source)
                except StopIteration:
                    return
                if isinstance(text, Mapping):
                    text = text.get(self._field)
                if not isinstance(text, str):
                    raise UserError(f"the data hold {_kind(text)} where a text is expected: give strings.")
                ids = self.tokenizer.encode_documents([text])[0].astype(np.int32)
                self._left = np.concatenate([self._left, ids])
            block, self._left = self._left[: rows * length + 1], self._left[rows * length :]
            yield self._make(np.stack([block[row * length : (row + 1) * length + 1] for row in range(rows)]))

    def state_dict(self) -> dict[str, Any]:
        """JSON values: the place in the texts, and the ids that no window has taken yet."""
        return {"texts": self._source.state(), "left": self._left.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._source.restore(state["texts"])
        self._left = np.array(state["left"], np.int32)


# Items -> a batch of the objective: a batch as it is, or windows of ids [B, S + 1].
MakeBatch = Callable[[Any], Any]


class GivenBatches(Pipeline):
    """Training batches from an iterable, in its order."""

    def __init__(
        self,
        items: Iterable[Any],
        data: DataConfig,
        sizes: BatchSizes,
        name: str,
        make_batch: MakeBatch,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`make_batch`: turns an item into a batch of host arrays, or raises UserError; `tokenizer`: of the ids, None if unknown."""
        self._config, self.batch_sizes, self.global_batch = data, sizes, sizes.largest
        self._items, self._name, self._make, self.tokenizer = Resumable(items), name, make_batch, tokenizer
        self.left_out: tuple[int, ...] = ()
        self.annotate, self.plan = None, None
        self._next = 0  # the step that the next item is for
        self._begin = self._items.state()
        self._states = {0: self._begin}  # step -> the place before its batch
        self._recent: dict[int, Any] = {}
        self._lock = threading.Lock()

    def go_on(self, position: Mapping[str, Any], left_out: Sequence[int] = ()) -> list[str]:
        self.left_out = tuple(left_out)
        self._next = position.get("next_step", 0)
        self._states = {self._next: position.get(_POSITION, self._begin)}
        return []

    def batches(self, start_step: int, shardings: Any, stop_step: int) -> Batches:
        self.restart(start_step)
        return super().batches(start_step, shardings, stop_step)

    def restart(self, step: int) -> None:
        """Go to the place of `step`: the place of `go_on`, or the beginning. Raises UserError if the iterable cannot."""
        with self._lock:
            self._items.restore(self._states.get(step, self._begin))
            self._next, self._recent = step, {}

    def host_batch(self, step: int, rows: slice | np.ndarray | None = None, spans: Spans | None = None) -> Any:
        """The batch of `step`: the next one, or one of the last few again."""
        with self._lock, (spans or Spans()).measure("read"):
            while step not in self._recent:
                if step != self._next:
                    raise UserError(f"the batch of step {step:,} is gone: batches that a program gives have no numbers to fetch them by.")
                self._draw()
            batch = self._recent[step]
        return batch if rows is None else type(batch)._make(None if array is None else array[rows] for array in batch)

    def _draw(self) -> None:
        step, size = self._next, self.end_sample(self._next) - self.first_sample(self._next)
        for _ in range(batch_number(step, self.left_out) - self._items.drawn):  # batches that no step trains on
            next(self._items, None)
        try:
            batch = self._make(next(self._items))
        except StopIteration:
            raise UserError(
                f"the data end after {step:,} batches, before the run does: give an iterable that can begin anew, or lower train.steps."
            ) from None
        if len(batch[0]) != size:
            raise UserError(f"batch {step:,} of the data has {len(batch[0]):,} rows, and train.global_batch says {size:,}.")
        self._recent = {**{old: one for old, one in self._recent.items() if old > step - KEPT}, step: batch}
        self._next = step + 1
        self._states[self._next] = self._items.state()

    def position(self, step: int) -> dict[str, Any]:
        with self._lock:
            state = self._states.get(step, {})
            self._states = {known: one for known, one in self._states.items() if known >= step}
        return {_POSITION: state}

    def check_length(self, steps: int) -> None: ...

    @property
    def fingerprint(self) -> str:
        return manifest.fingerprint({PYTHON: self._name})

    @property
    def tokenizer_hash(self) -> str:
        return "none" if self.tokenizer is None else self.tokenizer.hash

    def stage_begins(self, step: int) -> bool:
        return False

    def described(self, step: int) -> str:
        return f"batch {batch_number(step, self.left_out)} of {PYTHON}{self._name}"

    def sample_ids(self, step: int) -> np.ndarray:
        return np.zeros(0, np.int64)

    def token_ranges(self, ids: np.ndarray) -> dict[str, list[tuple[int, int]]]:
        return {}

    def take_problems(self) -> list[dict[str, Any]]:
        return []


class GivenHeldOut(GivenBatches):
    """Held-out batches: the first `most` items of an iterable, which are kept in memory."""

    def __init__(self, items: Iterable[Any], most: int, *args: Any) -> None:
        super().__init__(items, *args)
        self._kept = list(map(self._make, itertools.islice(iter(items), most)))
        if not self._kept:
            raise UserError(f"{self._name}: the held-out data hold no batch.")
        if wrong := next((len(batch[0]) for batch in self._kept if len(batch[0]) != self.global_batch), None):
            raise UserError(f"a held-out batch has {wrong:,} rows, and train.global_batch says {self.global_batch:,}.")

    @property
    def n_batches(self) -> int:
        return len(self._kept)

    def host_batch(self, step: int, rows: slice | np.ndarray | None = None, spans: Spans | None = None) -> Any:
        batch = self._kept[step]
        return batch if rows is None else type(batch)._make(None if array is None else array[rows] for array in batch)


def to_batch(item: Any, like: Any, seq_len: int, vocab_size: int, from_windows: Callable[[np.ndarray], Any] | None) -> Any:
    """`item` as a batch of host arrays. `like`: a batch of the objective, for its fields; `from_windows`: makes one from ids [B, S + 1],
    None for an objective that needs more than ids. Raises UserError for any other item.
    """
    if isinstance(item, type(like)):
        batch = type(like)._make(None if array is None else np.asarray(array) for array in item)
    elif isinstance(item, tuple | Mapping | str) or (array := np.asarray(item)).dtype.kind not in "iu" or from_windows is None:
        windows = "" if from_windows is None else f", or an array of ids [rows, {seq_len + 1}]"
        raise UserError(f"the data hold {_kind(item)}: give a maxlm.Batch{windows}.")
    elif array.ndim != 2 or array.shape[1] != seq_len + 1:
        rule = f"an array of ids has the shape [rows, {seq_len + 1}], data.seq_len + 1"
        raise UserError(f"the data hold an array of shape {list(array.shape)}: {rule}.")
    else:
        batch = from_windows(array)
    for name in ("tokens_BS", "targets_BS"):
        ids = getattr(batch, name)
        if ids.shape[1:] != (seq_len,):
            raise UserError(f"{name} of a batch has the shape {list(ids.shape)}, and data.seq_len is {seq_len}.")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise UserError(f"{name} of a batch holds ids from {ids.min()} to {ids.max()}, and model.vocab_size is {vocab_size}.")
    return batch


def _kind(item: Any) -> str:
    return f"an item of the kind {shorten(type(item).__name__)}"
