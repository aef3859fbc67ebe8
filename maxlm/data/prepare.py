"""Make a token store from text: `maxlm data prepare`. The same command again returns at once, or continues an interrupted one."""

import contextlib
import functools
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.progress import Progress, TimeElapsedColumn

from maxlm.base import directory_lock
from maxlm.base.console import Console, print_line
from maxlm.base.errors import ConfigError, UserError, setting_error, show
from maxlm.base.host import host_memory, in_bytes
from maxlm.base.paths import is_remote, user_path
from maxlm.config.schema import DataConfig
from maxlm.config.sections.prepare import PrepareConfig
from maxlm.data import manifest, marks, storage
from maxlm.data.chat_template import ChatTemplate
from maxlm.data.conversations import ConversationEncoder
from maxlm.data.encoding import Encoder, TextEncoder, encode_in_order, is_held_out
from maxlm.data.manifest import StoreInfo
from maxlm.data.messages import FIELD
from maxlm.data.metadata import write_index
from maxlm.data.sources import Digests, Fields, SourceFile, combined, digests, documents_in, find_files, read_documents
from maxlm.data.template_files import opening_of, template_file, template_of_config, with_template
from maxlm.data.tokenizer import Tokenizer, companions_of, load_tokenizer, stored_tokenizer, tokenizer_hash, train_tokenizer
from maxlm.data.writer import Router, SavedProgress, SplitWriter, load_progress, save_progress

SAVE_SECONDS = 30.0  # between two saves of the progress
PROCESS_BYTES = 10 << 20  # memory of a Python process that tokenizes, at the very least
TOKEN_BYTES = 56  # memory of a token of the tokenizer in training: a string in a list and in a table
SOURCES = "sources.json"
LOCK_SECONDS = 5.0  # to wait for another process that is about to end
CONTENT = "the content of data.prepare.sources"
NEWER = ("bad_rows", "chat_template_kwargs", "special_tokens", "turns")  # settings that stores of older versions do not record


@dataclass(frozen=True)
class _Job:
    """A store to make: settings, source files and their digests."""

    store: str
    config: PrepareConfig
    files: list[SourceFile]
    console: Console
    digests: Digests
    companions: dict[str, bytes]  # of the tokenizer
    template: ChatTemplate | None
    longest: int  # tokens that a row holds
    opening: tuple[int, ...]  # ids before plain texts of conversations


def prepare(config: DataConfig, *, progress: bool = True) -> StoreInfo:
    """Make the token store `config.store` from `config.prepare`, unless it is there already.

    `progress`: show a progress bar on stderr. Raises UserError: a source is missing, foreign or damaged; the store cannot be written; or it
    was made with other settings.
    """
    if config.prepare is None:
        raise ConfigError("data.prepare", None, "names the text that the store is made from", "set data.prepare.sources")
    if config.store is None:
        raise ConfigError("data.store", None, "is the folder the tokens are written to", "set it to a folder or gs://bucket/folder")
    _check_sizes(config.prepare)
    store = config.store.rstrip("/")
    files = find_files(config.prepare.sources)
    known = _known_digests(store)
    of_files = digests(files, known)
    path, spoken = config.prepare.tokenizer.path, config.prepare.conversations
    companions = companions_of(path.rpartition("/")[0] or ".") if path is not None else {}
    template = None if spoken is None else template_of_config(spoken, companions)
    if spoken is not None and spoken.kind != "prompt_response":
        companions = with_template(companions, template_file(spoken))
    templated = spoken is None or spoken.kind == "chat"
    settings = _settings(config.prepare, combined(files, of_files)) | _settings_of_conversations(config, template)
    opening: tuple[int, ...] = ()
    if path is not None and not templated:
        end = config.prepare.tokenizer.end_of_document
        opening = opening_of(path, end)
        settings |= {f"{FIELD}.opening": list(opening)} if opening else {}
        if not load_tokenizer(path, end).joins:  # older versions put a space before responses
            settings[f"{FIELD}.pairs"] = "encoded as one text"
    existing = _existing(store, settings)
    if existing is not None:
        if of_files != known:  # new dates with the same content, or a format without digests
            with contextlib.suppress(UserError):  # the store may be read-only
                storage.write_bytes(store, SOURCES, json.dumps(of_files).encode())
        return existing
    with _locked(store):
        console = Console(stderr=True, quiet=not progress)
        job = _Job(store, config.prepare, files, console, of_files, companions, template, config.seq_len + 1, opening)
        return _existing(store, settings) or _make(job, settings)


