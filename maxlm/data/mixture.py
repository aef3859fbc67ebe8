"""Sources of a run's samples and the stages of their shares: as the config asks for them, and as a run has had them.

A checkpoint keeps the plan up to its own first sample. The run goes on from there with what the config then asks for, so that an edit of
`data.mixture` changes nothing of the past: no source repeats a sample in its epoch, and none loses one.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from maxlm.base import paths
from maxlm.base.errors import ConfigError
from maxlm.config.schema import DataConfig
from maxlm.config.sections.mixture import MixtureConfig, SourceConfig
from maxlm.data import manifest
from maxlm.data.manifest import Split
from maxlm.data.order import Stage, counts_at, planned, shares_of
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


POSITION = "order"  # entry of a checkpoint's data position


class Known(NamedTuple):
    """A source that the run has, or once had. Its place among all is its number, for ever."""

    identity: str
    name: str
    content: str  # digest of the tokens of its store


class Plan(NamedTuple):
    """`stages`: of numbers of the sources, the first from sample 0 on."""

    sources: list[Known]
    stages: list[Stage]

    def names(self, numbers: Iterable[int]) -> list[str]:
        """Names of sources by their numbers."""
        return [self.sources[number].name for number in numbers]

    def to_json(self, sample: int) -> dict[str, Any]:
        """State before a sample, from which `from_json` makes a plan."""
        past = [[stage.first, [list(share) for share in stage.shares.items()]] for stage in self.stages if stage.first < sample]
        return {"sources": [list(source) for source in self.sources], "stages": past}


def from_json(value: Mapping[str, Any]) -> Plan:
    """The plan that `to_json` wrote."""
    stages = [Stage(first, dict(shares)) for first, shares in value["stages"]]
    return Plan([Known(*source) for source in value["sources"]], stages)


def make_plan(
    mixture: MixtureConfig | None,
    sources: Sequence[Source],
    sizes: Mapping[str, tuple[int, int]],
    *,
    seq_len: int,
    past: Plan | None = None,
    sample: int = 0,
) -> Plan:
    """The plan of a run that has followed `past` until `sample`; None: what the config asks for now.

    `sizes`: windows and tokens of every source. Raises ConfigError: a source holds other documents than the source of its name in `past`.
    """
    known = list(past.sources) if past is not None else []
    for source in sources:
        if source.identity not in [one.identity for one in known]:
            if mixture is not None and source.name in [one.name for one in known]:
                rule = "is not what it was in this run: the content of its store, its `where` or its `by` has changed"
                fix = "change it back, or give it another name, by which it is read from its beginning"
                raise ConfigError(f"{FIELD}.sources", source.name, rule, fix)
            known.append(Known(source.identity, source.name, source.content))
    numbers = {source.name: [one.identity for one in known].index(source.identity) for source in sources}
    names = {number: name for name, number in numbers.items()}
    for number, one in enumerate(known):
        free = one.name if one.name not in numbers else f"{one.name} until sample {sample:,}"
        known[number] = one._replace(name=names.get(number, free))
    wanted = [
        Stage(first, shares_of({numbers[name]: weight for name, weight in weights.items()}))
        for first, weights in wanted_stages(mixture, {name: tokens for name, (_, tokens) in sizes.items()}, seq_len)
    ]
    entries = mixture.sources if mixture is not None else {}
    limits = {name: entries[name.partition("/")[0]].epochs for name in sizes} if entries else {}
    most = {numbers[name]: max(int(limit * sizes[name][0]), 1) for name, limit in limits.items() if limit is not None}  # samples
    return Plan(known, planned([], wanted, 0, most) if past is None else planned(past.stages, wanted, sample, most))


def repeating(past: Plan, plan: Plan, current: Sequence[Source], sample: int) -> list[str]:
    """A line for each of the `current` sources that begins, or goes on, at `sample` and reads a store of which a source that is gone has
    given samples: which of their documents are the same is not known. Sources that are there together share none.
    """
    counts, here = counts_at(past.stages, sample), {source.identity for source in current}
    gone = {one.content: one.name for number, one in enumerate(past.sources) if counts.get(number) and one.identity not in here}
    before = past.stages[-1].shares if past.stages else {}
    return [
        f"{FIELD}.sources.{one.name} {'is back where it was' if counts.get(number) else 'is new and begins at its first document'}: "
        f"those that {gone[one.content]} has given as well may come once more"
        for number, one in enumerate(plan.sources)
        if one.identity in here and number not in before and one.content in gone
    ]
