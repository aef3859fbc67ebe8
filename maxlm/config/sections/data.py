"""Token stores to train on, and how they become batches."""

import re

from pydantic import ConfigDict, model_validator

from maxlm.base import paths
from maxlm.config.capability import Capability, Problems, keeps
from maxlm.config.fields import Bool, Few, Positive, Section, StoredPath, StorePath
from maxlm.config.sections.mixture import MixtureConfig
from maxlm.config.sections.prepare import PrepareConfig
from maxlm.config.sections.run import RunConfig


class SkipConfig(Section):
    """Go on past damaged chunks of a store: samples that touch one become padding, with an alarm. Absent: the first stops training."""

    at_most: Positive = 100
    """Damaged chunks of one store that are skipped; one more stops the training. Unit: chunks."""


class HeldOutConfig(Section):
    """Further held-out sets, by names of one's own: the store of each, of which the held-out documents are read."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, StoredPath]

    @model_validator(mode="after")
    def _plain_names(self) -> "HeldOutConfig":
        for name in self.stores:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
                paths.refuse(f"have plain names, and {name[:64]} is none", "use letters, digits, `-`, `_` and `.`")
        return self

    @property
    def stores(self) -> dict[str, str]:
        """Name -> store."""
        return self.__pydantic_extra__


class DataConfig(Section):
    """Token stores to train on, and how they become batches."""

    store: StorePath | None = None
    """Token store to train on: a folder or a gs:// address, as written by `maxlm data prepare`. Exactly one of `store` and `mixture` is
    set. python://NAME, which `maxlm.fit` writes, says that a Python program gave the batches.
    """
    mixture: MixtureConfig | None = None
    """Several token stores with their shares, in place of `store`; null: one store."""
    seq_len: Positive
    """Length of a training sequence, and so the context length of the run. Unit: tokens."""
    shuffle: Bool = True
    """Draw samples in a random order that is a function of train.seed; false: in the order in which they are stored."""
    mask_documents: Bool = True
    """Let a token attend only to tokens of its own document; false: to all earlier tokens of the sequence."""
    read_threads: Few = 4
    """Threads of each host that read the store. Unit: threads."""
    prefetch: Few = 2
    """Batches that are kept ready on the device ahead of the step. Unit: batches."""
    skip_bad_chunks: SkipConfig | None = None
    """Go on past damaged chunks of a store: samples that touch one become padding, with an alarm; null: the first damaged chunk stops the
    training.
    """
    prepare: PrepareConfig | None = None
    """Source of the text that `maxlm data prepare` turns into data.store; null: the store is there already."""
    eval: HeldOutConfig | None = None
    """Further held-out sets, as name: store, in addition to the held-out documents of the stores that are trained on. Each has its own
    curve, eval_loss/NAME; null: none.
    """

    @property
    def stores(self) -> tuple[str, ...]:
        """The stores that are trained on, each once."""
        named = (source.store for source in self.mixture.sources.values()) if self.mixture is not None else ()
        return tuple(dict.fromkeys(filter(None, (self.store, *named))))


def _problems(data: DataConfig, run: RunConfig, checkpoint_dir: str | None, model_max_seq_len: int | None) -> Problems:
    if (data.store is None) == (data.mixture is None):
        fix = (
            "set one of them (python://NAME where a program gives the batches)"
            if data.store is None
            else "write data.mixture=null to train on the store, or data.store=null on the mixture"
        )
        yield "data.store", data.store, "exactly one of data.store and data.mixture must be set", fix
    if data.prepare is not None and data.store is None:
        yield "data.prepare", "set", "prepares data.store, which is not set", "set data.store"
    if data.prepare is not None and data.prepare.conversations is not None and data.prepare.tokenizer.path is None:
        rule = "conversations are read with the tokenizer of the model that is fine-tuned"
        yield "data.prepare.tokenizer.path", None, rule, "name its tokenizer.json, as in runs/NAME/tokenizer/tokenizer.json"
    written = {"run.dir": f"{run.dir.rstrip('/')}/{run.name}", "checkpoint.dir": checkpoint_dir}
    for field, place in written.items():
        store = next((store for store in data.stores if place and paths.is_inside(place, store)), None)
        if store is not None:
            yield field, place, f"is inside the token store {store}, where nothing else is written", "name another folder"
    for store in data.stores:
        if checkpoint_dir and paths.is_inside(store, checkpoint_dir):
            rule = f"is inside checkpoint.dir = {checkpoint_dir}, which holds checkpoints only"
            yield "data.store", store, rule, "name another folder"
    limit = model_max_seq_len
    if limit is not None and data.seq_len > limit:
        yield "data.seq_len", data.seq_len, f"is above model.learned_positions.max_seq_len = {limit}", "shorten it or lengthen the table"


CAPABILITY = Capability(key="data", rules=(_problems,), identity=keeps("data.seq_len", "data.shuffle", "data.mask_documents"))