def _check_sizes(config: PrepareConfig) -> None:
    """Refuse settings that need more memory than the machine has."""
    host = host_memory()
    sizes = {"workers": (config.workers, PROCESS_BYTES, "use 0 for one process a core")}
    if config.tokenizer.path is None:
        sizes["tokenizer.vocab_size"] = config.tokenizer.vocab_size, TOKEN_BYTES, "use 4096 to 262144"
    for field, (count, each, fix) in sizes.items():
        if host is not None and count * each > host:
            rule = f"takes at least {in_bytes(count * each)} of memory, and this machine has {in_bytes(host)}"
            raise ConfigError(f"data.prepare.{field}", count, rule, fix)


def _known_digests(store: str) -> Digests:
    """Digests saved with the store; {} if there are none or they are damaged, and then all sources are read again."""
    try:
        saved_digests = json.loads(storage.read_bytes(store, SOURCES) or b"{}")
        return {path: (list(unchanged), str(digest)) for path, (unchanged, digest) in saved_digests.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _settings(config: PrepareConfig, content: str) -> dict[str, Any]:
    """Every setting that decides the tokens, by its name in the config."""
    tokenizer = config.tokenizer
    settings: dict[str, Any] = {
        CONTENT: content,
        "data.prepare.text_field": config.text_field,
        "data.prepare.eval_fraction": config.eval_fraction,
        "data.prepare.tokenizer.end_of_document": tokenizer.end_of_document,
    }
    if tokenizer.path is not None:
        return {**settings, "data.prepare.tokenizer.path": tokenizer_hash(tokenizer.path)}
    trained = {"vocab_size": tokenizer.vocab_size, "train_bytes": tokenizer.train_bytes}
    return {**settings, **{f"data.prepare.tokenizer.{key}": value for key, value in trained.items()}}


def _settings_of_conversations(config: DataConfig, template: ChatTemplate | None) -> dict[str, Any]:
    """Settings of conversations that decide the tokens, data.seq_len only where longer ones are left out; {} for texts."""
    spoken = config.prepare.conversations if config.prepare is not None else None
    if spoken is None:
        return {}
    values = spoken.model_dump(exclude={"template"})
    values = {name: value for name, value in values.items() if name not in NEWER or value != type(spoken).model_fields[name].default}
    settings = {f"{FIELD}.{name}": value for name, value in values.items()}
    if template is not None:
        further = [part for part in (template.tool_use,) if part is not None]
        settings[f"{FIELD}.template"] = manifest.fingerprint([*template[:3], *further])
    return {**settings, "data.seq_len": config.seq_len} if spoken.too_long == "leave_out" else settings


def _existing(store: str, settings: dict[str, Any]) -> StoreInfo | None:
    """Manifest of the finished store in the folder, or None.

    Raises UserError: it was made with other settings, or the folder holds something else.
    """
    info = manifest.load(store)
    if info is None:
        keys = [] if is_remote(store) else [path.name for path in user_path(store).glob("*") if path.name != directory_lock.NAME]
        if keys and storage.read_bytes(store, manifest.PROGRESS) is None:
            raise ConfigError("data.store", store, f"is not empty and not a token store: it holds {min(keys)}", "choose another folder")
        return None
    for name in dict.fromkeys([*settings, *info.settings]):
        was, now = info.settings.get(name), settings.get(name)
        if was != now:
            rule = f"was made with {name} = {show(was)}, and now it is {show(now)}"
            if name == CONTENT:
                rule = f"was made when {name} was different"
            raise ConfigError("data.store", store, rule, "choose another store, or delete this one to make it anew")
    return info


def _make(job: _Job, settings: dict[str, Any]) -> StoreInfo:
    store, console = job.store, job.console
    fingerprint = manifest.fingerprint(settings)
    done = load_progress(store)
    if done is None or done.fingerprint != fingerprint:
        if done is not None and done.documents:
            console.print(f"{store}: {done.documents:,} documents of an unfinished prepare with other settings or sources are dropped")
        for name in (manifest.TOKENIZER, *manifest.COMPANIONS, manifest.METADATA):
            storage.delete(store, name)
        save_progress(store, fingerprint)  # last: once it is saved, a tokenizer in the store was made with these settings
        done = SavedProgress(fingerprint)
    tokenizer = _tokenizer(job)
    dtype = manifest.smallest_dtype(tokenizer.vocab_size) if job.config.conversations is None else marks.DTYPE
    if tokenizer.vocab_size > marks.IDS:
        raise ConfigError("data.prepare.tokenizer.path", job.config.tokenizer.path, "has ids above 2^29", "use another tokenizer")
    router = Router({split: SplitWriter(store, split, dtype, done) for split in manifest.SPLITS}, job.config.eval_fraction)
    if done.documents:
        console.print(f"{store}: continuing after {done.documents:,} documents")
    splits = _write(job, tokenizer, router, done)
    storage.write_bytes(store, SOURCES, json.dumps(job.digests).encode())
    info = StoreInfo(
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        end_of_document_id=tokenizer.end_of_document_id,
        dtype=dtype.name,  # type: ignore[arg-type]  # one of the three by construction
        fingerprint=fingerprint,
        settings=settings,
        splits=splits,
    )
    info = manifest.save(store, info)
    storage.delete(store, manifest.PROGRESS)
    return info


def _write(job: _Job, tokenizer: Tokenizer, router: Router, done: SavedProgress) -> dict[manifest.Split, manifest.SplitInfo]:
    """Tokenize the documents after those in `done`, and write each to its split."""
    workers, fraction = job.config.workers or os.cpu_count() or 1, job.config.eval_fraction
    seen, last_save, counts, first = done.documents, time.monotonic(), Counter[str](), dict[str, str]()
    encoder, fields = _encoder(job, tokenizer)
    documents = documents_in(job.files, fields)
    if (skipped := sum(1 for _ in islice(documents, seen))) < seen:
        rule = f"is of {seen:,} documents, and the sources have {skipped:,}"
        raise UserError(f"{job.store}/{manifest.PROGRESS} {rule}; delete {job.store}.")
    bar = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=job.console)
    with bar, contextlib.closing(encode_in_order(documents, encoder, fraction, workers)) as results:
        task = bar.add_task("tokenizing", total=sum(file.size for file in job.files))
        for result in results:
            for tokens, held_out, note, about in zip(result.documents, result.held_out, result.notes, result.abouts, strict=True):
                if note is not None:
                    counts[note.kind] += 1
                    first.setdefault(note.kind, note.text)
                if tokens is not None:
                    router.add(tokens, held_out, about)
            seen += len(result.documents)
            bar.update(task, completed=result.bytes_read)
            if router.settled and time.monotonic() - last_save >= SAVE_SECONDS:
                save_progress(job.store, done.fingerprint, seen, router.writers)
                last_save = time.monotonic()
    splits = router.finish()
    write_index(job.store, {split: writer.metadata for split, writer in router.writers.items()})
    lines = _notice(counts, first, seen, seen - sum(split.documents for split in splits.values()), job.longest - 1)
    if not any(split.documents for split in splits.values()):
        raise UserError(f"all {seen:,} conversations are left out: {'; '.join(lines)}.")
    for line in lines:
        print_line(job.console, line)
    return splits


