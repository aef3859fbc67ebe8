"""A document on its way through the stages, and one that a stage removed."""

from dataclasses import dataclass, field

Value = str | int | float | bool


@dataclass
class Document:
    """`id`: "FILE#NUMBER", the file as it was given and the record's number in it. `metadata`: source, url, date, language, licence and
    scores, as far as they are known.
    """

    id: str
    text: str
    metadata: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Removed:
    """A document that `stage` left out for `reason`, a short fixed name that can be counted. `example`: text for a person to read, at most
    300 characters; `detail`: figures or names behind the reason.
    """

    id: str
    stage: str
    reason: str
    example: str = ""
    detail: dict[str, Value] = field(default_factory=dict)
