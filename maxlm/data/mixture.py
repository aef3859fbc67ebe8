"""Sources of training data, as the config names them: each a store, or the documents of one by their metadata; and their shares."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from maxlm.config import paths
from maxlm.config.errors import ConfigError
from maxlm.config.schema import DataConfig
from maxlm.config.sections.mixture import MixtureConfig, SourceConfig
from maxlm.data import manifest
from maxlm.data.manifest import Split
from maxlm.data.selection import Metadata
from maxlm.data.token_store import ReadContext, TokenStore

FIELD = "data.mixture"
MOST_SOURCES = 1000


@dataclass(frozen=True, eq=False)
class Source:
    """Documents of one split that are trained on in an order of their own. `documents`: numbers of those in the store, ascending; None:
    all. `identity`: digest of all that decides its samples but the seed, whatever its name and its place are; `content`: of the tokens of
    its store.
    """

    name: str
    store: TokenStore
    documents: np.ndarray | None
    identity: str
    content: str


def open_sources(config: DataConfig, split: Split, context: ReadContext) -> list[Source]:
    """The sources of a config, with those split `by` a field in parts of one value each. Those without documents are among them.

    Raises ConfigError: unknown metadata, a document in two sources, or too many sources.
    """
    if config.mixture is None:
        assert config.store is not None, "config/rules.py requires a store or a mixture"
        store = TokenStore(config.store, split, context=context)
        return [_source("store", store, None)]
    stores: dict[str, TokenStore] = {}
    sources: list[Source] = []
    for name, entry in config.mixture.sources.items():
        place = paths.same_place(entry.store)
        if place not in stores:
            stores[place] = TokenStore(entry.store.rstrip("/"), split, context=context)
        parts = list(_parts(name, entry, stores[place]))
        if split == "train" and not any(part.documents is None or len(part.documents) for part in parts):
            raise ConfigError(f"{FIELD}.sources.{name}.where", list(entry.where), Metadata(stores[place]).unmet(entry.where), "loosen it")
        sources += parts
    if len(sources) > MOST_SOURCES:
        raise ConfigError(FIELD, f"{len(sources):,} sources", f"are more than {MOST_SOURCES:,}", "split by fields of fewer values")
    _check_apart(sources)
    return sources


def wanted_stages(mixture: MixtureConfig | None, tokens: Mapping[str, int], seq_len: int) -> list[tuple[int, dict[str, float]]]:
    """First sample of each stage, and the weights of its sources. `tokens`: of every source, by its name. Raises ConfigError."""
    if mixture is None:
        return [(0, dict.fromkeys(tokens, 1.0))]
    given = {name: source.weight for name, source in mixture.sources.items() if source.weight is not None}
    stages = [(0, _weights(given or None, mixture.temperature, tokens, f"{FIELD}.sources"))]
    for number, stage in enumerate(mixture.stages):
        temperature = stage.temperature if stage.temperature is not None else mixture.temperature
        weights = _weights(stage.weights, temperature, tokens, f"{FIELD}.stages.{number}.weights")
        stages.append((-(-stage.from_tokens // seq_len), weights))
    return stages


def _weights(given: Mapping[str, float] | None, temperature: float, tokens: Mapping[str, int], field: str) -> dict[str, float]:
    """Weight of every source that has a part. A weight given to a source that is split is divided among its parts as their sizes say."""
    sizes = {name: count ** (1 / temperature) for name, count in tokens.items()}
    if given is None:
        return sizes
    weights = {name: weight for name, weight in given.items() if name in tokens}
    for name, weight in given.items():
        if name in tokens:
            continue
        parts = {part: size for part, size in sizes.items() if part.startswith(f"{name}/") and part not in given}
        if not parts:
            known = ", ".join(list(tokens)[:20])
            raise ConfigError(field, list(given), f"{name} has no documents of its own in the stores", f"the sources are {known}")
        total = sum(parts.values())
        weights |= {part: weight * size / total for part, size in parts.items()}
    return weights


def _parts(name: str, entry: SourceConfig, store: TokenStore) -> Iterator[Source]:
    where = tuple(sorted(set(entry.where)))
    if not where and entry.by is None:
        yield _source(name, store, None)
        return
    field = f"{FIELD}.sources.{name}"
    known = Metadata(store)
    chosen = known.chosen(entry.where, f"{field}.where") if where else np.ones(store.size.documents, np.bool_)
    if entry.by is None:
        yield _source(name, store, np.flatnonzero(chosen), where)
        return
    codes, values = known.groups(entry.by, f"{field}.by")
    found = np.flatnonzero(chosen)
    found = found[np.argsort(codes[found], kind="stable")]
    bounds = np.searchsorted(codes[found], np.arange(len(values) + 1))
    for value, (first, end) in zip(values, itertools.pairwise(bounds.tolist()), strict=True):
        documents = found[first:end]
        if len(documents):
            yield _source(f"{name}/{value}", store, documents, where, (entry.by, value))


def _source(
    name: str, store: TokenStore, documents: np.ndarray | None, where: tuple[str, ...] = (), value: tuple[str, str] | None = None
) -> Source:
    """`where`, `value`: conditions, and a field and its value, by which the documents were chosen; nothing else of `documents` counts."""
    info = store.info
    shards = {file: digest for file, digest in info.files.items() if file.endswith(".shards")}
    content = manifest.fingerprint(
        {"settings": info.fingerprint, "tokenizer": info.tokenizer_hash, "splits": info.model_dump()["splits"], "shards": shards}
    )
    chosen = {} if documents is None else {"metadata": info.files[manifest.METADATA], "where": where, "value": value}
    return Source(name, store, documents, manifest.fingerprint({"content": content, **chosen}), content)


def _check_apart(sources: Sequence[Source]) -> None:
    """Refuse a document that two sources hold, since it would be repeated though neither repeats it."""
    places = {source.content: source for source in reversed(sources)}
    for source in sources:
        place = places[source.content].store.path
        if source.store.path != place:
            rule = f"is a copy of the store {place}, so that documents would be in both"
            raise ConfigError(f"{FIELD}.sources.{source.name}.store", source.store.path, rule, "name one of them alone")
    stores = Counter(source.store.path for source in sources)
    owners = {source.store.path: np.full(source.store.size.documents, -1, np.int32) for source in sources if stores[source.store.path] > 1}
    for number, source in enumerate(sources):
        if source.store.path not in owners:
            continue
        owner, own = owners[source.store.path], slice(None) if source.documents is None else source.documents
        if (owner[own] >= 0).any():
            other = sources[int(owner[own].max())].name
            rule = f"holds {np.count_nonzero(owner[own] >= 0):,} documents of {source.store.path} that the source {other} holds, too"
            raise ConfigError(f"{FIELD}.sources", source.name, rule, "tell their documents apart by conditions in `where`")
        owner[own] = number