def _notice(counts: Counter[str], first: dict[str, str], seen: int, left_out: int, seq_len: int) -> list[str]:
    """Lines about `seen` documents, of which `left_out` are in no split: counts of notes by kind, with the first of each."""
    said = {
        "too_long": f"conversations are left out, longer than data.seq_len = {seq_len}, the first at",
        "bad_rows": "conversations are left out as bad rows, the first at",
        "special_tokens": f"rows hold special tokens as text ({FIELD}.special_tokens=tokens makes them tokens), the first at",
        "unwritten": "conversations have parts that the chat template does not write, and that are not trained on, the first at",
    }
    lines = [f"{counts[kind]:,} of {seen:,} {rule} {first[kind].rstrip('.')}" for kind, rule in said.items() if kind in first]
    before = left_out - counts["too_long"] - counts["bad_rows"]
    return [*lines, f"{before:,} of {seen:,} conversations were left out before the interruption"] if before else lines


def _encoder(job: _Job, tokenizer: Tokenizer) -> tuple[Encoder, Fields]:
    """The encoder of the documents, and the fields of the sources that it reads."""
    spoken = job.config.conversations
    if spoken is None:
        return partial(TextEncoder, tokenizer.text, tokenizer.end_of_document), Fields.of_text(job.config.text_field)
    content = {value for name, value in spoken.model_dump().items() if name.endswith("_field")}
    encoder = partial(ConversationEncoder, spoken, tokenizer.text, tokenizer.end_of_document, job.template, job.longest, job.opening)
    fields = frozenset({*content, "tools", "system", "conversations", "chat_template_kwargs"})
    return encoder, Fields(None, fields, lenient=spoken.bad_rows == "leave_out")


