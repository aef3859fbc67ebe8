"""Settings of a mixture: several sources of training data, their shares, and stages in which the shares are others."""

import re
from itertools import chain, count
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from maxlm.config import conditions, paths
from maxlm.config.fields import AtLeastOne, PositiveFloat, Section, StoredPath, Text, Tokens


def _plain(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", name):
        paths.refuse(f"have plain names, and {name[:64]} is none", "use letters, digits, `-` and `_`")
    return name


def of_list(value: Any) -> Any:
    """A list of stores and weights, which was all of a mixture before sources had names, as sources named by the folders of the stores.

    Runs of then have it in their config.yml, `[]` where they had no mixture.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(entry, dict) and isinstance(entry.get("store"), str) for entry in value):
        return value
    sources: dict[str, Any] = {}
    for entry in value:
        folder = re.sub(r"[^A-Za-z0-9_]+", "-", entry["store"].rstrip("/").rpartition("/")[2]).strip("-")[:50] or "store"
        sources[next(name for name in chain([folder], (f"{folder}-{n}" for n in count(2))) if name not in sources)] = entry
    return {"sources": sources} if sources else None


Condition = Annotated[Text, AfterValidator(conditions.checked)]
Name = Annotated[Text, AfterValidator(_plain)]
Weights = Annotated[dict[Text, PositiveFloat], Field(min_length=1)]


class SourceConfig(Section):
    """A token store, or the documents of it that meet conditions."""

    store: StoredPath
    where: tuple[Condition, ...] = ()  # on the metadata of its documents, all of which are met, as `language == en`
    by: Text | None = None  # a field of the metadata: each of its values is a source of its own, NAME/VALUE
    weight: PositiveFloat | None = None  # share of the samples, in any unit; None, for all sources: by their tokens
    epochs: PositiveFloat | None = None  # at most; then the other sources share what this one had


class StageConfig(Section):
    """Other shares from some token of the run on, until the next stage."""

    from_tokens: Tokens  # of the whole run, rounded up to samples
    weights: Weights | None = None  # of the sources in this stage, by name: others have no part in it
    temperature: AtLeastOne | None = None  # instead, or within sources that are split `by` a field


class MixtureConfig(Section):
    """Sources, and their shares of the samples from the beginning on."""

    sources: Annotated[dict[Name, SourceConfig], Field(min_length=1)]
    temperature: AtLeastOne = 1.0  # where no weights are given shares are as tokens ** (1 / temperature) (arXiv 1907.05019)
    stages: tuple[StageConfig, ...] = ()