def _tokenizer(job: _Job) -> Tokenizer:
    """The tokenizer already in the store, else the one the config names or a new one, which is written to the store."""
    store, wanted = job.store, job.config.tokenizer
    if (stored := stored_tokenizer(store, wanted.end_of_document)) is not None:
        return stored
    if wanted.path is not None:
        tokenizer = load_tokenizer(wanted.path, wanted.end_of_document)
    else:
        with job.console.status(f"training a tokenizer of {wanted.vocab_size:,} tokens"):
            tokenizer = train_tokenizer(_training_texts(job.config, job.files), wanted.vocab_size, wanted.end_of_document)
    for name, content in job.companions.items():
        storage.write_bytes(store, name, content)
    storage.write_bytes(store, manifest.TOKENIZER, tokenizer.text.encode())  # last: it is there when all are
    return tokenizer


def _training_texts(config: PrepareConfig, files: list[SourceFile]) -> Iterator[str]:
    """At most `train_bytes` of text for the tokenizer, an equal share of every file, without held-out documents."""
    left = config.tokenizer.train_bytes
    for number, file in enumerate(files):
        share = left // (len(files) - number)  # bytes that small files do not use go to later files
        for document in read_documents(file, Fields.of_text(config.text_field)):
            if is_held_out(document.text.encode(), config.eval_fraction):
                continue
            piece = document.text.encode()[:share]
            yield piece.decode(errors="ignore")
            share, left = share - len(piece), left - len(piece)
            if share == 0:
                break


class _Owner(directory_lock.Lock):
    """A store in a bucket, which has no locks: a token in it names the process that writes there."""

    def __init__(self, store: str) -> None:
        super().__init__(Path(store), "data.store")
        self._store, self._own = store, secrets.token_hex(16).encode()
        storage.write_bytes(store, directory_lock.NAME, self._own)

    def check(self, every_s: float = 0.0) -> None:
        """Raise UserError if another process has written its token."""
        if self.is_due(every_s) and storage.read_bytes(self._store, directory_lock.NAME) not in (self._own, None):
            raise UserError(
                f"data.store = {self._store}: another process has begun to write it: this one ends, and writes nothing more there; "
                "let one process at a time use it."
            )

    def release(self) -> None:
        """Remove the token."""
        storage.delete(self._store, directory_lock.NAME)


@contextlib.contextmanager
def _locked(store: str) -> Iterator[None]:
    """Lock the store against other processes. The lock ends with its process; of a bucket, the last process to take it has it."""
    if is_remote(store):
        owner = _Owner(store)
        with directory_lock.working_for(owner):
            yield
        owner.release()
        return
    folder, say = user_path(store), functools.partial(print_line, Console(stderr=True))
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(directory_lock.locked(folder, "data.store", LOCK_SECONDS, say, "wait for it to end"))
        except OSError as error:
            raise setting_error(error)("data.store", store, f"cannot be written: {error.strerror}", "choose another folder") from error
        for left in folder.rglob("*.__lock"):  # by TensorStore, of a process that was killed while it wrote the file of that name
            left.unlink(missing_ok=True)
        yield
